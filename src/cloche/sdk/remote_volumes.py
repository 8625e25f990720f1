"""The volumes that a server has for the library."""

from __future__ import annotations

import builtins
from urllib.parse import quote

from cloche.model import VolumeInfo
from cloche.protocol import requests
from cloche.sdk.remote_server import Server


class RemoteVolumes:
    def __init__(self, server: Server):
        self._server = server

    async def create(self, name: str) -> VolumeInfo:
        made: VolumeInfo = await self._server.ask("POST", "/volumes", VolumeInfo, body=requests.MakeVolume(name=name))
        return made

    async def list(self) -> builtins.list[VolumeInfo]:
        found: builtins.list[VolumeInfo] = await self._server.ask("GET", "/volumes", builtins.list[VolumeInfo])
        return found

    async def get(self, ref: str) -> VolumeInfo:
        found: VolumeInfo = await self._server.ask("GET", _path(ref), VolumeInfo)
        return found

    async def remove(self, ref: str) -> None:
        await self._server.ask("DELETE", _path(ref))


def _path(ref: str) -> str:
    return f"/volumes/{quote(ref, safe='')}"
