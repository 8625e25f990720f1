"""Health of executions: judged by clients' executions, and by a canary where there are none."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import get_args

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.endings import CANARY_ENDED
from cloche.model import SandboxSpec, Struct, User
from cloche.telemetry import log

CANARY_SECONDS = 20.0  # a sandbox, an execution and its end take a hundredth of a second where all is well
RETRY_SECONDS = 2.0  # after a failure
TICK_SECONDS = 0.5


class HealthVerdict(Struct):
    ok: bool
    why: str  # an error's code, or a few words of ours; empty if ok
    age_seconds: float  # since an execution succeeded; since the watch began if none has


class CanaryFailed(errors.Unavailable):
    """A sandbox was made, but the simplest program did not run in it."""

    code = "canary_failed"


class Health:
    """Watches an engine. Its verdict is `ok` only if an execution succeeded lately."""

    def __init__(self, engine: Engine, every_seconds: float):
        self._engine = engine
        self._every_seconds = every_seconds
        self._checked_at = 0.0
        self._worked_at = time.monotonic()
        self._failures_seen = 0
        self._why = "no execution has succeeded yet"
        self._users: Iterator[User] = itertools.cycle(get_args(User))  # which also keeps cells for both waiting

    @property
    def verdict(self) -> HealthVerdict:
        age = time.monotonic() - self._worked_at
        stale = age > 2 * self._every_seconds + CANARY_SECONDS
        why = self._why or ("no execution has succeeded lately" if stale else "")
        return HealthVerdict(ok=not why, why=why, age_seconds=age)

    async def check(self) -> None:
        """Runs a canary now: a sandbox is made, runs `6*7` and ends. Raises the failure."""
        self._checked_at = time.monotonic()
        self._failures_seen = self._engine.counters.not_created.total()
        try:
            async with asyncio.timeout(CANARY_SECONDS):
                await self._run_canary()
        except TimeoutError:
            self._mark_failed("timed_out")
            raise CanaryFailed(f"a canary execution did not end within {CANARY_SECONDS:g} s") from None
        except errors.ClocheError as error:
            self._mark_failed(error.code)
            raise
        self._mark_healthy()

    async def watch(self) -> None:
        """Checks for as long as it is not cancelled."""
        while True:
            await asyncio.sleep(min(TICK_SECONDS, self._every_seconds))
            if self._is_due() and not self._others_worked():
                try:
                    await self.check()
                except errors.ClocheError:
                    pass  # the verdict has it
                except Exception as error:  # noqa: BLE001 - a watch that ended would say that all is well for too long
                    log.error("health.broken", error=type(error).__name__)
                    self._mark_failed("internal_error")

    async def _run_canary(self) -> None:
        user = next(self._users)
        sandbox = await self._engine.create(SandboxSpec(owner="", user=user, lifetime_seconds=60.0))
        try:
            run = await sandbox.context().execute("6*7", timeout_seconds=CANARY_SECONDS, recorded=False).result()
        finally:
            await sandbox.kill(CANARY_ENDED)
        if run.text != "42":
            raise CanaryFailed(f"a canary execution ended with {run.outcome}")

    def _is_due(self) -> bool:
        since = time.monotonic() - self._checked_at
        troubled = bool(self._why) or self._engine.counters.not_created.total() > self._failures_seen
        return since >= (min(RETRY_SECONDS, self._every_seconds) if troubled else self._every_seconds)

    def _others_worked(self) -> bool:
        """Whether a client's sandbox was made and ran something since the last check: as good as a canary."""
        counters = self._engine.counters
        worked = min(counters.last_creation_at, counters.last_success_at) > self._checked_at
        if worked:
            self._checked_at = time.monotonic()
            self._mark_healthy()
        return worked

    def _mark_healthy(self) -> None:
        if self._why:
            log.info("health.ok")
        self._why, self._worked_at = "", time.monotonic()

    def _mark_failed(self, why: str) -> None:
        if why != self._why:
            log.error("health.failed", why=why)
        self._why = why
