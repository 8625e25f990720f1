"""POST /exec: a program, with the caller's files, and what came of it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche.api.http import unless_left
from cloche.api.librechat.desk import Desk
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Json, json_reply
from cloche.api.librechat.request import decode
from cloche.api.librechat.room import Share
from cloche.api.librechat.turns import Ticket, Turns
from cloche.api.librechat.workshop import Workshop


def routes(desk: Desk, workshop: Workshop) -> list[Route]:
    return [desk.route("POST", "/exec", Executions(desk, workshop).execute)]


class Executions:
    def __init__(self, desk: Desk, workshop: Workshop):
        self._desk = desk
        self._workshop = workshop
        self._turns = Turns()

    async def execute(self, request: Request) -> Response:
        caller = self._desk.starter(request)
        with self._turns.ticket(caller) as ticket, self._desk.room.share(caller) as share:
            return json_reply(await self._answer(request, caller, ticket, share))

    async def _answer(self, request: Request, caller: Caller, ticket: Ticket, share: Share) -> Json:
        asked = decode(await self._desk.body(request, share))
        share.settle(asked.bytes)
        return await unless_left(request, self._workshop.carry_out(caller, asked, ticket.turn()))
