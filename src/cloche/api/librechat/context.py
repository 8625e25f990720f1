"""Where the handlers of LibreChat's code API meet who asks, what for, and how errors are said."""

from __future__ import annotations

from math import ceil

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.http import Edge, Handler, body_chunks, status_of
from cloche.api.librechat.identity import Caller, Doorkeeper
from cloche.api.librechat.limits import Pace, Room, Share
from cloche.api.librechat.replies import Refusal, json_reply
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.model import MIB
from cloche.store.gateway import Shelf

MAX_JSON_BYTES = 50 * MIB
ROOM_BYTES = 512 * MIB  # for requests that come, wait or run


class Desk:
    """What every handler needs."""

    def __init__(self, engine: Engine, shelf: Shelf, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        self.engine = engine
        self.shelf = shelf
        self.config = config.librechat
        self.secret = secret
        self.room = Room(ROOM_BYTES)
        self._doorkeeper = Doorkeeper(gatekeeper, config.librechat.jwt)
        self._pace = Pace(config.librechat.exec_per_minute)

    def route(self, method: str, path: str, handler: Handler) -> Route:
        return Route(path, Edge(self, handler), methods=[method])

    def caller(self, request: Request) -> Caller:
        """Raises Unauthenticated, Forbidden or Refusal."""
        return self._doorkeeper.caller(request)

    def starter(self, request: Request) -> Caller:
        """Who starts a program, which is counted. Raises as `caller` does, and Refusal (429) for one too many."""
        caller = self.caller(request)
        self._pace.take(caller)
        return caller

    async def body(self, request: Request, share: Share) -> bytes:
        """Raises TooLarge, and Refusal (503) as soon as there is no room for it."""
        pieces = []
        async for chunk in body_chunks(request, MAX_JSON_BYTES):
            share.grow(len(chunk))
            pieces.append(chunk)
        return b"".join(pieces)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, Refusal):
            return json_reply(error.body, error.status, error.headers)
        if isinstance(error, errors.Gone):  # no sandbox of a client's: ours, which it may ask for again
            return json_reply({"error": "sandbox_execution_failed", "message": str(error)}, 503)
        soon = {} if error.retry_after_seconds is None else {"retry_after_seconds": ceil(error.retry_after_seconds)}
        return json_reply({"error": _word(error), "message": str(error), **soon}, status_of(error))


def _word(error: errors.ClocheError) -> str:
    """What clients take as the kind of an error."""
    match error:
        case errors.Unauthenticated() | errors.Forbidden() | errors.NotFound():
            return str(error)
        case errors.InvalidRequest():
            return "bad_request"
        case errors.Busy():
            return "too_many_programs"
        case errors.QuotaExceeded():
            return "rate_limited"
    return error.code
