"""`/ui/keys`: who may use this server, and how much. What is done here, the page's script does by `/admin`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.console import format
from cloche.api.console.context import House, Page, Visitor, is_partial
from cloche.config.sections import KeyQuota
from cloche.engine.quotas.quotas import Quotas
from cloche.store.keys import PRESET_ID, KeyRecord
from cloche.store.quotas import Tenant

# Quotas and what is used of them, for people.

NEARLY = 0.8  # of a quota


class Kind(NamedTuple):
    name: str  # as the API has it
    title: str
    short: str  # behind a number
    say: Callable[[float], str]
    hint: str


def _count(amount: float) -> str:
    return f"{amount:,.15g}"


def _lifetime(amount: float) -> str:
    return format.duration(amount) if amount >= 1 else f"{amount:g}s"


KINDS = (
    Kind("sandboxes", "Sandboxes at once", "sandboxes", _count, "those that run, or are paused with their memory"),
    Kind("executions_per_minute", "Executions per minute", "executions/min", _count, "of code, and starts of commands"),
    Kind("cpu_seconds_per_hour", "CPU seconds per hour", "CPU s/hour", _count, "of all programs in sandboxes"),
    Kind("memory_bytes", "Memory", "memory", format.size, "of all sandboxes together, by their limits; such as 8GiB"),
    Kind("stored_bytes", "Stored", "stored", format.size, "snapshots, volumes, files and so on; such as 10GiB"),
    Kind(
        "lifetime_seconds", "Lifetime of a sandbox, in seconds", "lifetime", _lifetime, "from its creation or resuming"
    ),
)


class Meter(NamedTuple):
    """How much of something is used."""

    title: str
    used: str
    most: str  # empty where there is no limit
    value: str  # from 0 to 1
    tone: str  # good, warn (nearly all) or bad (all of it)
    alarm: str  # the same in words; empty where all is well


def meter(title: str, used: float, most: float | None, say: Callable[[float], str]) -> Meter:
    if most is None:
        return Meter(title, say(used), "", "0", "good", "")
    part = used / most if most else 1.0
    tone, alarm = ("bad", "used up") if part >= 1 else ("warn", "nearly used up") if part >= NEARLY else ("good", "")
    return Meter(title, say(used), say(most), f"{min(part, 1.0):.3f}", tone, alarm)


def limits_of(quota: KeyQuota) -> list[str]:
    """What is limited: "20 sandboxes", "10 GiB stored"."""
    amounts = ((kind, getattr(quota, kind.name, None)) for kind in KINDS)
    return [f"{kind.say(amount)} {kind.short}" for kind, amount in amounts if amount is not None]


MAX_KEYS = 500  # on the page
EXPIRIES = (
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


class OwnerRows(NamedTuple):
    owner: str
    limits: list[str]
    is_set: bool
    keys: list[KeyRow]


class Keys:
    def __init__(self, house: House):
        self._house = house
        self._quotas = house.engine.quotas

    async def overview(self, request: Request, visitor: Visitor) -> Response:
        revoked, only = request.query_params.get("revoked") == "1", request.query_params.get("owner", "")
        records = await self._records(visitor)
        wanted = [each for each in records if only in ("", each.owner) and (revoked or each.revoked_at is None)]
        owners = {each.owner for each in records} | (self._with_quotas() if visitor.is_admin else set())
        shown = [name for name in sorted(owners) if only in ("", name)]
        return self._house.render(
            request,
            visitor,
            "keys_rows.html" if is_partial(request) else "keys.html",
            groups=[self._group(name, wanted[:MAX_KEYS], visitor) for name in shown],
            left_out=max(len(wanted) - MAX_KEYS, 0),
            owners=sorted(owners),
            only=only,
            revoked=revoked,
            hidden=sum(each.revoked_at is not None for each in records),
            kinds=KINDS,
            expiries=EXPIRIES,
            defaults=[
                ("every owner", limits_of(self._quotas.defaults.owner)),
                ("every key", limits_of(self._quotas.defaults.key)),
            ],
        )

    async def _records(self, visitor: Visitor) -> list[KeyRecord]:
        """Those that a visitor may know of, and that of the environment."""
        records = [each for each in await self._house.keys.list() if visitor.sees in (None, each.owner)]
        try:
            preset = [await self._house.keys.get(PRESET_ID)]
        except errors.NotFound:
            preset = []
        return [*(each for each in preset if visitor.sees in (None, each.owner)), *records]

    def _with_quotas(self) -> set[str]:
        """Owners who may have no key yet."""
        return {tenant.owner for tenant in self._quotas.overrides if not tenant.key_id}

    def _group(self, owner: str, records: Iterable[KeyRecord], visitor: Visitor) -> OwnerRows:
        rows = [_row(each, self._quotas, visitor) for each in records if each.owner == owner]
        tenant = Tenant(owner)
        return OwnerRows(owner, limits_of(self._quotas.quota_of(tenant)), tenant in self._quotas.overrides, rows)


def _row(record: KeyRecord, quotas: Quotas, visitor: Visitor) -> KeyRow:
    tenant = Tenant(record.owner, record.id)
    return KeyRow(
        record=record,
        state=_state(record),
        made=format.moment(record.created_at) if record.created_at else "",
        made_iso=format.iso(record.created_at),
        last_used="" if record.last_used_at is None else _ago(record.last_used_at),
        expires="" if record.expires_at is None else format.moment(record.expires_at),
        expires_iso="" if record.expires_at is None else format.iso(record.expires_at),
        is_own=record.id == visitor.principal.key_id,
        limits=limits_of(quotas.quota_of(tenant)),
        is_set=tenant in quotas.overrides,
    )


def _state(record: KeyRecord) -> str:
    if record.id == PRESET_ID:
        return "environment"
    if record.revoked_at is not None:
        return "revoked"
    return "expired" if record.expired else "valid"


def _ago(at: float) -> str:
    """The store knows it to the minute."""
    seconds = time.time() - at
    return "just now" if seconds < 90 else f"{format.duration(seconds)} ago"


def pages(house: House) -> list[Page]:
    return [Page("/keys", Keys(house).overview)]
