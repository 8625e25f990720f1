"""Who asks, for which sandbox, and what: the start of every handler of this dialect."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import OPERATOR, Gatekeeper
from cloche.api.http import request_id, status_of, whole_body
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Principal
from cloche.protocol import OWN_ONLY, responses

T = TypeVar("T")

MAX_VALUES = 200_000  # of a message with halves of surrogates, which takes a slow parser

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`")


class Door:
    """Lets requests in.

    A foreign sandbox is answered for as one that never existed, except to the server's operator: whoever comes through
    the control socket, or is an admin at the console.
    """

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        self.engine = engine
        self.config = config
        self._gatekeeper = gatekeeper

    def admit(self, connection: HTTPConnection) -> Principal:
        """Raises Unauthenticated or Forbidden."""
        return self._gatekeeper.admit(connection)  # type: ignore[arg-type]  # it looks at scope and headers only

    def owner(self, connection: HTTPConnection) -> str | None:
        """Whose sandboxes they may see; None for the operator, who may see all. Raises as `admit` does."""
        principal = self.admit(connection)
        return None if self.is_operator(connection) else principal.owner

    def is_operator(self, connection: HTTPConnection) -> bool:
        """Whether they came without a key and were let in as admin: by the control socket, or where no keys are used.

        So is an admin who logged in at the console. Raises as `admit` does.
        """
        principal = self.admit(connection)
        if connection.headers.get(OWN_ONLY):
            return False
        at_console = connection.scope["state"].get(OPERATOR, False)
        return principal.role == "admin" and (at_console or not principal.key_id)

    async def named(self, connection: HTTPConnection) -> tuple[str, str]:
        """The id of the sandbox that the path names, and whose it is, also if it is paused. Raises SandboxNotFound."""
        owner, id = self.owner(connection), str(connection.path_params["id"])
        return id, (await self.engine.describe(id, owner)).owner

    async def sandbox(self, connection: HTTPConnection) -> Sandbox:
        """The one that the path names. Raises SandboxNotFound, Gone or SandboxPaused."""
        owner = self.owner(connection)
        id = str(connection.path_params["id"])
        sandbox = await (self.engine.find(id) if owner is None else self.engine.get(id, owner))
        sandbox.check_running()
        return sandbox


async def body_of(request: Request, kind: type[T]) -> T:
    """The JSON body as such a message. Raises InvalidRequest that says what is wrong with it, or TooLarge."""
    message: T = read(await whole_body(request) or b"{}", kind)
    return message


def read(raw: bytes | str, kind: Any) -> Any:
    """A message of the client. Raises InvalidRequest."""
    try:
        return responses.decode(raw, kind, MAX_VALUES)
    except msgspec.ValidationError as error:
        raise _refused(error, kind) from None
    except ValueError as error:
        raise errors.InvalidRequest(f"the request is no valid JSON: {error}") from None


def query_of(connection: HTTPConnection, kind: type[T]) -> T:
    """The query string as such a message. Raises InvalidRequest."""
    try:
        return msgspec.convert(dict(connection.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refused(error, kind) from None


def _refused(error: msgspec.ValidationError, kind: Any) -> errors.InvalidRequest:
    match = _UNKNOWN_FIELD.match(str(error))
    if match is None:
        return errors.InvalidRequest(f"the request makes no sense: {error}")
    known = _fields_of(kind)
    near = difflib.get_close_matches(match[1], known, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
    return errors.InvalidRequest(f"the request has no field {match[1]!r}: {hint}")


def _fields_of(kind: Any) -> list[str]:
    """The names of a message's fields, and of the messages in it."""
    names: list[str] = []
    for each in getattr(kind, "__args__", (kind,)):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            for field in msgspec.structs.fields(each):
                names += [field.name, *_fields_of(field.type)]
    return list(dict.fromkeys(names))


def reply(value: Any, status: int = 200) -> Response:
    return Response(responses.encode(value), status, media_type="application/json")


def raw_reply(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, headers=headers, media_type="application/json")


class Native:
    """How this dialect says that something of ours went wrong."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return reply(responses.Failure(error=responses.fault_of(error, request_id(request))), status_of(error))
