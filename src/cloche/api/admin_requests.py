"""`/admin/requests`: what requests to the gateway did: model calls, containers, executions. For admins."""

from __future__ import annotations

import math
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.http import Dialect, Edge
from cloche.api.system import json_reply
from cloche.store.gateway import Page, Step, Steps

MAX_LIMIT = 1000
MAX_MOMENT = 253402300799.0  # the end of the year 9999
UNFINISHED = "unfinished"  # of a request that goes on, or whose server died


class AdminRequests:
    def __init__(self, dialect: Dialect, steps: Steps, gatekeeper: Gatekeeper):
        self._steps = steps
        self._gatekeeper = gatekeeper
        self.routes = [
            Route("/admin/requests", Edge(dialect, self.list), methods=["GET"]),
            Route("/admin/requests/{id:path}", Edge(dialect, self.show), methods=["GET"]),
        ]

    async def list(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        page = decode(request.query_params)
        found = await self._steps.requests(page)
        following = found[-1].id if len(found) == page.limit else None
        return json_reply({"requests": [line_of(each) for each in found], "before": following})

    async def show(self, request: Request) -> Response:
        """Several requests, where clients gave them one id."""
        self._gatekeeper.admit_admin(request)
        id = request.path_params["id"]
        steps = await self._steps.of(id)
        if not steps:
            raise errors.NotFound(f"there is no record of a request {id[:200]!r}: they are kept for 30 days")
        return json_reply({"id": id, "requests": trees(steps)})


def decode(query: QueryParams) -> Page:
    """Raises InvalidRequest."""
    known = Page.__struct_fields__
    unknown = [name for name in query if name not in known]
    if unknown:
        raise errors.InvalidRequest(f"{unknown[0][:100]!r} is no filter: there are {', '.join(known)}")
    limit = query.get("limit", "50")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise errors.InvalidRequest(f"limit must be a number from 1 to {MAX_LIMIT}, not {limit[:100]!r}")
    return Page(
        limit=int(limit),
        before=query.get("before"),
        owner=query.get("owner"),
        outcome=query.get("outcome") or None,
        model=query.get("model") or None,
        id=query.get("id") or None,
        since=_moment("since", query.get("since")),
        until=_moment("until", query.get("until")),
    )


def _moment(name: str, text: str | None) -> float | None:
    if not text:
        return None
    try:
        at = float(text)
    except ValueError:
        at = math.nan
    if not 0 <= at <= MAX_MOMENT:
        raise errors.InvalidRequest(f"{name} must be a time in seconds since 1970, not {text[:100]!r}")
    return at


def line_of(step: Step) -> dict[str, Any]:
    """A request in one line. `record` is ours, and unique; `id` may be a client's."""
    return {
        "id": step.request,
        "record": step.id,
        "owner": step.owner,
        "at": step.started_at,
        "seconds": round(step.seconds, 6),
        "outcome": step.outcome,
        **step.fields,
    }


def trees(steps: list[Step]) -> list[dict[str, Any]]:
    """The requests among these records, each with its steps in the order in which they began."""
    roots = {step.id: step for step in steps if step.kind == "request"}
    children: dict[str, list[Step]] = {id: [] for id in roots}
    for step in steps:
        if step.parent is not None:
            children.setdefault(step.parent, []).append(step)
    found = [_tree(roots.get(id) or _unfinished(id, below), below) for id, below in children.items()]
    return sorted(found, key=lambda tree: float(tree["at"]))


def _tree(root: Step, below: list[Step]) -> dict[str, Any]:
    return {**line_of(root), "steps": [_below(step, root.started_at) for step in below], **_captured(root)}


def _below(step: Step, began: float) -> dict[str, Any]:
    return {
        "kind": step.kind,
        "record": step.id,
        "offset_seconds": round(max(step.started_at - began, 0.0), 6),
        "seconds": round(step.seconds, 6),
        "outcome": step.outcome,
        **step.fields,
        **_captured(step),
    }


def _captured(step: Step) -> dict[str, Any]:
    return {"captured": step.captured} if step.captured else {}


def _unfinished(id: str, below: list[Step]) -> Step:
    first, last = below[0], max(below, key=lambda step: step.started_at + step.seconds)
    return Step(
        id=id,
        request=first.request,
        owner=first.owner,
        kind="request",
        started_at=first.started_at,
        seconds=last.started_at + last.seconds - first.started_at,
        outcome=UNFINISHED,
    )
