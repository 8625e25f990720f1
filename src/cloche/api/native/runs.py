"""Running code: to its end, or as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import Stream, request_id, unless_disconnected
from cloche.api.native.context import Door, body_of, query_of, raw_reply, reply
from cloche.engine.executions.execution import Execution
from cloche.engine.executions.runs import Line
from cloche.engine.executions.runs import Runs as DetachedRuns
from cloche.engine.sandboxes.files import check_cwd
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Event
from cloche.model import Tool
from cloche.protocol import requests, responses

# Server-sent events: one of ours is one of theirs, named by its type.

QUIET_SECONDS = 15.0
KEEPALIVE = b": still here\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # else a proxy in front keeps events to itself


def event_stream(request: Request, events: AsyncGenerator[Event | Line, None]) -> Stream:
    """A response that owns the source of its events. What fails after its begin is its last event.

    A numbered event has its number as its id.
    """
    chunks = _written(events, request_id(request))
    return Stream(
        chunks, media_type="text/event-stream", headers=HEADERS, quiet_seconds=QUIET_SECONDS, keepalive=KEEPALIVE
    )


def encode(event: Event | Line) -> bytes:
    """JSON has no line breaks, so it is one line of data."""
    if isinstance(event, Line):
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.number, event.kind, event.body)
    return b"event: %s\ndata: %s\n\n" % (_name(event).encode(), responses.encode_event(event))


def _name(event: Event) -> str:
    return str(type(event).__struct_config__.tag)


async def _written(events: AsyncGenerator[Event | Line, None], request: str) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                yield encode(event)
                begun = True
    except errors.ClocheError as error:
        if not begun:
            raise  # a status can still say so
        yield encode(responses.Failed(error=responses.fault_of(error, request)))


class Running:
    def __init__(self, door: Door):
        self._door = door

    async def run(self, request: Request) -> Response:
        execution = await self._execution(request)
        return raw_reply(responses.encode_run(await unless_disconnected(request, execution.result())))

    async def stream(self, request: Request) -> Response:
        return event_stream(request, _events(await self._execution(request)))

    async def _execution(self, request: Request) -> Execution:
        sandbox = await self._door.sandbox(request)
        asked = await body_of(request, requests.Execute)
        if asked.input is True:
            raise errors.InvalidRequest("input: true needs a WebSocket, over which the answers come: give lines here")
        if asked.tools:
            raise errors.InvalidRequest("tools need a WebSocket, over which their calls go out and their results come")
        return execution_of(sandbox, asked)


def execution_of(sandbox: Sandbox, asked: requests.Execute) -> Execution:
    """Raises ContextNotFound, InvalidRequest or InvalidPath."""
    check_cwd(asked.cwd)
    return sandbox.context(asked.context).execute(
        asked.code,
        env=asked.env,
        cwd=asked.cwd,
        timeout_seconds=asked.timeout_seconds,
        input=asked.input,
        argv=asked.argv,
        tools=[Tool(name=each.name, description=each.description, parameters=each.parameters) for each in asked.tools],
    )


async def _events(execution: Execution) -> AsyncGenerator[Event, None]:
    async with contextlib.aclosing(execution):
        while events := await execution.next_events():
            for event in events:
                yield event


# Runs that outlive the connection that began them: begun, followed, interrupted, forgotten.

LAST_EVENT = "last-event-id"
_MOST_DIGITS = 18


class Runs:
    def __init__(self, door: Door):
        self._door = door

    async def start(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        asked = await body_of(request, requests.Detach)
        if asked.input is True:
            raise errors.InvalidRequest("nobody answers the input() of a detached run: give its lines, or none")
        if asked.tools:
            raise errors.InvalidRequest("nobody answers the tools of a detached run: leave them out")
        execution = execution_of(sandbox, asked)
        context = asked.context or sandbox.context().id
        return reply(await self._runs.start(sandbox, context, execution, last=asked.last), 201)

    async def list(self, request: Request) -> Response:
        owner, id = self._door.owner(request), request.path_params["id"]
        await self._door.engine.describe(id, owner)
        return reply(await self._runs.list(owner, id))

    async def list_all(self, request: Request) -> Response:
        return reply(await self._runs.list(self._door.admit(request).owner))

    async def get(self, request: Request) -> Response:
        return reply(await self._runs.info(*self._named(request)))

    async def result(self, request: Request) -> Response:
        """When it has ended."""
        id, owner = self._named(request)
        return raw_reply(responses.encode_run(await unless_disconnected(request, self._runs.result(id, owner))))

    async def events(self, request: Request) -> Response:
        id, owner = self._named(request)
        after = _after(request)
        followed = await self._runs.attach(id, owner, after)
        info = await self._runs.info(id, owner)
        if info.state == "ended" and after == info.events:
            return Response(status_code=204)  # there is nothing more: a browser's EventSource would come again
        return event_stream(request, _one_by_one(followed))

    async def interrupt(self, request: Request) -> Response:
        return reply(responses.Interrupted(interrupted=await self._runs.interrupt(*self._named(request))))

    async def remove(self, request: Request) -> Response:
        await self._runs.remove(*self._named(request))
        return Response(status_code=204)

    @property
    def _runs(self) -> DetachedRuns:
        return self._door.engine.runs

    def _named(self, request: Request) -> tuple[str, str | None]:
        return request.path_params["run"], self._door.owner(request)


def _after(request: Request) -> int:
    """Who comes again says in a header what was seen; what the URL says is older then. Raises InvalidRequest."""
    seen = request.headers.get(LAST_EVENT)
    if seen is None or seen == "":
        return query_of(request, requests.RunEventsQuery).after
    if not (seen.isascii() and seen.isdigit()) or len(seen) > _MOST_DIGITS:
        raise errors.InvalidRequest("the header Last-Event-ID must be the number of an event, as its id says it")
    return int(seen)


async def _one_by_one(followed: AsyncGenerator[list[Line], None]) -> AsyncGenerator[Line, None]:
    async with contextlib.aclosing(followed):
        async for batch in followed:
            for line in batch:
                yield line
