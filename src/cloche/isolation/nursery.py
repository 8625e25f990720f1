"""A nursery as the host sees it: a zygote behind a channel, and the cells that it made.

The same for every backend; only the start of the process and the container of its cells differ.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from cloche import errors
from cloche.isolation.base import CellSpec
from cloche.isolation.cell import CellSockets, ProcessCell, wait_ended
from cloche.isolation.channel import Header, HostChannel, close_all
from cloche.linux.cgroups import Group, InstanceGroups
from cloche.model import GIB, KIB, MIB, Template

# The end of a nursery's stderr, for error messages.


class StderrTail:
    """The last few KiB that a nursery wrote to its stderr."""

    def __init__(self, process: subprocess.Popen[bytes]):
        if process.stderr is None:
            raise ValueError("the nursery's stderr must be a pipe")
        self._pipe = process.stderr
        self._tail = b""
        os.set_blocking(self._pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read_stderr)

    def _read_stderr(self) -> None:
        try:
            piece = os.read(self._pipe.fileno(), 64 * KIB)
        except BlockingIOError:
            return
        if piece:
            self._tail = (self._tail + piece)[-8 * KIB :]
        else:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())

    def text(self) -> str:
        self._read_stderr()
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()


# Kills a zygote, or its init factory, that does not answer any more.
#
# It cannot be left there: it is the parent of the first kernels of its cells, and no pid 1 is dead before all
# of its namespace have been reaped. When it is gone, the nursery's reaper collects them.


def kill_zygote(inits: Iterable[int]) -> None:
    """Kills the init factory, which is the parent of these pids 1, and its parent, the zygote.

    Not the nursery's reaper, a pid 1 itself, to which they may have been left.
    """
    for init in inits:
        with suppress(OSError, ValueError, StopIteration):
            ancestors = [cradle := int(_status_field(init, "PPid")), int(_status_field(cradle, "PPid"))]
            living = [pid for pid in ancestors if pid > 1 and _status_field(pid, "NSpid").split()[-1] != "1"]
            for pid in reversed(living):
                os.kill(pid, signal.SIGKILL)
            if living:
                return


def _status_field(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/status") as file:
        return next(line.partition(":")[2] for line in file if line.startswith(f"{name}:"))


IMPORT_SECONDS = 180.0
SPAWN_SECONDS = 30.0
_CELLS_PER_STEP = 64
_BASE_BYTES = 2 * GIB
SOCKET_BYTES = 32 * MIB  # buffers of TCP and UDP under cgroups of version 1, on top of a limit on memory
_PROCESSES = 512  # of the zygote's own: cells have a limit each
_BYTES_PER_CELL = 3 * MIB  # page tables of a cell are charged to the zygote that forked it


class ZygoteOrder:
    """The start of a zygote: its command, its stdin, and its first frame."""

    def __init__(self, command: list[str], stdin: bytes, first: Header, program: bytes):
        self.command = command
        self.stdin = stdin
        self.first = first
        self.program = program


class VolumeTrees(NamedTuple):
    """Mounts of volumes on their way into a new cell."""

    paths: list[str]
    fds: list[int]
    bytes: int


class ZygoteNursery:
    def __init__(
        self,
        template: Template,
        process: subprocess.Popen[bytes],
        parent: InstanceGroups | None,
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
        self._live: dict[str, ProcessCell] = {}
        self._waiting: dict[str, asyncio.Future[list[int]]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._raw: asyncio.Future[float] | None = None
        self._cells = 0
        self._made = 0
        self._asked = 0
        self._steps = 0
        self._heard_at = time.monotonic()  # the zygote's last frame
        self._closing = False
        self._ending: asyncio.Task[None] | None = None
        self._channel: HostChannel | None = None
        self._last_words = StderrTail(process)

    # --- start and end

    async def begin(self, sock: socket.socket, order: ZygoteOrder) -> None:
        """Waits until the zygote has imported everything. Raises NurseryFailed with its last words."""
        self._channel = HostChannel(sock, self._on_frame, self._on_channel_closed)
        self._channel.send(order.first, order.program)
        try:
            async with asyncio.timeout(IMPORT_SECONDS):  # `wait_for` of Python 3.11 may swallow a cancellation
                await asyncio.shield(self._ready)
        except BaseException as error:
            await self.aclose()
            if not isinstance(error, TimeoutError):
                raise
            raise errors.NurseryFailed(
                f"template {self.template.ref}: its imports took longer than {IMPORT_SECONDS:.0f} s"
            ) from None

    @property
    def alive(self) -> bool:
        return self._channel is not None and not self._channel.closed and not self._closing

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left of it, nor of its cells."""
        return self._ending is not None and self._ending.done()

    @property
    def cells(self) -> int:
        """How many cells it has, with those that it makes."""
        return self._cells

    async def aclose(self) -> None:
        """Ends the zygote. Its process tree ends with its last cell: called after that, this waits for it."""
        self._closing = True
        if self._channel is not None:
            self._channel.close()
        self._end_if_empty()
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def _end_if_empty(self) -> None:
        if self._closing and self._cells == 0 and self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end_process())

    async def _end_process(self) -> None:
        self._process.kill()  # and with it, by death signals and pid namespaces, all that it holds
        await wait_ended(self._pidfd)
        self._process.wait()
        os.close(self._pidfd)
        self._last_words.close()
        if self._group is not None:
            for _ in range(100):
                if self._group.remove():
                    break
                await asyncio.sleep(0.01)

    # --- cells

    async def spawn(
        self,
        spec: CellSpec,
        extra: dict[str, Any],
        group: Group | None,
        on_closed: Callable[[], None],
        trees: VolumeTrees | None = None,
    ) -> ProcessCell:
        """Forks a cell. Its walls go up while we return; requests to its init wait for them."""
        if not self.alive or self._channel is None:
            raise errors.NurseryFailed(f"the nursery of {self.template.ref} has ended")
        self._made += 1
        name = str(self._made)
        wires = CellSockets()
        forked: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting[name] = forked
        self._grow_limit()
        self._cells += 1
        try:
            volumes = {} if trees is None else {"volumes": trees.paths}
            uncharged = {"uncharged": True} if group is None or "memory" in group.missing else {}
            inside = {**spec_fields(spec), **extra, **volumes, **uncharged, "token": wires.token}
            order = {"do": "spawn", "cell": name, "spec": inside}
            wires.hand_over(self._channel, order, group, () if trees is None else trees.fds)
            async with asyncio.timeout(SPAWN_SECONDS):
                (pidfd,) = await forked
        except BaseException as error:
            wires.close()
            self._cells -= 1
            self._end_if_empty()
            if isinstance(error, TimeoutError):
                self._give_up_if_hung()
                raise self._make_failure(f"no cell was forked in {SPAWN_SECONDS:.0f} s") from None
            raise
        finally:
            self._waiting.pop(name, None)
        closed = functools.partial(self._cell_closed, name, on_closed)
        volume_bytes = 0 if trees is None else trees.bytes
        cell = ProcessCell(
            name,
            wires.init,
            wires.first_kernel(),
            pidfd,
            group,
            closed,
            volume_bytes,
            self._follow_death,
            functools.partial(self._start_fork_server, name, inside),
        )
        self._live[name] = cell
        return cell

    def _start_fork_server(self, name: str, inside: dict[str, Any], group: Group | None) -> socket.socket:
        """Has a fork server forked for a cell. If that fails, init's socket is at its end."""
        ours, theirs = socket.socketpair()
        entrances = group.open_entrances() if group is not None else []
        if self._channel is not None:
            spec = {field: value for field, value in inside.items() if field != "token"}  # which is the first kernel's
            order = {"do": "seed", "cell": name, "spec": spec}
            self._channel.send(order, fds=(theirs.fileno(), *entrances))
        close_all(entrances)
        theirs.close()
        return ours

    def _give_up_if_hung(self) -> None:
        """Called after SPAWN_SECONDS without an answer. The zygote may have been busy with other requests first."""
        self._give_up_if_silent(time.monotonic() - SPAWN_SECONDS / 2)

    def _give_up_if_silent(self, since: float) -> None:
        """Closes the channel of a zygote that has sent nothing since; the next caller starts another. Its cells
        live on.
        """
        if self._channel is None or self._heard_at > since:
            return
        self._channel.close("it does not answer")
        if self._pid_namespaces:  # else no cell's death waits for it
            kill_zygote(cell.init for cell in self._live.values())

    def _follow_death(self) -> Callable[[], None]:
        return functools.partial(self._give_up_if_silent, time.monotonic())

    def _cell_closed(self, name: str, on_closed: Callable[[], None]) -> None:
        del self._live[name]
        self._cells -= 1
        on_closed()
        self._end_if_empty()

    def _grow_limit(self) -> None:
        steps = self._cells // _CELLS_PER_STEP + 1
        if self._group is not None and steps > self._steps:
            self._steps = steps
            self._group.set_memory(_BASE_BYTES + steps * _CELLS_PER_STEP * _BYTES_PER_CELL)

    async def ask_volume(self, act: str, **fields: Any) -> list[int]:
        """The descriptors that the zygote passes for it. Raises NurseryFailed, and Unavailable with the zygote's
        message.
        """
        if not self.alive or self._channel is None:
            raise errors.NurseryFailed(f"the nursery of {self.template.ref} has ended, and its volumes with it")
        self._asked += 1
        asked: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        name = f"volume-{self._asked}"
        self._waiting[name] = asked
        try:
            self._channel.send({"do": "volume", "act": act, "ask": name, **fields})
            async with asyncio.timeout(SPAWN_SECONDS):
                return await asked
        except TimeoutError:
            self._give_up_if_hung()
            raise self._make_failure(f"no answer about a volume in {SPAWN_SECONDS:.0f} s") from None
        finally:
            self._waiting.pop(name, None)

    def tell_volume(self, act: str, **fields: Any) -> None:
        """Sends the request without waiting. Nothing is left to do where the nursery has ended."""
        if self.alive and self._channel is not None:
            self._channel.send({"do": "volume", "act": act, "ask": "", **fields})

    def _on_volume(self, header: Header, fds: list[int]) -> None:
        asked = self._waiting.get(str(header.get("ask")))
        if asked is None or asked.done():
            close_all(fds)
        elif "message" in header:
            close_all(fds)
            asked.set_exception(errors.Unavailable(f"the volume cannot be had: {_error_message(header)}"))
        else:
            asked.set_result(fds)

    async def raw_cost_seconds(self) -> float:
        """The present cost of the bare fork into namespaces, measured by the zygote itself."""
        if self._channel is None:
            raise errors.NurseryFailed("not started")
        self._raw = asyncio.get_running_loop().create_future()
        self._channel.send({"do": "raw"})
        async with asyncio.timeout(SPAWN_SECONDS):
            return await self._raw

    # --- messages of the zygote. It has run a template's code, so it is not trusted either.

    def _on_frame(self, header: Header, _: bytes, fds: list[int]) -> None:
        event, cell = header.get("ev"), header.get("cell")
        self._heard_at = time.monotonic()
        if event == "volume":
            self._on_volume(header, fds)
            return
        if event == "spawned" and isinstance(cell, str) and cell in self._waiting:
            waiting = self._waiting[cell]
            if not waiting.done() and self._is_cell(fds):
                waiting.set_result(fds)
                return
            self._fail_waiting(waiting, "it announced something that is no new cell")
        close_all(fds)
        if event == "ready" and not self._ready.done():
            self._ready.set_result(None)
        elif event == "failed" and not self._ready.done():
            self._ready.set_exception(self._make_failure(_error_message(header)))
        elif event == "spawn_failed" and isinstance(cell, str) and cell in self._waiting:
            self._fail_waiting(self._waiting[cell], _error_message(header))
        elif event == "kernel_exited" and isinstance(cell, str) and cell in self._live:
            self._live[cell].tell({**header, "kernel": "0"})
        elif event == "raw" and self._raw is not None and not self._raw.done():
            seconds = header.get("seconds")
            self._raw.set_result(float(seconds) if isinstance(seconds, (int, float)) else 0.0)

    def _is_cell(self, fds: list[int]) -> bool:
        return len(fds) == 1 and is_init(fds[0], self._pid_namespaces)

    def _on_channel_closed(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(self._make_failure(why))
            self._ready.exception()  # marks it as retrieved; waiting callers get it too
        for waiting in self._waiting.values():
            self._fail_waiting(waiting, why)

    def _fail_waiting(self, waiting: asyncio.Future[list[int]], why: str) -> None:
        if not waiting.done():
            waiting.set_exception(self._make_failure(why))

    def _make_failure(self, why: str) -> errors.NurseryFailed:
        words = self._last_words.text()
        return errors.NurseryFailed(
            f"the nursery of {self.template.ref} failed: {why}" + (f"\n{words}" if words else "")
        )


def start_process(
    order: ZygoteOrder, theirs: socket.socket, group: Group | None, command_tail: list[str]
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


def spec_fields(spec: CellSpec) -> dict[str, Any]:
    inodes = max(spec.space_bytes // (4 * KIB), 1024)
    return {"user": spec.user, "space_bytes": spec.space_bytes, "inodes": inodes, "open_files": spec.open_files}


def _error_message(header: Header) -> str:
    message = header.get("message")
    return message[:2000] if isinstance(message, str) else "it did not say why"


def limit_imports(group: Group) -> None:
    """Limits a nursery before it has made its first cell: importing a package runs its code."""
    group.set_memory(_BASE_BYTES + _CELLS_PER_STEP * _BYTES_PER_CELL)
    group.set_sockets(SOCKET_BYTES)
    group.set_processes(_PROCESSES)


def is_init(fd: int, pid_namespaces: int) -> bool:
    """Whether a descriptor from a zygote is the pidfd of a pid 1 that many namespaces below ours, or of one
    that ended.

    We kill its process. A zygote can have our own pidfd: a socket reveals the process at its other end.
    """
    with open(f"/proc/self/fdinfo/{fd}") as file:
        fields = dict(line.partition(":")[::2] for line in file)
    if "Pid" not in fields or not pid_namespaces:
        return "Pid" in fields
    pids = fields.get("NSpid", "").split()
    return fields["Pid"].strip() == "-1" or (pids[-1:] == ["1"] and len(pids) == _namespace_depth() + pid_namespaces)


@cache
def _namespace_depth() -> int:
    """The number of nested pid namespaces that we are in."""
    with open("/proc/self/status") as file:
        return next(len(line.split()) - 1 for line in file if line.startswith("NSpid:"))
