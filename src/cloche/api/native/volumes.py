"""Named volumes: made, listed, looked at and removed. What is in them, sandboxes read and write."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.native.door import Door, body_of, reply
from cloche.protocol import requests


class Volumes:
    def __init__(self, door: Door):
        self._door = door

    async def make(self, request: Request) -> Response:
        owner = self._door.admit(request).owner
        asked = await body_of(request, requests.MakeVolume)
        return reply((await self._door.engine.volumes.create(asked.name, owner)).info, 201)

    async def list(self, request: Request) -> Response:
        return reply([each.info for each in await self._door.engine.volumes.list(self._door.admit(request).owner)])

    async def get(self, request: Request) -> Response:
        owner = self._door.admit(request).owner
        return reply((await self._door.engine.volumes.get(request.path_params["ref"], owner)).info)

    async def remove(self, request: Request) -> Response:
        owner = self._door.admit(request).owner
        await self._door.engine.volumes.remove(request.path_params["ref"], owner)
        return Response(status_code=204)
