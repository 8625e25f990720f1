"""Runs that outlive the connection that began them: begun, followed, interrupted, forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import unless_disconnected
from cloche.api.native.door import Door, body_of, query_of, raw_reply, reply
from cloche.api.native.running import execution_of
from cloche.api.native.sse import event_stream
from cloche.engine.executions.runs import Line
from cloche.engine.executions.runs import Runs as DetachedRuns
from cloche.protocol import requests, responses

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
