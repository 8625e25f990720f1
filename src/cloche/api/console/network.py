"""`/ui/network`: what sandboxes tried to reach, what became of it and why; and what they may reach."""

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
from cloche.api.console.context import House, Page, Visitor, is_partial
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.network_policy import NetworkEntry, NetworkPolicy
from cloche.protocol import requests
from cloche.telemetry import OF_NETWORKS, Entry, log

# What sandboxes of a visitor tried to reach, the newest first.
#
# Of those that live it is their own log. Of those that have ended it is what the server's log has kept, which is for
# all
# of them together, and has sums where much came at once.

ROWS = 100
MAX_TEXT = 300
VERDICTS = {"denied": "denied", "failed": "failed", "allowed": "allowed", "open": "open now"}
LEFT_OUT = "network.left_out"


class Asked(NamedTuple):
    """Which of them; empty is all."""

    sandbox: str = ""
    verdict: str = ""
    host: str = ""
    owner: str = ""
    before: float | None = None

    @property
    def filters(self) -> dict[str, str]:
        """The same, but for the page."""
        values = (("sandbox", self.sandbox), ("verdict", self.verdict), ("host", self.host), ("owner", self.owner))
        return {name: value for name, value in values if value}

    def wants(self, one: Row | NetworkEntry) -> bool:
        return (
            self.verdict in ("", one.verdict)
            and (not self.host or self.host.lower() in f"{one.host}:{one.port} {one.reason}".lower())
            and (self.before is None or one.at < self.before)
        )


class Row(NamedTuple):
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
        """Its reason, without where to, which is beside it."""
        return self.reason.removeprefix(f"{self.there} is ").removeprefix(f"{self.there} ")

    @property
    def was_let_through(self) -> bool:
        """By a rule: for packages of the index there are others."""
        return self.verdict in ("allowed", "open") and self.protocol != "package"


class Found(NamedTuple):
    rows: list[Row]
    has_more: bool


def asked_of(query: Mapping[str, str], *, is_admin: bool) -> Asked:
    """Raises InvalidRequest for what cannot be asked for."""
    texts = {name: query.get(name, "").strip()[:MAX_TEXT] for name in ("sandbox", "verdict", "host", "owner")}
    if texts["verdict"] and texts["verdict"] not in VERDICTS:
        raise errors.InvalidRequest(f"there is no verdict {texts['verdict'][:50]!r}: use {', '.join(VERDICTS)}")
    if not is_admin:
        texts["owner"] = ""
    return Asked(**texts, before=_moment(query.get("before", "")))


def _moment(text: str) -> float | None:
    if not text:
        return None
    try:
        return float(text[:40])
    except ValueError:
        raise errors.InvalidRequest(f"before is a moment in seconds, not {text[:50]!r}") from None


async def found(engine: Engine, owner: str | None, asked: Asked) -> Found:
    """Of that owner's sandboxes, or with None of all. One more is looked for than is shown: whether there are more."""
    matching: list[Row] = []
    living = set()
    for sandbox in engine.living():
        living.add(sandbox.id)
        if _is_asked(asked, owner, sandbox.id, sandbox.spec.owner) and (entries := sandbox.network.log):
            newest = heapq.nlargest(ROWS + 1, filter(asked.wants, entries), key=lambda entry: entry.at)
            matching += (_row(each, sandbox.id, sandbox.spec.owner) for each in newest)
            await asyncio.sleep(0)  # there may be hundreds of them, each with a thousand lines
    matching += filter(asked.wants, _of_ended(living, owner, asked))
    rows = heapq.nlargest(ROWS + 1, matching, key=lambda row: row.at)
    return Found(rows[:ROWS], len(rows) > ROWS)


def _is_asked(asked: Asked, sees: str | None, sandbox: str, owner: str) -> bool:
    return bool(owner) and sees in (None, owner) and asked.owner in ("", owner) and asked.sandbox in sandbox


