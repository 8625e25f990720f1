"""The client of a sandbox's init: requests with answers, and events with subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import struct
import termios
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from cloche import errors
from cloche.engine.executions.clock import ProgramTime
from cloche.engine.executions.streams import Bell, Share, is_readable_pipe, write_available
from cloche.engine.operations.audit import Noted, unnoted
from cloche.guest import wire
from cloche.isolation.base import Cell
from cloche.isolation.channel import Channel, Header, close_all
from cloche.linux import syscalls

T = TypeVar("T")

OnEvent = Callable[[Header], None]

ERRORS: dict[str, type[errors.ClocheError]] = {
    cls.code: cls
    for cls in (
        errors.InvalidRequest,
        errors.InvalidPath,
        errors.FileNotFound,
        errors.ProcessNotFound,
        errors.ContextNotFound,
        errors.PortNotOpen,
        errors.FileError,
        errors.FileExists,
        errors.PermissionDenied,
        errors.IsADirectory,
        errors.NotADirectory,
        errors.NoSpace,
    )
}
SUBJECTS = {
    "kernel_exited": "kernel",
    "over_memory": "kernel",
    "branch_ended": "kernel",
    "process_exited": "process",
    "changes": "watch",
    "image_ended": "image",
}
AT_REST = frozenset({"hold", "release", "image_save", "image_restore", "usage", "kernel_signal", "process_signal"})
MAX_UNCLAIMED = 256
HUNG_SECONDS = (
    120.0  # init answers each request in turn, in a moment, but shares its CPUs with up to 256 busy processes
)
MAX_MESSAGE = 4096
MAX_SEEDS = 8  # of one sandbox, and then
SEED_SECONDS = 60.0  # for each further one


class Reply(NamedTuple):
    """The answer to a request. Whoever asked owns the fds."""

    ok: dict[str, Any]
    body: bytes
    fds: list[int]


class Guest:
    """Speaks to the init of one cell. `on_lost(why)` is called when init is gone, unless `close` was called first."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self.time = ProgramTime()  # stands still while those do that init has started
        self.unread = Share()  # of what its programs have written
        self.on_lost: Callable[[str], None] | None = None
        self.noted: Noted = unnoted  # hears what is done in it, for the audit log
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._waiting: set[asyncio.Future[Any]] = set()
        self._last_id = 0
        self._subscribers: dict[tuple[str, object], OnEvent] = {}
        self._unclaimed: dict[tuple[str, object], Header] = {}
        self._why_closed: str | None = None
        self._shut = False
        self._stirred = Bell()
        self._heard = 0  # frames of init
        self._watch: asyncio.TimerHandle | None = None
        self._error: Callable[[], errors.ClocheError] = self._lost
        self._has_seed = False
        self._seeds = float(MAX_SEEDS)  # that it may have yet
        self._sown_at = self._loop.time()
        self._channel = Channel(cell.socket, self._on_frame, self._on_closed)
        cell.listen(self._on_header)

    @property
    def alive(self) -> bool:
        return not self._channel.closed

    def is_there(self) -> bool:
        """As `alive`, and hears first what the event loop has not come to yet: init may have died long ago."""
        self._channel.pump()
        return self.alive

    async def request(self, verb: str, body: bytes = b"", *, warm: bool = False, **fields: object) -> Reply:
        """Asks init to do `verb`. Raises what init answers (an error of `cloche.errors`), or Gone.

        `warm`: for something that is to find everything imported.
        """
        while self._shut and verb not in AT_REST and not self._channel.closed:
            await self._stirred.heard()
        await self._channel.drain()
        if self._channel.closed:
            raise self._error()
        if warm:
            self.give_seed()
        number = self._send(verb, body, fields)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._pending[number] = future
        if self._watch is None:
            self._watch = self._loop.call_later(HUNG_SECONDS, self._look, self._heard, number)
        try:
            return await future
        except asyncio.CancelledError:
            _disown(future)
            raise
        finally:
            self._pending.pop(number, None)

    async def wait(self, future: asyncio.Future[T]) -> T:
        """Waits for something that depends on init. Raises Gone if the sandbox ends first."""
        if self._channel.closed:
            raise self._error()
        self._waiting.add(future)
        try:
            return await future
        finally:
            self._waiting.discard(future)

    def shut(self) -> None:
        """From now on what is asked for waits, but for what a sandbox that stands still can do: nothing new starts."""
        self._shut = True

    def open(self) -> None:
        """Undoes `shut`."""
        self._shut = False
        self._stirred.ring()

    def tell(self, verb: str, **fields: object) -> None:
        """A request whose answer nobody waits for."""
        self._send(verb, b"", fields)

    def give_seed(self) -> None:
        """Before something is asked for that is to find everything imported: init can fork it then. See `guest.seed`.

        There may be none: what is asked for starts an interpreter of its own then, and needs longer.
        """
        if not self._has_seed and self._may_sow():
            self._sow()

    def _sow(self) -> None:
        self._has_seed = True
        try:
            sown = self.cell.make_seed()
        except OSError:  # too many files are open
            sown = None
        if sown is not None:
            with sown:
                self._channel.send({"do": "seed"}, fds=(sown.fileno(),))

    def _may_sow(self) -> bool:
        """A program of root's could kill seeds as fast as they come."""
        now = self._loop.time()
        self._seeds = min(self._seeds + (now - self._sown_at) / SEED_SECONDS, MAX_SEEDS)
        self._sown_at = now
        if self._seeds < 1:
            return False
        self._seeds -= 1
        return True

    def _on_seed(self, wanted: bool) -> None:
        """Init has lost its seed, or wants one for a program that has asked for it, and is told if there is none."""
        self._has_seed = False
        if not wanted:
            return
        if self._channel.behind:
            raise wire.WireError("it asks for seeds and does not read")
        if self._shut or not self._may_sow():
            self._channel.send({"do": "seed"})
        else:
            self._sow()

    def subscribe(self, event: str, subject: object, on_event: OnEvent) -> None:
        """Calls `on_event(header)` for each such event about that subject, also for one that came a moment before."""
        self._subscribers[event, subject] = on_event
        early = self._unclaimed.pop((event, subject), None)
        if early is not None:
            on_event(early)

    def unsubscribe(self, event: str, subject: object) -> None:
        self._subscribers.pop((event, subject), None)

    def subscribers(self, event: str) -> int:
        """How many subscriptions there are to such events, about whatever."""
        return sum(1 for each, _subject in self._subscribers if each == event)

    def close(self, error: Callable[[], errors.ClocheError] | None = None) -> None:
        """Stops speaking. Requests, pending and later ones, fail with what `error` makes; without it SandboxLost."""
        self.on_lost = None
        self._error = error or self._error
        self._channel.close("the sandbox has ended")
        # Whoever listened is let go at once, with what they keep, and not when the garbage collector comes by.
        self._subscribers.clear()
        self._unclaimed.clear()
        self.cell.listen(_ignore)

    def _send(self, verb: str, body: bytes, fields: dict[str, object]) -> int:
        self._last_id += 1
        self._channel.send({"id": self._last_id, "do": verb, **fields}, body)
        return self._last_id

    def _look(self, heard: int, number: int) -> None:
        """Whether init answers. One that has said nothing for so long, and owes an answer, is as good as dead."""
        self._watch = None
        if self._channel.closed or not self._pending:
            return
        if heard == self._heard and number in self._pending:
            self._channel.close(f"it has not answered for {HUNG_SECONDS:.0f} s")
            return
        self._watch = self._loop.call_later(HUNG_SECONDS, self._look, self._heard, next(iter(self._pending)))

    def _on_frame(self, header: Header, body: bytes, fds: list[int]) -> None:
        self._heard += 1
        if "id" in header:
            self._on_reply(header, body, fds)
            return
        close_all(fds)
        self._on_header(header)

    def _on_header(self, header: Header) -> None:
        event = header.get("ev")
        if event == "fatal":
            self._channel.close(clean(str(header.get("message")), MAX_MESSAGE))
            return
        if event in ("seed_wanted", "seed_lost"):
            self._on_seed(event == "seed_wanted")
            return
        subject = header.get(SUBJECTS.get(event, "")) if isinstance(event, str) else None
        if isinstance(event, str) and isinstance(subject, (str, int)):
            self._on_event(event, subject, header)

    def _on_event(self, event: str, subject: object, header: Header) -> None:
        subscriber = self._subscribers.get((event, subject))
        if subscriber is not None:
            subscriber(header)
        else:
            self._unclaimed[event, subject] = header
            if len(self._unclaimed) > MAX_UNCLAIMED:  # the oldest is of something that nobody will ask for
                del self._unclaimed[next(iter(self._unclaimed))]

    def _on_reply(self, header: Header, body: bytes, fds: list[int]) -> None:
        number = header["id"]
        future = self._pending.pop(number, None) if type(number) is int else None
        if future is None or future.done():
            close_all(fds)  # nobody waits for it any more
            return
        try:
            future.set_result(Reply(_ok(header), body, fds))
        except errors.ClocheError as error:
            close_all(fds)
            future.set_exception(error)

    def _on_closed(self, why: str) -> None:
        self._why_closed = why
        if self._watch is not None:
            self._watch.cancel()
        self._stirred.ring()
        pending, self._pending = self._pending, {}
        for future in (*pending.values(), *self._waiting):
            if not future.done():
                future.set_exception(self._error())
        if self.on_lost is not None:
            self.on_lost(why)

    def _lost(self) -> errors.SandboxLost:
        return errors.SandboxLost(f"the sandbox has gone: its init does not answer ({self._why_closed})")


