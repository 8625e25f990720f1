"""The rounds of tool calls of one execution, told in its stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from cloche import errors
from cloche.engine.tool_calls import Offer, Runner
from cloche.events import ToolsCalled
from cloche.model import ToolResult


class Rounds:
    """Calls `tell(event)` for each round of calls, from `begin` to `close`. Later ones do not wait for earlier ones."""

    def __init__(self, offer: Offer, tell: Callable[[ToolsCalled], None]):
        self._offer = offer
        self._tell = tell
        self._telling: asyncio.Task[None] | None = None

    async def open(self) -> dict[str, Any]:
        """What the program's kernel must be told. Empty if the sandbox has ended, which its stage will say."""
        try:
            await self._offer.open()
        except errors.Gone:
            return {}
        return {"tools": self._offer.header}

    def begin(self, runner: Runner) -> None:
        """The program runs."""
        self._offer.runs(runner)
        self._telling = asyncio.create_task(self._tell_all())

    def answer(self, results: Iterable[ToolResult]) -> None:
        self._offer.answer(results)

    def close(self) -> None:
        """The program has ended. Harmless when it has been called before."""
        self._offer.close()
        if self._telling is not None:
            self._telling.cancel()

    async def _tell_all(self) -> None:
        while calls := await self._offer.next_round():
            self._tell(ToolsCalled(calls=calls))
