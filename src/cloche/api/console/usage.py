"""`/ui/usage`: usage and quotas of owners and keys, and their last hour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.console import format
from cloche.api.console.context import ConsoleContext, ConsolePage, ConsoleVisitor, is_partial
from cloche.api.console.keys import QuotaMeter, quota_meter
from cloche.config.sections import KeyQuota
from cloche.engine.quotas.quotas import KeyUsage, OwnerUsage, UsageAmounts
from cloche.store.quotas import SpentUsage

WIDTH, HEIGHT = 240, 40  # of a chart, in its own units
STORED_KINDS = {
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


class UsageChart(NamedTuple):
    """One hour, a bar for each minute in which there was something."""

    title: str
    bars: list[tuple[str, str, str]]  # x, y and height
    in_all: str
    most: str


class UsageRow(NamedTuple):
    name: str
    key_id: str  # empty of an owner
    meters: list[QuotaMeter]
    executions: str
    cpu: str


class OwnerUsageRow(NamedTuple):
    owner: str
    own: UsageRow
    keys: list[UsageRow]
    stored: list[tuple[str, str]]
    charts: list[UsageChart]


class UsagePage:
    def __init__(self, context: ConsoleContext):
        self._context = context

    async def show(self, request: Request, visitor: ConsoleVisitor) -> Response:
        quotas = self._context.engine.quotas
        owners = await quotas.usage_of_all_owners() if visitor.is_admin else [await quotas.usage(visitor.owner)]
        hour = await quotas.last_hour(visitor.visible_owner)
        name = "usage_rows.html" if is_partial(request) else "usage.html"
        shown = [owner_row(each, hour.get(each.owner, [])) for each in owners]
        return self._context.render(request, visitor, name, owners=shown)


def owner_row(used: OwnerUsage, minutes: Sequence[SpentUsage]) -> OwnerUsageRow:
    stored = sorted(((kind, size) for kind, size in used.stored.items() if size), key=lambda each: -each[1])
    return OwnerUsageRow(
        owner=used.owner,
        own=_usage_row(
            used.owner,
            "",
            used,
            used.quota,
            [quota_meter("Stored", used.stored_bytes, used.quota.stored_bytes, format.size)],
        ),
        keys=[_key_row(each) for each in used.keys],
        stored=[(STORED_KINDS.get(kind, kind), format.size(size)) for kind, size in stored],
        charts=[
            _draw_chart("Executions", [float(each.executions) for each in minutes], "{:,.0f}".format),
            _draw_chart("CPU seconds", [each.cpu_seconds for each in minutes], _format_seconds),
        ]
        if minutes
        else [],
    )


def _key_row(used: KeyUsage) -> UsageRow:
    return _usage_row(used.name or used.key_id, used.key_id, used, used.quota, [])


def _usage_row(name: str, key_id: str, used: UsageAmounts, quota: KeyQuota, more: list[QuotaMeter]) -> UsageRow:
    return UsageRow(
        name=name,
        key_id=key_id,
        meters=[
            quota_meter("Sandboxes", used.sandboxes, quota.sandboxes, "{:,.0f}".format),
            quota_meter("Memory", used.memory_bytes, quota.memory_bytes, format.size),
            quota_meter(
                "Executions in the last minute",
                used.executions_last_minute,
                quota.executions_per_minute,
                "{:,.0f}".format,
            ),
            quota_meter(
                "CPU seconds in the last hour", used.cpu_seconds_last_hour, quota.cpu_seconds_per_hour, _format_seconds
            ),
            *more,
        ],
        executions=f"{used.executions:,}",
        cpu=f"{_format_seconds(used.cpu_seconds)} s",
    )


def _format_seconds(amount: float) -> str:
    """0.04, 3.21, 12.5, 3,600."""
    return f"{amount:,.2f}" if amount < 10 and amount % 1 else f"{amount:,.1f}" if amount % 1 else f"{amount:,.0f}"


def _draw_chart(title: str, values: Sequence[float], say: Callable[[float], str]) -> UsageChart:
    most, step = max(values) or 1.0, WIDTH / len(values)
    bars = [
        (f"{at * step:.1f}", f"{HEIGHT - max(value / most * HEIGHT, 1):.1f}", f"{max(value / most * HEIGHT, 1):.1f}")
        for at, value in enumerate(values)
        if value > 0
    ]
    return UsageChart(title, bars, say(sum(values)), say(max(values)))


def pages(context: ConsoleContext) -> list[ConsolePage]:
    return [ConsolePage("/usage", UsagePage(context).show)]
