"""The state that all handlers of LibreChat's code API share: engine, store, callers, limits, error replies."""

from __future__ import annotations

from math import ceil

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.http import DialectEndpoint, Handler, read_body_chunks, status_of
from cloche.api.librechat.identity import LibreChatAuth, LibreChatCaller
from cloche.api.librechat.limits import ProgramRateLimit, RequestMemory, RequestMemoryShare
from cloche.api.librechat.replies import LibreChatRefusal, json_reply
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.model import MIB
from cloche.store.gateway import GatewayStore

MAX_JSON_BYTES = 50 * MIB
REQUEST_MEMORY_BYTES = 512 * MIB  # for requests that come, wait or run


class LibreChatContext:
    """The shared state of the handlers."""

    def __init__(self, engine: Engine, shelf: GatewayStore, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        self.engine = engine
        self.shelf = shelf
        self.config = config.librechat
        self.secret = secret
        self.room = RequestMemory(REQUEST_MEMORY_BYTES)
        self._doorkeeper = LibreChatAuth(gatekeeper, config.librechat.jwt)
        self._pace = ProgramRateLimit(config.librechat.exec_per_minute)

    def route(self, method: str, path: str, handler: Handler) -> Route:
        return Route(path, DialectEndpoint(self, handler), methods=[method])

    def caller(self, request: Request) -> LibreChatCaller:
        """Raises Unauthenticated, Forbidden or LibreChatRefusal."""
        return self._doorkeeper.caller(request)

    def starter(self, request: Request) -> LibreChatCaller:
        """The caller of a request that starts a program, which is counted.

        Raises as `caller` does, and LibreChatRefusal (429) over the rate limit.
        """
        caller = self.caller(request)
        self._pace.take(caller)
        return caller

    async def body(self, request: Request, share: RequestMemoryShare) -> bytes:
        """Reads the body. Raises TooLarge, and LibreChatRefusal (503) as soon as there is no memory for it."""
        pieces = []
        async for chunk in read_body_chunks(request, MAX_JSON_BYTES):
            share.add_bytes(len(chunk))
            pieces.append(chunk)
        return b"".join(pieces)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, LibreChatRefusal):
            return json_reply(error.body, error.status, error.headers)
        if isinstance(error, errors.Gone):  # no sandbox of a client's: ours, which it may ask for again
            return json_reply({"error": "sandbox_execution_failed", "message": str(error)}, 503)
        soon = {} if error.retry_after_seconds is None else {"retry_after_seconds": ceil(error.retry_after_seconds)}
        return json_reply({"error": _error_kind(error), "message": str(error), **soon}, status_of(error))


def _error_kind(error: errors.ClocheError) -> str:
    """The `error` field: clients take it as the kind of an error."""
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
