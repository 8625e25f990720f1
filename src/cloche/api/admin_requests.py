"""`/admin/requests`: records of gateway requests: model calls, containers, executions. Admins only."""

from __future__ import annotations

import math
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import dialect_route, json_reply
from cloche.api.http import Dialect
from cloche.store.gateway import StepQuery, StepRecord, StoredSteps

MAX_REQUESTS_PER_PAGE = 1000
LATEST_REQUEST_TIME = 253402300799.0  # the end of the year 9999
UNFINISHED = "unfinished"  # of a request that goes on, or that lost its server


class AdminRequests:
    def __init__(self, dialect: Dialect, steps: StoredSteps, gatekeeper: Gatekeeper):
        self._steps = steps
        self._gatekeeper = gatekeeper
        self.routes = [
            dialect_route(dialect, "GET", "/admin/requests", self.list),
            dialect_route(dialect, "GET", "/admin/requests/{id:path}", self.show),
        ]

    async def list(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        page = decode_requests_query(request.query_params)
        found = await self._steps.requests(page)
        following = found[-1].id if len(found) == page.limit else None
        return json_reply({"requests": [request_summary(each) for each in found], "before": following})

    async def show(self, request: Request) -> Response:
        """All requests with this id: clients may give one id to several requests."""
        self._gatekeeper.admit_admin(request)
        id = request.path_params["id"]
        steps = await self._steps.of(id)
        if not steps:
            raise errors.NotFound(f"there is no record of a request {id[:200]!r}: they are kept for 30 days")
        return json_reply({"id": id, "requests": build_request_trees(steps)})


def decode_requests_query(query: QueryParams) -> StepQuery:
    """Raises InvalidRequest."""
    known = StepQuery.__struct_fields__
    unknown = [name for name in query if name not in known]
    if unknown:
        raise errors.InvalidRequest(f"{unknown[0][:100]!r} is no filter: there are {', '.join(known)}")
    limit = query.get("limit", "50")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MAX_REQUESTS_PER_PAGE):
        raise errors.InvalidRequest(f"limit must be a number from 1 to {MAX_REQUESTS_PER_PAGE}, not {limit[:100]!r}")
    return StepQuery(
        limit=int(limit),
        before=query.get("before"),
        owner=query.get("owner"),
        outcome=query.get("outcome") or None,
        model=query.get("model") or None,
        id=query.get("id") or None,
        since=_parse_query_time("since", query.get("since")),
        until=_parse_query_time("until", query.get("until")),
    )


def _parse_query_time(name: str, text: str | None) -> float | None:
    if not text:
        return None
    try:
        at = float(text)
    except ValueError:
        at = math.nan
    if not 0 <= at <= LATEST_REQUEST_TIME:
        raise errors.InvalidRequest(f"{name} must be a time in seconds since 1970, not {text[:100]!r}")
    return at


def request_summary(step: StepRecord) -> dict[str, Any]:
    """A request as one row. `record` is the server's unique id; `id` may come from the client."""
    return {
        "id": step.request,
        "record": step.id,
        "owner": step.owner,
        "at": step.started_at,
        "seconds": round(step.seconds, 6),
        "outcome": step.outcome,
        **step.fields,
    }


def build_request_trees(steps: list[StepRecord]) -> list[dict[str, Any]]:
    """The requests among these records, each with its steps in the order of their start."""
    roots = {step.id: step for step in steps if step.kind == "request"}
    children: dict[str, list[StepRecord]] = {id: [] for id in roots}
    for step in steps:
        if step.parent is not None:
            children.setdefault(step.parent, []).append(step)
    found = [
        _build_request_tree(roots.get(id) or _unfinished_request(id, below), below) for id, below in children.items()
    ]
    return sorted(found, key=lambda tree: float(tree["at"]))


def _build_request_tree(root: StepRecord, below: list[StepRecord]) -> dict[str, Any]:
    return {
        **request_summary(root),
        "steps": [_step_summary(step, root.started_at) for step in below],
        **_captured_fields(root),
    }


def _step_summary(step: StepRecord, began: float) -> dict[str, Any]:
    return {
        "kind": step.kind,
        "record": step.id,
        "offset_seconds": round(max(step.started_at - began, 0.0), 6),
        "seconds": round(step.seconds, 6),
        "outcome": step.outcome,
        **step.fields,
        **_captured_fields(step),
    }


def _captured_fields(step: StepRecord) -> dict[str, Any]:
    return {"captured": step.captured} if step.captured else {}


def _unfinished_request(id: str, below: list[StepRecord]) -> StepRecord:
    first, last = below[0], max(below, key=lambda step: step.started_at + step.seconds)
    return StepRecord(
        id=id,
        request=first.request,
        owner=first.owner,
        kind="request",
        started_at=first.started_at,
        seconds=last.started_at + last.seconds - first.started_at,
        outcome=UNFINISHED,
    )
