"""Sandboxes are paused and resumed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.native.door import Door, body_of, reply
from cloche.model import check_seconds
from cloche.protocol import requests


class Pausing:
    def __init__(self, door: Door):
        self._door = door

    async def pause(self, request: Request) -> Response:
        id, owner = await self._door.named(request)
        asked = await body_of(request, requests.Pause)
        return reply(await self._door.engine.pause(id, owner, memory=asked.memory))

    async def resume(self, request: Request) -> Response:
        id, owner = await self._door.named(request)
        seconds = (await body_of(request, requests.Resume)).timeout_seconds
        check_seconds("timeout_seconds", seconds)
        sandbox = await self._door.engine.resume(id, owner, seconds=seconds)
        return reply(sandbox.info if seconds is None else sandbox.renew(seconds))  # it may have been running
