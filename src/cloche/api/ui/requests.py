"""`/ui/requests`: what requests to the gateway did, a line each, and one of them as a tree with a waterfall."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.admin_requests import UNFINISHED, line_of, trees
from cloche.api.ui import words
from cloche.api.ui.asking import is_partial
from cloche.api.ui.house import House, Page, Visitor
from cloche.api.ui.request_outcomes import FILTERS, Outcome, label_of, outcome_of
from cloche.api.ui.request_tree import href, sandbox_of, took, tree_of
from cloche.store.gateway import Page as Wanted
from cloche.store.gateway import Step

ROWS = 50
MAX_TEXT = 300
UNDER_WAY_SECONDS = 900.0  # for which a request without an end is shown among the others
SINCE = {"1h": 3600.0, "24h": 86400.0, "7d": 7 * 86400.0}
_SINCE_NAMES = {"1h": "the last hour", "24h": "the last day", "7d": "the last week"}


class Asked(NamedTuple):
    """Which of them; empty is all."""

    outcome: str = ""
    model: str = ""
    owner: str = ""
    since: str = ""
    id: str = ""
    before: str = ""

    @property
    def query(self) -> str:
        """The same, but for the page."""
        return urlencode({name: value for name, value in self._asdict().items() if value and name != "before"})

    @property
    def is_live(self) -> bool:
        """Whether new ones come to it: not on an older page, nor where one is looked for by an id."""
        return not self.before and not self.id


class Line(NamedTuple):
    href: str
    id: str
    at: str
    moment: str
    model: str
    owner: str
    outcome: Outcome
    took: str
    tokens_in: str
    tokens_out: str
    calls: int
    executions: int
    sandboxes: tuple[str, ...]


def pages(house: House) -> list[Page]:
    desk = Requests(house)
    return [Page("/requests", desk.overview), Page("/requests/{id:path}", desk.show)]


class Requests:
    def __init__(self, house: House):
        self._house = house
        self._steps = house.gateway.shelf.steps

    async def overview(self, request: Request, visitor: Visitor) -> Response:
        asked = asked_of(request.query_params, visitor)
        wanted = Wanted(
            limit=ROWS + 1,
            before=asked.before or None,
            owner=visitor.sees or asked.owner or None,
            outcome=asked.outcome or None,
            model=asked.model or None,
            id=asked.id or None,
            since=time.time() - SINCE[asked.since] if asked.since else None,
        )
        found = await self._steps.requests(wanted)
        lines = [*await self._under_way(asked, visitor), *(_line(line_of(each)) for each in found[:ROWS])]
        older = urlencode({"before": found[ROWS - 1].id}) if len(found) > ROWS else ""
        name = "requests_rows.html" if is_partial(request) else "requests.html"
        return self._house.render(
            request,
            visitor,
            name,
            lines=lines,
            asked=asked,
            older="&".join(filter(None, (asked.query, older))) if older else "",
            outcomes=[(code, label_of(code)) for code in FILTERS],
            times=_SINCE_NAMES,
            models=sorted({line.model for line in lines if line.model}),
            capture=self._house.config.gateway.capture,
        )

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """By the id of its record, or by its own: clients may have given that to several."""
        id = request.path_params["id"]
        steps = await self._found(id, visitor.sees)
        if not steps:
            raise errors.NotFound(f"there is no record of a request {id[:200]!r}: they are kept for 30 days")
        found = [tree_of(_until_now(each)) for each in trees(steps)]
        name = "request_trees.html" if is_partial(request) else "request.html"
        return self._house.render(
            request, visitor, name, id=id, href=href(id), trees=found, capture=self._house.config.gateway.capture
        )

    async def _found(self, id: str, owner: str | None) -> list[Step]:
        record = await self._steps.get(id)
        if record is None or owner not in (None, record.owner):
            return await self._steps.of(id, owner)
        root = record.parent or record.id
        return [each for each in await self._steps.of(record.request, owner) if root in (each.id, each.parent)] or [
            record
        ]

    async def _under_way(self, asked: Asked, visitor: Visitor) -> list[Line]:
        """Those that have not ended. Only where nothing is asked for that nobody knows before the end."""
        if not asked.is_live or asked.outcome:
            return []
        owner = visitor.sees or asked.owner or None
        steps = await self._steps.under_way(time.time() - UNDER_WAY_SECONDS, owner)
        found = [_unfinished(each) for each in reversed(trees(steps)) if each["outcome"] == UNFINISHED]
        return [line for line in found if asked.model in ("", line.model)]


def asked_of(query: Mapping[str, str], visitor: Visitor) -> Asked:
    """Raises InvalidRequest for what cannot be asked for."""
    texts = {name: query.get(name, "").strip()[:MAX_TEXT] for name in Asked._fields}
    if texts["since"] and texts["since"] not in SINCE:
        raise errors.InvalidRequest(f"since must be one of {', '.join(SINCE)}, not {texts['since'][:50]!r}")
    return Asked(**{**texts, "owner": texts["owner"] if visitor.is_admin else ""})


def _line(told: Mapping[str, Any]) -> Line:
    return Line(
        href=href(told["record"]),
        id=told["id"],
        at=words.iso(told["at"]),
        moment=words.moment(told["at"]),
        model=str(told.get("model", "")),
        owner=told["owner"],
        outcome=outcome_of(told["outcome"], told),
        took=took(told["seconds"]),
        tokens_in=f"{told.get('input_tokens', 0):,}",
        tokens_out=f"{told.get('output_tokens', 0):,}",
        calls=int(told.get("model_calls", 0)),
        executions=int(told.get("executions", 0)),
        sandboxes=tuple(sandbox_of(each) for each in told.get("containers", ())),
    )


def _until_now(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """What has no end may go on: it takes as long as it has been there. After a while nobody believes that any more."""
    seconds = time.time() - told["at"]
    if told["outcome"] != UNFINISHED or not told["seconds"] < seconds < UNDER_WAY_SECONDS:
        return told
    return {**told, "seconds": seconds}


def _unfinished(told: Mapping[str, Any]) -> Line:
    """Its own record has no sums yet: those of its steps."""
    steps = told["steps"]
    kinds = [each["kind"] for each in steps]
    sums = {name: sum(each.get(name, 0) for each in steps) for name in ("input_tokens", "output_tokens")}
    model = next((each["model"] for each in steps if each.get("model")), "")
    line = _line({**_until_now(told), **sums, "model": model, "model_calls": kinds.count("model_call")})
    return line._replace(href=href(told["id"]), executions=kinds.count("execution"))