def _row(entry: NetworkEntry, sandbox: str, owner: str) -> Row:
    return Row(
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


def _of_ended(living: set[str], sees: str | None, asked: Asked) -> Iterator[Row]:
    for entry in log.kept:
        if entry.event not in OF_NETWORKS:
            continue
        sandbox, owner = str(entry.fields.get("sandbox", "")), str(entry.fields.get("owner", ""))
        if sandbox not in living and _is_asked(asked, sees, sandbox, owner):
            yield _logged(entry, sandbox, owner)


def _logged(entry: Entry, sandbox: str, owner: str) -> Row:
    """What is nothing is left out of the server's log."""
    fields = entry.fields
    is_sum = entry.event == LEFT_OUT
    return Row(
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
ANYTHING = NetworkPolicy(allow=("*:*",))  # a sandbox that asks for all that it can get


class NetworkPage:
    def __init__(self, house: House):
        self._house = house
        self._engine = house.engine
        self._config = house.config

    async def overview(self, request: Request, visitor: Visitor) -> Response:
        asked = asked_of(request.query_params, is_admin=visitor.is_admin)
        shown = await found(self._engine, visitor.sees, asked)
        if is_partial(request):
            return self._render(request, visitor, "network_rows.html", asked, shown)
        living = self._living(visitor)
        one = next((each for each in living if each.id == asked.sandbox), None)
        return self._render(
            request,
            visitor,
            "network.html",
            asked,
            shown,
            one=None if one is None else (one.record, requests.info_of(one.network.policy), one.network.dropped),
            networked=[(each.record, each.network.policy) for each in living if each.network.policy.allows_something],
        )

    async def check(self, request: Request, visitor: Visitor) -> Response:
        """Whether somewhere would be let through, and which rules say so. Nothing is looked up or connected to."""
        from cloche.api.console.network_rules import opinion  # loads the proxy, which most servers have no need for

        place = request.query_params.get("place", "").strip()[:MAX_TEXT]
        id = request.query_params.get("sandbox", "").strip()
        one = next((each for each in self._living(visitor) if each.id == id), None)
        policy = ANYTHING if one is None else one.network.policy
        said = opinion(place, policy, self._config.network)
        return self._house.render(
            request, visitor, "network_check.html", said=said, place=place, id=id, sandbox=one and one.record
        )

    def _living(self, visitor: Visitor) -> list[Sandbox]:
        """Theirs, the newest first."""
        own = [each for each in self._engine.living() if each.spec.owner and visitor.sees in (None, each.spec.owner)]
        return sorted(own, key=lambda each: -each.record.created_at)

    def _render(
        self, request: Request, visitor: Visitor, name: str, asked: Asked, shown: Found, **values: Any
    ) -> Response:
        older = urlencode({**asked.filters, "before": shown.rows[-1].at}) if shown.has_more else ""
        return self._house.render(
            request,
            visitor,
            name,
            words=format,
            asked=asked,
            query=urlencode(asked.filters),
            older=older,
            rows=self._with_rules(shown.rows),
            verdicts=VERDICTS,
            network=self._config.network,
            packages=self._config.packages,
            sealed=self._engine.networks.sealed,
            page_rows=ROWS,
            shown_sandboxes=SHOWN_SANDBOXES,
            shown_rules=SHOWN_RULES,
            **values,
        )

    def _with_rules(self, rows: list[Row]) -> list[tuple[Row, str]]:
        """Those that were let through with the rule for it, as it is now. Of all others, the reason says it."""
        policies = {each.id: each.network.policy for each in self._engine.living()}
        if not any(row.sandbox in policies for row in rows):
            return [(row, "") for row in rows]
        from cloche.api.console.network_rules import Deciders

        deciders = Deciders(policies, self._config.network.bound)
        return [(row, deciders.rule(row) if row.was_let_through else "") for row in rows]


def pages(house: House) -> list[Page]:
    page = NetworkPage(house)
    return [Page("/network", page.overview), Page("/network/check", page.check)]
