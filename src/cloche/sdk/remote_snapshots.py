"""The snapshots that a server has for the library."""

from __future__ import annotations

import builtins
from urllib.parse import quote

from cloche.model import SnapshotInfo
from cloche.sdk.remote_server import Server


class RemoteSnapshots:
    def __init__(self, server: Server):
        self._server = server

    async def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        found: builtins.list[SnapshotInfo] = await self._server.ask(
            "GET", "/snapshots", builtins.list[SnapshotInfo], query={"sandbox": sandbox}
        )
        return found

    async def get(self, ref: str) -> SnapshotInfo:
        found: SnapshotInfo = await self._server.ask("GET", _path(ref), SnapshotInfo)
        return found

    async def remove(self, ref: str) -> None:
        await self._server.ask("DELETE", _path(ref))


def _path(ref: str) -> str:
    return f"/snapshots/{quote(ref, safe='')}"
