"""Terminals: shells of a chat. The client of a terminal's WebSocket authenticates in its first message."""

from __future__ import annotations

import asyncio
import contextlib
import json

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from cloche import errors
from cloche.api.auth import key_from_headers
from cloche.api.dialect import Conflict, json_reply
from cloche.api.http import request_id_of
from cloche.api.open_terminal.arguments import SocketMessage, TypedInputBody
from cloche.api.open_terminal.commands import TERMINAL_NAME
from cloche.api.open_terminal.context import CHAT_HEADER, OpenTerminalContext, chat_of, directory_of
from cloche.api.open_terminal.processes import MAX_TERMINALS, TERMINAL_SIZE, TerminalSession
from cloche.api.open_terminal.workspace import Workspace
from cloche.events import Exited
from cloche.tasks import run_until_first_ends
from cloche.telemetry import log

SHELL = "/bin/bash"
FIRST_MESSAGE_SECONDS = 10.0
RENEW_SECONDS = 60.0  # how often the workspace of a connected terminal gets more time
MAX_MESSAGE = 4096  # letters of a message that is no input
UNAUTHENTICATED, NOT_FOUND, CONNECTED, FAILED = 4001, 4004, 4009, 1011  # codes that close a WebSocket
TERMINAL_PATH = "/api/terminals/{session}"


class TerminalNotFound(errors.NotFound):
    code = "terminal_not_found"


class TerminalRoutes:
    def __init__(self, api: OpenTerminalContext):
        self._api = api
        self.socket = TerminalSockets(api)

    def routes(self) -> list[BaseRoute]:
        route = self._api.route
        return [
            route("GET", "/api/terminals/user/output", self.read_output),
            route("POST", "/api/terminals/user/input", self.send_input),
            route("GET", "/api/terminals", self.list_all),
            route("POST", "/api/terminals", self.create),
            route("GET", TERMINAL_PATH, self.get),
            route("DELETE", TERMINAL_PATH, self.delete),
        ]

    async def create(self, request: Request) -> Response:
        workspace = await self._api.workspace(request)
        sandbox = await workspace.sandbox()
        _forget_ended(workspace)
        if len(workspace.terminals) >= MAX_TERMINALS:
            return json_reply({"error": f"there are {MAX_TERMINALS} terminals: end some of them"}, 429)
        job = await sandbox.commands.launch(
            (SHELL,),
            env={"TERM": TERMINAL_NAME},
            cwd=directory_of(workspace, request),
            stdin=True,
            pty=TERMINAL_SIZE,
        )
        session = TerminalSession(job, chat_of(request))
        workspace.terminals[session.id] = session
        return json_reply(session.describe())

    async def list_all(self, request: Request) -> Response:
        return json_reply([each.describe() for each in self._sessions(request)])

    async def get(self, request: Request) -> Response:
        found = self._find(request)
        return _no_session() if found is None else json_reply(found.describe())

    async def delete(self, request: Request) -> Response:
        found = self._find(request)
        if found is None:
            return _no_session()
        found.end()
        if (workspace := self._api.find_workspace(request)) is not None:
            workspace.terminals.pop(found.id, None)
        return json_reply({"status": "deleted"})

    async def read_output(self, request: Request) -> Response:
        return json_reply({"output": self._connected(request).recent.decode("utf-8", "replace")})

    async def send_input(self, request: Request) -> Response:
        self._api.workspace_key(request)
        asked = await self._api.arguments(request, TypedInputBody)
        session = self._connected(request)
        try:
            await session.job.send_stdin(asked.input.encode("utf-8", "replace"))
        except errors.InvalidRequest:
            raise Conflict("User shell has disconnected") from None
        return json_reply({"status": "ok"})

    def _sessions(self, request: HTTPConnection) -> list[TerminalSession]:
        """The terminals of the chat."""
        workspace = self._api.find_workspace(request)
        if workspace is None:
            return []
        _forget_ended(workspace)
        return [each for each in workspace.terminals.values() if each.chat == chat_of(request)]

    def _find(self, request: Request) -> TerminalSession | None:
        return next((each for each in self._sessions(request) if each.id == request.path_params["session"]), None)

    def _connected(self, request: Request) -> TerminalSession:
        """The chat's newest terminal with a client. Raises TerminalNotFound."""
        found = next((each for each in reversed(self._sessions(request)) if each.connected), None)
        if found is None:
            raise TerminalNotFound("No connected user shell")
        return found


