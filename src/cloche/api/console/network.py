"""`/ui/network`: connections that sandboxes tried, with their verdicts, and the rules for them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.console import format
from cloche.api.console.context import ConsoleContext, ConsolePage, ConsoleVisitor, is_partial
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.network_policy import NetworkEntry, NetworkPolicy
from cloche.protocol import requests
from cloche.telemetry import NETWORK_EVENTS, LogEntry, log

# Connections that a visitor's sandboxes tried, the newest first.
#
# For running sandboxes it reads their own logs. For ended ones it reads the server's log, which is shared by
# all of them, and has sums where many lines came at once.

PAGE_ROWS = 100
MAX_TEXT = 300
VERDICTS = {"denied": "denied", "failed": "failed", "allowed": "allowed", "open": "open now"}
LEFT_OUT_EVENT = "network.left_out"


class NetworkPageQuery(NamedTuple):
    """The filter; empty fields match all."""

    sandbox: str = ""
    verdict: str = ""
    host: str = ""
    owner: str = ""
    before: float | None = None

    @property
    def filters(self) -> dict[str, str]:
        """The fields without the page."""
        values = (("sandbox", self.sandbox), ("verdict", self.verdict), ("host", self.host), ("owner", self.owner))
        return {name: value for name, value in values if value}

    def matches_row(self, one: NetworkRow | NetworkEntry) -> bool:
        return (
            self.verdict in ("", one.verdict)
            and (not self.host or self.host.lower() in f"{one.host}:{one.port} {one.reason}".lower())
            and (self.before is None or one.at < self.before)
        )


class NetworkRow(NamedTuple):
    at: float  # when it began; of a sandbox that has ended, when it was over
    sandbox: str
    owner: str
    protocol: str
    host: str
    port: int
    verdict: str
    reason: str
    sent_bytes: int
    received_bytes: int
    seconds: float | None  # None: not known
    more: int = 0  # how many connections the line is a sum of

    @property
    def there(self) -> str:
        host = f"[{self.host}]" if ":" in self.host and self.port else self.host
        return f"{host}:{self.port}" if self.port else host

    @property
    def why(self) -> str:
        """The reason, without the destination, which is shown beside it."""
        return self.reason.removeprefix(f"{self.there} is ").removeprefix(f"{self.there} ")

    @property
    def was_let_through(self) -> bool:
        """Whether a rule allowed it: packages of the index have other rules."""
        return self.verdict in ("allowed", "open") and self.protocol != "package"


class NetworkListing(NamedTuple):
    rows: list[NetworkRow]
    has_more: bool


def decode_network_query(query: Mapping[str, str], *, is_admin: bool) -> NetworkPageQuery:
    """Raises InvalidRequest for an invalid filter."""
    texts = {name: query.get(name, "").strip()[:MAX_TEXT] for name in ("sandbox", "verdict", "host", "owner")}
    if texts["verdict"] and texts["verdict"] not in VERDICTS:
        raise errors.InvalidRequest(f"there is no verdict {texts['verdict'][:50]!r}: use {', '.join(VERDICTS)}")
    if not is_admin:
        texts["owner"] = ""
    return NetworkPageQuery(**texts, before=_decode_moment(query.get("before", "")))


def _decode_moment(text: str) -> float | None:
    if not text:
        return None
    try:
        return float(text[:40])
    except ValueError:
        raise errors.InvalidRequest(f"before is a moment in seconds, not {text[:50]!r}") from None


async def find_connections(engine: Engine, owner: str | None, query: NetworkPageQuery) -> NetworkListing:
    """Connections of that owner's sandboxes (None: of all). Looks for one more than a page, to know of more."""
    matching: list[NetworkRow] = []
    living = set()
    for sandbox in engine.live_sandboxes():
        living.add(sandbox.id)
        if _is_selected(query, owner, sandbox.id, sandbox.spec.owner) and (entries := sandbox.network.log):
            newest = heapq.nlargest(PAGE_ROWS + 1, filter(query.matches_row, entries), key=lambda entry: entry.at)
            matching += (_live_row(each, sandbox.id, sandbox.spec.owner) for each in newest)
            await asyncio.sleep(0)  # there may be hundreds of them, each with a thousand lines
    matching += filter(query.matches_row, _ended_rows(living, owner, query))
    rows = heapq.nlargest(PAGE_ROWS + 1, matching, key=lambda row: row.at)
    return NetworkListing(rows[:PAGE_ROWS], len(rows) > PAGE_ROWS)


def _is_selected(query: NetworkPageQuery, sees: str | None, sandbox: str, owner: str) -> bool:
    return bool(owner) and sees in (None, owner) and query.owner in ("", owner) and query.sandbox in sandbox


def _live_row(entry: NetworkEntry, sandbox: str, owner: str) -> NetworkRow:
    return NetworkRow(
        at=entry.at,
        sandbox=sandbox,
        owner=owner,
        protocol=entry.protocol,
        host=entry.host,
        port=entry.port,
        verdict=entry.verdict,
        reason=entry.reason,
        sent_bytes=entry.sent_bytes,
        received_bytes=entry.received_bytes,
        seconds=entry.seconds,
    )


