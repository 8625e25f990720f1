"""Who pays for what a sandbox does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec

from cloche.engine.account import Account
from cloche.engine.acting import acting
from cloche.engine.quotas import Quotas
from cloche.isolation.base import Cell
from cloche.model import Limits, SandboxSpec

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
