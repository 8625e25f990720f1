"""The state that all handlers of LibreChat's code API share: engine, store, callers, limits, error replies."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from math import ceil

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectContext, json_reply
from cloche.api.http import collect_json, read_body_chunks, status_of
from cloche.api.librechat.identity import LibreChatAuth, LibreChatCaller
from cloche.api.librechat.limits import ProgramRateLimit, RequestMemory, RequestMemoryShare
from cloche.api.librechat.replies import LibreChatRefusal
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.model import MIB
from cloche.store.gateway import GatewayStore

REQUEST_MEMORY_BYTES = 512 * MIB  # for requests that come, wait or run


class LibreChatContext(DialectContext):
    """The context of all handlers. A request has a caller, which may be one of an owner's users."""

    max_body_bytes = 50 * MIB

    def __init__(self, engine: Engine, store: GatewayStore, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        super().__init__(engine, gatekeeper, config)
        self.store = store
        self.settings = config.librechat
        self.secret = secret
        self.room = RequestMemory(REQUEST_MEMORY_BYTES)
        self._auth = LibreChatAuth(gatekeeper, config.librechat.jwt)
        self._rate_limit = ProgramRateLimit(config.librechat.exec_per_minute)

    def caller(self, request: Request) -> LibreChatCaller:
        """Raises Unauthenticated, Forbidden or LibreChatRefusal."""
        return self._auth.caller(request)

    def starter(self, request: Request) -> LibreChatCaller:
        """The caller of a request that starts a program, which is counted.

        Raises as `caller` does, and LibreChatRefusal (429) over the rate limit.
        """
        caller = self.caller(request)
        self._rate_limit.take(caller)
        return caller

    async def counted_body(self, request: Request, share: RequestMemoryShare) -> bytes:
        """Reads the body. Raises TooLarge, and LibreChatRefusal (503) as soon as there is no memory for it."""
        return await collect_json(self._counted_chunks(request, share))

    async def _counted_chunks(self, request: Request, share: RequestMemoryShare) -> AsyncGenerator[bytes, None]:
        async for chunk in read_body_chunks(request, self.max_body_bytes):
            share.add_bytes(len(chunk))
            yield chunk

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
