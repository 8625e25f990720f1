"""POST /exec: a program, with the caller's files, and what came of it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche.api.http import unless_left
from cloche.api.librechat.desk import Desk
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Json, json_reply
from cloche.api.librechat.request import Asked, decode
from cloche.api.librechat.workshop import Workshop

AT_ONCE = 64  # programs without a session; those that come later wait for their turn


def routes(desk: Desk, workshop: Workshop) -> list[Route]:
    return [desk.route("POST", "/exec", Executions(desk, workshop).execute)]


class Executions:
    def __init__(self, desk: Desk, workshop: Workshop):
        self._desk = desk
        self._workshop = workshop
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def execute(self, request: Request) -> Response:
        caller = self._desk.starter(request)
        asked = decode(await self._desk.body(request))
        return json_reply(await unless_left(request, self._answer(caller, asked)))

    async def _answer(self, caller: Caller, asked: Asked) -> Json:
        """Of one session, one program runs at a time anyway: whoever waits for it is in nobody else's way."""
        if asked.hint is not None:
            return await self._workshop.carry_out(caller, asked)
        async with self._turn:
            return await self._workshop.carry_out(caller, asked)
