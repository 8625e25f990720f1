"""execd's code and contexts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import InvalidJson, decode_json_object, json_reply
from cloche.api.encoding import to_json_value
from cloche.api.http import MAX_CODE_REQUEST_BYTES, read_decoded
from cloche.api.opensandbox.execd import ExecdPlane, require_query_parameter
from cloche.api.opensandbox.programs import ProgramContext, open_program_context
from cloche.api.opensandbox.registry import SandboxState
from cloche.api.opensandbox.stream import (
    COMMAND_ERROR,
    complete_fields,
    encode_frame,
    encode_init_frame,
    error_fields,
    execd_stream,
)
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import AnyEvent, Display, Ended, Output, Raised, Started
from cloche.model import Struct

# The wire format of code: decodes requests, encodes events. Pure.

_FAILURE_NAMES = {
    "died": "KernelDied",
    "out_of_memory": "OutOfMemory",
    "timed_out": "ExecutionTimedOut",
    "interrupted": "KeyboardInterrupt",
}


class ExecdCodeRequest(Struct):
    code: str
    language: str | None = None
    context: str | None = None


class ExecdContextRequest(Struct):
    language: str
    cwd: str | None = None


def decode_code_request(body: bytes) -> ExecdCodeRequest:
    """Raises InvalidRequest."""
    message = _decode_object(body)
    if not isinstance(message.get("code"), str):
        raise errors.InvalidRequest("code: it must be a string")
    where = message.get("context")
    if where is None:
        where = {}
    if not isinstance(where, dict):
        raise errors.InvalidRequest('context: it must be an object such as {"language": "python"}')
    language, context = _optional_string_field(where, "language"), _optional_string_field(where, "id")
    if language is None and context is None:
        raise errors.InvalidRequest('context: it must say where, as {"language": "python"} or {"id": ".."}')
    return ExecdCodeRequest(code=message["code"], language=language and language.lower(), context=context)


def decode_context_request(body: bytes) -> ExecdContextRequest:
    """Raises InvalidRequest."""
    message = _decode_object(body)
    language = _optional_string_field(message, "language")
    if language is None:
        raise errors.InvalidRequest("language: it is missing; give one such as python")
    return ExecdContextRequest(language=language.lower(), cwd=_optional_string_field(message, "cwd"))


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        return decode_json_object(body)
    except InvalidJson as error:
        whole = {"type": "must be a JSON object", "complexity": f"is too complex: {error.problem}"}.get(
            error.flaw, "is not JSON"
        )
        raise errors.InvalidRequest(f"the request's body {whole}") from None


def _optional_string_field(asked: Mapping[str, Any], name: str) -> str | None:
    """A string field; None if it is missing, null or empty."""
    value = asked.get(name)
    if value is not None and not isinstance(value, str):
        raise errors.InvalidRequest(f"{name}: it must be a string")
    return value or None


def encode_context(context: Context | ProgramContext) -> dict[str, str]:
    return {"id": context.id, "language": context.language}


class ExecutionFrameEncoder:
    """Encodes events as frames.

    An execution has one error at most, sent at the end, when more is known about it.
    """

    def __init__(self) -> None:
        self._error: dict[str, Any] | None = None

    def encode(self, events: Iterable[AnyEvent]) -> bytes:
        """The frames for these events; empty for events that execd does not have."""
        return b"".join([encode_frame(fields) for event in events for fields in self._event_fields(event)])

    def _event_fields(self, event: AnyEvent) -> Iterable[dict[str, Any]]:
        match event:
            case Started(count=count) if count:
                return ({"type": "execution_count", "execution_count": count},)
            case Output():
                return ({"type": event.stream, "text": event.text},)
            case Display(update=False):
                return ({"type": "result", "results": encode_display_results(event)},)
            case Raised():
                self._error = self._error or error_fields(event.name, event.value, event.traceback)
            case Ended():
                return (self._end_fields(event),)
        return ()

    def _end_fields(self, ended: Ended) -> dict[str, Any]:
        found = self._error
        if ended.outcome in _FAILURE_NAMES and (found is None or ended.outcome == "timed_out"):
            return error_fields(_FAILURE_NAMES[ended.outcome], ended.reason or ended.outcome)
        if found is None and ended.exit_code:
            return error_fields(COMMAND_ERROR, str(ended.exit_code))
        return found or complete_fields(ended.usage.wall_seconds)


def encode_display_results(event: Display) -> dict[str, Any]:
    """The display by MIME type, except plain text; bytes in base64."""
    return {"text" if mime == "text/plain" else mime: to_json_value(value) for mime, value in event.data.items()}


class CodePlane:
    def __init__(self, plane: ExecdPlane):
        self._plane = plane

    @property
    def routes(self) -> list[BaseRoute]:
        route = self._plane.route
        return [
            route("POST", "/code", self.run),
            route("DELETE", "/code", self.interrupt),
            route("POST", "/code/context", self.create_context),
            route("GET", "/code/contexts", self.list_contexts),
            route("DELETE", "/code/contexts", self.remove_contexts),
            route("GET", "/code/contexts/{context}", self.get_context),
            route("DELETE", "/code/contexts/{context}", self.remove_context),
        ]

    async def run(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        message = await read_decoded(request, decode_code_request, MAX_CODE_REQUEST_BYTES)
        program = await _program_for_request(sandbox, state, message)
        if program is not None:
            return execd_stream(program.stream_frames(sandbox, message.code), sandbox)
        context = _context_for_request(sandbox, message)
        state.use(context)
        return execd_stream(_stream_execution_frames(context.execute(message.code), context, state), sandbox)

    async def interrupt(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        id = require_query_parameter(request, "id")
        if id in state.programs:
            state.programs[id].interrupt()
        else:
            state.interrupt(sandbox.context(id))
        return Response()

    async def create_context(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        message = await read_decoded(request, decode_context_request, MAX_CODE_REQUEST_BYTES)
        if (program := await open_program_context(sandbox, message.language, len(state.programs))) is not None:
            state.programs[program.id] = program
            return json_reply(encode_context(program))
        context = await sandbox.create_context(language=message.language, cwd=message.cwd)
        return json_reply(encode_context(context))

    async def list_contexts(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        found = _listed_contexts(sandbox, state, request.query_params.get("language"))
        return json_reply([encode_context(each) for each in found])

    async def get_context(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        id = request.path_params["context"]
        return json_reply(encode_context(state.programs.get(id) or sandbox.context(id)))

    async def remove_context(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        id = request.path_params["context"]
        _remove_context(sandbox, state, state.programs.get(id) or sandbox.context(id))
        return Response()

    async def remove_contexts(self, request: Request) -> Response:
        sandbox, state = await self._plane.enter(request)
        for context in _listed_contexts(sandbox, state, require_query_parameter(request, "language")):
            _remove_context(sandbox, state, context)
        return Response()


async def _stream_execution_frames(
    execution: Execution, context: Context, state: SandboxState
) -> AsyncGenerator[bytes, None]:
    """The response frames. Closing the generator interrupts the program."""
    frames = ExecutionFrameEncoder()
    state.wait(execution, context)
    try:
        yield encode_init_frame(context.id)
        async with execution:
            state.begin(execution)
            while events := await execution.next_events():
                if encoded := frames.encode(events):
                    yield encoded
    except errors.ClocheError as error:  # no kernel could be started: the headers are out, so it is said here
        yield encode_frame(error_fields(type(error).__name__, str(error)))
    finally:
        state.leave(execution)


def _context_for_request(sandbox: Sandbox, request: ExecdCodeRequest) -> Context:
    if request.context is not None:
        return sandbox.context(request.context)
    assert request.language is not None
    return sandbox.default_context(request.language)


async def _program_for_request(
    sandbox: Sandbox, state: SandboxState, request: ExecdCodeRequest
) -> ProgramContext | None:
    """The context of programs that the request is for, if it is for one."""
    if request.context is not None:
        return state.programs.get(request.context)
    return await open_program_context(sandbox, request.language or "", 0)


def _listed_contexts(sandbox: Sandbox, state: SandboxState, language: str | None) -> Sequence[Context | ProgramContext]:
    kernels = [each for each in sandbox.contexts if state.lists(each)]
    found: list[Context | ProgramContext] = [*kernels, *state.programs.values()]
    return [each for each in found if not language or each.language == language.lower()]


def _remove_context(sandbox: Sandbox, state: SandboxState, context: Context | ProgramContext) -> None:
    if isinstance(context, ProgramContext):
        del state.programs[context.id]
        context.interrupt()
        return
    sandbox.remove_context(context.id)
    state.forget(context)
