"""Timers that can be held, and that stop while the programs of a sandbox are frozen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol


class ProgramTimeFollower(Protocol):
    """Is told at once when program time stops and when it goes on."""

    def hold(self) -> None: ...

    def go_on(self) -> None: ...


class ProgramTime:
    """The time of a sandbox's programs: it stops while they are frozen.

    A frozen program cannot end, so all limits on programs that take too long are measured by this time.
    """

    def __init__(self) -> None:
        self._still_since: float | None = None
        self._still_seconds = 0.0
        self._followers: set[ProgramTimeFollower] = set()

    @property
    def is_frozen(self) -> bool:
        return self._still_since is not None

    def now(self) -> float:
        """In seconds, as `time.monotonic`."""
        return (time.monotonic() if self._still_since is None else self._still_since) - self._still_seconds

    def follow(self, follower: ProgramTimeFollower) -> None:
        """Adds a follower until `leave`. One that comes while time is stopped is told so."""
        self._followers.add(follower)
        if self.is_frozen:
            follower.hold()

    def leave(self, follower: ProgramTimeFollower) -> None:
        self._followers.discard(follower)

    def hold(self) -> None:
        """Stops the time. Harmless when it is stopped."""
        if self._still_since is None:
            self._still_since = time.monotonic()
            for follower in tuple(self._followers):
                follower.hold()

    def go_on(self) -> None:
        """Lets the time go on. Harmless when it does."""
        if self._still_since is not None:
            self._still_seconds += time.monotonic() - self._still_since
            self._still_since = None
            for follower in tuple(self._followers):
                follower.go_on()

    def call_later(self, seconds: float, call: Callable[[], None]) -> PausableTimer:
        """As a loop's, by this time."""
        return PausableTimer(seconds, call, self)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """As `asyncio.timeout`, by this time. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            clock = PausableTimer(seconds, lambda: limit.reschedule(loop.time()), self)
            try:
                yield
            finally:
                clock.stop()


class PausableTimer:
    """Calls `on_end()` after `seconds` of program time during which it was not held. Runs from now on."""

    def __init__(self, seconds: float, on_end: Callable[[], None], time: ProgramTime):
        self._left_seconds = seconds
        self._on_end = on_end
        self._time = time
        self._loop = asyncio.get_running_loop()
        self._holds = 0
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        time.follow(self)
        self._start_timer()

    def hold(self) -> None:
        """Until `go_on` was called as often as this."""
        self._holds += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_seconds -= self._loop.time() - self._since

    def go_on(self) -> None:
        self._holds = max(self._holds - 1, 0)
        self._start_timer()

    def stop(self) -> None:
        """Stops for good, and drops its reference to the callback."""
        self._stopped = True
        self._on_end = _ignore_end
        self._time.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if not self._stopped and not self._holds and self._timer is None:
            self._since = self._loop.time()
            self._timer = self._loop.call_later(max(self._left_seconds, 0.0), self._on_elapsed)

    def _on_elapsed(self) -> None:
        on_end = self._on_end
        self.stop()
        on_end()


class FreezeCallback:
    """Calls `on_still()` once, a moment after programs are frozen, or soon if they are already."""

    def __init__(self, on_still: Callable[[], None], time: ProgramTime):
        self._on_still = on_still
        self._time = time
        self._call: asyncio.Handle | None = None
        time.follow(self)

    def hold(self) -> None:
        self._time.leave(self)
        self._call = asyncio.get_running_loop().call_soon(self._on_still)

    def go_on(self) -> None:
        """Does nothing: programs may have moved before the callback, which is called nevertheless."""

    def stop(self) -> None:
        """Stops for good, and drops its reference to the callback."""
        self._on_still = _ignore_end
        self._time.leave(self)
        if self._call is not None:
            self._call.cancel()


def _ignore_end() -> None:
    """The callback of a stopped timer."""
