"""Cgroup directories of an instance and of each of its groups. Use them through `cloche.linux.cgroups`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from cloche.linux.cgroups import v1, v2
from cloche.linux.cgroups.files import FileBytes, read_numbers, write_control

# A subgroup of all processes of a group but one, so that they can be stopped while that one works.
#
# Use it through `cloche.linux.cgroups`.

SUBGROUP_NAME = b"/programs"
FREEZE_SECONDS = 5.0  # one who waits for the kernel itself (a disk that does not answer) cannot be stopped before
_FIRST_LOOK_SECONDS = 0.0002
_LONGEST_LOOK_SECONDS = 0.01


class FreezerSwitch:
    """The freezer of one group. Its file stays open: to thaw must work even where no descriptor is free."""

    def __init__(self, version: int, directory: bytes) -> None:
        """Raises OSError."""
        self._freezer = v1.FreezerV1(directory) if version == 1 else v2.FreezerV2(directory)
        self._fd = os.open(directory + self._freezer.FILE, os.O_WRONLY | os.O_CLOEXEC)

    def freeze(self) -> None:
        os.pwrite(self._fd, self._freezer.FROZEN, 0)

    def wait_until_frozen(self, deadline: float) -> None:
        """Raises OSError, TimeoutError in particular."""
        pause_seconds = _FIRST_LOOK_SECONDS
        while not self._freezer.frozen():
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"some did not stand still within {FREEZE_SECONDS:.0f} s")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_LOOK_SECONDS)

    def thaw(self) -> None:
        """Thaws and closes it. A group that is gone has no processes to thaw."""
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, self._freezer.THAWED, 0)
        os.close(self._fd)


class ProgramSubgroup:
    """`directory` is the group's in the hierarchy of the freezer, which in version 1 holds no other controller."""

    def __init__(self, version: int, directory: bytes) -> None:
        self._version = version
        self._whole = directory
        self.directory = directory + SUBGROUP_NAME
        self._frozen: FreezerSwitch | None = None

    def freeze(self, awake_pid: int) -> None:
        """Stops all but that one, and returns when they stand still: all since the same moment.

        New processes since the last time are moved in, which takes 8 to 25 ms (see `cgroups`). Raises OSError,
        TimeoutError in particular: then all run as before.
        """
        deadline = time.monotonic() + FREEZE_SECONDS
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory, 0o755)
        switch = FreezerSwitch(self._version, self.directory)
        try:
            switch.freeze()
            if self._outside_pids(awake_pid):
                self._move_in(awake_pid, deadline)
            switch.wait_until_frozen(deadline)
        except BaseException:
            switch.thaw()
            raise
        self._frozen = switch

    def _move_in(self, awake_pid: int, deadline: float) -> None:
        """Moves the processes outside in.

        All are frozen meanwhile, the awake one too, so that forks cannot outrun it.
        """
        whole = FreezerSwitch(self._version, self._whole)
        try:
            whole.freeze()
            whole.wait_until_frozen(deadline)
            for pid in self._outside_pids(awake_pid):
                with contextlib.suppress(ProcessLookupError):  # it was ended meanwhile
                    write_control(self.directory + b"/cgroup.procs", b"%d" % pid)
        finally:
            whole.thaw()

    def _outside_pids(self, awake_pid: int) -> list[int]:
        return [pid for pid in read_numbers(self._whole + b"/cgroup.procs") if pid != awake_pid]

    def thaw(self) -> None:
        """Thaws them, if they are frozen."""
        switch, self._frozen = self._frozen, None
        if switch is not None:
            switch.thaw()

    def pids(self) -> list[int]:
        """The processes that were moved in, and their children."""
        with contextlib.suppress(FileNotFoundError):
            return read_numbers(self.directory + b"/cgroup.procs")
        return []


CONTROLLERS = ("memory", "cpu", "pids", "freezer")
CPU_CLOCK = "clock"  # how CPU time is read: not a controller to be reported, but a place like the others
KILL_ROUNDS = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_REMOVE_TRIES = 3

Old = TypeVar("Old")
New = TypeVar("New")


class ControllerLocation(NamedTuple):
    """The directory in which the groups of one controller are made."""

    version: int
    base: str


