"""One call of a tool: who asked, what they see while it runs, and what they get."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from cloche.mcp.content import Content, sayable
from cloche.mcp.schemas import Arguments, Given, structured
from cloche.mcp.workspace import Workspace

BREATH_SECONDS = 0.1  # between two notifications of progress
MESSAGE_CHARS = 2_000  # of one
MOST_BYTES = 16 << 20  # of one answer, half of it for pictures and documents


class Told(Protocol):
    """How a client hears of things while its call is answered."""

    @property
    def wants_progress(self) -> bool: ...
    @property
    def knows_links(self) -> bool:
        """Whether its protocol has links to resources."""

    @property
    def most_bytes(self) -> int:
        """That an answer can have, by the way it goes now."""

    async def progress(self, count: int, message: str) -> None: ...
    async def resources_changed(self) -> None: ...


class Answer:
    """What a tool gives."""

    def __init__(self, *content: Content, given: Given | None = None, failed: bool = False):
        self.content = [*content]
        self.given = given
        self.failed = failed

    def encode(self) -> dict[str, Any]:
        found: dict[str, Any] = {"content": self.content}
        if self.given is not None:
            found["structuredContent"] = structured(self.given)
        if self.failed:
            found["isError"] = True
        return found


class Call(NamedTuple):
    workspace: Workspace
    told: Told

    @contextlib.asynccontextmanager
    async def reporting(self) -> AsyncIterator[Report]:
        """What is put into the report is shown to the client, in pieces, before this ends."""
        report = Report(self.told)
        try:
            yield report
            await report.finish()
        finally:
            report.close()


class Report:
    """Output on its way to the client. What comes faster than it is sent is told in fewer pieces, and cut."""

    def __init__(self, told: Told):
        self._told = told
        self._wanted = told.wants_progress
        self._waiting = ""
        self._count = 0
        self._news = asyncio.Event()
        self._sending = asyncio.create_task(self._send_all())

    def put(self, text: str) -> None:
        if not self._wanted:
            return
        self._waiting = (self._waiting + sayable(text[-MESSAGE_CHARS:]))[-MESSAGE_CHARS:]
        self._news.set()

    async def _send_all(self) -> None:
        while True:
            await self._news.wait()
            await self._send()
            await asyncio.sleep(BREATH_SECONDS)

    async def _send(self) -> None:
        self._news.clear()
        text, self._waiting = self._waiting, ""
        if text:
            self._count += 1
            await self._told.progress(self._count, text)

    async def finish(self) -> None:
        """Sends what is left."""
        self.close()
        await asyncio.gather(self._sending, return_exceptions=True)
        await self._send()

    def close(self) -> None:
        self._sending.cancel()


class Tool(NamedTuple):
    name: str
    title: str
    description: str  # for a model
    takes: type[Arguments]
    call: Callable[[Call, Any], Awaitable[Answer]]
    gives: type[Given] | None = None
    reads_only: bool = False
    destroys: bool = False
    repeats: bool = False  # whether doing it twice is the same as once
