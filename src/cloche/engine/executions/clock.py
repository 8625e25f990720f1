"""Time limits that stand still while somebody else's time passes, and while the programs of a sandbox stand still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol


class Follower(Protocol):
    """Who is told, at once, that the time of programs stands still, and that it goes on."""

    def hold(self) -> None: ...

    def go_on(self) -> None: ...


class ProgramTime:
    """How time passes for the programs of a sandbox: not at all while they stand still.

    Who cannot move cannot end either: whatever is done to programs that take too long is measured by this.
    """

    def __init__(self) -> None:
        self._still_since: float | None = None
        self._still_seconds = 0.0
        self._followers: set[Follower] = set()

    @property
    def still(self) -> bool:
        return self._still_since is not None

    def now(self) -> float:
        """In seconds, as `time.monotonic`."""
        return (time.monotonic() if self._still_since is None else self._still_since) - self._still_seconds

    def follow(self, follower: Follower) -> None:
        """Until it leaves. One that comes while time stands still is told so."""
        self._followers.add(follower)
        if self.still:
            follower.hold()

    def leave(self, follower: Follower) -> None:
        self._followers.discard(follower)

    def hold(self) -> None:
        """Harmless when it stands still."""
        if self._still_since is None:
            self._still_since = time.monotonic()
            for follower in tuple(self._followers):
                follower.hold()

    def go_on(self) -> None:
        """Harmless when it goes on."""
        if self._still_since is not None:
            self._still_seconds += time.monotonic() - self._still_since
            self._still_since = None
            for follower in tuple(self._followers):
                follower.go_on()

    def call_later(self, seconds: float, call: Callable[[], None]) -> Clock:
        """As a loop's, by this time."""
        return Clock(seconds, call, self)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """As `asyncio.timeout`, by this time. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            clock = Clock(seconds, lambda: limit.reschedule(loop.time()), self)
            try:
                yield
            finally:
                clock.stop()


class Clock:
    """Runs from now on, and calls `on_end()` once `seconds` of programs' time have passed in which nobody held it."""

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
        self._run()

    def hold(self) -> None:
        """Until `go_on` was called as often as this."""
        self._holds += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_seconds -= self._loop.time() - self._since

    def go_on(self) -> None:
        self._holds = max(self._holds - 1, 0)
        self._run()

    def stop(self) -> None:
        """For good. Whoever made it can be forgotten."""
        self._stopped = True
        self._on_end = _nothing
        self._time.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        if not self._stopped and not self._holds and self._timer is None:
            self._since = self._loop.time()
            self._timer = self._loop.call_later(max(self._left_seconds, 0.0), self._end)

    def _end(self) -> None:
        on_end = self._on_end
        self.stop()
        on_end()


class Standstill:
    """Calls `on_still()` once, a moment after programs stand still, or soon if they do already."""

    def __init__(self, on_still: Callable[[], None], time: ProgramTime):
        self._on_still = on_still
        self._time = time
        self._call: asyncio.Handle | None = None
        time.follow(self)

    def hold(self) -> None:
        self._time.leave(self)
        self._call = asyncio.get_running_loop().call_soon(self._on_still)

    def go_on(self) -> None:
        """They may have moved before it was called: whoever waits for it is let go nevertheless."""

    def stop(self) -> None:
        """For good. Whoever made it can be forgotten."""
        self._on_still = _nothing
        self._time.leave(self)
        if self._call is not None:
            self._call.cancel()


def _nothing() -> None:
    """Nobody waits for it any more."""
