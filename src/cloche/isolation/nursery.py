"""A nursery as the host sees it: a zygote behind a channel, and the cells that it made.

The same for every backend; what differs is how the process was started and what holds its cells.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import signal
import socket
import stat
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

from cloche import errors
from cloche.isolation.base import CellSpec, CellStats, FirstKernel
from cloche.isolation.channel import Channel, Header, close_all
from cloche.linux.cgroups import Group, Parent
from cloche.model import GIB, KIB, MIB, Limits, Template

IMPORT_SECONDS = 180.0
SPAWN_SECONDS = 30.0
_CELLS_PER_STEP = 64
_BASE_BYTES = 2 * GIB
_PROCESSES = 512  # of the zygote's own: cells have a limit each
_BYTES_PER_CELL = 3 * MIB  # page tables of a cell are charged to the zygote that forked it


class Order:
    """How a zygote is started: the command, what goes to its stdin, and its first frame."""

    def __init__(self, command: list[str], stdin: bytes, first: Header, program: bytes):
        self.command = command
        self.stdin = stdin
        self.first = first
        self.program = program


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
        self._pidfd = pidfd
        self._group = group
        self._on_closed = on_closed
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed and not _has_ended(self._pidfd)

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
        return CellStats(
            memory_bytes=group.memory_bytes(),
            cpu_seconds=group.cpu_seconds(),
            processes=group.processes(),
            oom_kills=group.oom_kills() or 0,
        )

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await _ended(self._pidfd)
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


class ZygoteNursery:
    def __init__(
        self,
        template: Template,
        process: subprocess.Popen[bytes],
        parent: Parent | None,
        group: Group | None,
        *,
        pid_namespaces: int,
    ):
        """`pid_namespaces`: how many of them lie between us and a cell's init, which is pid 1 of the last."""
        self.template = template
        self._pid_namespaces = pid_namespaces
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._parent = parent
        self._group = group
        self._waiting: dict[str, asyncio.Future[list[int]]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._raw: asyncio.Future[float] | None = None
        self._cells = 0
        self._made = 0
        self._steps = 0
        self._closing = False
        self._channel: Channel | None = None
        self._errors = ErrorTail(process)

    # --- start and end

    async def begin(self, sock: socket.socket, order: Order) -> None:
        """Waits until the zygote has imported everything. Raises NurseryFailed with its last words."""
        self._channel = Channel(sock, self._on_frame, self._on_channel_closed)
        self._channel.send(order.first, order.program)
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), IMPORT_SECONDS)
        except TimeoutError:
            await self.aclose()
            raise errors.NurseryFailed(
                f"template {self.template.ref}: its imports took longer than {IMPORT_SECONDS:.0f} s"
            ) from None
        except errors.NurseryFailed:
            await self.aclose()
            raise

    @property
    def alive(self) -> bool:
        return self._channel is not None and not self._channel.closed and not self._closing

    async def aclose(self) -> None:
        """Ends the zygote. What holds its cells ends with the last of them."""
        self._closing = True
        if self._channel is not None:
            self._channel.close()
        if self._cells == 0:
            await self._end_process()

    async def _end_process(self) -> None:
        if self._process.returncode is not None:
            return
        self._process.kill()  # and with it, by death signals and pid namespaces, all that it holds
        await _ended(self._pidfd)
        self._process.wait()
        os.close(self._pidfd)
        self._errors.close()
        if self._group is not None:
            for _ in range(100):
                if self._group.remove():
                    break
                await asyncio.sleep(0.01)

    # --- cells

    async def spawn(
        self, spec: CellSpec, extra: dict[str, Any], group: Group | None, on_closed: Callable[[], None]
    ) -> ProcessCell:
        """Forks a cell. Its walls go up while we return; what is asked of its init waits for them."""
        if not self.alive or self._channel is None:
            raise errors.NurseryFailed(f"the nursery of {self.template.ref} has ended")
        self._made += 1
        name = str(self._made)
        wires = Wires()
        forked: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting[name] = forked
        self._grow()
        self._cells += 1
        try:
            order = {"do": "spawn", "cell": name, "spec": {**_inside(spec), **extra, "token": wires.token}}
            wires.hand_over(self._channel, order, group)
            pidfd, *outputs = await asyncio.wait_for(forked, SPAWN_SECONDS)
        except BaseException as error:
            wires.close()
            self._cells -= 1
            if isinstance(error, TimeoutError):
                raise self._failure(f"no cell was forked in {SPAWN_SECONDS:.0f} s") from None
            raise
        finally:
            self._waiting.pop(name, None)
        return ProcessCell(
            name, wires.init, wires.first_kernel(outputs), pidfd, group, lambda: self._cell_closed(on_closed)
        )

    def _cell_closed(self, on_closed: Callable[[], None]) -> None:
        self._cells -= 1
        on_closed()
        if self._closing and self._cells == 0:
            asyncio.get_running_loop().create_task(self._end_process())

    def _grow(self) -> None:
        steps = self._cells // _CELLS_PER_STEP + 1
        if self._group is not None and steps > self._steps:
            self._steps = steps
            self._group.set_memory(_BASE_BYTES + steps * _CELLS_PER_STEP * _BYTES_PER_CELL)

    async def raw_cost_seconds(self) -> float:
        """What the bare fork into namespaces costs right now, measured by the zygote itself."""
        if self._channel is None:
            raise errors.NurseryFailed("not started")
        self._raw = asyncio.get_running_loop().create_future()
        self._channel.send({"do": "raw"})
        return await asyncio.wait_for(self._raw, SPAWN_SECONDS)

    # --- what the zygote says. It has run a template's code, so it is not trusted either.

    def _on_frame(self, header: Header, _: bytes, fds: list[int]) -> None:
        event, cell = header.get("ev"), header.get("cell")
        if event == "spawned" and isinstance(cell, str) and cell in self._waiting:
            waiting = self._waiting[cell]
            if not waiting.done() and self._is_cell(fds):
                waiting.set_result(fds)
                return
            self._fail(waiting, "it announced something that is no new cell")
        close_all(fds)
        if event == "ready" and not self._ready.done():
            self._ready.set_result(None)
        elif event == "failed" and not self._ready.done():
            self._ready.set_exception(self._failure(_message(header)))
        elif event == "spawn_failed" and isinstance(cell, str) and cell in self._waiting:
            self._fail(self._waiting[cell], _message(header))
        elif event == "raw" and self._raw is not None and not self._raw.done():
            seconds = header.get("seconds")
            self._raw.set_result(float(seconds) if isinstance(seconds, (int, float)) else 0.0)

    def _is_cell(self, fds: list[int]) -> bool:
        pipes = len(fds) == 3 and all(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in fds[1:])
        return pipes and is_init(fds[0], self._pid_namespaces)

    def _on_channel_closed(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(self._failure(why))
            self._ready.exception()  # it is also raised to whoever waits
        for waiting in self._waiting.values():
            self._fail(waiting, why)

    def _fail(self, waiting: asyncio.Future[list[int]], why: str) -> None:
        if not waiting.done():
            waiting.set_exception(self._failure(why))

    def _failure(self, why: str) -> errors.NurseryFailed:
        words = self._errors.text()
        return errors.NurseryFailed(
            f"the nursery of {self.template.ref} failed: {why}" + (f"\n{words}" if words else "")
        )


class ErrorTail:
    """The last few KiB that a nursery wrote to its stderr."""

    def __init__(self, process: subprocess.Popen[bytes]):
        if process.stderr is None:
            raise ValueError("the nursery's stderr must be a pipe")
        self._pipe = process.stderr
        self._tail = b""
        os.set_blocking(self._pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read)

    def _read(self) -> None:
        try:
            piece = os.read(self._pipe.fileno(), 64 * KIB)
        except BlockingIOError:
            return
        if piece:
            self._tail = (self._tail + piece)[-8 * KIB :]
        else:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())

    def text(self) -> str:
        self._read()
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()


