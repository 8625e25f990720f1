"""Sandboxes are paused, go on, and are forked."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.e2b.control_replies import Json, created
from cloche.api.e2b.control_wire import Connection, Fork, Pause, Resumption, decode
from cloche.api.e2b.desk import Desk
from cloche.api.e2b.replies import Conflict, NotOffered, error_body, json_reply
from cloche.api.http import status_of
from cloche.engine.sandboxes.sandbox import Sandbox

CONNECT_SECONDS = 300
RESUME_SECONDS = 15
FORK_SECONDS = 15


def routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlPauses(desk)
    return [
        desk.route("POST", "/sandboxes/{id}/pause", plane.pause),
        desk.route("POST", "/v2/sandboxes/{id}/connect", partial(plane.connect, default_seconds=CONNECT_SECONDS)),
        desk.route("POST", "/sandboxes/{id}/connect", partial(plane.connect, default_seconds=None)),
        desk.route("POST", "/sandboxes/{id}/resume", plane.resume),
        desk.route("POST", "/sandboxes/{id}/fork", plane.fork),
    ]


class ControlPauses:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def pause(self, request: Request) -> Response:
        """With its memory, unless that is said not to be wanted. One that is paused already is a conflict."""
        owner = self._desk.owner(request)
        asked = decode(await self._desk.body(request), Pause)
        await self._desk.engine.pause(self._desk.id(request), owner, memory=asked.memory is not False)
        return Response(status_code=204)

    async def connect(self, request: Request, *, default_seconds: int | None) -> Response:
        """Gives a sandbox that runs at least that long from now, never less than it has; one that is paused goes on."""
        owner, id = self._desk.owner(request), self._desk.id(request)
        asked = decode(await self._desk.body(request), Connection)
        seconds = self._desk.seconds(asked.timeout, default_seconds)
        known = await self._desk.engine.describe(id, owner)
        if known.state == "paused" and known.pause_memory and asked.memory is False:
            raise NotOffered("memory: this sandbox was paused with its memory and goes on with it; leave it out")
        sandbox = await self._desk.engine.resume(id, owner, seconds=max(seconds, 1))
        if seconds > 0:
            sandbox.extend(seconds)
        return self._connected(sandbox, 201 if known.state == "paused" else 200)

    async def resume(self, request: Request) -> Response:
        """What clients did before there was `connect`. One that runs is a conflict."""
        owner, id = self._desk.owner(request), self._desk.id(request)
        asked = decode(await self._desk.body(request), Resumption)
        seconds = self._desk.seconds(asked.timeout, RESUME_SECONDS)
        known = await self._desk.engine.describe(id, owner)
        if known.state == "running":
            raise Conflict(f"sandbox {id} is already running")
        if asked.autoPause and known.on_deadline != "pause":
            raise NotOffered("autoPause: it is settled when a sandbox is made; leave it out, or set a longer timeout")
        return self._connected(await self._desk.engine.resume(id, owner, seconds=max(seconds, 1)), 201)

    async def fork(self, request: Request) -> Response:
        """Sandboxes with the files and the environment of this one. It runs on."""
        owner, id = self._desk.owner(request), self._desk.id(request)
        asked = decode(await self._desk.body(request), Fork)
        seconds = self._desk.seconds(asked.timeout, FORK_SECONDS)
        count = 1 if asked.count is None else asked.count
        forks = await self._desk.engine.fork(id, owner, count, seconds=max(seconds, 1))
        return json_reply([self._fork(each) for each in forks], 201)

    def _fork(self, fork: Sandbox | errors.ClocheError) -> Json:
        """One of those that were asked for: it, or why there is none."""
        if isinstance(fork, Sandbox):
            return {"sandbox": created(self._desk.residents.of(fork), self._desk.domain)}
        return {"error": error_body(status_of(fork), str(fork))}

    def _connected(self, sandbox: Sandbox, status: int) -> Response:
        return json_reply(created(self._desk.residents.of(sandbox), self._desk.domain), status)
