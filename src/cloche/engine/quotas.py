"""How much each owner and each key may use of this host, and what they use.

What an owner may use holds for all of their keys together, and what a key may use for that one. It is counted here, in
this process; what is stored is counted where it lies, so for all processes that share a data directory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from cloche import errors
from cloche.engine.account import Account, Rate
from cloche.engine.usage import KeyUsage, OwnerUsage, amounts_of
from cloche.quotas_config import KeyQuota, Override, Quota, QuotaDefaults
from cloche.store.quotas import UNREADABLE, Spent, StoredQuotas, Tenant
from cloche.telemetry import log

if TYPE_CHECKING:
    from cloche.engine.charge import Charge

SAVE_SECONDS = 10.0  # how exactly is kept what was used, should this process be killed


class Quotas:
    """The engine opens and closes it. `refresh` learns what other processes changed."""

    def __init__(self, defaults: QuotaDefaults, store: StoredQuotas):
        self.defaults = defaults
        self._store = store
        self.charges: set[Charge] = set()  # of all sandboxes that have a cell
        self._accounts: dict[Tenant, Account] = {}
        self.overrides: Mapping[Tenant, Override] = {}
        self._successors: Mapping[str, str] = {}  # of keys that were rotated
        self._saved_at = time.monotonic()
        self._limits_cpu = False

    async def open(self) -> None:
        """A store that cannot be read now is one without quotas of its own, until it can."""
        await self.try_refresh()
        try:
            used = await self._store.minutes()
        except UNREADABLE:
            return
        now = time.monotonic()
        for tenant, minute, spent in used:
            ago = max(time.time() - (minute * 60 + 30), 0.0)
            self.account(tenant).hour.add(spent.cpu_seconds, now - ago, now)

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
        if time.monotonic() - self._saved_at > SAVE_SECONDS:
            self.save()
        try:
            await self.refresh()
        except UNREADABLE as error:
            log.error("quotas.not_refreshed", error=str(error))

    def save(self) -> None:
        """Has kept what was used since the last time. Never waits."""
        self._saved_at = time.monotonic()
        found = {tenant: account.saved() for tenant, account in self._accounts.items()}
        if spent := {tenant: used for tenant, used in found.items() if any(used)}:
            self._store.add(spent)

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
        log.info("quota.set", owner=tenant.owner, key_id=tenant.key_id)
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
            found = self._accounts[tenant] = Account(whose, self.quota_of(tenant))
        return found

    def accounts(self, owner: str, key_id: str) -> tuple[Account, ...]:
        """All that what they do counts for. Without an owner it is nobody's."""
        if not owner:
            return ()
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
        in_all = await self._store.in_all(owner)
        self.account(Tenant(owner)).stored_bytes = sum(stored.values())
        keys = await self._store.keys(owner)
        known = {each.key_id for each in (*in_all, *self._accounts) if each.owner == owner and each.key_id}
        names = {**dict.fromkeys(sorted(known - {*self._successors}), ""), **keys}
        return OwnerUsage(
            owner=owner,
            stored_bytes=sum(stored.values()),
            stored=stored,
            quota=msgspec.convert(self.quota_of(Tenant(owner)), Quota, from_attributes=True),
            keys=[self._key_usage(Tenant(owner, id), name, in_all) for id, name in names.items()],
            **amounts_of(self.account(Tenant(owner)), in_all.get(Tenant(owner), Spent())),
        )

    async def usage_of_all(self) -> list[OwnerUsage]:
        """Of all who have anything here. Raises Unavailable."""
        owners = await self._store.owners() | {each.owner for each in self._accounts}
        return [await self.usage(owner) for owner in sorted(owners)]

    def _key_usage(self, tenant: Tenant, name: str, in_all: Mapping[Tenant, Spent]) -> KeyUsage:
        account, spent = self.account(tenant), in_all.get(tenant, Spent())
        return KeyUsage(key_id=tenant.key_id, name=name, quota=account.quota, **amounts_of(account, spent))

    # -- inside

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
