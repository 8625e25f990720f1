"""A cell as the host sees it: a pid 1, its cgroup, and its sockets. The same for every backend."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence

from cloche import errors
from cloche.guest import wire
from cloche.isolation.base import CellStats, FirstKernel
from cloche.isolation.channel import Header, HostChannel, close_all, make_kernel_wires
from cloche.linux.cgroups import Group
from cloche.linux.cgroups.files import FileBytes
from cloche.model import Limits

FILES_SECONDS = 60.0  # after which file memory is read again, although the total has not changed
# Without a memory cgroup, pipes of all processes together hold half the limit at most: each is two files and two pages.
BYTES_PER_FILE = 8 << 10
LEAST_OPEN_FILES = 64
STUCK_SECONDS = 20.0  # dying takes a hundredth of a second, but a thousand may do it at once


class CellSockets:
    """The sockets and pipes between a new cell and the host: init's channel, and all that its first kernel has.

    Raises Unavailable.
    """

    def __init__(self) -> None:
        self._wires = make_kernel_wires()
        self.init, self._init_end = socket.socketpair()
        self._kernel_is_ours = True

    @property
    def token(self) -> str:
        return self._wires.token

    def hand_over(self, channel: HostChannel, order: Header, group: Group | None, trees: Sequence[int] = ()) -> None:
        """Sends the order with their ends of it all, the entrances of its cgroup, and the mounts of its volumes."""
        entrances = group.open_entrances() if group is not None else []
        channel.send(order, fds=(*self._theirs, *entrances, *trees))
        close_all(entrances)
        self._close_theirs()

    def send_to_guest(self, connection: socket.socket, order: Header) -> None:
        """The same for a guest at the other end of a socket of its own."""
        wire.send_frame(connection, order, fds=self._theirs)
        self._close_theirs()

    @property
    def _theirs(self) -> tuple[int, ...]:
        return (self._init_end.fileno(), *self._wires.theirs)

    def first_kernel(self) -> FirstKernel:
        return FirstKernel(token=self.token, fds=self._wires.ours)

    def close(self) -> None:
        self.init.close()
        close_all(self._wires.ours)
        self._close_theirs()

    def _close_theirs(self) -> None:
        """Harmless when they are closed."""
        self._init_end.close()
        if self._kernel_is_ours:
            self._kernel_is_ours = False
            close_all(self._wires.theirs)


class ProcessCell:
    """One cell: a pid 1, its cgroup if there is one, and our end of init's channel."""

    passes_descriptors = True

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        first_kernel: FirstKernel,
        pidfd: int,
        group: Group | None,
        on_closed: Callable[[], None],
        volume_bytes: int = 0,
        follow_death: Callable[[], Callable[[], None]] | None = None,
        sow: Callable[[Group | None], socket.socket] | None = None,
    ):
        """`volume_bytes`: the size of its volumes. Data written there counts as its memory, as in its own space.

        `follow_death` is called when it is killed; the callback that it returns, if it is not dead long after that.
        """
        self._follow_death = follow_death
        self._sow = sow
        self._volume_bytes = volume_bytes
        self.name = name
        self.socket = sock
        self.first_kernel = first_kernel
        self._events: list[Header] = []
        self._on_event: Callable[[Header], None] = self._events.append
        self._pidfd = pidfd
        self._group = group
        self._used_bytes: int | None = None  # when it was last measured
        self._files: FileBytes | None = None  # of these
        self._files_at = -FILES_SECONDS
        self._on_closed = on_closed
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._freezing: asyncio.Future[bool] | None = None  # the last freeze that was given to a thread
        self._frozen = False

    def listen(self, on_event: Callable[[Header], None]) -> None:
        self._on_event = on_event
        for early in self._events:
            on_event(early)

    def tell(self, event: Header) -> None:
        """Passes on an event of the nursery about this cell."""
        self._on_event(event)

    def make_fork_server(self) -> socket.socket | None:
        return None if self._sow is None or self._closed else self._sow(self._group)

    @property
    def alive(self) -> bool:
        return not self._closed and not has_ended(self._pidfd)

    @property
    def init(self) -> int:
        """The pid of its init; -1 if it has ended."""
        return -1 if self._closed and has_ended(self._pidfd) else pid_of(self._pidfd)

    def set_limits(self, limits: Limits) -> None:
        if self._group is None:
            return
        self._group.set_memory(limits.memory_and_space_bytes + self._volume_bytes)
        self._group.set_cpus(limits.cpus)
        self._group.set_processes(limits.processes)

    def limits_for_init(self, limits: Limits) -> dict[str, int]:
        missing = {"memory", "pids"} if self._group is None else self._group.missing
        all_bytes = limits.memory_and_space_bytes + self._volume_bytes
        files = max(LEAST_OPEN_FILES, min(limits.open_files, all_bytes // (limits.processes * BYTES_PER_FILE)))
        watched = {"watch_memory_bytes": all_bytes, "data_bytes": limits.memory_bytes, "open_files": files}
        return (watched if "memory" in missing else {}) | ({"processes": limits.processes} if "pids" in missing else {})

    def stats(self) -> CellStats:
        group = self._group
        if group is None or self._closed:
            return CellStats()
        used = group.memory_bytes()
        due = time.monotonic() - self._files_at > FILES_SECONDS
        if used != self._used_bytes or due:  # reading file memory takes ten times as long as reading the total
            self._used_bytes, self._files, self._files_at = used, group.file_bytes(), time.monotonic()
        files = self._files
        return CellStats(
            memory_bytes=used,
            file_bytes=None if files is None else files.all,
            shared_bytes=None if files is None else files.shared,
            cpu_seconds=group.cpu_seconds(),
            processes=group.processes(),
        )

    def oom_kills(self) -> int:
        return 0 if self._group is None or self._closed else self._group.oom_kills()

    def cpu_seconds(self) -> float | None:
        return None if self._group is None or self._closed else self._group.cpu_seconds()

    def memory_peak_bytes(self) -> int | None:
        return None if self._group is None or self._closed else self._group.memory_peak_bytes()

    async def freeze(self) -> bool:
        group = self._group
        if group is None:
            return False
        if self._freezing is not None:
            await asyncio.wait([self._freezing])  # an earlier freeze was cancelled, and is still to be undone
        if not self.alive:
            raise errors.Unavailable("the sandbox has ended: nothing is left to be stopped")
        self._frozen = True  # even if it fails, it may have to be undone
        try:
            self._frozen = await self._freeze_in_thread(group.freeze_programs, pid_of(self._pidfd))
        except OSError as error:
            self._frozen = False
            raise errors.Unavailable(f"the programs of the sandbox could not be stopped: {error.strerror}") from None
        return self._frozen

    async def _freeze_in_thread(self, freeze: Callable[[int], bool], init: int) -> bool:
        """Freezes in a thread, which cannot be cancelled: a freeze that comes too late is undone when it is done."""
        self._freezing = asyncio.ensure_future(asyncio.to_thread(freeze, init))
        try:
            return await asyncio.shield(self._freezing)
        except asyncio.CancelledError:
            self._freezing.add_done_callback(self._undo_freeze)
            raise

    def _undo_freeze(self, freezing: asyncio.Future[bool]) -> None:
        if not freezing.cancelled():
            freezing.exception()  # no caller is left: marks the exception as retrieved
        self.thaw()

    def thaw(self) -> None:
        if self._frozen and self._group is not None and not self._closed:
            self._group.thaw_programs()
            self._frozen = False

    def open_guest_socket(self, name: str) -> socket.socket:
        raise errors.Unavailable("the guest passes its own")

    def rest(self) -> None:
        """Costs nothing while it waits."""

    def wake(self) -> None:
        """It does not rest."""

    async def aclose(self) -> None:
        """Goes on to its end also when the waiting caller is cancelled: half of it would leave the rest for ever."""
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.get_running_loop().create_task(self._kill_and_close())
        await asyncio.shield(self._closing)

    async def _kill_and_close(self) -> None:
        if self._freezing is not None:
            await asyncio.wait([self._freezing])
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if self._group is not None and self._frozen:
            self._group.kill()  # frozen processes would not die with init, and must not continue when thawed
        await self._wait_dead()
        os.close(self._pidfd)
        self.socket.close()
        if self._group is not None:
            await self._remove_group(self._group)
        self._on_closed()

    async def _wait_dead(self) -> None:
        """A pid 1 is dead when its whole namespace is, and of that, the zygote has to collect the first kernel."""
        on_stuck = self._follow_death() if self._follow_death is not None else None
        try:
            async with asyncio.timeout(STUCK_SECONDS if on_stuck is not None else None):
                await wait_ended(self._pidfd)
        except TimeoutError:
            if on_stuck is not None:
                on_stuck()
            await wait_ended(self._pidfd)

    async def _remove_group(self, group: Group) -> None:
        """A cgroup is busy for a moment after its last process; one that stays busy is left to the parent's sweep."""
        for _ in range(50):
            if group.remove():
                return
            await asyncio.sleep(0.01)


def pid_of(pidfd: int) -> int:
    """The pid in our pid namespace; -1, no process's pid, if it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def wait_ended(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, done.cancel)
    try:
        await asyncio.wait([done])
    finally:
        loop.remove_reader(pidfd)
