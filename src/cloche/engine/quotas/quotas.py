"""Quotas of each owner and each key of this host, and their use.

An owner's quota holds for all of their keys together, a key's quota for that key. Use is counted in this
process; the CPU of the last hour, and stored bytes, for all processes that share a data directory.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from cloche import errors
from cloche.config.sections import KeyQuota, Quota, QuotaDefaults, QuotaOverride
from cloche.engine.principal import current_principal
from cloche.isolation.base import SandboxCell
from cloche.model import GIB, MIB, Limits, SandboxSpec, Struct
from cloche.store.quotas import KEPT_MINUTES, UNREADABLE, QuotaSubject, SpentUsage, StoredQuotas
from cloche.telemetry import log

# A sliding window: the sum of amounts counted lately.

SLOTS = 60


class SlidingWindow:
    """The sum of the amounts of the last `seconds`, exact to a sixtieth of that. Adding takes a microsecond.

    Times are of the monotonic clock: changes of the wall clock have no effect.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._slot_seconds = seconds / SLOTS
        self._slots = [0.0] * SLOTS
        self._newest = 0  # the number of the newest slot, since the clock began
        self._sum = 0.0

    def add(self, amount: float, at: float, now: float) -> None:
        """Counts it as of `at`, which may be a while ago."""
        self._advance_slots(now)
        slot = int(at / self._slot_seconds)
        if self._newest - SLOTS < slot <= self._newest:
            self._slots[slot % SLOTS] += amount
            self._sum += amount

    def count(self, now: float) -> None:
        """One more, now."""
        self._advance_slots(now)
        self._slots[self._newest % SLOTS] += 1
        self._sum += 1

    def sum(self, now: float) -> float:
        self._advance_slots(now)
        return max(self._sum, 0.0)

    def wait_seconds(self, most: float, now: float) -> float:
        """After how long the sum is below `most`, should nothing be added."""
        self._advance_slots(now)
        left = self._sum
        if left < most:
            return 0.0
        oldest = self._newest - SLOTS + 1
        turn = oldest % SLOTS
        for age, amount in enumerate(self._slots[turn:] + self._slots[:turn]):
            left -= amount
            if left < most:
                return (oldest + age + SLOTS) * self._slot_seconds - now
        return self.seconds

    def merge_counts(self, other: SlidingWindow, now: float) -> None:
        """Adds the other window's counts."""
        other._advance_slots(now)
        self._advance_slots(now)
        self._slots = [mine + theirs for mine, theirs in zip(self._slots, other._slots, strict=True)]
        self._sum += other._sum

    def _advance_slots(self, now: float) -> None:
        newest = int(now / self._slot_seconds)
        if newest == self._newest:
            return
        for slot in range(max(self._newest, newest - SLOTS) + 1, newest + 1):
            self._sum -= self._slots[slot % SLOTS]
            self._slots[slot % SLOTS] = 0.0
        if newest - self._newest >= SLOTS:
            self._sum = 0.0  # and no rounding error lives on
        self._newest = newest


# The usage account of one owner or one key: current and recent use, checked against its quota.

MINUTE_SECONDS, HOUR_SECONDS = 60.0, 3600.0


class QuotaRate(NamedTuple):
    """One quota and the amount that is left of it."""

    name: str
    quota: int
    window_seconds: int | None
    left: int
    reset_seconds: int | None  # until there will be more, where time gives it