def _ignore(_header: Header) -> None:
    """Nobody is left to hear it."""


def error_of(described: object) -> errors.ClocheError:
    """The error that an `err` object of init describes."""
    if not isinstance(described, dict):
        return errors.ProtocolViolation("the guest's init sent an error that is not an object")
    code, message = described.get("code"), described.get("message")
    if not isinstance(code, str) or code not in ERRORS or not isinstance(message, str):
        return errors.ProtocolViolation("the guest's init sent an error of a kind that does not exist")
    return ERRORS[code](clean(message, MAX_MESSAGE))


def clean(text: str, limit: int) -> str:
    """`text` from a guest, cut to `limit` characters and without lone surrogates, so that it can be encoded."""
    text = text[:limit]
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def _disown(answered: asyncio.Future[Reply]) -> None:
    """Whoever asked was cancelled, perhaps between the answer's coming and the moment to take it."""
    if answered.done() and not answered.cancelled() and answered.exception() is None:
        close_all(answered.result().fds)


def _ok(header: Header) -> dict[str, Any]:
    if "err" in header:
        raise error_of(header["err"])
    ok = header.get("ok")
    if not isinstance(ok, dict):
        raise errors.ProtocolViolation("the guest's init sent an answer without a result")
    return ok


def expect(condition: bool, what: str) -> None:
    """Raises WireError: a guest broke the rule `what`."""
    if not condition:
        raise wire.WireError(what)


