"""Detached runs of the engine in this process, and of others that share its data directory."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import AsyncGenerator

from cloche.engine.engine import Engine
from cloche.engine.executions.runs import Line
from cloche.events import Numbered, Run, RunInfo
from cloche.sdk.request import OWNER


class NearRuns:
    def __init__(self, engine: Engine):
        self._runs = engine.runs

    async def info(self, id: str) -> RunInfo:
        return await self._runs.info(id, OWNER)

    async def list(self, sandbox: str) -> builtins.list[RunInfo]:
        return await self._runs.list(OWNER, sandbox)

    async def attach(self, id: str, after: int) -> AsyncGenerator[builtins.list[Numbered], None]:
        return _numbered(await self._runs.attach(id, OWNER, after))

    async def result(self, id: str) -> Run:
        return await self._runs.result(id, OWNER)

    async def interrupt(self, id: str) -> bool:
        return await self._runs.interrupt(id, OWNER)

    async def remove(self, id: str) -> None:
        await self._runs.remove(id, OWNER)


async def _numbered(followed: AsyncGenerator[list[Line], None]) -> AsyncGenerator[list[Numbered], None]:
    async with contextlib.aclosing(followed):
        async for batch in followed:
            yield [Numbered(line.number, line.event) for line in batch]
