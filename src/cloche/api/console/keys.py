"""`/ui/keys`: keys, owners and their quotas. The page's script makes changes through `/admin`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.console import format
from cloche.api.console.context import ConsoleContext, ConsolePage, ConsoleVisitor, is_partial
from cloche.config.sections import KeyQuota
from cloche.engine.quotas.quotas import Quotas
from cloche.store.keys import PRESET_ID, KeyRecord
from cloche.store.quotas import QuotaSubject

# Quotas and their usage, formatted for people.

NEARLY_USED = 0.8  # of a quota


class QuotaKind(NamedTuple):
    name: str  # as the API has it
    title: str
    short: str  # behind a number
    say: Callable[[float], str]
    hint: str


def _format_count(amount: float) -> str:
    return f"{amount:,.15g}"


def _format_lifetime(amount: float) -> str:
    return format.duration(amount) if amount >= 1 else f"{amount:g}s"


QUOTA_KINDS = (
    QuotaKind(
        "sandboxes", "Sandboxes at once", "sandboxes", _format_count, "those that run, or are paused with their memory"
    ),
    QuotaKind(
        "executions_per_minute",
        "Executions per minute",
        "executions/min",
        _format_count,
        "of code, and starts of commands",
    ),
    QuotaKind(
        "cpu_seconds_per_hour", "CPU seconds per hour", "CPU s/hour", _format_count, "of all programs in sandboxes"
    ),
    QuotaKind(
        "memory_bytes", "Memory", "memory", format.size, "of all sandboxes together, by their limits; such as 8GiB"
    ),
    QuotaKind("stored_bytes", "Stored", "stored", format.size, "snapshots, volumes, files and so on; such as 10GiB"),
    QuotaKind(
        "lifetime_seconds",
        "Lifetime of a sandbox, in seconds",
        "lifetime",
        _format_lifetime,
        "from its creation or resuming",
    ),
)


class QuotaMeter(NamedTuple):
    """The used part of a quota."""

    title: str
    used: str
    most: str  # empty where there is no limit
    value: str  # from 0 to 1
    tone: str  # good, warn (nearly all) or bad (all of it)
    alarm: str  # the same in words; empty where all is well


def quota_meter(title: str, used: float, most: float | None, say: Callable[[float], str]) -> QuotaMeter:
    if most is None:
        return QuotaMeter(title, say(used), "", "0", "good", "")
    part = used / most if most else 1.0
    tone, alarm = (
        ("bad", "used up") if part >= 1 else ("warn", "nearly used up") if part >= NEARLY_USED else ("good", "")
    )
    return QuotaMeter(title, say(used), say(most), f"{min(part, 1.0):.3f}", tone, alarm)


def quota_limits(quota: KeyQuota) -> list[str]:
    """The limits of a quota: "20 sandboxes", "10 GiB stored"."""
    amounts = ((kind, getattr(quota, kind.name, None)) for kind in QUOTA_KINDS)
    return [f"{kind.say(amount)} {kind.short}" for kind, amount in amounts if amount is not None]


MAX_KEYS = 500  # on the page
EXPIRY_CHOICES = (
    ("", "never"),
    ("1", "in a day"),
    ("7", "in a week"),
    ("30", "in 30 days"),
    ("90", "in 90 days"),
    ("365", "in a year"),
)


class KeyRow(NamedTuple):
    record: KeyRecord
    state: str  # valid, expired, revoked; or environment, of the one that `CLOCHE_API_KEY` sets
    made: str
    made_iso: str
    last_used: str
    expires: str
    expires_iso: str
    is_own: bool  # the one that this session was opened with
    limits: list[str]
    is_set: bool  # whether something was set for it alone

    @property
    def title(self) -> str:
        return self.record.name or self.record.id


class OwnerKeyRows(NamedTuple):
    owner: str
    limits: list[str]
    is_set: bool
    keys: list[KeyRow]


class KeyPages:
    def __init__(self, context: ConsoleContext):
        self._context = context
        self._quotas = context.engine.quotas

    async def show_overview(self, request: Request, visitor: ConsoleVisitor) -> Response:
        revoked, only = request.query_params.get("revoked") == "1", request.query_params.get("owner", "")
        records = await self._visible_records(visitor)
        wanted = [each for each in records if only in ("", each.owner) and (revoked or each.revoked_at is None)]
        owners = {each.owner for each in records} | (self._owners_with_quotas() if visitor.is_admin else set())
        shown = [name for name in sorted(owners) if only in ("", name)]
        return self._context.render(
            request,
            visitor,
            "keys_rows.html" if is_partial(request) else "keys.html",
            groups=[self._owner_rows(name, wanted[:MAX_KEYS], visitor) for name in shown],
            left_out=max(len(wanted) - MAX_KEYS, 0),
            owners=sorted(owners),
            only=only,
            revoked=revoked,
            hidden=sum(each.revoked_at is not None for each in records),
            kinds=QUOTA_KINDS,
            expiries=EXPIRY_CHOICES,
            defaults=[
                ("every owner", quota_limits(self._quotas.defaults.owner)),
                ("every key", quota_limits(self._quotas.defaults.key)),
            ],
        )

    async def _visible_records(self, visitor: ConsoleVisitor) -> list[KeyRecord]:
        """The keys visible to the visitor, and the one of the environment."""
        records = [each for each in await self._context.keys.list() if visitor.visible_owner in (None, each.owner)]
        try:
            preset = [await self._context.keys.get(PRESET_ID)]
        except errors.NotFound:
            preset = []
        return [*(each for each in preset if visitor.visible_owner in (None, each.owner)), *records]

    def _owners_with_quotas(self) -> set[str]:
        """Owners with quotas of their own; some have no key yet."""
        return {tenant.owner for tenant in self._quotas.overrides if not tenant.key_id}

    def _owner_rows(self, owner: str, records: Iterable[KeyRecord], visitor: ConsoleVisitor) -> OwnerKeyRows:
        rows = [_key_row(each, self._quotas, visitor) for each in records if each.owner == owner]
        tenant = QuotaSubject(owner)
        return OwnerKeyRows(owner, quota_limits(self._quotas.quota_of(tenant)), tenant in self._quotas.overrides, rows)


def _key_row(record: KeyRecord, quotas: Quotas, visitor: ConsoleVisitor) -> KeyRow:
    tenant = QuotaSubject(record.owner, record.id)
    return KeyRow(
        record=record,
        state=_key_state(record),
        made=format.moment(record.created_at) if record.created_at else "",
        made_iso=format.iso(record.created_at),
        last_used="" if record.last_used_at is None else _time_ago(record.last_used_at),
        expires="" if record.expires_at is None else format.moment(record.expires_at),
        expires_iso="" if record.expires_at is None else format.iso(record.expires_at),
        is_own=record.id == visitor.principal.key_id,
        limits=quota_limits(quotas.quota_of(tenant)),
        is_set=tenant in quotas.overrides,
    )


def _key_state(record: KeyRecord) -> str:
    if record.id == PRESET_ID:
        return "environment"
    if record.revoked_at is not None:
        return "revoked"
    return "expired" if record.expired else "valid"


def _time_ago(at: float) -> str:
    """The time since then: the store knows it to the minute."""
    seconds = time.time() - at
    return "just now" if seconds < 90 else f"{format.duration(seconds)} ago"


def pages(context: ConsoleContext) -> list[ConsolePage]:
    return [ConsolePage("/keys", KeyPages(context).show_overview)]
