"""How much each owner and each key may use of this host, and what they use.

What an owner may use holds for all of their keys together, and what a key may use for that one. It is counted here, in
this process; the CPU of the last hour, and what is stored, for all processes that share a data directory.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cloche import errors
from cloche.config.sections import KeyQuota, Override, Quota, QuotaDefaults
from cloche.engine.principal import acting
from cloche.engine.quotas.usage import HOUR_SECONDS, Account, KeyUsage, OwnerUsage, Rate, Window, amounts_of
from cloche.isolation.base import Cell
from cloche.model import Limits, SandboxSpec
from cloche.store.quotas import MINUTES, UNREADABLE, Spent, StoredQuotas, Tenant
from cloche.telemetry import log

if TYPE_CHECKING:
    pass

SAVE_SECONDS = 10.0  # how exactly is kept what was used, should this process be killed


class _Used(NamedTuple):
    hour: Mapping[Tenant, Spent]
    in_all: Mapping[Tenant, Spent]

    def by(self, tenant: Tenant) -> tuple[Spent, Spent]:
        return self.hour.get(tenant, Spent()), self.in_all.get(tenant, Spent())


class Quotas:
    """The engine opens and closes it. `refresh` learns what other processes changed."""

    def __init__(self, defaults: QuotaDefaults, store: StoredQuotas):
        self.defaults = defaults
        self._store = store
        self.charges: set[Charge] = set()  # of all sandboxes that have a cell
        self._accounts: dict[Tenant, Account] = {}
        self.overrides: Mapping[Tenant, Override] = {}
        self.refused: Counter[str] = Counter()  # what was asked for, by the quota that did not allow it
        self._successors: Mapping[str, str] = {}  # of keys that were rotated
        self._saved_at = time.monotonic()
        self._limits_cpu = False
        self.heard: Callable[[Tenant, str], None] = lambda tenant, quota: None  # what was set for somebody

    async def open(self) -> None:
        """A store that cannot be read now is one without quotas of its own, until it can."""
        await self.try_refresh()
        with contextlib.suppress(*UNREADABLE):
            await self._recount()

    async def refresh(self) -> None:
        """Raises one of UNREADABLE."""
        known = await self._store.known()
        self.overrides = known.overrides
        for old, new in known.successors.items():
            if old not in self._successors:
                self._succeed(old, new)
        self._successors = known.successors
        for tenant, account in self._accounts.items():
            account.allow(self.quota_of(tenant))
        self._slow_down()

    async def try_refresh(self) -> None:
        """As `refresh`; where the store cannot be read now, what was known last holds, and the log says so."""
        saves = time.monotonic() - self._saved_at > SAVE_SECONDS
        if saves:
            self.save()
        try:
            await self.refresh()
            if saves and self._may_limit_cpu():
                await self._recount()
        except UNREADABLE as error:
            log.error("quotas.not_refreshed", error=str(error))

    def save(self) -> None:
        """Has kept what was used since the last time. Never waits."""
        self._saved_at = time.monotonic()
        found = {tenant: account.saved() for tenant, account in self._accounts.items()}
        if spent := {tenant: used for tenant, used in found.items() if any(used)}:
            self._store.add(spent)

    async def has_several_owners(self) -> bool:
        """Whether more than one has anything here. A store that cannot be read now knows of none."""
        try:
            return len(await self._store.owners()) > 1
        except UNREADABLE:
            return False

    def forget(self, owner: str) -> None:
        """All that was counted of that owner, and of their keys."""
        self._accounts = {tenant: account for tenant, account in self._accounts.items() if tenant.owner != owner}

    # -- what may be used

    def quota_of(self, tenant: Tenant) -> KeyQuota:
        """What holds for that owner or key."""
        default = self.defaults.key if tenant.key_id else self.defaults.owner
        override = self.overrides.get(tenant)
        return default if override is None else override.over(default)

    async def set(self, tenant: Tenant, override: Override) -> KeyQuota:
        """What holds from now on, at once. Raises Unavailable, and InvalidRequest for what a key has no quota of."""
        if tenant.key_id and override.stored_bytes is not msgspec.UNSET:
            raise errors.InvalidRequest("a key stores nothing of its own: set stored_bytes for its owner")
        await self._store.put(tenant, override)
        await self.try_refresh()
        log.info("quota.set", owner=tenant.owner, key_id=tenant.key_id, quota=str(override))
        self.heard(tenant, str(override))
        return self.quota_of(tenant)

    def lifetime_seconds(self, owner: str, key_id: str) -> float | None:
        """How long a sandbox may live at most."""
        found = [each.quota.lifetime_seconds for each in self.accounts(owner, key_id)]
        return min((each for each in found if each is not None), default=None)

    # -- what is used

    def account(self, tenant: Tenant) -> Account:
        found = self._accounts.get(tenant)
        if found is None:
            whose = f"key {tenant.key_id}" if tenant.key_id else f"owner {tenant.owner!r}"
            found = self._accounts[tenant] = Account(whose, self.quota_of(tenant), self.refused)
        return found

    def accounts(self, owner: str, key_id: str) -> tuple[Account, ...]:
        """All that what they do counts for. Without an owner it is nobody's."""
        if not owner:
            return ()
        # A plain tuple is the same key as a Tenant, and cheaper to make: this is asked for every execution.
        of_owner = self._accounts.get((owner, "")) or self.account(Tenant(owner))  # type: ignore[call-overload]
        if not key_id:
            return (of_owner,)
        if key_id in self._successors:
            key_id = self._successor(key_id)
        return of_owner, self._accounts.get((owner, key_id)) or self.account(Tenant(owner, key_id))  # type: ignore[call-overload]

    def count_execution(self, owner: str, key_id: str) -> None:
        """One more. Raises QuotaExceeded, with nothing counted."""
        now, accounts = time.monotonic(), self.accounts(owner, key_id)
        for each in accounts:
            each.check_execution(now)
        for each in accounts:
            each.count(now)

    async def check_stored(self, owner: str, more_bytes: int = 0) -> None:
        """Raises QuotaExceeded unless so much more may be stored. Asks a disk only where there is such a quota."""
        account = self.account(Tenant(owner))
        if owner and getattr(account.quota, "stored_bytes", None) is not None:
            account.stored_bytes = sum((await self._store.stored(owner)).values())
            account.check_stored(more_bytes)

    def rates(self, owner: str, key_id: str) -> list[Rate]:
        """What is left of their quotas, of the owner's first."""
        accounts = self.accounts(owner, key_id)
        found = accounts[0].rates("") if accounts else []
        return found + accounts[1].rates("key-") if len(accounts) > 1 else found

    # -- what is told

    async def usage(self, owner: str) -> OwnerUsage:
        """Of an owner and their keys, also those that did nothing yet. Raises Unavailable."""
        self.save()
        stored = await self._store.stored(owner)
        used = _Used(await self._store.hour(owner), await self._store.in_all(owner))
        self.account(Tenant(owner)).stored_bytes = sum(stored.values())
        known = {each.key_id for each in (*used.in_all, *self._accounts) if each.owner == owner and each.key_id}
        known -= {*self._successors}
        names = {**dict.fromkeys(sorted(known), ""), **await self._store.keys(owner, known)}
        return OwnerUsage(
            owner=owner,
            stored_bytes=sum(stored.values()),
            stored=stored,
            quota=msgspec.convert(self.quota_of(Tenant(owner)), Quota, from_attributes=True),
            keys=[self._key_usage(Tenant(owner, id), name, used) for id, name in names.items()],
            **amounts_of(self.account(Tenant(owner)), *used.by(Tenant(owner))),
        )

    async def usage_of_all(self) -> list[OwnerUsage]:
        """Of all who have anything here. Raises Unavailable."""
        owners = await self._store.owners() | {each.owner for each in self._accounts}
        return [await self.usage(owner) for owner in sorted(owners)]

    async def last_hour(self, owner: str | None = None) -> dict[str, list[Spent]]:
        """What each owner, or one, used in each of the last 60 minutes, the oldest first. Raises one of UNREADABLE.

        Whoever used nothing is left out.
        """
        self.save()
        now, found = int(time.time() // 60), defaultdict[str, list[Spent]](lambda: [Spent()] * MINUTES)
        for tenant, minute, spent in await self._store.minutes():
            if not tenant.key_id and owner in (None, tenant.owner) and 0 <= now - minute < MINUTES:
                found[tenant.owner][MINUTES - 1 - (now - minute)] = spent
        return dict(found)

    def _key_usage(self, tenant: Tenant, name: str, used: _Used) -> KeyUsage:
        account = self.account(tenant)
        return KeyUsage(key_id=tenant.key_id, name=name, quota=account.quota, **amounts_of(account, *used.by(tenant)))

    # -- inside

    async def _recount(self) -> None:
        """The CPU of the last hour, by all processes of the data directory. Raises one of UNREADABLE.

        What this one has saved must be among it: where the store cannot be written, and where more was saved
        meanwhile, what was counted here stays.
        """
        saved_at, minutes = self._saved_at, await self._store.minutes()
        if self._store.is_behind or self._saved_at != saved_at:
            return
        now, hours = time.monotonic(), defaultdict[Tenant, Window](lambda: Window(HOUR_SECONDS))
        for (owner, key_id), minute, spent in minutes:
            ago = max(time.time() - (minute * 60 + 30), 0.0)
            hours[Tenant(owner, self._successor(key_id))].add(spent.cpu_seconds, now - ago, now)
        for tenant in {*hours, *self._accounts}:
            self.account(tenant).recount(hours[tenant], now)

    def _may_limit_cpu(self) -> bool:
        """Whether there is a quota of it for anybody."""
        own = any(isinstance(each.cpu_seconds_per_hour, float | int) for each in self.overrides.values())
        return own or any(each.cpu_seconds_per_hour is not None for each in (self.defaults.owner, self.defaults.key))

    def _slow_down(self) -> None:
        """Also once after the last quota of CPU is gone."""
        limited = any(each.quota.cpu_seconds_per_hour is not None for each in self._accounts.values())
        if limited or self._limits_cpu:
            for charge in self.charges:
                charge.slow_down()
        self._limits_cpu = limited

    def _successor(self, key_id: str) -> str:
        while key_id in self._successors:
            key_id = self._successors[key_id]
        return key_id

    def _succeed(self, old: str, new: str) -> None:
        for tenant in [each for each in self._accounts if each.key_id == old]:
            former = self._accounts.pop(tenant)
            self.account(Tenant(tenant.owner, new)).absorb(former)


# Who pays for what a sandbox does.

SLOW_CPUS = 0.05  # of a sandbox whose owner or key has used what it may


class Charge:
    """What one sandbox takes, on the accounts of its owner and of the key that it was made with, until `leave`.

    One without an owner is on the accounts of whoever it works for, if anybody does: one in which a template is built,
    say. Only its lifetime is not theirs to limit. What limits hold for its cell at a moment is known here alone.
    """

    def __init__(self, quotas: Quotas, owner: str, key_id: str, memory_bytes: int):
        """Raises QuotaExceeded, with nothing taken."""
        self.owner = owner
        self.key_id = key_id
        self._quotas = quotas
        self._memory_bytes = memory_bytes
        self._left = False
        self._cell: Cell | None = None
        self._limits = Limits()
        self._slow = False
        self._saving_bytes: int | None = None  # of memory, for one process more; None: nobody saves its files just now
        behind = None if owner else acting()
        self._payer = (owner, key_id) if behind is None else (behind.owner, behind.key_id)
        for each in self._accounts():
            each.check_sandbox(memory_bytes)
            each.check_cpu(time.monotonic())
        self._take(1)
        quotas.charges.add(self)

    def within_lifetime(self, spec: SandboxSpec) -> SandboxSpec:
        """The same, with a lifetime that their quotas allow."""
        most = self._quotas.lifetime_seconds(self.owner, self.key_id)
        if most is None or (spec.lifetime_seconds is not None and spec.lifetime_seconds <= most):
            return spec
        return msgspec.structs.replace(spec, lifetime_seconds=most)

    def max_lifetime_seconds(self, of_host: float) -> float:
        most = self._quotas.lifetime_seconds(self.owner, self.key_id)
        return of_host if most is None else min(most, of_host)

    def begin(self, cell: Cell, limits: Limits) -> Charge:
        """That is the cell which is paid for. The same charge."""
        self._cell, self._limits = cell, limits
        return self

    def slow_down(self) -> None:
        """Whoever pays has no more CPU, or has some again: what runs goes on, with next to none until then."""
        now = time.monotonic()
        slow = any(each.out_of_cpu(now) for each in self._accounts())
        if slow != self._slow and self._cell is not None and not self._left:
            self._slow = slow
            self._set_limits()

    @contextlib.contextmanager
    def room_to_save(self, memory_bytes: int) -> Iterator[None]:
        """A process beyond the limits, with so much memory, while all others in the cell stand still.

        It has all of the cell's CPU, also where those others get next to none: they cannot take what this one has.
        """
        self._saving_bytes = memory_bytes
        self._set_limits()
        try:
            yield
        finally:
            self._saving_bytes = None
            self._set_limits()

    def count_execution(self) -> None:
        """One more, by the key of whoever asks; where it is none of the owner's, by the one that it was made with.

        Raises QuotaExceeded.
        """
        who, (owner, key_id) = acting(), self._payer
        by_owner = who is not None and who.owner == owner and who.key_id
        self._quotas.count_execution(owner, by_owner or key_id)

    def spend(self, cpu_seconds: float) -> None:
        """So much more than before."""
        now = time.monotonic()
        for each in self._accounts():
            each.spend(cpu_seconds, now)

    def leave(self) -> None:
        """Its cell is given up. Harmless when it was already."""
        if not self._left:
            self._left = True
            self._quotas.charges.discard(self)
            self._take(-1)

    @property
    def limits(self) -> Limits:
        """Those that hold now."""
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

    def _accounts(self) -> tuple[Account, ...]:
        return self._quotas.accounts(*self._payer)

    def _take(self, count: int) -> None:
        for each in self._accounts():
            each.sandboxes = max(each.sandboxes + count, 0)  # of an owner who was erased meanwhile there are none
            each.memory_bytes = max(each.memory_bytes + count * self._memory_bytes, 0)