class QuotaAccount:
    """Usage and quota of one owner or key. Never waits and never touches a disk: every execution checks it."""

    def __init__(self, holder: str, quota: KeyQuota, refused: Counter[str] | None = None):
        """`refused` counts the refusals, by quota name."""
        self.allow(quota)
        self._refused: Counter[str] = Counter() if refused is None else refused
        self.sandboxes = 0
        self.memory_bytes = 0
        self.stored_bytes: int | None = None  # as it was counted last
        self.minute = SlidingWindow(MINUTE_SECONDS)
        self.hour = SlidingWindow(HOUR_SECONDS)
        self.unsaved_executions = 0
        self.unsaved_cpu_seconds = 0.0
        self._holder = holder

    def allow(self, quota: KeyQuota) -> None:
        """Sets the quota that holds from now on."""
        self.quota = quota
        self._limited = any(amount is not None for amount in msgspec.structs.astuple(quota))

    # -- may they?

    def check_sandbox(self, memory_bytes: int) -> None:
        """Raises QuotaExceeded unless there can be one more, with so much memory."""
        quota = self.quota
        if quota.sandboxes is not None and self.sandboxes >= quota.sandboxes:
            raise self._exceeded_error(
                "sandboxes", f"{self.sandboxes} of {quota.sandboxes} sandboxes are there", "kill one of them first"
            )
        if quota.memory_bytes is not None and self.memory_bytes + memory_bytes > quota.memory_bytes:
            used = f"{_format_bytes(self.memory_bytes)} of {_format_bytes(quota.memory_bytes)} are taken"
            raise self._exceeded_error(
                "memory_bytes",
                f"{used}, and this takes {_format_bytes(memory_bytes)}",
                "ask for less, or kill a sandbox first",
                partly=self.memory_bytes < quota.memory_bytes,
            )

    def check_execution(self, now: float) -> None:
        """Raises QuotaExceeded unless there can be one more now."""
        most = self.quota.executions_per_minute
        if most is not None and self.minute.sum(now) >= most:
            wait = self.minute.wait_seconds(most, now)
            raise self._exceeded_error(
                "executions_per_minute", f"{most} of {most} executions ran in a minute", wait=wait
            )
        self.check_cpu(now)

    def check_cpu(self, now: float) -> None:
        """Raises QuotaExceeded where all is used."""
        if self.is_out_of_cpu(now):
            most = self.quota.cpu_seconds_per_hour or 0.0
            used = f"{self.hour.sum(now):.0f} of {most:g} seconds of CPU were used in an hour"
            raise self._exceeded_error("cpu_seconds_per_hour", used, wait=self.hour.wait_seconds(most, now))

    def is_out_of_cpu(self, now: float) -> bool:
        most = self.quota.cpu_seconds_per_hour
        return most is not None and self.hour.sum(now) >= most

    def check_stored(self, more_bytes: int) -> None:
        """Raises QuotaExceeded unless so much more can be stored than was counted last."""
        most = getattr(self.quota, "stored_bytes", None)
        used = self.stored_bytes or 0
        if most is not None and (used + more_bytes > most or used >= most):
            more = f", and this would be {_format_bytes(more_bytes)} more" if more_bytes else ""
            raise self._exceeded_error(
                "stored_bytes",
                f"{_format_bytes(used)} of {_format_bytes(most)} are stored{more}",
                "remove snapshots, paused sandboxes, volumes, files, runs, responses or conversations first",
                partly=used < most,
            )

    def _exceeded_error(
        self, name: str, used: str, remedy: str = "", *, wait: float | None = None, partly: bool = False
    ) -> errors.QuotaExceeded:
        """`partly`: some is left, which is not enough."""
        self._refused[name] += 1
        never = getattr(self.quota, name) == 0  # time does not help, nor does anything that they could do
        if not never and wait is not None:
            remedy = f"wait {max(1, math.ceil(wait))} s"
        todo = "ask the operator for some" if never else f"{remedy}, or ask the operator for more"
        return errors.QuotaExceeded(
            f"the quota {name} of {self._holder} {'would be exceeded' if partly else 'is used up'}: {used}; {todo}",
            retry_after_seconds=None if never else wait,
        )

    # -- they do

    def count(self, now: float) -> None:
        """One more execution."""
        self.minute.count(now)
        self.unsaved_executions += 1

    def spend_cpu(self, cpu_seconds: float, now: float) -> None:
        self.hour.add(cpu_seconds, now, now)
        self.unsaved_cpu_seconds += cpu_seconds

    def replace_hour_usage(self, hour: SlidingWindow, now: float) -> None:
        """Replaces the last hour's CPU use by `hour`: that of all processes, without this one's unsaved part."""
        hour.add(self.unsaved_cpu_seconds, now, now)
        self.hour = hour

    def take_unsaved_usage(self) -> SpentUsage:
        """Returns the use since the last call, and resets it."""
        spent = SpentUsage(self.unsaved_executions, self.unsaved_cpu_seconds)
        self.unsaved_executions, self.unsaved_cpu_seconds = 0, 0.0
        return spent

    def merge_counts(self, other: QuotaAccount) -> None:
        """Adds the other account's counts to this one: its key was replaced by this one's."""
        now = time.monotonic()
        self.sandboxes += other.sandboxes
        self.memory_bytes += other.memory_bytes
        self.minute.merge_counts(other.minute, now)
        self.hour.merge_counts(other.hour, now)
        self.unsaved_executions += other.unsaved_executions
        self.unsaved_cpu_seconds += other.unsaved_cpu_seconds

    # -- reports

    def quota_rates(self, prefix: str) -> list[QuotaRate]:
        """The amount left of each quota, where there are any; of stored bytes as counted last."""
        if not self._limited:
            return []
        quota, now, found = self.quota, time.monotonic(), []
        if quota.executions_per_minute is not None:
            found.append(_windowed_rate(prefix + "executions", quota.executions_per_minute, self.minute, now))
        if quota.cpu_seconds_per_hour is not None:
            found.append(_windowed_rate(prefix + "cpu-seconds", int(quota.cpu_seconds_per_hour), self.hour, now))
        if quota.sandboxes is not None:
            found.append(_current_rate(prefix + "sandboxes", quota.sandboxes, self.sandboxes))
        if quota.memory_bytes is not None:
            found.append(_current_rate(prefix + "memory-bytes", quota.memory_bytes, self.memory_bytes))
        if isinstance(quota, Quota) and quota.stored_bytes is not None and self.stored_bytes is not None:
            found.append(_current_rate(prefix + "stored-bytes", quota.stored_bytes, self.stored_bytes))
        return found