def start_process(
    order: Order, theirs: socket.socket, group: Group | None, command_tail: list[str]
) -> subprocess.Popen[bytes]:
    """Starts a nursery's process; it waits for its stdin until it is in its cgroup."""
    process = subprocess.Popen(
        [*order.command, *command_tail],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(theirs.fileno(),),
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    if group is not None:
        group.add(process.pid)
    if process.stdin is None:
        raise ValueError("stdin must be a pipe")
    process.stdin.write(order.stdin)
    process.stdin.close()
    return process


def _inside(spec: CellSpec) -> dict[str, Any]:
    inodes = max(spec.space_bytes // (4 * KIB), 1024)
    return {"user": spec.user, "space_bytes": spec.space_bytes, "inodes": inodes, "open_files": spec.open_files}


def _message(header: Header) -> str:
    message = header.get("message")
    return message[:2000] if isinstance(message, str) else "it did not say why"


def bound_imports(group: Group) -> None:
    """What a nursery may use before it has made its first cell: importing a package runs its code."""
    group.set_memory(_BASE_BYTES + _CELLS_PER_STEP * _BYTES_PER_CELL)
    group.set_processes(_PROCESSES)


def is_init(fd: int, pid_namespaces: int) -> bool:
    """Whether a descriptor from a zygote is the pidfd of a pid 1 that many namespaces below ours, or of one that ended.

    We kill what it stands for. A zygote can have our own pidfd: a socket tells who is at its other end.
    """
    with open(f"/proc/self/fdinfo/{fd}") as file:
        fields = dict(line.partition(":")[::2] for line in file)
    if "Pid" not in fields or not pid_namespaces:
        return "Pid" in fields
    pids = fields.get("NSpid", "").split()
    return fields["Pid"].strip() == "-1" or (pids[-1:] == ["1"] and len(pids) == _depth() + pid_namespaces)


@cache
def _depth() -> int:
    """In how many nested pid namespaces we are."""
    with open("/proc/self/status") as file:
        return next(len(line.split()) - 1 for line in file if line.startswith("NSpid:"))


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def _ended(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, done.cancel)
    try:
        await asyncio.wait([done])
    finally:
        loop.remove_reader(pidfd)
