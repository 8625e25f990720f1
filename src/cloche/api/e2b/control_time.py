"""How long a sandbox lives, and connecting to one that does."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.e2b.control_replies import created
from cloche.api.e2b.control_wire import MAX_REFRESH_SECONDS, Lifespan, Refresh, decode
from cloche.api.e2b.desk import Desk
from cloche.api.e2b.replies import Conflict, json_reply

CONNECT_SECONDS = 300
REFRESH_SECONDS = 15


def routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlTime(desk)
    return [
        desk.route("POST", "/v2/sandboxes/{id}/connect", partial(plane.connect, default_seconds=CONNECT_SECONDS)),
        desk.route("POST", "/sandboxes/{id}/connect", partial(plane.connect, default_seconds=None)),
        desk.route("POST", "/sandboxes/{id}/resume", plane.resume),
        desk.route("POST", "/sandboxes/{id}/timeout", plane.set_timeout),
        desk.route("POST", "/sandboxes/{id}/refreshes", plane.refresh),
    ]


class ControlTime:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def connect(self, request: Request, *, default_seconds: int | None) -> Response:
        """Gives the sandbox at least that long from now; never less than it has."""
        resident = await self._desk.resident(request)
        asked = decode(await self._desk.body(request), Lifespan)
        seconds = self._seconds(asked, default_seconds)
        if seconds > 0:
            resident.sandbox.extend(seconds)
        return json_reply(created(resident, self._desk.domain))

    async def resume(self, request: Request) -> Response:
        """What clients did before there was `connect`. Nothing is ever paused here yet."""
        sandbox = await self._desk.sandbox(request)
        raise Conflict(f"sandbox {sandbox.id} is already running")

    async def set_timeout(self, request: Request) -> Response:
        """Moves the deadline, also to an earlier moment; 0 is now."""
        sandbox = await self._desk.sandbox(request)
        seconds = self._seconds(decode(await self._desk.body(request), Lifespan), None)
        if seconds == 0:
            sandbox.expire()
        else:
            sandbox.renew(seconds)
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        sandbox = await self._desk.sandbox(request)
        asked = decode(await self._desk.body(request), Refresh)
        seconds = REFRESH_SECONDS if asked.duration is None else asked.duration
        if not 0 <= seconds <= MAX_REFRESH_SECONDS:
            raise errors.InvalidRequest(f"duration: it must be from 0 to {MAX_REFRESH_SECONDS} s, not {seconds}")
        if seconds > 0:
            sandbox.extend(min(seconds, self._desk.max_seconds))
        return Response(status_code=204)

    def _seconds(self, asked: Lifespan, default: int | None) -> int:
        seconds = default if asked.timeout is None else asked.timeout
        if seconds is None:
            raise errors.InvalidRequest("timeout: it is missing; give the seconds from now on")
        if asked.timeout is not None:
            self._desk.check_timeout("timeout", seconds)
        return seconds
