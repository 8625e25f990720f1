"""`/ui/network`: what sandboxes tried to reach, what became of it and why; and what they may reach."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.ui import words
from cloche.api.ui.asking import is_partial
from cloche.api.ui.house import House, Page, Visitor
from cloche.api.ui.network_rows import MAX_TEXT, ROWS, VERDICTS, Asked, Found, Row, asked_of, found
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.network_policy import NetworkPolicy
from cloche.protocol import requests

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
        from cloche.api.ui.network_rules import opinion  # loads the proxy, which most servers have no need for

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
            words=words,
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
        from cloche.api.ui.network_rules import Deciders

        deciders = Deciders(policies, self._config.network.bound)
        return [(row, deciders.rule(row) if row.was_let_through else "") for row in rows]


def pages(house: House) -> list[Page]:
    page = NetworkPage(house)
    return [Page("/network", page.overview), Page("/network/check", page.check)]
