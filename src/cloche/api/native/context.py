"""The context of this dialect's handlers: authentication, the requested sandbox, decoding of requests."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import OPERATOR_STATE, Gatekeeper
from cloche.api.http import read_whole_body, request_id, status_of
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Principal
from cloche.protocol import OWN_ONLY_HEADER, responses

T = TypeVar("T")

MAX_SLOW_PARSE_VALUES = 200_000  # of a message with halves of surrogates, which takes a slow parser

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`")


class NativeContext:
    """Authenticates requests and finds their sandboxes.

    A sandbox of another owner is reported as unknown, except to the server's operator: a client of the control
    socket, or an admin at the console.
    """

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        self.engine = engine
        self.config = config
        self._gatekeeper = gatekeeper

    def admit(self, connection: HTTPConnection) -> Principal:
        """Raises Unauthenticated or Forbidden."""
        return self._gatekeeper.admit(connection)

    def owner(self, connection: HTTPConnection) -> str | None:
        """The owner of the visible sandboxes; None for the operator, which sees all. Raises as `admit` does."""
        principal = self.admit(connection)
        return None if self.is_operator(connection) else principal.owner

    def is_operator(self, connection: HTTPConnection) -> bool:
        """Whether the client is an admin without a key: over the control socket, or on a server without keys.

        So is an admin logged in at the console. Raises as `admit` does.
        """
        principal = self.admit(connection)
        if connection.headers.get(OWN_ONLY_HEADER):
            return False
        at_console = connection.scope["state"].get(OPERATOR_STATE, False)
        return principal.role == "admin" and (at_console or not principal.key_id)

    async def named(self, connection: HTTPConnection) -> tuple[str, str]:
        """The id and the owner of the sandbox in the path, also of a paused one. Raises SandboxNotFound."""
        owner, id = self.owner(connection), str(connection.path_params["id"])
        return id, (await self.engine.describe(id, owner)).owner

    async def sandbox(self, connection: HTTPConnection) -> Sandbox:
        """The running sandbox in the path. Raises SandboxNotFound, Gone or SandboxPaused."""
        owner = self.owner(connection)
        id = str(connection.path_params["id"])
        sandbox = await (self.engine.find(id) if owner is None else self.engine.get(id, owner))
        sandbox.check_running()
        return sandbox


async def decode_request_body(request: Request, kind: type[T]) -> T:
    """The JSON body as a message of that type. Raises InvalidRequest that names the mistake, or TooLarge."""
    message: T = decode_client_message(await read_whole_body(request) or b"{}", kind)
    return message


def decode_client_message(raw: bytes | str, kind: Any) -> Any:
    """Decodes a message of the client. Raises InvalidRequest."""
    try:
        return responses.decode_json(raw, kind, MAX_SLOW_PARSE_VALUES)
    except msgspec.ValidationError as error:
        raise _invalid_message_error(error, kind) from None
    except ValueError as error:
        raise errors.InvalidRequest(f"the request is no valid JSON: {error}") from None


def decode_request_query(connection: HTTPConnection, kind: type[T]) -> T:
    """The query string as a message of that type. Raises InvalidRequest."""
    try:
        return msgspec.convert(dict(connection.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid_message_error(error, kind) from None


def _invalid_message_error(error: msgspec.ValidationError, kind: Any) -> errors.InvalidRequest:
    match = _UNKNOWN_FIELD.match(str(error))
    if match is None:
        return errors.InvalidRequest(f"the request makes no sense: {error}")
    known = _field_names_of(kind)
    near = difflib.get_close_matches(match[1], known, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
    return errors.InvalidRequest(f"the request has no field {match[1]!r}: {hint}")


def _field_names_of(kind: Any) -> list[str]:
    """The names of a message's fields, and of the messages in it."""
    names: list[str] = []
    for each in getattr(kind, "__args__", (kind,)):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            for field in msgspec.structs.fields(each):
                names += [field.name, *_field_names_of(field.type)]
    return list(dict.fromkeys(names))


def json_response(value: Any, status: int = 200) -> Response:
    return Response(responses.encode_json(value), status, media_type="application/json")


def raw_json_response(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, headers=headers, media_type="application/json")


class NativeErrors:
    """The error format of this dialect."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return json_response(
            responses.ErrorResponse(error=responses.to_error_info(error, request_id(request))), status_of(error)
        )
