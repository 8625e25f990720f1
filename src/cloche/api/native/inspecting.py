"""What is in a context, and what ran in a sandbox: variables, history, notebook."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.native.door import Door, query_of, reply
from cloche.engine.executions.history import history_of, notebook_of
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.notebook import MIME
from cloche.protocol import requests, responses


class Inspecting:
    def __init__(self, door: Door):
        self._door = door

    async def variables(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        found = await sandbox.context(request.path_params["context"]).variables()
        return reply(responses.VariablesInfo(variables=found, more=found.more))

    async def history(self, request: Request) -> Response:
        sandbox, context = await self._asked(request)
        found = history_of(sandbox, context)
        return reply(responses.HistoryInfo(cells=found, dropped=found.dropped))

    async def notebook(self, request: Request) -> Response:
        sandbox, context = await self._asked(request)
        return Response(await notebook_of(sandbox, context), media_type=MIME)

    async def _asked(self, request: Request) -> tuple[Sandbox, str | None]:
        return await self._door.sandbox(request), query_of(request, requests.HistoryQuery).context
