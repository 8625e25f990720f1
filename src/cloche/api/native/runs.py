"""Code execution: to its end, or as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.dialect import encode_sse, encoded_json_reply, event_stream, json_reply
from cloche.api.http import StreamResponse, request_id, run_unless_disconnected
from cloche.api.native.context import NativeContext, decode_request_body, decode_request_query
from cloche.engine.executions.execution import Execution
from cloche.engine.executions.runs import DetachedRuns, RunEventLine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Event
from cloche.model import ExecutionRequest, ToolDefinition, check_cwd
from cloche.protocol import requests, responses

# Server-sent events: each event of the engine becomes one, named by its type.

SSE_QUIET_SECONDS = 15.0
SSE_KEEPALIVE = b": still here\n\n"


def event_stream_response(request: Request, events: AsyncGenerator[Event | RunEventLine, None]) -> StreamResponse:
    """A response that owns the source of its events. An error after its start is its last event.

    A numbered event has its number as its id.
    """
    chunks = _encode_event_stream(events, request_id(request))
    return event_stream(chunks, quiet_seconds=SSE_QUIET_SECONDS, keepalive=SSE_KEEPALIVE)


def encode_server_event(event: Event | RunEventLine) -> bytes:
    if isinstance(event, RunEventLine):
        return encode_sse(event.body, event.kind, event.number)
    return encode_sse(responses.encode_event(event), _event_type_name(event).encode())


def _event_type_name(event: Event) -> str:
    return str(type(event).__struct_config__.tag)


async def _encode_event_stream(
    events: AsyncGenerator[Event | RunEventLine, None], request: str
) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                yield encode_server_event(event)
                begun = True
    except errors.ClocheError as error:
        if not begun:
            raise  # a status can still say so
        yield encode_server_event(responses.ErrorMessage(error=responses.to_error_info(error, request)))


class NativeExecutions:
    def __init__(self, api: NativeContext):
        self._api = api

    async def run(self, request: Request) -> Response:
        execution = await self._execution_from_request(request)
        return encoded_json_reply(responses.encode_run(await run_unless_disconnected(request, execution.result())))

    async def stream(self, request: Request) -> Response:
        return event_stream_response(request, _stream_execution_events(await self._execution_from_request(request)))

    async def _execution_from_request(self, request: Request) -> Execution:
        sandbox = await self._api.sandbox(request)
        message = await decode_request_body(request, requests.ExecuteRequest)
        if message.input is True:
            raise errors.InvalidRequest("input: true needs a WebSocket, over which the answers come: give lines here")
        if message.tools:
            raise errors.InvalidRequest("tools need a WebSocket, over which their calls go out and their results come")
        return prepare_execution(sandbox, message)


def prepare_execution(sandbox: Sandbox, message: requests.ExecuteRequest) -> Execution:
    """The requested execution, not started yet. Raises ContextNotFound, InvalidRequest or InvalidPath."""
    check_cwd(message.cwd)
    request = ExecutionRequest(
        code=message.code,
        env=message.env or {},
        cwd=message.cwd,
        timeout_seconds=message.timeout_seconds,
        argv=message.argv,
        tools=[
            ToolDefinition(name=each.name, description=each.description, parameters=each.parameters)
            for each in message.tools
        ],
    )
    return sandbox.context(message.context).submit(request, message.input)


async def _stream_execution_events(execution: Execution) -> AsyncGenerator[Event, None]:
    async with contextlib.aclosing(execution):
        while events := await execution.next_events():
            for event in events:
                yield event


# Detached runs, which outlive the connection that started them: start, follow, interrupt and remove.

LAST_EVENT_HEADER = "last-event-id"
_MAX_EVENT_DIGITS = 18


class NativeRuns:
    def __init__(self, api: NativeContext):
        self._api = api

    async def start(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        message = await decode_request_body(request, requests.DetachRequest)
        if message.input is True:
            raise errors.InvalidRequest("a detached run has no client to answer input(): give its lines, or none")
        if message.tools:
            raise errors.InvalidRequest("a detached run has no client to answer tool calls: leave the tools out")
        execution = prepare_execution(sandbox, message)
        context = message.context or sandbox.context().id
        return json_reply(await self._detached_runs.start(sandbox, context, execution, last=message.last), 201)

    async def list(self, request: Request) -> Response:
        owner, id = self._api.visible_owner(request), request.path_params["id"]
        await self._api.engine.describe(id, owner)
        return json_reply(await self._detached_runs.list(owner, id))

    async def list_all(self, request: Request) -> Response:
        return json_reply(await self._detached_runs.list(self._api.owner(request)))

    async def get(self, request: Request) -> Response:
        return json_reply(await self._detached_runs.info(*self._run_and_owner(request)))

    async def result(self, request: Request) -> Response:
        """The result, once the run has ended."""
        id, owner = self._run_and_owner(request)
        return encoded_json_reply(
            responses.encode_run(await run_unless_disconnected(request, self._detached_runs.result(id, owner)))
        )

    async def events(self, request: Request) -> Response:
        id, owner = self._run_and_owner(request)
        after = _last_seen_event(request)
        followed = await self._detached_runs.attach(id, owner, after)
        info = await self._detached_runs.info(id, owner)
        if info.state == "ended" and after == info.events:
            return Response(status_code=204)  # there is nothing more: a browser's EventSource would come again
        return event_stream_response(request, _flatten_batches(followed))

    async def interrupt(self, request: Request) -> Response:
        return json_reply(
            responses.InterruptedResponse(
                interrupted=await self._detached_runs.interrupt(*self._run_and_owner(request))
            )
        )

    async def remove(self, request: Request) -> Response:
        await self._detached_runs.remove(*self._run_and_owner(request))
        return Response(status_code=204)

    @property
    def _detached_runs(self) -> DetachedRuns:
        return self._api.engine.runs

    def _run_and_owner(self, request: Request) -> tuple[str, str | None]:
        return request.path_params["run"], self._api.visible_owner(request)


def _last_seen_event(request: Request) -> int:
    """The last event that the client has seen. A reconnecting client's header overrides the URL.

    Raises InvalidRequest.
    """
    seen = request.headers.get(LAST_EVENT_HEADER)
    if seen is None or seen == "":
        return decode_request_query(request, requests.RunEventsQuery).after
    if not (seen.isascii() and seen.isdigit()) or len(seen) > _MAX_EVENT_DIGITS:
        raise errors.InvalidRequest("the header Last-Event-ID must be the number of an event, as its id says it")
    return int(seen)


async def _flatten_batches(followed: AsyncGenerator[list[RunEventLine], None]) -> AsyncGenerator[RunEventLine, None]:
    async with contextlib.aclosing(followed):
        async for batch in followed:
            for line in batch:
                yield line
