"""`/ui/usage`: what owners and keys use of this host, against what they may, and over the last hour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.console import format
from cloche.api.console.context import House, Page, Visitor, is_partial
from cloche.api.console.keys import Meter, meter
from cloche.config.sections import KeyQuota
from cloche.engine.quotas.usage import Amounts, KeyUsage, OwnerUsage
from cloche.store.quotas import Spent

WIDTH, HEIGHT = 240, 40  # of a chart, in its own units
KINDS = {
    "snapshots": "snapshots and templates",
    "paused": "paused sandboxes",
    "volumes": "volumes",
    "files": "uploaded files",
    "container_files": "files of containers",
    "code_files": "LibreChat's files",
    "build_files": "archives for builds",
    "responses": "responses",
    "conversations": "conversations",
    "runs": "detached runs",
}


class Chart(NamedTuple):
    """One hour, a bar for each minute in which there was something."""

    title: str
    bars: list[tuple[str, str, str]]  # x, y and height
    in_all: str
    most: str


class Row(NamedTuple):
    name: str
    key_id: str  # empty of an owner
    meters: list[Meter]
    executions: str
    cpu: str


class OwnerRow(NamedTuple):
    owner: str
    own: Row
    keys: list[Row]
    stored: list[tuple[str, str]]
    charts: list[Chart]


class Usage:
    def __init__(self, house: House):
        self._house = house

    async def show(self, request: Request, visitor: Visitor) -> Response:
        quotas = self._house.engine.quotas
        owners = await quotas.usage_of_all() if visitor.is_admin else [await quotas.usage(visitor.owner)]
        hour = await quotas.last_hour(visitor.sees)
        name = "usage_rows.html" if is_partial(request) else "usage.html"
        shown = [owner_row(each, hour.get(each.owner, [])) for each in owners]
        return self._house.render(request, visitor, name, owners=shown)


def owner_row(used: OwnerUsage, minutes: Sequence[Spent]) -> OwnerRow:
    stored = sorted(((kind, size) for kind, size in used.stored.items() if size), key=lambda each: -each[1])
    return OwnerRow(
        owner=used.owner,
        own=_row(
            used.owner, "", used, used.quota, [meter("Stored", used.stored_bytes, used.quota.stored_bytes, format.size)]
        ),
        keys=[_key_row(each) for each in used.keys],
        stored=[(KINDS.get(kind, kind), format.size(size)) for kind, size in stored],
        charts=[
            _chart("Executions", [float(each.executions) for each in minutes], "{:,.0f}".format),
            _chart("CPU seconds", [each.cpu_seconds for each in minutes], _seconds),
        ]
        if minutes
        else [],
    )


def _key_row(used: KeyUsage) -> Row:
    return _row(used.name or used.key_id, used.key_id, used, used.quota, [])


def _row(name: str, key_id: str, used: Amounts, quota: KeyQuota, more: list[Meter]) -> Row:
    return Row(
        name=name,
        key_id=key_id,
        meters=[
            meter("Sandboxes", used.sandboxes, quota.sandboxes, "{:,.0f}".format),
            meter("Memory", used.memory_bytes, quota.memory_bytes, format.size),
            meter(
                "Executions in the last minute",
                used.executions_last_minute,
                quota.executions_per_minute,
                "{:,.0f}".format,
            ),
            meter("CPU seconds in the last hour", used.cpu_seconds_last_hour, quota.cpu_seconds_per_hour, _seconds),
            *more,
        ],
        executions=f"{used.executions:,}",
        cpu=f"{_seconds(used.cpu_seconds)} s",
    )


def _seconds(amount: float) -> str:
    """0.04, 3.21, 12.5, 3,600."""
    return f"{amount:,.2f}" if amount < 10 and amount % 1 else f"{amount:,.1f}" if amount % 1 else f"{amount:,.0f}"


def _chart(title: str, values: Sequence[float], say: Callable[[float], str]) -> Chart:
    most, step = max(values) or 1.0, WIDTH / len(values)
    bars = [
        (f"{at * step:.1f}", f"{HEIGHT - max(value / most * HEIGHT, 1):.1f}", f"{max(value / most * HEIGHT, 1):.1f}")
        for at, value in enumerate(values)
        if value > 0
    ]
    return Chart(title, bars, say(sum(values)), say(max(values)))


def pages(house: House) -> list[Page]:
    return [Page("/usage", Usage(house).show)]
