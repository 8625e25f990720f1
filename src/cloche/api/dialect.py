"""The kit that every dialect is built from.

A dialect is one API over the engine, in its vendor's words: E2B, OpenSandbox, OpenAI, LibreChat, and Cloche's own.
Each has a subclass of `DialectContext`, which renders errors in the vendor's format; its handlers call the context
for the owner, the sandbox and the body of a request. The rest of the kit: `json_reply`, `decode_json` with located
errors, `NotSupported` for routes that only the vendor has, event streams, and the router with the dialect's own 404.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, TypeVar, overload

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.http import MAX_JSON_BYTES, Dialect, DialectEndpoint, Handler, StreamResponse, read_decoded
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import encode_json
from cloche.json_text import TooComplexJson, check_json, decode_lenient_utf8, parse_json
from cloche.model import Principal

T = TypeVar("T")

JSON_TYPE = "application/json"

Json = dict[str, Any]  # an object on the wire


# The context: what all handlers of a dialect share.


class DialectContext(ABC):
    """The engine, and the owner, sandbox and body of a request."""

    max_body_bytes: ClassVar[int] = MAX_JSON_BYTES

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        self.engine = engine
        self.config = config
        self._gatekeeper = gatekeeper

    @abstractmethod
    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        """The error in the dialect's format."""

    def route(self, method: str | Sequence[str], path: str, handler: Handler) -> Route:
        """A route for these methods. The handler's errors are rendered in the dialect's format."""
        return dialect_route(self, method, path, handler)

    def admit(self, connection: HTTPConnection) -> Principal:
        """The principal of the request. Raises Unauthenticated or Forbidden."""
        return self._gatekeeper.admit(connection)

    def owner(self, connection: HTTPConnection) -> str:
        """The owner of the request's key. Raises as `admit` does."""
        return self.admit(connection).owner

    def visible_owner(self, connection: HTTPConnection) -> str | None:
        """The owner whose sandboxes the request may see; None for those of all owners. Raises as `admit` does."""
        return self.owner(connection)

    def sandbox_id(self, connection: HTTPConnection) -> str:
        """The id of the sandbox in the path."""
        return str(connection.path_params["id"])

    async def sandbox(self, connection: HTTPConnection) -> Sandbox:
        """The sandbox in the path, running. One that was created with automatic resume is resumed.

        Raises SandboxNotFound (also for one that the request may not see), Gone, SandboxPaused, and as `admit`.
        """
        return await (await self.handle(connection)).running()

    async def handle(self, connection: HTTPConnection) -> SandboxHandle:
        """The handle of the sandbox in the path, running or paused. Raises SandboxNotFound, Gone, and as `admit`."""
        return await self.engine.handle(self.sandbox_id(connection), self.visible_owner(connection))

    async def decoded(self, request: Request, decode: Callable[[bytes], T]) -> T:
        """The body's JSON, as `decode` reads it. Raises TooLarge, and everything that `decode` raises."""
        return await read_decoded(request, decode, self.max_body_bytes)

    async def json_body(self, request: Request, kind: type[T]) -> T:
        """The body's JSON as that type; an empty body is an empty object. Raises InvalidJson, TooLarge."""
        return await self.decoded(request, lambda body: decode_json_body(body, kind))

    def unsupported(self, why: str) -> Handler:
        """The handler of a route that the vendor's API has and this server has not.

        The key is checked first, and the sandbox: that one is missing is the more useful answer.
        """

        async def refuse(request: Request) -> Response:
            if "id" in request.path_params:
                await self.sandbox(request)
            else:
                self.admit(request)
            raise NotSupported(why)

        return refuse


def dialect_route(dialect: Dialect, method: str | Sequence[str], path: str, handler: Handler) -> Route:
    """A route for these methods. The handler's errors are rendered by `dialect`."""
    methods = [method] if isinstance(method, str) else list(method)
    return Route(path, DialectEndpoint(dialect, handler), methods=methods)


