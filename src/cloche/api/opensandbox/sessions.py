"""execd's bash sessions: shells that keep their directory and variables between runs."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.opensandbox.commands import read_environment_file
from cloche.api.opensandbox.execd import ExecdPlane
from cloche.api.opensandbox.registry import SandboxState
from cloche.api.opensandbox.stream import (
    COMMAND_ERROR,
    LineFrames,
    complete_fields,
    encode_frame,
    encode_init_frame,
    error_fields,
    execd_stream,
)
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.events import Ended, Output
from cloche.model import Struct


class CreateBashSessionBody(Struct):
    cwd: str | None = None


class RunInSessionBody(Struct):
    command: str
    cwd: str | None = None
    timeout: int | None = None  # milliseconds


def session_script(message: RunInSessionBody, env: dict[str, str]) -> str:
    """The command, after a change of the directory and new variables, which the session keeps."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    if message.cwd:
        lines.append(f"cd -- {shlex.quote(message.cwd)}")
    return "\n".join([*lines, message.command])


class SessionPlane:
    """A session is a context of bash, which is not listed among the contexts of code."""

    def __init__(self, plane: ExecdPlane):
        self._plane = plane

    @property
    def routes(self) -> list[BaseRoute]:
        route = self._plane.route
        return [
            route("POST", "/session", self.create),
            route("POST", "/session/{session}/run", self.run),
            route("DELETE", "/session/{session}", self.remove),
        ]

    async def create(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        asked = await self._plane.json_body(request, CreateBashSessionBody)
        context = await sandbox.create_context(language="bash", cwd=asked.cwd or None)
        state.sessions.add(context.id)
        return json_reply({"session_id": context.id})

    async def run(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        asked = await self._plane.json_body(request, RunInSessionBody)
        if not asked.command.strip():
            raise errors.InvalidRequest("command: it is empty")
        if asked.timeout is not None and asked.timeout < 0:
            raise errors.InvalidRequest("timeout: it must be a number of milliseconds")
        id = request.path_params["session"]
        _require_session(state, id)
        context = sandbox.context(id)
        execution = context.execute(
            session_script(asked, await read_environment_file(sandbox)),
            timeout_seconds=asked.timeout / 1000 if asked.timeout else None,
            until_deadline=not asked.timeout,
        )
        return execd_stream(_stream_session_frames(execution, context, state), sandbox)

    async def remove(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        id = request.path_params["session"]
        _require_session(state, id)
        sandbox.remove_context(id)
        state.sessions.discard(id)
        return Response()


def _require_session(state: SandboxState, id: str) -> None:
    """Raises ContextNotFound."""
    if id not in state.sessions:
        raise errors.ContextNotFound(f"session not found: {id[:80]}")


async def _stream_session_frames(
    execution: Execution, context: Context, state: SandboxState
) -> AsyncGenerator[bytes, None]:
    """The response frames: all output is stdout. Closing the generator interrupts the command."""
    output = LineFrames("stdout")
    state.wait(execution, context)
    try:
        yield encode_init_frame(context.id)
        async with execution:
            state.begin(execution)
            while events := await execution.next_events():
                for event in events:
                    match event:
                        case Output():
                            if encoded := output.encode_text(event.text):
                                yield encoded
                        case Ended():
                            yield output.finish() + encode_session_end(event)
    except errors.ClocheError as error:  # the headers are out, so it is said here
        yield encode_frame(error_fields(type(error).__name__, str(error)))
    finally:
        state.leave(execution)


def encode_session_end(ended: Ended) -> bytes:
    if ended.outcome == "ok" and not ended.exit_code:
        return encode_frame(complete_fields(ended.usage.wall_seconds))
    code = ended.exit_code or 1
    return encode_frame(error_fields(COMMAND_ERROR, str(code), ended.reason or f"exit status {code}"))
