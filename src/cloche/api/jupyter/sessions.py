"""`/api/sessions`: a session is a document with the kernel that runs it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.http import create_unless_disconnected
from cloche.api.jupyter.context import JUPYTER_PREFIX, JupyterContext
from cloche.api.jupyter.kernels import DEFAULT_KERNEL, JupyterKernel, kernel_model
from cloche.model import Struct

MAX_SESSIONS = 1000  # of one owner
MAX_TEXT = 4096


class SessionKernelRequest(Struct):
    id: str | None = None
    name: str | None = None


class SessionRequest(Struct):
    """The body of a request that makes or changes a session."""

    path: str | None = None
    name: str | None = None
    type: str | None = None
    kernel: SessionKernelRequest | None = None
    env: dict[str, str] = {}


class JupyterSession(Struct):
    id: str
    path: str
    name: str
    type: str
    kernel: JupyterKernel


class SessionRoutes:
    def __init__(self, api: JupyterContext):
        self._api = api
        self._sessions: dict[str, JupyterSession] = {}

    def routes_at(self, base: str) -> list[BaseRoute]:
        route, one = self._api.route, base + "/api/sessions/{session}"
        return [
            route("GET", base + "/api/sessions", self.list),
            route("POST", base + "/api/sessions", self.create),
            route("GET", one, self.get),
            route("PATCH", one, self.change),
            route("DELETE", one, self.delete),
        ]

    async def list(self, request: Request) -> Response:
        return json_reply([session_model(each) for each in self._sessions_of(self._api.owner(request))])

    async def create(self, request: Request) -> Response:
        """The session of a document that has one already is that one."""
        owner = self._api.owner(request)
        asked = await self._api.json_body(request, SessionRequest)
        known = self._sessions_of(owner)
        found = next((each for each in known if asked.path is not None and each.path == asked.path), None)
        if found is None:
            if len(known) >= MAX_SESSIONS:
                raise errors.QuotaExceeded(f"{MAX_SESSIONS} sessions are open, the maximum of an owner: end one")
            kernel = await self._kernel(request, asked)
            found = make_session(str(uuid.uuid4()), asked, kernel)
            self._sessions[found.id] = found
        location = {"location": f"{JUPYTER_PREFIX}/api/sessions/{found.id}"}
        return json_reply(session_model(found), 201, location)

    async def get(self, request: Request) -> Response:
        return json_reply(session_model(self._find(request)))

    async def change(self, request: Request) -> Response:
        """Names another document or kernel. A kernel that no session names any more is ended."""
        before = self._find(request)
        asked = await self._api.json_body(request, SessionRequest)
        kernel = before.kernel if asked.kernel is None else await self._kernel(request, asked)
        after = make_session(before.id, asked, kernel, before)
        self._sessions[before.id] = after
        if kernel is not before.kernel and not any(each.kernel is before.kernel for each in self._sessions.values()):
            await self._api.kernels.end(before.kernel)
        return json_reply(session_model(after))

    async def delete(self, request: Request) -> Response:
        """Ends its kernel too."""
        session = self._find(request)
        del self._sessions[session.id]
        await self._api.kernels.end(session.kernel)
        return Response(status_code=204)

    async def _kernel(self, request: Request, asked: SessionRequest) -> JupyterKernel:
        """The kernel that the request names, or a new one."""
        wanted = asked.kernel or SessionKernelRequest()
        if wanted.id is not None:
            return self._api.kernels.find(wanted.id, self._api.owner(request))
        starting = self._api.start_kernel(request, wanted.name or DEFAULT_KERNEL, asked.env)
        return await create_unless_disconnected(request, self._api.engine, starting)

    def _find(self, request: Request) -> JupyterSession:
        id, owner = request.path_params["session"], self._api.owner(request)
        session = next((each for each in self._sessions_of(owner) if each.id == id), None)
        if session is None:
            raise errors.NotFound(f"Session not found: {id}")
        return session

    def _sessions_of(self, owner: str) -> Sequence[JupyterSession]:
        """Those of that owner whose kernels live; the others are forgotten."""
        self._sessions = {id: each for id, each in self._sessions.items() if each.kernel.alive}
        return [each for each in self._sessions.values() if each.kernel.owner == owner]


def make_session(
    id: str, asked: SessionRequest, kernel: JupyterKernel, before: JupyterSession | None = None
) -> JupyterSession:
    """Raises InvalidRequest for texts that are too long."""
    if any(len(each or "") > MAX_TEXT for each in (asked.path, asked.name, asked.type)):
        raise errors.InvalidRequest(f"path, name and type of a session have up to {MAX_TEXT} characters")
    path, name, type = (before.path, before.name, before.type) if before else (str(uuid.uuid4()), "", "notebook")
    return JupyterSession(
        id=id,
        path=path if asked.path is None else asked.path,
        name=name if asked.name is None else asked.name,
        type=type if asked.type is None else asked.type,
        kernel=kernel,
    )


def session_model(session: JupyterSession) -> dict[str, Any]:
    document = {"path": session.path, "name": session.name}
    return {
        "id": session.id,
        **document,
        "type": session.type,
        "kernel": kernel_model(session.kernel),
        "notebook": document,
    }