class InstanceGroups:
    """The groups of one instance: one directory in each hierarchy that is used."""

    def __init__(self, places: dict[str, ControllerLocation], name: str) -> None:
        self._directories = {place.base: os.fsencode(os.path.join(place.base, name)) for place in places.values()}
        self._locks: dict[bytes, int] = {}
        self._busy: set[bytes] = set()
        self.on_busy: Callable[[], None] | None = None  # called when there is something to be swept later
        try:
            for directory in self._directories.values():
                self._locks[directory] = _make_locked(directory)
            self._places = self._enabled_places(places)
        except BaseException:
            self.remove()
            raise
        self.missing = frozenset(CONTROLLERS) - self._places.keys()
        memory = _controller_files(self._places.get("memory"), v1.MemoryV1, v2.MemoryV2)
        if memory is not None:
            memory.limit_sockets(-1)  # so that the kernel does not begin to count, and end, with each group

    @property
    def directories(self) -> list[str]:
        """For `remove_dead`, should this process die: they lie below the group in which it was started."""
        return [os.fsdecode(directory) for directory in self._directories.values()]

    def _enabled_places(self, places: dict[str, ControllerLocation]) -> dict[str, tuple[int, bytes]]:
        """Version and directory of each controller, less those of version 2 that could not be enabled for us."""
        core = {"freezer", CPU_CLOCK}
        chosen = {name: (place.version, self._directories[place.base]) for name, place in places.items()}
        unified = {name for name, (version, _) in chosen.items() if version == 2} - core
        if unified:
            handed_on = v2.enable_controllers(next(chosen[name][1] for name in unified), frozenset(unified))
            chosen = {name: place for name, place in chosen.items() if name not in unified - handed_on}
        return chosen

    def create(self, name: str) -> Group:
        """A new empty group without limits. Raises OSError, FileExistsError in particular."""
        tail = b"/" + checked_name(name).encode()
        group = Group(self, {key: (version, path + tail) for key, (version, path) in self._places.items()})
        group.make()
        return group

    def sweep_busy(self) -> bool:
        """Removes the groups that were still busy when they were to be removed; true if none is left."""
        inner_first = sorted(self._busy, key=len, reverse=True)
        self._busy = {directory for directory in inner_first if not remove_directory(directory)}
        return not self._busy

    def postpone_removal(self, directories: Iterable[bytes]) -> None:
        self._busy.update(directories)
        if self.on_busy is not None:
            self.on_busy()

    def removed(self, directories: Iterable[bytes]) -> None:
        """They are gone after all: nothing of them is left to be swept."""
        self._busy.difference_update(directories)

    def remove(self) -> bool:
        """Removes the directories if no group is left in them, and gives up the locks. False if one is left."""
        self.sweep_busy()
        gone = [remove_directory(directory) for directory in self._locks]  # one that we could not lock is another's
        self.disown()
        return all(gone)

    def disown(self) -> None:
        """Gives up the locks, here or in a forked child, which would hold them by its copies."""
        while self._locks:
            os.close(self._locks.popitem()[1])


