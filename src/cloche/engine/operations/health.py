"""Whether executions work: seen from those that people run, and from a canary where nobody runs any."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import get_args

from cloche import errors
from cloche.engine.engine import Engine
from cloche.model import SandboxSpec, Struct, User
from cloche.telemetry import log

CANARY_SECONDS = 20.0  # a sandbox, an execution and its end take a hundredth of a second where all is well
RETRY_SECONDS = 2.0  # after a failure
TICK_SECONDS = 0.5


class Verdict(Struct):
    ok: bool
    why: str  # an error's code, or a few words of ours; empty if ok
    age_seconds: float  # since an execution succeeded; since the watch began if none has


class CanaryFailed(errors.Unavailable):
    """A sandbox was made, but the simplest program did not run in it."""

    code = "canary_failed"


class Health:
    """Watches an engine. `ok` only when an execution succeeded lately."""

    def __init__(self, engine: Engine, every_seconds: float):
        self._engine = engine
        self._every_seconds = every_seconds
        self._checked_at = 0.0
        self._worked_at = time.monotonic()
        self._failures_seen = 0
        self._why = "no execution has succeeded yet"
        self._users: Iterator[User] = itertools.cycle(get_args(User))  # which also keeps cells for both waiting

    @property
    def verdict(self) -> Verdict:
        age = time.monotonic() - self._worked_at
        stale = age > 2 * self._every_seconds + CANARY_SECONDS
        why = self._why or ("no execution has succeeded lately" if stale else "")
        return Verdict(ok=not why, why=why, age_seconds=age)

    async def check(self) -> None:
        """A canary, now: a sandbox is made, runs `6*7` and ends. Raises what went wrong."""
        self._checked_at = time.monotonic()
        self._failures_seen = self._engine.tally.not_created.total()
        try:
            async with asyncio.timeout(CANARY_SECONDS):
                await self._fly()
        except TimeoutError:
            self._fail("timed_out")
            raise CanaryFailed(f"a canary execution did not end within {CANARY_SECONDS:g} s") from None
        except errors.ClocheError as error:
            self._fail(error.code)
            raise
        self._succeed()

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
                    self._fail("internal_error")

    async def _fly(self) -> None:
        user = next(self._users)
        sandbox = await self._engine.create(SandboxSpec(owner="", user=user, lifetime_seconds=60.0))
        try:
            run = await sandbox.context().execute("6*7", timeout_seconds=CANARY_SECONDS, recorded=False).result()
        finally:
            await sandbox.kill("the canary's end")
        if run.text != "42":
            raise CanaryFailed(f"a canary execution ended with {run.outcome}")

    def _is_due(self) -> bool:
        since = time.monotonic() - self._checked_at
        troubled = bool(self._why) or self._engine.tally.not_created.total() > self._failures_seen
        return since >= (min(RETRY_SECONDS, self._every_seconds) if troubled else self._every_seconds)

    def _others_worked(self) -> bool:
        """Whether somebody else's sandbox was made and ran something since the last check: as good as a canary."""
        tally = self._engine.tally
        worked = min(tally.last_creation_at, tally.last_success_at) > self._checked_at
        if worked:
            self._checked_at = time.monotonic()
            self._succeed()
        return worked

    def _succeed(self) -> None:
        if self._why:
            log.info("health.ok")
        self._why, self._worked_at = "", time.monotonic()

    def _fail(self, why: str) -> None:
        if why != self._why:
            log.error("health.failed", why=why)
        self._why = why
