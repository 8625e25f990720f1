"""Freezes the programs of a sandbox, and thaws them without their noticing."""

from __future__ import annotations

import asyncio

from cloche import errors
from cloche.engine.sandboxes.init_client import InitClient
from cloche.isolation.base import SandboxCell

FREEZE_SECONDS = 10.0  # init gives up before


class ProgramFreezer:
    """Uses the host's freezer where there is one; else init stops them by a signal (see `guest.init.freeze`).

    Init itself always goes on, and so do processes that it forks later. Requests to frozen programs wait: a
    signal, too, be it SIGKILL. So their time stops as well: see `ProgramTime`.
    """

    def __init__(self, cell: SandboxCell, guest: InitClient):
        self._cell = cell
        self._guest = guest
        self._lock = asyncio.Lock()
        self._holders = 0
        self._by_host = False

    @property
    def held(self) -> bool:
        return self._holders > 0

    async def hold(self) -> None:
        """Returns when they are frozen. Counted: each needs its `release`.

        Raises Unavailable (then all run as before), or Gone.
        """
        async with self._lock:
            if not self._holders:
                await self._freeze_programs()
            self._holders += 1

    async def release(self) -> None:
        """After the last, they go on. Raises Gone where that takes init and the sandbox has ended."""
        async with self._lock:
            if not self._holders:
                raise RuntimeError("released more often than held")
            self._holders -= 1
            if not self._holders:
                await self._thaw_programs()

    async def _freeze_programs(self) -> None:
        """First blocks new starts, so that none happens while the others are frozen."""
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

    async def _thaw_programs(self) -> None:
        self._guest.open()
        try:
            if self._by_host:
                self._cell.thaw()
                self._guest.tell("release")  # before the next request to it
            else:
                await self._guest.request("release")
        finally:
            self._guest.time.go_on()

    async def _ask_init(self, *, stop: bool) -> None:
        try:
            async with asyncio.timeout(FREEZE_SECONDS):
                reply = await self._guest.request("hold", stop=stop)
        except TimeoutError:
            raise errors.Unavailable("the sandbox's init did not answer when asked to stop its programs") from None
        if reply.ok.get("still") is not True:
            raise errors.Unavailable("the programs of the sandbox could not be stopped: they start new ones too fast")