class NotSupported(errors.ClocheError):
    """A feature of the vendor's API that this server does not have."""

    code = "not_offered"


class UnsupportedField(errors.InvalidRequest):
    """A valid request with a field for a feature that this server does not have."""

    code = "not_offered"


class Conflict(errors.ClocheError):
    """The current state does not allow the operation."""

    code = "conflict"


# Replies.


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response. Lone surrogates, which programs can print, are sent as escapes."""
    return Response(encode_json(body), status, headers, JSON_TYPE)


def encoded_json_reply(body: bytes) -> Response:
    """A response with JSON that is encoded already."""
    return Response(body, media_type=JSON_TYPE)


_FIRST_SECONDS, _LAST_SECONDS = -62135596800, 253402300799  # the years 1 to 9999, which is what RFC 3339 can write


def format_timestamp(seconds: float, timespec: Literal["microseconds", "milliseconds"] = "microseconds") -> str:
    """RFC 3339 in UTC. Times that it cannot express, which a file may have, are clamped."""
    seconds = to_microseconds(min(max(_FIRST_SECONDS, seconds), _LAST_SECONDS)) / 1_000_000
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=timespec)[:-6] + "Z"


def to_microseconds(seconds: float) -> int:
    """The time in the resolution that clients see: values they send back must compare equal."""
    return round(seconds * 1_000_000)


# JSON bodies. Errors say where and what; each dialect may put that into its own words.

JsonFlaw = Literal["empty", "syntax", "complexity", "type"]


class InvalidJson(errors.InvalidRequest):
    """A body that is not JSON, or not of the expected type.

    `path` is the place of the wrong value, such as `metadata.name` (empty: the whole body), `problem` what is wrong
    with it, `position` the offset of a syntax error, and `detail` the decoder's whole message.
    """

    def __init__(self, flaw: JsonFlaw, problem: str, *, path: str = "", detail: str = "", position: int | None = None):
        super().__init__(_describe_flaw(flaw, problem, path))
        self.flaw = flaw
        self.problem = problem
        self.path = path
        self.detail = detail or problem
        self.position = position


def _describe_flaw(flaw: JsonFlaw, problem: str, path: str) -> str:
    match flaw:
        case "type":
            return f"the request's body is not right: {path + ': ' if path else ''}{problem}"
        case "complexity":
            return f"the request's body is too complex: {problem}"
    return f"the request's body is not JSON: {problem}"


@overload
def decode_json(body: bytes) -> Any: ...
@overload
def decode_json(body: bytes, kind: type[T]) -> T: ...
def decode_json(body: bytes, kind: Any = Any) -> Any:
    """Decodes a body, if it is within the bounds of `check_json`. Raises InvalidJson.

    A body of more than a mebibyte does not belong on the event loop: `read_decoded`.
    """
    try:
        return parse_json(body, kind)
    except TooComplexJson as error:
        raise InvalidJson("complexity", str(error)) from None
    except msgspec.ValidationError as error:
        raise invalid_type(error) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidJson("syntax", str(error)) from None


def decode_json_body(body: bytes, kind: type[T]) -> T:
    """As `decode_json`. An empty body is an empty object."""
    return decode_json(body.strip() or b"{}", kind)


def decode_json_object(body: bytes) -> dict[str, Any]:
    """Decodes an object with Python's parser, which keeps lone surrogates: in code they are the program's affair.

    Raises InvalidJson.
    """
    if not body.strip():
        raise InvalidJson("empty", "it is empty")
    try:
        check_json(body)
        value = json.loads(decode_lenient_utf8(body))
    except TooComplexJson as error:
        raise InvalidJson("complexity", str(error)) from None
    except json.JSONDecodeError as error:
        raise InvalidJson("syntax", error.msg, position=error.pos) from None
    except ValueError:
        raise InvalidJson("syntax", "it is not UTF-8, or has a number of thousands of digits") from None
    if not isinstance(value, dict):
        raise InvalidJson("type", "it must be an object")
    return value


def invalid_type(error: msgspec.ValidationError) -> InvalidJson:
    """Splits msgspec's message, "Expected `str`, got `int` - at `$.metadata[...]`", into problem and path."""
    problem, _, where = str(error).partition(" - at `$")
    return InvalidJson("type", problem, path=where.rstrip("`").lstrip("."), detail=str(error))