def _forget_ended(workspace: Workspace) -> None:
    for id, each in list(workspace.terminals.items()):
        if not each.alive and not each.connected:
            del workspace.terminals[id]


def _no_session() -> Response:
    return json_reply({"error": "Session not found"}, 404)


class TerminalSockets:
    """The ASGI endpoint of a terminal's WebSocket. It ends with its client."""

    def __init__(self, api: OpenTerminalContext):
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        try:
            await self._talk(socket)
        except WebSocketDisconnect:
            pass
        except errors.Unauthenticated:
            await _close(socket, UNAUTHENTICATED, "Invalid API key")
        except errors.NotFound as error:
            await _close(socket, NOT_FOUND, str(error))
        except Conflict as error:
            await _close(socket, CONNECTED, str(error))
        except errors.ClocheError as error:
            await _close(socket, FAILED, error.code)
        except Exception as error:  # noqa: BLE001 - the dialect's edge
            log.error("socket.failed", request=request_id_of(scope), error=type(error).__name__)
            await _close(socket, FAILED, "internal error")

    async def _talk(self, socket: WebSocket) -> None:
        chat = socket.headers.get(CHAT_HEADER)
        if not key_from_headers(socket.headers):
            await socket.accept()
            first = await _receive_first(socket)
            chat = chat if chat is not None else first.chat_id or None
            key = first.token if isinstance(first.token, str) and first.type == "auth" else ""
            socket.scope["headers"] = [*socket.scope["headers"], (b"x-api-key", key.encode("utf-8", "replace"))]
        workspace = self._api.find_workspace(HTTPConnection(socket.scope))  # `socket` keeps the headers that it had
        session = None if workspace is None else workspace.terminals.get(socket.path_params["session"])
        # Open WebUI does not say here which chat it is: the user decides then.
        if workspace is None or session is None or not session.alive or chat not in (None, session.chat):
            raise TerminalNotFound("Session not found")
        if session.connected:
            raise Conflict("Session already connected")
        if socket.application_state == WebSocketState.CONNECTING:
            await socket.accept()
        session.connected = True
        try:
            await run_until_first_ends(
                _send_output(socket, session), _receive_input(socket, session), _renew(workspace)
            )
        finally:
            session.connected = False
            session.end()
            workspace.terminals.pop(session.id, None)
        await _close(socket, 1000, "")


async def _receive_first(socket: WebSocket) -> SocketMessage:
    """Raises Unauthenticated if it is no message, or comes late."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            text = (await socket.receive()).get("text") or ""
        return _decode_message(text)
    except (TimeoutError, errors.InvalidRequest):
        raise errors.Unauthenticated("Auth timeout or invalid payload") from None


def _decode_message(text: str) -> SocketMessage:
    """Raises InvalidRequest."""
    if len(text) > MAX_MESSAGE:
        raise errors.InvalidRequest("the message is too long")
    try:
        return msgspec.convert(json.loads(text), SocketMessage)
    except (ValueError, RecursionError):
        raise errors.InvalidRequest("the message is no JSON object of a known kind") from None


async def _send_output(socket: WebSocket, session: TerminalSession) -> None:
    while events := await session.listener.next_events():
        for event in events:
            if not isinstance(event, Exited):
                session.note_output(event.data)
                await socket.send_bytes(event.data)


async def _receive_input(socket: WebSocket, session: TerminalSession) -> None:
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        with contextlib.suppress(errors.InvalidRequest):  # the shell has ended, or the message makes no sense
            if message.get("bytes"):
                await session.job.send_stdin(message["bytes"])
            elif message.get("text"):
                asked = _decode_message(message["text"])
                if asked.type == "resize":
                    session.job.resize(asked.rows, asked.cols)


async def _renew(workspace: Workspace) -> None:
    """Keeps the workspace running for as long as a client is connected, and returns at its end."""
    while True:
        sandbox = await workspace.sandbox()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RENEW_SECONDS):
                await sandbox.wait_ended()
            return


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    """Closes it. A close frame is how the clients hear of an error, so that it is accepted before."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client has disconnected meanwhile
        if socket.application_state == WebSocketState.CONNECTING:
            await socket.accept()
        await socket.close(code, reason[:100])
