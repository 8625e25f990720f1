"""Detached runs on a server."""

from __future__ import annotations

import builtins
import re
from collections.abc import AsyncGenerator
from urllib.parse import quote

from cloche import errors
from cloche.events import Ended, Numbered, Run, RunInfo
from cloche.protocol import responses
from cloche.sdk.remote_server import Server

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RemoteRuns:
    def __init__(self, server: Server):
        self._server = server

    async def info(self, id: str) -> RunInfo:
        info: RunInfo = await self._server.ask("GET", _path(id), RunInfo)
        return info

    async def list(self, sandbox: str) -> builtins.list[RunInfo]:
        path = f"/sandboxes/{quote(sandbox, safe='')}/runs"
        found: builtins.list[RunInfo] = await self._server.ask("GET", path, builtins.list[RunInfo])
        return found

    async def attach(self, id: str, after: int) -> AsyncGenerator[builtins.list[Numbered], None]:
        """Raises when there is nothing to be attached to, not only when it is used."""
        followed = self._followed(id, after)
        await anext(followed)
        return followed

    async def _followed(self, id: str, after: int) -> AsyncGenerator[builtins.list[Numbered], None]:
        events, last = responses.EventsIn(), None
        async with self._server.streaming(f"{_path(id)}/events", {"after": after}) as chunks:
            yield []  # the answer has begun
            async for chunk in chunks:
                if batch := list(events.feed_numbered(chunk)):
                    last = batch[-1].event
                    yield batch
        if last is not None and not isinstance(last, Ended):
            raise self._server.lost()

    async def result(self, id: str) -> Run:
        return responses.decode_run(await self._server.ask("GET", f"{_path(id)}/result"))

    async def interrupt(self, id: str) -> bool:
        answer: responses.Interrupted = await self._server.ask("POST", f"{_path(id)}/interrupt", responses.Interrupted)
        return answer.interrupted

    async def remove(self, id: str) -> None:
        await self._server.ask("DELETE", _path(id))


def _path(id: str) -> str:
    """Raises RunNotFound for what is no id of any run: it could be another path."""
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise errors.RunNotFound(f"there is no run {str(id)[:100]!r}")
    return f"/runs/{id}"