# Descriptors that a guest passed: what they really are, and reading and writing them without blocking the loop.

CHUNK_BYTES = 1 << 20
PIPE_BYTES = 1 << 20

# File systems whose "regular files" are doors into a kernel or into somebody's daemon.
REFUSED_TYPES = frozenset(
    {
        0x9FA0,  # proc
        0x62656572,  # sysfs
        0x64626720,  # debugfs
        0x74726163,  # tracefs
        0x27E0EB,  # cgroup
        0x63677270,  # cgroup2
        0x65735546,  # fuse: a read may never return
        0x19800202,  # mqueue
    }
)


def only_fd(reply: Reply) -> int:
    """The one descriptor of a reply. Raises ProtocolViolation."""
    if len(reply.fds) != 1:
        close_all(reply.fds)
        raise errors.ProtocolViolation("the guest's init did not pass the one descriptor that was asked for")
    return reply.fds[0]


def check_regular(fd: int) -> os.stat_result:
    """What a passed file is. Raises PermissionDenied unless it is a regular file that can be read like one."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or syscalls.filesystem_type(fd) in REFUSED_TYPES:
        raise errors.PermissionDenied("only regular files can be read; this one is a door to something else")
    return status


def is_kernel(reply: Reply) -> bool:
    """Whether what init passed is what the host needs of a kernel."""
    token = reply.ok.get("token")
    if len(reply.fds) != 3 or not isinstance(token, str) or len(token) != 16 or not token.isascii():
        return False
    return _is_unix_stream(reply.fds[0]) and all(is_readable_pipe(fd) for fd in reply.fds[1:])


def _is_unix_stream(fd: int) -> bool:
    try:
        probe = socket.socket(fileno=fd)
    except OSError:
        return False
    try:
        return probe.family == socket.AF_UNIX and probe.type == socket.SOCK_STREAM
    finally:
        probe.detach()


def read_whole(fd: int, size: int) -> bytes:
    """The first `size` bytes, fewer at the end of the file. Blocking: for a thread.

    A regular file gives all at once, so that the content is in memory once only.
    """
    content = os.pread(fd, size, 0)
    while len(content) < size and (rest := os.pread(fd, size - len(content), len(content))):
        content += rest
    return content


class PipeWriter:
    """Writes to a pipe or terminal that a guest reads, on the event loop. Owns `fd`."""

    def __init__(self, fd: int):
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._room: asyncio.Future[None] | None = None  # done when there is room to write, or nothing to write to
        self._turn = asyncio.Lock()
        with contextlib.suppress(OSError):  # EPERM: this user has too many large pipes; small ones work
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    async def write(self, data: bytes) -> None:
        """Waits until all is in the pipe. Raises BrokenPipeError when nobody reads, or after `close`."""
        async with self._turn:
            rest = memoryview(data)
            while rest:
                rest = rest[await self._write_some(rest) :]

    def resize(self, rows: int, columns: int) -> None:
        """Gives a terminal that size. Raises OSError if it is none, or after `close`."""
        if self._fd is None:
            raise BrokenPipeError("closed")
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def closed(self) -> bool:
        return self._fd is None

    def close(self) -> None:
        """Whoever waits in `write` is told."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_writer(self._fd)
            os.close(self._fd)
            self._fd = None
        if self._room is not None:
            _set(self._room)

    async def _write_some(self, data: memoryview) -> int:
        if self._fd is None:
            raise BrokenPipeError("closed")
        try:
            return write_available(self._fd, data)
        except (BlockingIOError, InterruptedError):
            await self._wait_for_room(self._fd)
            return 0

    async def _wait_for_room(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        self._room = loop.create_future()
        loop.add_writer(fd, _set, self._room)
        try:
            await self._room
        finally:
            self._room = None
            if self._fd is not None:
                loop.remove_writer(fd)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
