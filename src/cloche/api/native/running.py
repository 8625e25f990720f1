"""Running code: to its end, or as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import unless_disconnected
from cloche.api.native.door import Door, body_of, raw_reply
from cloche.api.native.sse import event_stream
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.files import check_cwd
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Event
from cloche.model import Tool
from cloche.protocol import requests, responses


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
