"""What a sandbox uses and used, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.e2b.control_replies import Json, log_entries, log_line, metric
from cloche.api.e2b.control_wire import whole_number
from cloche.api.e2b.desk import Desk
from cloche.api.e2b.replies import json_reply, timestamp
from cloche.api.e2b.routing import bare_id
from cloche.engine.sandboxes.sandbox import Sandbox

MAX_IDS = 100
MAX_LINES = 1000
LEVELS = ("debug", "info", "warn", "error")
_LATEST_SECONDS = 10_000_000_000
_LATEST_MILLISECONDS = _LATEST_SECONDS * 1000


def routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlReports(desk)
    return [
        desk.route("GET", "/sandboxes/metrics", plane.all_metrics),
        desk.route("GET", "/sandboxes/{id}/metrics", plane.metrics),
        desk.route("GET", "/sandboxes/{id}/logs", plane.logs),
        desk.route("GET", "/v2/sandboxes/{id}/logs", plane.log_entries),
    ]


class ControlReports:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def metrics(self, request: Request) -> Response:
        sandbox = await self._desk.sandbox(request)
        start = whole_number("start", request.query_params.get("start"), 0, _LATEST_SECONDS)
        end = whole_number("end", request.query_params.get("end"), 0, _LATEST_SECONDS)
        through = None if end is None else end + 0.999999  # a client's clock has only seconds here
        samples = await sandbox.meter.between(start, through)
        return json_reply([metric(each, sandbox.limits) for each in samples])

    async def all_metrics(self, request: Request) -> Response:
        """The newest of each sandbox. Ids that are not there, or somebody else's, are left out."""
        owner = self._desk.owner(request)
        ids = [bare_id(each) for each in request.query_params.get("sandbox_ids", "").split(",") if each]
        if not 0 < len(ids) <= MAX_IDS:
            raise errors.InvalidRequest(f"sandbox_ids: it must be 1 to {MAX_IDS} ids, joined by commas")
        found = [sandbox for id in dict.fromkeys(ids) if (sandbox := await self._running(id, owner))]
        return json_reply({"sandboxes": {each.id: metric(await each.meter.latest(), each.limits) for each in found}})

    async def logs(self, request: Request) -> Response:
        start = whole_number("start", request.query_params.get("start"), 0, _LATEST_MILLISECONDS) or 0
        entries = [each for each in await self._entries(request) if each["timestamp"] >= timestamp(start / 1000)]
        entries = entries[: _line_limit(request.query_params)]
        return json_reply({"logs": [log_line(each) for each in entries], "logEntries": entries})

    async def log_entries(self, request: Request) -> Response:
        query = request.query_params
        entries = [each for each in await self._entries(request) if _is_wanted(each, query)]
        backward = query.get("direction") == "backward"
        cursor = whole_number("cursor", query.get("cursor"), 0, _LATEST_MILLISECONDS)
        if cursor is not None:
            moment = timestamp(cursor / 1000)
            entries = [
                each for each in entries if each["timestamp"] == moment or (each["timestamp"] < moment) == backward
            ]
        return json_reply({"logs": (entries[::-1] if backward else entries)[: _line_limit(query)]})

    async def _entries(self, request: Request) -> list[Json]:
        """Those of a sandbox that has ended, too."""
        owner = self._desk.owner(request)
        return log_entries(await self._desk.engine.describe(self._desk.id(request), owner))

    async def _running(self, id: str, owner: str) -> Sandbox | None:
        """None also for one that is paused: nobody is woken to be measured."""
        try:
            resident = await self._desk.residents.find(id, owner)
        except (errors.NotFound, errors.Gone):
            return None
        return None if resident.is_asleep else resident.sandbox


def _is_wanted(entry: Json, query: Mapping[str, str]) -> bool:
    level = query.get("level") or LEVELS[0]
    if level not in LEVELS:
        raise errors.InvalidRequest(f"level: it is one of {', '.join(LEVELS)}, not {level[:40]!r}")
    return LEVELS.index(entry["level"]) >= LEVELS.index(level) and query.get("search", "") in entry["message"]


def _line_limit(query: Mapping[str, str]) -> int:
    limit = whole_number("limit", query.get("limit"), 0, MAX_LINES)
    return MAX_LINES if limit is None else limit
