"""Notebooks: cells of a file run one by one, in a kernel of their own. The file stays inside the workspace."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import Conflict, Json, json_reply
from cloche.api.http import run_unless_disconnected
from cloche.api.open_terminal.arguments import CellBody, NotebookBody
from cloche.api.open_terminal.context import OpenTerminalContext
from cloche.api.open_terminal.processes import MAX_NOTEBOOKS, NotebookSession
from cloche.api.open_terminal.workspace import HOME, Workspace, resolve_path
from cloche.engine.executions.execution import Execution
from cloche.events import Display, Ended, Output, Raised, Started
from cloche.languages import LANGUAGES
from cloche.model import ExecutionRequest
from cloche.notebook import display_output, error_output, stopped_output, stream_output

NOTEBOOK_PATH = "/notebooks/{notebook}"
MAX_OUTPUTS = 1000  # of one cell


class NotebookCell(msgspec.Struct):
    source: str
    runs: bool


class NotebookRoutes:
    def __init__(self, api: OpenTerminalContext):
        self._api = api

    def routes(self) -> list[BaseRoute]:
        route = self._api.route
        return [
            route("POST", "/notebooks", self.create),
            route("POST", NOTEBOOK_PATH + "/execute", self.execute),
            route("GET", NOTEBOOK_PATH, self.get),
            route("DELETE", NOTEBOOK_PATH, self.delete),
        ]

    async def create(self, request: Request) -> Response:
        self._api.workspace_key(request)
        path = resolve_path((await self._api.arguments(request, NotebookBody)).path, HOME)
        workspace = await self._api.workspace(request)
        if len(workspace.notebooks) >= MAX_NOTEBOOKS:
            raise errors.QuotaExceeded(f"{MAX_NOTEBOOKS} notebooks are open in this workspace: close some of them")
        reply = await run_unless_disconnected(request, workspace.perform("open_notebook", path=path))
        kernel = msgspec.json.decode(reply, type=dict[str, str])["kernel"]
        language = next((name for name, about in LANGUAGES.items() if about.kernel_name == kernel), None)
        if language is None:
            raise errors.InvalidRequest(f"there is no kernel {kernel[:80]!r} here")
        context = await (await workspace.sandbox()).create_context(language=language, cwd=HOME)
        session = NotebookSession(path, kernel, context.id)
        workspace.notebooks[session.id] = session
        return json_reply({"id": session.id, "kernel": kernel, "status": "ready"})

    async def execute(self, request: Request) -> Response:
        workspace, session = self._find(request)
        asked = await self._api.arguments(request, CellBody)
        if session.busy:
            raise Conflict("Cell already executing")
        session.busy = True
        try:
            return json_reply(await run_unless_disconnected(request, _run_cell(workspace, session, asked)))
        finally:
            session.busy = False

    async def get(self, request: Request) -> Response:
        return json_reply(self._find(request)[1].describe())

    async def delete(self, request: Request) -> Response:
        workspace, session = self._find(request)
        workspace.notebooks.pop(session.id, None)
        (await workspace.sandbox()).remove_context(session.context)
        return json_reply({"status": "stopped"})

    def _find(self, request: Request) -> tuple[Workspace, NotebookSession]:
        """Raises NotFound."""
        workspace = self._api.find_workspace(request)
        found = None if workspace is None else workspace.notebooks.get(request.path_params["notebook"])
        if workspace is None or found is None:
            raise errors.NotFound("Session not found")
        return workspace, found


async def _run_cell(workspace: Workspace, session: NotebookSession, asked: CellBody) -> Json:
    """Runs a cell and writes its outputs into the file. A cell without code does nothing."""
    where = {"path": session.path, "index": asked.cell_index}
    cell = msgspec.json.decode(await workspace.perform("notebook_cell", **where), type=NotebookCell)
    source = cell.source if asked.source is None else asked.source
    outputs: list[Any] = []
    count: int | None = None
    if cell.runs:
        context = (await workspace.sandbox()).context(session.context)
        count = await _collect_outputs(context.submit(ExecutionRequest(code=source)), outputs)
    await workspace.perform("save_cell", **where, source=source, outputs=outputs, count=count)
    outputs = [_join_lines(each) for each in outputs]
    failed = any(each["output_type"] == "error" for each in outputs)
    if failed:  # the reply has the error alone, as Open Terminal's
        error = next(each for each in reversed(outputs) if each["output_type"] == "error")
        return {"status": "error", "execution_count": None, "outputs": [error]}
    return {"status": "ok", "execution_count": count, "outputs": outputs}


def _join_lines(output: Any) -> Any:
    """The output with each text as one string; files have lists of lines."""
    if isinstance(output, dict):
        return {name: each if name == "traceback" else _join_lines(each) for name, each in output.items()}
    return "".join(output) if isinstance(output, list) and all(isinstance(each, str) for each in output) else output


async def _collect_outputs(execution: Execution, outputs: list[Any]) -> int | None:
    """Appends the outputs, and returns the count of the cell."""
    count: int | None = None
    async with aclosing(execution):
        while events := await execution.next_events():
            for event in events:
                if isinstance(event, Started):
                    count = event.count
                elif len(outputs) < MAX_OUTPUTS:
                    _append_output(outputs, event, count or 0)
    return count


def _append_output(outputs: list[Any], event: Any, count: int) -> None:
    last = outputs[-1] if outputs else {}
    match event:
        case Output() if last.get("name") == event.stream:
            last["text"] += [event.text]
        case Output():
            outputs.append(stream_output(event.stream, event.text))
        case Display():
            outputs.append(display_output(event, count))
        case Raised():
            outputs.append(error_output(event))
        case Ended() if event.outcome != "ok" and last.get("output_type") != "error":
            outputs.append(stopped_output(event))
