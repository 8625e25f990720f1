"""The context of this dialect's handlers: whose workspace a request is for, its arguments, and errors."""

from __future__ import annotations

import re
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectContext, InvalidJson, decode_json, invalid_type, json_reply
from cloche.api.http import status_of
from cloche.api.open_terminal.workspace import HOME, MAX_USER, Refusal, Workspace, WorkspaceKey, Workspaces
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.model import MIB

USER_HEADER, CHAT_HEADER = "x-user-id", "x-session-id"
MAX_CHAT = 256  # letters
_MISSING = re.compile(r"missing required field `(\w+)`")
T = TypeVar("T")


class OpenTerminalContext(DialectContext):
    max_body_bytes = 32 * MIB

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        super().__init__(engine, gatekeeper, config)
        self.workspaces = Workspaces(engine, config)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return error_reply(error)

    def workspace_key(self, connection: HTTPConnection) -> WorkspaceKey:
        """Raises NotFound for a policy that is not there, InvalidRequest for a long name, and as `admit`."""
        owner = self.owner(connection)
        policy = str(connection.scope["state"].get("policy", ""))
        self.workspaces.policy_of(policy)
        user = connection.headers.get(USER_HEADER) or connection.query_params.get("user_id", "")
        if len(user) > MAX_USER or len(chat_of(connection)) > MAX_CHAT:
            raise errors.InvalidRequest(f"{USER_HEADER} and {CHAT_HEADER} have up to {MAX_USER} letters")
        return WorkspaceKey(owner=owner, policy=policy, user=user)

    def find_workspace(self, connection: HTTPConnection) -> Workspace | None:
        """The workspace, if it was used; raises as `workspace_key`."""
        return self.workspaces.find(self.workspace_key(connection))

    async def workspace(self, connection: HTTPConnection) -> Workspace:
        """The workspace, made at its first use. Raises as `workspace_key` and `Engine.create`."""
        return await self.workspaces.open(self.workspace_key(connection))

    async def arguments(self, request: Request, kind: type[T]) -> T:
        """The body, or the query of a method without one. Raises InvalidJson, TooLarge."""
        if request.method in ("POST", "PUT", "PATCH"):
            return await self.decoded(request, lambda body: decode_json(body.strip() or b"{}", kind))
        return decode_query(request, kind)


def chat_of(connection: HTTPConnection) -> str:
    return connection.headers.get(CHAT_HEADER, "")


def directory_of(workspace: Workspace, request: HTTPConnection, *, in_chat: bool = True) -> str:
    return workspace.directory(chat_of(request)) if in_chat else HOME


def decode_query(request: HTTPConnection, kind: type[T]) -> T:
    """The query's fields; `null` stands for none. Raises InvalidJson."""
    given: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):  # type: ignore[arg-type]
        found = [each for each in request.query_params.getlist(field.name) if each.lower() != "null"]
        if found:
            given[field.name] = found if _takes_list(field.type) else found[-1]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidQuery(*_flaw_of(error)) from None


def _flaw_of(error: msgspec.ValidationError) -> tuple[str, str]:
    found = invalid_type(error)
    return found.problem, found.path


def _takes_list(kind: Any) -> bool:
    return get_origin(kind) is list or any(_takes_list(each) for each in get_args(kind))


class InvalidQuery(errors.InvalidRequest):
    """A query that does not have the fields of its route."""

    def __init__(self, problem: str, path: str):
        super().__init__(problem)
        self.path = path


def error_reply(error: errors.ClocheError) -> Response:
    """An error in FastAPI's format, which Open Terminal has."""
    if isinstance(error, InvalidQuery | InvalidJson):
        place = "query" if isinstance(error, InvalidQuery) else "body"
        missing = _MISSING.search(str(error))
        names = [*filter(None, error.path.split(".")), *(missing.groups() if missing else ())]
        flaw = {"type": "missing" if missing else "value_error", "loc": [place, *names], "msg": str(error)}
        return json_reply({"detail": [flaw]}, 422)
    status = error.status if isinstance(error, Refusal) else status_of(error)
    return json_reply({"detail": str(error)}, status)
