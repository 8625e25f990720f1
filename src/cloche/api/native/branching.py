"""Contexts are taken back to checkpoints, and copied."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.native.door import Door, body_of, reply
from cloche.api.native.sandboxes import described
from cloche.engine.context import Context
from cloche.protocol import asks


class Branching:
    def __init__(self, door: Door):
        self._door = door

    async def checkpoint(self, request: Request) -> Response:
        return reply(await (await self._context(request)).checkpoint(), 201)

    async def list(self, request: Request) -> Response:
        return reply((await self._context(request)).marks())

    async def forget(self, request: Request) -> Response:
        (await self._context(request)).forget(request.path_params["checkpoint"])
        return Response(status_code=204)

    async def rollback(self, request: Request) -> Response:
        context = await self._context(request)
        await context.rollback((await body_of(request, asks.Rollback)).checkpoint)
        return Response(status_code=204)

    async def fork(self, request: Request) -> Response:
        context = await self._context(request)
        made = await context.fork((await body_of(request, asks.ForkContext)).count)
        return reply([described(each) for each in made], 201)

    async def _context(self, request: Request) -> Context:
        return (await self._door.sandbox(request)).context(request.path_params["context"])
