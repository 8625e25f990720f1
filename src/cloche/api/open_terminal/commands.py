"""The routes about commands: each belongs to a chat of its user."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.http import run_unless_disconnected
from cloche.api.open_terminal.arguments import (
    KillArguments,
    StartCommandBody,
    StatusArguments,
    TypedInputBody,
    WaitArguments,
)
from cloche.api.open_terminal.context import OpenTerminalContext, chat_of, decode_query, directory_of
from cloche.api.open_terminal.processes import TERMINAL_SIZE, TerminalProcess, decode_escapes, forget_ended
from cloche.api.open_terminal.workspace import resolve_path

TERMINAL_NAME = "xterm-256color"
PROCESS_PATH = "/execute/{process}"


class CommandRoutes:
    def __init__(self, api: OpenTerminalContext):
        self._api = api

    def routes(self) -> list[BaseRoute]:
        route = self._api.route
        return [
            route("GET", "/execute", self.list_all),
            route("POST", "/execute", self.run),
            route("GET", PROCESS_PATH + "/status", self.show_status),
            route("POST", PROCESS_PATH + "/input", self.send_input),
            route("DELETE", PROCESS_PATH, self.kill),
        ]

    async def list_all(self, request: Request) -> Response:
        workspace = self._api.find_workspace(request)
        known = [] if workspace is None else list(workspace.processes.values())
        return json_reply([each.describe() for each in known if each.chat == chat_of(request)])

    async def run(self, request: Request) -> Response:
        self._api.workspace_key(request)
        query = decode_query(request, WaitArguments)
        asked = await self._api.arguments(request, StartCommandBody)
        workspace = await self._api.workspace(request)
        directory = directory_of(workspace, request)
        cwd = resolve_path(asked.cwd, directory) if asked.cwd else directory
        sandbox = await workspace.sandbox()
        forget_ended(workspace.processes)
        job = await sandbox.commands.launch(
            ("/bin/sh", "-c", asked.command),
            env={"TERM": TERMINAL_NAME, **(asked.env or {})},
            cwd=cwd,
            stdin=True,
            pty=TERMINAL_SIZE,
        )
        process = TerminalProcess(job, asked.command, chat_of(request))
        workspace.processes[process.id] = process
        if query.wait is not None:
            await run_unless_disconnected(request, process.wait(query.wait))
        return json_reply({**process.describe(), "cwd": cwd, **process.output_since(0, query.tail)})

    async def show_status(self, request: Request) -> Response:
        process = self._find(request)
        query = decode_query(request, StatusArguments)
        if query.wait is not None and process.ended_at is None:
            await (await self._api.workspace(request)).sandbox()  # which has to live while it waits
            await run_unless_disconnected(request, process.wait(query.wait))
        return json_reply({**process.describe(), **process.output_since(query.offset, query.tail)})

    async def send_input(self, request: Request) -> Response:
        process = self._find(request)
        data = decode_escapes((await self._api.arguments(request, TypedInputBody)).input)
        if process.ended_at is not None:
            raise errors.InvalidRequest("Process has already exited")
        await (await self._api.workspace(request)).sandbox()
        await run_unless_disconnected(request, process.job.send_stdin(data))
        return json_reply({"status": "ok"})

    async def kill(self, request: Request) -> Response:
        process = self._find(request)
        await process.kill(force=decode_query(request, KillArguments).force)
        return json_reply({"status": "killed"})

    def _find(self, request: Request) -> TerminalProcess:
        """The command of that id, of that chat. Raises ProcessNotFound."""
        workspace = self._api.find_workspace(request)
        found = None if workspace is None else workspace.processes.get(request.path_params["process"])
        if found is None or found.chat != chat_of(request):
            raise errors.ProcessNotFound("Process not found")
        return found