class Group:
    """The processes of one sandbox, or of a nursery."""

    def __init__(self, parent: InstanceGroups, places: dict[str, tuple[int, bytes]]) -> None:
        self._parent = parent
        self._directories = list(dict.fromkeys(path for _, path in places.values()))
        self.missing = parent.missing
        self._memory = _controller_files(places.get("memory"), v1.MemoryV1, v2.MemoryV2)
        self._cpu = _controller_files(places.get("cpu"), v1.CpuV1, v2.CpuV2)
        self._pids = _controller_files(places.get("pids"), v1.PidsController, v1.PidsController)
        self._clock = _controller_files(places.get(CPU_CLOCK), v1.CpuClockV1, v2.CpuClockV2)
        self._freezer = _controller_files(places.get("freezer"), v1.FreezerV1, v2.FreezerV2)
        self._programs = _make_subgroup(places)
        self._unified = next((path for version, path in places.values() if version == 2), None)

    def make(self) -> None:
        made: list[bytes] = []
        try:
            for directory in self._directories:
                os.mkdir(directory, 0o755)
                made.append(directory)
        except BaseException:
            for directory in made:
                os.rmdir(directory)
            raise

    def add(self, pid: int) -> None:
        """Moves a process in; children that it has already stay where they are. Raises ProcessLookupError."""
        text = b"%d" % pid
        for directory in self._directories:
            write_control(directory + b"/cgroup.procs", text)

    def open_entrances(self) -> list[int]:
        """Descriptors: a process with one thread that writes b"0" to each moves itself in. Close them.

        In version 1 that takes 0.1 ms where `add` may take 20, as the kernel need not stop forks and exits everywhere
        meanwhile.
        """
        opened: list[int] = []
        try:
            for directory in self._directories:
                name = b"/cgroup.procs" if directory == self._unified else b"/tasks"
                opened.append(os.open(directory + name, os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        return opened

    def set_memory(self, size_bytes: int) -> None:
        """Memory in all, with tmpfs files and page tables, and no swap."""
        if self._memory:
            self._memory.limit(size_bytes)

    def set_sockets(self, size_bytes: int) -> None:
        """Buffers of TCP and UDP, where the kernel does not count them as memory: in version 1."""
        if self._memory:
            self._memory.limit_sockets(size_bytes)

    def set_cpus(self, cpus: float) -> None:
        if self._cpu:
            self._cpu.limit(cpus)

    def set_processes(self, count: int) -> None:
        """Processes and threads, together."""
        if self._pids:
            self._pids.limit(count)

    def memory_bytes(self) -> int | None:
        return self._memory.used_bytes() if self._memory else None

    def file_bytes(self) -> FileBytes | None:
        """The part of it that is pages of files."""
        return self._memory.file_bytes() if self._memory else None

    def memory_peak_bytes(self) -> int | None:
        return self._memory.peak_bytes() if self._memory else None

    def oom_kills(self) -> int:
        """How many processes were killed because the group's memory was used up."""
        return self._memory.oom_kills() if self._memory else 0

    def cpu_seconds(self) -> float | None:
        return self._clock.seconds() if self._clock else None

    def processes(self) -> int | None:
        """Processes and threads, together."""
        return self._pids.count() if self._pids else None

    def pids(self) -> list[int]:
        if not self._directories:
            return []
        first, programs = self._directories[0], self._programs
        inner = programs.pids() if programs and programs.directory.startswith(first + b"/") else []
        return read_numbers(first + b"/cgroup.procs") + inner

    def freeze(self) -> None:
        """Asks for all to stop; `frozen` tells when they have."""
        if self._freezer:
            self._freezer.freeze()

    def thaw(self) -> None:
        self.thaw_programs()
        if self._freezer:
            self._freezer.thaw()

    def freeze_programs(self, awake_pid: int) -> bool:
        """Stops all but that one, and returns when they stand still. False, and nothing done, if this host cannot.

        Takes 8 to 25 ms if there are new processes since the last time: call it in a thread. Raises OSError,
        TimeoutError in particular: then all run as before.
        """
        if self._programs is None:
            return False
        self._programs.freeze(awake_pid)
        return True

    def thaw_programs(self) -> None:
        """One write. Nothing if they are not frozen."""
        if self._programs:
            self._programs.thaw()

    def frozen(self) -> bool:
        return self._freezer.frozen() if self._freezer else False

    def kill(self) -> None:
        """Sends SIGKILL to all, the frozen and those just being forked too. They may still be dying when it returns."""
        if self._unified is None or not _kill_unified(self._unified):
            self._kill_one_by_one()
        with contextlib.suppress(FileNotFoundError):
            self.thaw()

    def _kill_one_by_one(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed already
            self.set_processes(0)  # no more forks, so that the rounds come to an end
            for _ in range(KILL_ROUNDS):
                if not kill_pids(self.pids()):
                    break
                self.thaw()  # in version 1 the frozen die only when thawed; after the signal, so that none runs on

    def remove(self) -> bool:
        """Removes the group, killed before; false if some are still dying.

        Then `InstanceGroups.sweep_busy` does it later.
        """
        for attempt in range(_REMOVE_TRIES):
            if attempt:
                time.sleep(0.001)
            left = [directory for directory in self._inner_first() if not remove_directory(directory)]
            if not left:
                self._parent.removed(self._inner_first())
                return True
        self._parent.postpone_removal(left)
        return False

    def _inner_first(self) -> list[bytes]:
        return ([self._programs.directory] if self._programs else []) + self._directories


def _controller_files(
    place: tuple[int, bytes] | None, old: Callable[[bytes], Old], new: Callable[[bytes], New]
) -> Old | New | None:
    if place is None:
        return None
    version, directory = place
    return old(directory) if version == 1 else new(directory)


def _make_subgroup(places: dict[str, tuple[int, bytes]]) -> ProgramSubgroup | None:
    """None where the freezer is missing, or shares its hierarchy of version 1: its limits would not reach below."""
    version, directory = places.get("freezer", (0, b""))
    shared = any(path == directory for name, (_, path) in places.items() if name != "freezer")
    return None if version == 0 or (version == 1 and shared) else ProgramSubgroup(version, directory)


def checked_name(name: str) -> str:
    """Returns a name that is a single component of a path and none of the kernel's own files.

    Raises ValueError for any other.
    """
    if not _NAME.fullmatch(name) or name.startswith("cgroup."):
        raise ValueError(f"{name!r} cannot name a group: letters, digits, '_', '.' and '-' only")
    return name


def _make_locked(directory: bytes) -> int:
    """Makes a directory (it may be there) and locks it. Raises BlockingIOError if another process holds the lock."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o755)
        fd = opened(directory)
        if fd is None:
            continue  # another process took it for a dead instance's before we could lock it
        if not try_lock(fd):
            os.close(fd)
            raise BlockingIOError(errno.EAGAIN, "in use by another process", os.fsdecode(directory))
        if os.path.isdir(directory):
            return fd
        os.close(fd)


def opened(directory: bytes) -> int | None:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_directory(directory: bytes) -> bool:
    """Removes it. Returns whether it is gone."""
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def _kill_unified(directory: bytes) -> bool:
    """One write kills all; false before Linux 5.14."""
    try:
        write_control(directory + b"/cgroup.kill", b"1")
    except FileNotFoundError:
        return False
    return True


def kill_pids(pids: list[int]) -> bool:
    """Kills them. Returns whether there were any."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)
