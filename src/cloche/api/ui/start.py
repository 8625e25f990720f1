"""`/ui/`: where one begins: what runs now, how much room there is, and how clients are connected."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.admin_capacity import capacity_of
from cloche.api.ui import words
from cloche.api.ui.asking import is_partial
from cloche.api.ui.connecting import base_url, snippets
from cloche.api.ui.health import failing_parts, meaning_of
from cloche.api.ui.house import House, Page, Visitor
from cloche.api.ui.quota_words import meter
from cloche.engine.quotas.usage import OwnerUsage

SHOWN = 6  # sandboxes
ABOUT = {
    "/playground": "Run code in a live sandbox: cells, files, a terminal, a chat.",
    "/sandboxes": "What runs, what it uses, and why it ended.",
    "/requests": "What a model's answer took, step by step.",
    "/templates": "Versions, packages and builds.",
    "/network": "What sandboxes tried to reach.",
    "/keys": "Who may use this server, and how much.",
    "/health": "Whether all is well, and how full it is.",
}


class Start:
    def __init__(self, house: House):
        self._house = house

    async def show(self, request: Request, visitor: Visitor) -> Response:
        name, values = "start_now.html", await self._now(visitor)
        if not is_partial(request):
            name = "start.html"
            values |= {"about": ABOUT, "snippets": snippets(base_url(request, self._house.config))}
        return self._house.render(request, visitor, name, words=words, now=time.time(), **values)

    async def _now(self, visitor: Visitor) -> dict[str, Any]:
        engine, verdict = self._house.engine, self._house.health.verdict
        live = sorted(engine.known(visitor.sees), key=lambda each: -each.created_at)
        return {
            "running": sum(each.state == "running" for each in live),
            "paused": sum(each.state == "paused" for each in live),
            "newest": live[:SHOWN],
            "capacity": capacity_of(engine) if visitor.is_admin else None,
            "meters": _meters(await engine.quotas.usage(visitor.owner)),
            "verdict": verdict,
            "meaning": meaning_of(verdict),
            "failing": failing_parts(self._house) if visitor.is_admin else [],
        }


def _meters(used: OwnerUsage) -> list[Any]:
    return [
        meter("Executions/min", used.executions_last_minute, used.quota.executions_per_minute, _count),
        meter("CPU seconds/h", used.cpu_seconds_last_hour, used.quota.cpu_seconds_per_hour, _tenths),
        meter("Stored", used.stored_bytes, used.quota.stored_bytes, words.size),
    ]


def _count(amount: float) -> str:
    return f"{amount:,.0f}"


def _tenths(amount: float) -> str:
    return f"{amount:,.1f}"


def pages(house: House) -> list[Page]:
    return [Page("/", Start(house).show)]