# Server-sent events.

EVENTS_TYPE = "text/event-stream"
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # else a proxy in front keeps events to itself


def encode_sse(data: bytes, event: bytes = b"", id: int | None = None) -> bytes:
    """One event. JSON has no line breaks, so its data is one line."""
    number = b"" if id is None else b"id: %d\n" % id
    name = b"event: %s\n" % event if event else b""
    return b"%s%sdata: %s\n\n" % (number, name, data)


def event_stream(
    frames: AsyncGenerator[bytes, None],
    *,
    quiet_seconds: float,
    keepalive: bytes | Callable[[], bytes],
    headers: Mapping[str, str] = SSE_HEADERS,
    at_once: bool = False,
    until: Callable[[], Awaitable[None]] | None = None,
) -> StreamResponse:
    """A stream of server-sent events. The parameters are those of `StreamResponse`."""
    return StreamResponse(
        frames,
        headers=headers,
        media_type=EVENTS_TYPE,
        at_once=at_once,
        quiet_seconds=quiet_seconds,
        keepalive=keepalive,
        until=until,
    )


# Routes. A router that is indexed by the number of path segments and the last segment, so that it tries few routes.


class PathIndexRouter:
    """Responds as Starlette's Router does with the same routes, in their order, without redirects.

    Starlette's tries every route in turn, which with many routes takes longer than the rest of its work.
    """

    def __init__(self, routes: Sequence[BaseRoute], default: ASGIApp | None = None):
        ends = {_path_end_of(path) for path in map(_path_template_of, routes) if path is not None}
        self._by_end = {end: _build_router_for_end(routes, default, end) for end in ends}
        self._rest = Router([route for route in routes if _path_template_of(route) is None], False, default)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        count, last = _path_end_of(scope["path"]) if scope["type"] != "lifespan" else (0, "")
        found = self._by_end.get((count, last)) or self._by_end.get((count, "{}")) or self._rest
        await found(scope, receive, send)


def _build_router_for_end(routes: Sequence[BaseRoute], default: ASGIApp | None, end: tuple[int, str]) -> Router:
    fitting = {end, (end[0], "{}")}
    paths = [(route, _path_template_of(route)) for route in routes]
    return Router([route for route, path in paths if path is None or _path_end_of(path) in fitting], False, default)


def _path_template_of(route: BaseRoute) -> str | None:
    """The route's path template; None if it can have any length."""
    if not isinstance(route, Route | WebSocketRoute) or ":path}" in route.path:
        return None
    return route.path


def _path_end_of(path: str) -> tuple[int, str]:
    """The number of segments and the last segment; `{}` if that is a parameter."""
    last = path.rpartition("/")[2]
    return path.count("/"), "{}" if "{" in last else last


class DialectRouter:
    """The routes of a dialect. `missing` renders the responses for unknown paths (404) and methods (405)."""

    def __init__(self, routes: Sequence[BaseRoute], missing: Callable[[int, str], Response]):
        self._router = PathIndexRouter(routes)
        self._missing = missing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise an error instead of sending its own response
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            response = self._missing(error.status_code, describe_missing_route(error, scope))
            response.headers.update(error.headers or {})
            await response(scope, receive, send)


def describe_missing_route(error: HTTPException, scope: Scope) -> str:
    """The message for a router's 404 or 405."""
    return "no such route" if error.status_code == 404 else f"{scope['method']} is not possible there"