def _ended_rows(living: set[str], sees: str | None, query: NetworkPageQuery) -> Iterator[NetworkRow]:
    for entry in log.kept:
        if entry.event not in NETWORK_EVENTS:
            continue
        sandbox, owner = str(entry.fields.get("sandbox", "")), str(entry.fields.get("owner", ""))
        if sandbox not in living and _is_selected(query, sees, sandbox, owner):
            yield _logged_row(entry, sandbox, owner)


def _logged_row(entry: LogEntry, sandbox: str, owner: str) -> NetworkRow:
    """A row from the server's log, which leaves out empty fields."""
    fields = entry.fields
    is_sum = entry.event == LEFT_OUT_EVENT
    return NetworkRow(
        at=entry.at,
        sandbox=sandbox,
        owner=owner,
        protocol=str(fields.get("protocol", "")),
        host=str(fields.get("host", "")),
        port=int(fields.get("port", 0)),
        verdict=str(fields.get("verdict", "")) if is_sum else entry.event.removeprefix("network."),
        reason=str(fields.get("package" if is_sum else "reason", "")),
        sent_bytes=int(fields.get("sent_bytes", 0)),
        received_bytes=int(fields.get("received_bytes", 0)),
        seconds=None,
        more=int(fields.get("lines", 0)) if is_sum else 0,
    )


SHOWN_SANDBOXES = 100
SHOWN_RULES = 50
ALLOW_ANYTHING = NetworkPolicy(allow=("*:*",))  # a sandbox that asks for all that it can get


class NetworkPage:
    def __init__(self, context: ConsoleContext):
        self._context = context
        self._engine = context.engine
        self._config = context.config

    async def show_overview(self, request: Request, visitor: ConsoleVisitor) -> Response:
        query = decode_network_query(request.query_params, is_admin=visitor.is_admin)
        shown = await find_connections(self._engine, visitor.visible_owner, query)
        if is_partial(request):
            return self._render_rows(request, visitor, "network_rows.html", query, shown)
        living = self._visible_sandboxes(visitor)
        one = next((each for each in living if each.id == query.sandbox), None)
        return self._render_rows(
            request,
            visitor,
            "network.html",
            query,
            shown,
            one=None if one is None else (one.record, requests.policy_to_info(one.network.policy), one.network.dropped),
            networked=[(each.record, each.network.policy) for each in living if each.network.policy.allows_something],
        )

    async def check(self, request: Request, visitor: ConsoleVisitor) -> Response:
        """Whether a destination would be allowed, and by which rules. Nothing is looked up or connected to."""
        from cloche.api.console.network_rules import (
            check_destination,  # loads the proxy, which most servers have no need for
        )

        place = request.query_params.get("place", "").strip()[:MAX_TEXT]
        id = request.query_params.get("sandbox", "").strip()
        one = next((each for each in self._visible_sandboxes(visitor) if each.id == id), None)
        policy = ALLOW_ANYTHING if one is None else one.network.policy
        said = check_destination(place, policy, self._config.network)
        return self._context.render(
            request, visitor, "network_check.html", said=said, place=place, id=id, sandbox=one and one.record
        )

    def _visible_sandboxes(self, visitor: ConsoleVisitor) -> list[Sandbox]:
        """The visitor's running sandboxes, the newest first."""
        own = [
            each
            for each in self._engine.live_sandboxes()
            if each.spec.owner and visitor.visible_owner in (None, each.spec.owner)
        ]
        return sorted(own, key=lambda each: -each.record.created_at)

    def _render_rows(
        self,
        request: Request,
        visitor: ConsoleVisitor,
        name: str,
        query: NetworkPageQuery,
        shown: NetworkListing,
        **values: Any,
    ) -> Response:
        older = urlencode({**query.filters, "before": shown.rows[-1].at}) if shown.has_more else ""
        return self._context.render(
            request,
            visitor,
            name,
            words=format,
            asked=query,
            query=urlencode(query.filters),
            older=older,
            rows=self._with_rules(shown.rows),
            verdicts=VERDICTS,
            network=self._config.network,
            packages=self._config.packages,
            sealed=self._engine.networks.sealed,
            page_rows=PAGE_ROWS,
            shown_sandboxes=SHOWN_SANDBOXES,
            shown_rules=SHOWN_RULES,
            **values,
        )

    def _with_rules(self, rows: list[NetworkRow]) -> list[tuple[NetworkRow, str]]:
        """Allowed connections with the current rule for them. For all others, the reason is enough."""
        policies = {each.id: each.network.policy for each in self._engine.live_sandboxes()}
        if not any(row.sandbox in policies for row in rows):
            return [(row, "") for row in rows]
        from cloche.api.console.network_rules import DecidingRules

        deciders = DecidingRules(policies, self._config.network.bound)
        return [(row, deciders.deciding_rule(row) if row.was_let_through else "") for row in rows]


def pages(context: ConsoleContext) -> list[ConsolePage]:
    page = NetworkPage(context)
    return [ConsolePage("/network", page.show_overview), ConsolePage("/network/check", page.check)]
