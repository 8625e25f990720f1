"""Contexts are taken back to checkpoints, and copied. All of it waits for its turn, unless its client leaves."""

from __future__ import annotations

import contextlib

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import has_left, unless_disconnected, whole_body
from cloche.api.native.door import Door, body_of, reply
from cloche.api.native.sandboxes import described
from cloche.engine.executions.context import Context
from cloche.protocol import requests


class Branching:
    def __init__(self, door: Door):
        self._door = door

    async def checkpoint(self, request: Request) -> Response:
        context = await self._context(request)
        await whole_body(request)
        mark = await unless_disconnected(request, context.checkpoint())
        if has_left(request):
            with contextlib.suppress(errors.ClocheError):
                context.forget(mark.id)  # nobody would ever know its id
            raise ClientDisconnect
        return reply(mark, 201)

    async def list(self, request: Request) -> Response:
        return reply((await self._context(request)).marks())

    async def forget(self, request: Request) -> Response:
        (await self._context(request)).forget(request.path_params["checkpoint"])
        return Response(status_code=204)

    async def rollback(self, request: Request) -> Response:
        context = await self._context(request)
        mark = (await body_of(request, requests.Rollback)).checkpoint
        await unless_disconnected(request, context.rollback(mark))
        return Response(status_code=204)

    async def fork(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        context = sandbox.context(request.path_params["context"])
        asked = await body_of(request, requests.ForkContext)
        made = await unless_disconnected(request, context.fork(asked.count))
        if has_left(request):
            for each in made:
                with contextlib.suppress(errors.ClocheError):
                    sandbox.remove_context(each.id)
            raise ClientDisconnect
        return reply([described(each) for each in made], 201)

    async def _context(self, request: Request) -> Context:
        return (await self._door.sandbox(request)).context(request.path_params["context"])
