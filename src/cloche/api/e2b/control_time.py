"""How long a sandbox lives."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.e2b.control_wire import MAX_REFRESH_SECONDS, Lifespan, Refresh, decode
from cloche.api.e2b.desk import Desk

REFRESH_SECONDS = 15


def routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlTime(desk)
    return [
        desk.route("POST", "/sandboxes/{id}/timeout", plane.set_timeout),
        desk.route("POST", "/sandboxes/{id}/refreshes", plane.refresh),
    ]


class ControlTime:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def set_timeout(self, request: Request) -> Response:
        """Moves the deadline, also to an earlier moment; 0 is now."""
        sandbox = await self._desk.sandbox(request)
        seconds = self._desk.seconds(decode(await self._desk.body(request), Lifespan).timeout, None)
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
