"""The context of this dialect's handlers: authentication, the requested sandbox, decoding of requests."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import OPERATOR_STATE
from cloche.api.dialect import DialectContext, invalid_type, json_reply
from cloche.api.http import read_decoded, request_id_of, status_of
from cloche.events import decode_json
from cloche.json_text import TooComplexJson, check_json
from cloche.model import MIB, Principal
from cloche.protocol import OWN_ONLY_HEADER, responses

T = TypeVar("T")

MAX_SLOW_PARSE_BYTES = 8 * MIB  # of a message with halves of surrogates

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`")


class NativeContext(DialectContext):
    """The context of all handlers of this dialect.

    A sandbox of another owner is reported as unknown, except to the server's operator: a client of the control
    socket, or an admin at the console. Errors are `{"error": {"code": .., "message": .., "request_id": ..}}`.
    """

    def render_error(self, error: errors.ClocheError, request: HTTPConnection) -> Response:
        fault = responses.to_error_info(error, request_id_of(request.scope))
        return json_reply(responses.ErrorResponse(error=fault), status_of(error))

    def visible_owner(self, connection: HTTPConnection) -> str | None:
        principal = self.admit(connection)
        return None if _is_operator(connection, principal) else principal.owner

    def is_operator(self, connection: HTTPConnection) -> bool:
        """Whether the client is an admin without a key: over the control socket, or on a server without keys.

        So is an admin logged in at the console. Raises as `admit` does.
        """
        return _is_operator(connection, self.admit(connection))


def _is_operator(connection: HTTPConnection, principal: Principal) -> bool:
    if connection.headers.get(OWN_ONLY_HEADER):
        return False
    at_console = connection.scope["state"].get(OPERATOR_STATE, False)
    return principal.role == "admin" and (at_console or not principal.key_id)


async def decode_request_body(request: Request, kind: type[T]) -> T:
    """The JSON body as a message of that type. Raises InvalidRequest that names the mistake, or TooLarge."""
    return await read_decoded(request, lambda body: decode_client_message(body or b"{}", kind))


def decode_client_message(raw: bytes | str, kind: Any) -> Any:
    """Decodes a message of the client. Raises InvalidRequest."""
    try:
        check_json(raw)
        return decode_json(raw, kind, MAX_SLOW_PARSE_BYTES)
    except msgspec.ValidationError as error:
        raise _invalid_message_error(error, kind) from None
    except TooComplexJson as error:
        raise errors.InvalidRequest(f"invalid request: {error}") from None
    except ValueError as error:
        raise errors.InvalidRequest(f"the request is no valid JSON: {error}") from None


def decode_request_query(connection: HTTPConnection, kind: type[T]) -> T:
    """The query string as a message of that type. Raises InvalidRequest."""
    try:
        return msgspec.convert(dict(connection.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid_message_error(error, kind) from None


def _invalid_message_error(error: msgspec.ValidationError, kind: Any) -> errors.InvalidRequest:
    located = invalid_type(error)
    match = _UNKNOWN_FIELD.match(located.detail)
    if match is None:
        return errors.InvalidRequest(f"invalid request: {located.detail}")
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
