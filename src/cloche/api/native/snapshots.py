"""Snapshots of sandboxes, and forks of them."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import has_left
from cloche.api.native.door import Door, body_of, query_of, reply
from cloche.engine.sandboxes.create import all_made
from cloche.model import check_seconds
from cloche.protocol import requests


class Snapshots:
    def __init__(self, door: Door):
        self._door = door

    async def make(self, request: Request) -> Response:
        id, owner = await self._door.named(request)
        asked = await body_of(request, requests.MakeSnapshot)
        return reply((await self._door.engine.snapshot(id, owner, name=asked.name)).info, 201)

    async def fork(self, request: Request) -> Response:
        id, owner = await self._door.named(request)
        asked = await body_of(request, requests.Fork)
        check_seconds("timeout_seconds", asked.timeout_seconds)
        made = await all_made(await self._door.engine.fork(id, owner, asked.count, seconds=asked.timeout_seconds))
        if has_left(request):
            await asyncio.gather(*(each.kill("whoever asked for it left") for each in made))
            raise ClientDisconnect
        return reply([each.info for each in made], 201)

    async def list(self, request: Request) -> Response:
        principal = self._door.admit(request)
        asked = query_of(request, requests.SnapshotsQuery)
        if asked.all and not self._door.is_operator(request):
            raise errors.Forbidden("all snapshots are for the server's operator, on its control socket")
        found = await self._door.engine.snapshots.list(None if asked.all else principal.owner, asked.sandbox)
        return reply([each.info for each in found])

    async def get(self, request: Request) -> Response:
        owner = self._door.owner(request)
        return reply((await self._door.engine.snapshots.get(request.path_params["ref"], owner)).info)

    async def remove(self, request: Request) -> Response:
        owner = self._door.owner(request)
        found = await self._door.engine.snapshots.get(request.path_params["ref"], owner)
        await self._door.engine.snapshots.remove(found.id, found.owner)
        return Response(status_code=204)
