"""The programs of a sandbox, stopped where they are, and let go on without their noticing."""

from __future__ import annotations

import asyncio

from cloche import errors
from cloche.engine.sandboxes.init_client import Guest
from cloche.isolation.base import Cell

HOLD_SECONDS = 10.0  # init gives up before


class Stillness:
    """By the host's freezer where there is one; else init stops them by a signal (see `guest.stillness`).

    Init itself always goes on, and so does what it forks later. What is asked of programs while they are held waits: a
    signal, too, be it SIGKILL. So their time stands still as they do: see `ProgramTime`.
    """

    def __init__(self, cell: Cell, guest: Guest):
        self._cell = cell
        self._guest = guest
        self._lock = asyncio.Lock()
        self._holders = 0
        self._by_host = False

    @property
    def held(self) -> bool:
        return self._holders > 0

    async def hold(self) -> None:
        """Returns when they stand still. Counted: each needs its `release`.

        Raises Unavailable (then all run as before), or Gone.
        """
        async with self._lock:
            if not self._holders:
                await self._hold()
            self._holders += 1

    async def release(self) -> None:
        """After the last, they go on. Raises Gone where that takes init and the sandbox has ended."""
        async with self._lock:
            if not self._holders:
                raise RuntimeError("released more often than held")
            self._holders -= 1
            if not self._holders:
                await self._release()

    async def _hold(self) -> None:
        """First nobody is started any more, so that nobody is when the others stand still."""
        self._guest.shut()
        self._guest.time.hold()
        try:
            await self._ask_init(stop=False)
            self._by_host = await self._cell.freeze()
            if not self._by_host:
                await self._ask_init(stop=True)
        except BaseException:
            self._guest.open()
            if self._guest.alive:
                self._guest.tell("release")
            self._guest.time.go_on()
            raise

    async def _release(self) -> None:
        self._guest.open()
        try:
            if self._by_host:
                self._cell.thaw()
                self._guest.tell("release")  # before whatever is asked of it next
            else:
                await self._guest.request("release")
        finally:
            self._guest.time.go_on()

    async def _ask_init(self, *, stop: bool) -> None:
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                reply = await self._guest.request("hold", stop=stop)
        except TimeoutError:
            raise errors.Unavailable("the sandbox's init did not answer when asked to stop its programs") from None
        if reply.ok.get("still") is not True:
            raise errors.Unavailable("the programs of the sandbox could not be stopped: they start new ones too fast")