def _windowed_rate(name: str, most: int, window: SlidingWindow, now: float) -> QuotaRate:
    used = window.sum(now)
    reset = window.wait_seconds(used, now) if used else window.seconds
    return QuotaRate(name, most, int(window.seconds), max(most - math.ceil(used), 0), math.ceil(reset))


def _current_rate(name: str, most: int, used: int) -> QuotaRate:
    return QuotaRate(name, most, None, max(most - used, 0), None)


def _format_bytes(count: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


class UsageAmounts(Struct):
    sandboxes: int  # that have a cell now
    memory_bytes: int  # that those may use, by their limits
    executions_last_minute: int
    executions: int  # in all
    cpu_seconds_last_hour: float
    cpu_seconds: float  # in all


class KeyUsage(UsageAmounts):
    key_id: str
    name: str
    quota: KeyQuota  # None is as much as there is


class OwnerUsage(UsageAmounts):
    owner: str
    stored_bytes: int
    stored: dict[str, int]  # the same by kind
    quota: Quota
    keys: list[KeyUsage]


def usage_amounts(account: QuotaAccount, hour: SpentUsage, in_all: SpentUsage) -> dict[str, Any]:
    """`hour`, `in_all`: by all processes of the data directory, in the last hour and since the beginning."""
    now = time.monotonic()
    return {
        "sandboxes": account.sandboxes,
        "memory_bytes": account.memory_bytes,
        "executions_last_minute": round(account.minute.sum(now)),
        "executions": in_all.executions,
        "cpu_seconds_last_hour": round(hour.cpu_seconds, 3),
        "cpu_seconds": round(in_all.cpu_seconds, 3),
    }


SAVE_USAGE_SECONDS = 10.0  # the most usage that is lost if this process is killed


class _StoredUsage(NamedTuple):
    hour: Mapping[QuotaSubject, SpentUsage]
    in_all: Mapping[QuotaSubject, SpentUsage]

    def by(self, tenant: QuotaSubject) -> tuple[SpentUsage, SpentUsage]:
        return self.hour.get(tenant, SpentUsage()), self.in_all.get(tenant, SpentUsage())


class Quotas:
    """The engine opens and closes it. `refresh` reads the changes of other processes."""

    def __init__(self, defaults: QuotaDefaults, store: StoredQuotas):
        self.defaults = defaults
        self._store = store
        self.charges: set[QuotaLease] = set()  # of all sandboxes that have a cell
        self._accounts: dict[QuotaSubject, QuotaAccount] = {}
        self.overrides: Mapping[QuotaSubject, QuotaOverride] = {}
        self.refused: Counter[str] = Counter()  # refusals, by the quota
        self._successors: Mapping[str, str] = {}  # of keys that were rotated
        self._saved_at = time.monotonic()
        self._limits_cpu = False
        self.on_change: Callable[[QuotaSubject, str], None] = lambda tenant, quota: None  # called when one is set

    async def open(self) -> None:
        """A store that cannot be read now counts as one without quotas of its own, until it can."""
        await self.try_refresh()
        with contextlib.suppress(*UNREADABLE):
            await self._recount_cpu()

    async def refresh(self) -> None:
        """Raises one of UNREADABLE."""
        known = await self._store.known()
        self.overrides = known.overrides
        for old, new in known.successors.items():
            if old not in self._successors:
                self._merge_rotated_key(old, new)
        self._successors = known.successors
        for tenant, account in self._accounts.items():
            account.allow(self.quota_of(tenant))
        self._update_cpu_limits()

    async def try_refresh(self) -> None:
        """As `refresh`; where the store cannot be read now, the last known quotas hold, and it is logged."""
        saves = time.monotonic() - self._saved_at > SAVE_USAGE_SECONDS
        if saves:
            self.save()
        try:
            await self.refresh()
            if saves and self._may_limit_cpu():
                await self._recount_cpu()
        except UNREADABLE as error:
            log.error("quotas.not_refreshed", error=str(error))

    def save(self) -> None:
        """Stores the use since the last time. Never waits."""
        self._saved_at = time.monotonic()
        found = {tenant: account.take_unsaved_usage() for tenant, account in self._accounts.items()}
        if spent := {tenant: used for tenant, used in found.items() if any(used)}:
            self._store.add(spent)

    async def has_several_owners(self) -> bool:
        """Whether more than one owner has anything here; False for a store that cannot be read now."""
        try:
            return len(await self._store.owners()) > 1
        except UNREADABLE:
            return False

    def forget(self, owner: str) -> None:
        """Removes all counts of that owner, and of their keys."""
        self._accounts = {tenant: account for tenant, account in self._accounts.items() if tenant.owner != owner}

    # -- quotas

    def quota_of(self, tenant: QuotaSubject) -> KeyQuota:
        """The quota of that owner or key."""
        default = self.defaults.key if tenant.key_id else self.defaults.owner
        override = self.overrides.get(tenant)
        return default if override is None else override.apply_to(default)

    async def set(self, tenant: QuotaSubject, override: QuotaOverride) -> KeyQuota:
        """Sets and returns the quota, at once. Raises Unavailable, InvalidRequest for a quota that keys lack."""
        if tenant.key_id and override.stored_bytes is not msgspec.UNSET:
            raise errors.InvalidRequest("a key stores nothing of its own: set stored_bytes for its owner")
        await self._store.put(tenant, override)
        await self.try_refresh()
        log.info("quota.set", owner=tenant.owner, key_id=tenant.key_id, quota=str(override))
        self.on_change(tenant, str(override))
        return self.quota_of(tenant)

    def lifetime_seconds(self, owner: str, key_id: str) -> float | None:
        """The longest lifetime of a sandbox."""
        found = [each.quota.lifetime_seconds for each in self.accounts(owner, key_id)]
        return min((each for each in found if each is not None), default=None)

    # -- usage

    def account(self, tenant: QuotaSubject) -> QuotaAccount:
        found = self._accounts.get(tenant)
        if found is None:
            holder = f"key {tenant.key_id}" if tenant.key_id else f"owner {tenant.owner!r}"
            found = self._accounts[tenant] = QuotaAccount(holder, self.quota_of(tenant), self.refused)
        return found

    def accounts(self, owner: str, key_id: str) -> tuple[QuotaAccount, ...]:
        """The accounts charged for this owner and key; none without an owner."""
        if not owner:
            return ()
        # A plain tuple is the same key as a Tenant, and cheaper to make: this runs for every execution.
        of_owner = self._accounts.get((owner, "")) or self.account(QuotaSubject(owner))  # type: ignore[call-overload]
        if not key_id:
            return (of_owner,)
        if key_id in self._successors:
            key_id = self._current_key_id(key_id)
        return of_owner, self._accounts.get((owner, key_id)) or self.account(QuotaSubject(owner, key_id))  # type: ignore[call-overload]

    def count_execution(self, owner: str, key_id: str) -> None:
        """One more. Raises QuotaExceeded, with nothing counted."""
        now, accounts = time.monotonic(), self.accounts(owner, key_id)
        for each in accounts:
            each.check_execution(now)
        for each in accounts:
            each.count(now)

    async def check_stored(self, owner: str, more_bytes: int = 0) -> None:
        """Raises QuotaExceeded unless so much more may be stored. Reads a disk only where there is such a quota."""
        account = self.account(QuotaSubject(owner))
        if owner and getattr(account.quota, "stored_bytes", None) is not None:
            account.stored_bytes = sum((await self._store.stored(owner)).values())
            account.check_stored(more_bytes)

    def quota_rates(self, owner: str, key_id: str) -> list[QuotaRate]:
        """The amounts left of their quotas, the owner's first."""
        accounts = self.accounts(owner, key_id)
        found = accounts[0].quota_rates("") if accounts else []
        return found + accounts[1].quota_rates("key-") if len(accounts) > 1 else found

    # -- reports

    async def usage(self, owner: str) -> OwnerUsage:
        """The use of an owner and their keys, also of unused keys. Raises Unavailable."""
        self.save()
        stored = await self._store.stored(owner)
        used = _StoredUsage(await self._store.hour(owner), await self._store.in_all(owner))
        self.account(QuotaSubject(owner)).stored_bytes = sum(stored.values())
        known = {each.key_id for each in (*used.in_all, *self._accounts) if each.owner == owner and each.key_id}
        known -= {*self._successors}
        names = {**dict.fromkeys(sorted(known), ""), **await self._store.keys(owner, known)}
        return OwnerUsage(
            owner=owner,
            stored_bytes=sum(stored.values()),
            stored=stored,
            quota=msgspec.convert(self.quota_of(QuotaSubject(owner)), Quota, from_attributes=True),
            keys=[self._key_usage(QuotaSubject(owner, id), name, used) for id, name in names.items()],
            **usage_amounts(self.account(QuotaSubject(owner)), *used.by(QuotaSubject(owner))),
        )

    async def usage_of_all_owners(self) -> list[OwnerUsage]:
        """The use of all owners that have anything here. Raises Unavailable."""
        owners = await self._store.owners() | {each.owner for each in self._accounts}
        return [await self.usage(owner) for owner in sorted(owners)]

    async def last_hour(self, owner: str | None = None) -> dict[str, list[SpentUsage]]:
        """The use of each owner, or one, in each of the last 60 minutes, oldest first. Raises one of UNREADABLE.

        Owners without any use are left out.
        """
        self.save()
        now, found = int(time.time() // 60), defaultdict[str, list[SpentUsage]](lambda: [SpentUsage()] * KEPT_MINUTES)
        for tenant, minute, spent in await self._store.minutes():
            if not tenant.key_id and owner in (None, tenant.owner) and 0 <= now - minute < KEPT_MINUTES:
                found[tenant.owner][KEPT_MINUTES - 1 - (now - minute)] = spent
        return dict(found)

    def _key_usage(self, tenant: QuotaSubject, name: str, used: _StoredUsage) -> KeyUsage:
        account = self.account(tenant)
        return KeyUsage(
            key_id=tenant.key_id, name=name, quota=account.quota, **usage_amounts(account, *used.by(tenant))
        )

    # -- inside

    async def _recount_cpu(self) -> None:
        """Recounts the CPU of the last hour, by all processes of the data directory. Raises one of UNREADABLE.

        This process's saved use must be among it: where the store cannot be written, or more was saved meanwhile,
        the local counts stay.
        """
        saved_at, minutes = self._saved_at, await self._store.minutes()
        if self._store.is_behind or self._saved_at != saved_at:
            return
        now, hours = time.monotonic(), defaultdict[QuotaSubject, SlidingWindow](lambda: SlidingWindow(HOUR_SECONDS))
        for (owner, key_id), minute, spent in minutes:
            ago = max(time.time() - (minute * 60 + 30), 0.0)
            hours[QuotaSubject(owner, self._current_key_id(key_id))].add(spent.cpu_seconds, now - ago, now)
        for tenant in {*hours, *self._accounts}:
            self.account(tenant).replace_hour_usage(hours[tenant], now)

    def _may_limit_cpu(self) -> bool:
        """Whether any owner or key has a quota of CPU."""
        own = any(isinstance(each.cpu_seconds_per_hour, float | int) for each in self.overrides.values())
        return own or any(each.cpu_seconds_per_hour is not None for each in (self.defaults.owner, self.defaults.key))

    def _update_cpu_limits(self) -> None:
        """Slows cells down or up. Also once after the last quota of CPU is gone."""
        limited = any(each.quota.cpu_seconds_per_hour is not None for each in self._accounts.values())
        if limited or self._limits_cpu:
            for charge in self.charges:
                charge.slow_down()
        self._limits_cpu = limited

    def _current_key_id(self, key_id: str) -> str:
        while key_id in self._successors:
            key_id = self._successors[key_id]
        return key_id

    def _merge_rotated_key(self, old: str, new: str) -> None:
        for tenant in [each for each in self._accounts if each.key_id == old]:
            former = self._accounts.pop(tenant)
            self.account(QuotaSubject(tenant.owner, new)).merge_counts(former)


# Quota lease: one sandbox's use of its owner's and its key's quotas.

SLOW_CPUS = 0.05  # of a sandbox of an owner or key without CPU time left


class QuotaLease:
    """The use of one sandbox, on the accounts of its owner and of the key that made it, until `leave`.

    A sandbox without an owner (of a template's build, say) is on the accounts of the current principal, if
    there is one; only its lifetime is not limited by them. The limits that hold for its cell at a moment are
    known here alone.
    """

    def __init__(self, quotas: Quotas, owner: str, key_id: str, memory_bytes: int):
        """Raises QuotaExceeded, with nothing taken."""
        self.owner = owner
        self.key_id = key_id
        self._quotas = quotas
        self._memory_bytes = memory_bytes
        self._left = False
        self._cell: SandboxCell | None = None
        self._limits = Limits()
        self._slow = False
        self._saving_bytes: int | None = None  # of memory, for one process more; None: its files are not being saved
        behind = None if owner else current_principal()
        self._payer = (owner, key_id) if behind is None else (behind.owner, behind.key_id)
        for each in self._payer_accounts():
            each.check_sandbox(memory_bytes)
            each.check_cpu(time.monotonic())
        self._count_sandboxes(1)
        quotas.charges.add(self)

    def limit_spec_lifetime(self, spec: SandboxSpec) -> SandboxSpec:
        """The same spec, with a lifetime that the quotas allow."""
        most = self._quotas.lifetime_seconds(self.owner, self.key_id)
        if most is None or (spec.lifetime_seconds is not None and spec.lifetime_seconds <= most):
            return spec
        return msgspec.structs.replace(spec, lifetime_seconds=most)

    def max_lifetime_seconds(self, of_host: float) -> float:
        most = self._quotas.lifetime_seconds(self.owner, self.key_id)
        return of_host if most is None else min(most, of_host)

    def bind_cell(self, cell: SandboxCell, limits: Limits) -> QuotaLease:
        """Sets the cell that the lease pays for. Returns the lease itself."""
        self._cell, self._limits = cell, limits
        return self

    def slow_down(self) -> None:
        """Limits the cell to almost no CPU while the payer's CPU quota is used up, and lifts that afterwards."""
        now = time.monotonic()
        slow = any(each.is_out_of_cpu(now) for each in self._payer_accounts())
        if slow != self._slow and self._cell is not None and not self._left:
            self._slow = slow
            self._set_limits()

    @contextlib.contextmanager
    def extra_room_to_save(self, memory_bytes: int) -> Iterator[None]:
        """Allows one more process with so much memory, beyond the limits, while all others in the cell are frozen.

        It has all of the cell's CPU, also where the cell is slowed down: the frozen programs cannot use it.
        """
        self._saving_bytes = memory_bytes
        self._set_limits()
        try:
            yield
        finally:
            self._saving_bytes = None
            self._set_limits()

    def count_execution(self) -> None:
        """Counts one execution, on the current principal's key if it is the owner's, else on the creating key.

        Raises QuotaExceeded.
        """
        who, (owner, key_id) = current_principal(), self._payer
        by_owner = who is not None and who.owner == owner and who.key_id
        self._quotas.count_execution(owner, by_owner or key_id)

    def spend_cpu(self, cpu_seconds: float) -> None:
        """Adds CPU seconds used since the last call."""
        now = time.monotonic()
        for each in self._payer_accounts():
            each.spend_cpu(cpu_seconds, now)

    def leave(self) -> None:
        """Ends the lease: the cell is given up. Harmless when it has ended."""
        if not self._left:
            self._left = True
            self._quotas.charges.discard(self)
            self._count_sandboxes(-1)

    @property
    def limits(self) -> Limits:
        """The limits that hold now."""
        if self._saving_bytes is not None:
            more = self._limits.memory_bytes + self._saving_bytes
            return msgspec.structs.replace(self._limits, processes=self._limits.processes + 1, memory_bytes=more)
        if self._slow:
            return msgspec.structs.replace(self._limits, cpus=min(SLOW_CPUS, self._limits.cpus))
        return self._limits

    def _set_limits(self) -> None:
        if self._cell is not None:
            with contextlib.suppress(OSError):  # it ends just now
                self._cell.set_limits(self.limits)

    def _payer_accounts(self) -> tuple[QuotaAccount, ...]:
        return self._quotas.accounts(*self._payer)

    def _count_sandboxes(self, count: int) -> None:
        for each in self._payer_accounts():
            each.sandboxes = max(each.sandboxes + count, 0)  # an owner that was erased meanwhile has none
            each.memory_bytes = max(each.memory_bytes + count * self._memory_bytes, 0)
