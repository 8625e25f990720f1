"""A cell as the host sees it: a pid 1, its cgroup, and what connects us with it. The same for every backend."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import signal
import socket
from collections.abc import Callable

from cloche.isolation.base import CellStats, FirstKernel
from cloche.isolation.channel import Channel, Header, close_all
from cloche.linux.cgroups import Group
from cloche.model import Limits


class Wires:
    """What connects a new cell with us: init's channel and its first kernel's."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.init, self._init_end = socket.socketpair()
        self.kernel, self._kernel_end = socket.socketpair()

    def hand_over(self, channel: Channel, order: Header, group: Group | None) -> None:
        """Sends the order with their ends of it all, and the entrances of its cgroup."""
        entrances = group.entrances() if group is not None else []
        channel.send(order, fds=(self._init_end.fileno(), self._kernel_end.fileno(), *entrances))
        close_all(entrances)
        self._init_end.close()
        self._kernel_end.close()

    def first_kernel(self, outputs: list[int]) -> FirstKernel:
        return FirstKernel(token=self.token, fds=(self.kernel.detach(), outputs[0], outputs[1]))

    def close(self) -> None:
        for end in (self.init, self.kernel, self._init_end, self._kernel_end):
            end.close()


class ProcessCell:
    """One cell: a pid 1, its cgroup if there is one, and our end of init's channel."""

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        first_kernel: FirstKernel,
        pidfd: int,
        group: Group | None,
        on_closed: Callable[[], None],
    ):
        self.name = name
        self.socket = sock
        self.first_kernel = first_kernel
        self._events: list[Header] = []
        self._on_event: Callable[[Header], None] = self._events.append
        self._pidfd = pidfd
        self._group = group
        self._on_closed = on_closed
        self._closed = False

    def listen(self, on_event: Callable[[Header], None]) -> None:
        self._on_event = on_event
        for early in self._events:
            on_event(early)

    def tell(self, event: Header) -> None:
        """What the nursery has heard about this cell."""
        self._on_event(event)

    @property
    def alive(self) -> bool:
        return not self._closed and not has_ended(self._pidfd)

    def set_limits(self, limits: Limits) -> None:
        if self._group is None:
            return
        self._group.set_memory(limits.memory_bytes + limits.space_bytes)
        self._group.set_cpus(limits.cpus)
        self._group.set_processes(limits.processes)

    def limits_for_init(self, limits: Limits) -> dict[str, int]:
        missing = {"memory", "pids"} if self._group is None else self._group.missing
        watched = {"watch_memory_bytes": limits.memory_bytes + limits.space_bytes, "data_bytes": limits.memory_bytes}
        return (watched if "memory" in missing else {}) | ({"processes": limits.processes} if "pids" in missing else {})

    def stats(self) -> CellStats:
        group = self._group
        if group is None or self._closed:
            return CellStats()
        files = group.file_bytes()
        return CellStats(
            memory_bytes=group.memory_bytes(),
            file_bytes=None if files is None else files.all,
            shared_bytes=None if files is None else files.shared,
            cpu_seconds=group.cpu_seconds(),
            processes=group.processes(),
            oom_kills=group.oom_kills(),
        )

    def oom_kills(self) -> int:
        return 0 if self._group is None or self._closed else self._group.oom_kills()

    def memory_peak_bytes(self) -> int | None:
        return None if self._group is None or self._closed else self._group.memory_peak_bytes()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await ended(self._pidfd)
        os.close(self._pidfd)
        self.socket.close()
        if self._group is not None:
            await self._remove_group(self._group)
        self._on_closed()

    async def _remove_group(self, group: Group) -> None:
        """A cgroup is busy for a moment after its last process; what stays busy is left to the parent's sweep."""
        for _ in range(50):
            if group.remove():
                return
            await asyncio.sleep(0.01)


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def ended(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, done.cancel)
    try:
        await asyncio.wait([done])
    finally:
        loop.remove_reader(pidfd)
