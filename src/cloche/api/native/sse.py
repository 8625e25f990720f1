"""Server-sent events: one of ours is one of theirs, named by its type."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request

from cloche import errors
from cloche.api.http import Stream, request_id
from cloche.engine.executions.runs import Line
from cloche.events import Event
from cloche.protocol import responses

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
