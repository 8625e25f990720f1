"""The client of a sandbox's init: requests with answers, and events with subscribers."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from cloche import errors
from cloche.engine.executions.program_limits import ProgramTime
from cloche.engine.operations.audit import ActionRecorder, ignore_action
from cloche.events import QueueBudget, Signal
from cloche.guest import wire
from cloche.isolation.base import SandboxCell
from cloche.isolation.channel import Header, HostChannel, clean_text, close_all, make_socket_pair
from cloche.linux import syscalls

T = TypeVar("T")

OnEvent = Callable[[Header], None]

ERRORS_BY_CODE: dict[str, type[errors.ClocheError]] = {
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
EVENT_SUBJECTS = {
    "kernel_exited": "kernel",
    "over_memory": "kernel",
    "branch_ended": "kernel",
    "process_exited": "process",
    "changes": "watch",
    "image_ended": "image",
}
ALLOWED_WHILE_FROZEN = frozenset(
    {"hold", "release", "image_save", "image_restore", "usage", "kernel_signal", "process_signal"}
)
MAX_UNCLAIMED_EVENTS = 256
HUNG_SECONDS = (
    120.0  # init answers each request in turn, in a moment, but shares its CPUs with up to 256 busy processes
)
MAX_MESSAGE = 4096
MAX_FORK_SERVERS = 8  # of one sandbox, and then
FORK_SERVER_SECONDS = 60.0  # for each further one


class InitReply(NamedTuple):
    """The answer to a request. The caller owns the fds."""

    ok: dict[str, Any]
    body: bytes
    fds: list[int]


class InitClient:
    """Talks to the init of one cell. Calls `on_lost(why)` when init is gone, unless `close` was called first."""

    def __init__(self, cell: SandboxCell):
        self.cell = cell
        self.alive = True  # until the channel is closed, by either side
        self.time = ProgramTime()  # stands still while those do that init has started
        self.unread = QueueBudget()  # of its programs' output
        self.on_lost: Callable[[str], None] | None = None
        self.noted: ActionRecorder = ignore_action  # receives the actions in the sandbox, for the audit log
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[InitReply]] = {}
        self._waiting: set[asyncio.Future[Any]] = set()
        self._last_id = 0
        self._subscribers: dict[tuple[str, object], OnEvent] = {}
        self._unclaimed: dict[tuple[str, object], Header] = {}
        self._why_closed: str | None = None
        self._shut = False
        self._stirred = Signal()
        self._heard = 0  # frames of init
        self._watch: asyncio.TimerHandle | None = None
        self._error: Callable[[], errors.ClocheError] = self._lost_error
        self._has_seed = False
        self._seeds = float(MAX_FORK_SERVERS)  # that it may have yet
        self._sown_at = self._loop.time()
        self._channel = HostChannel(cell.socket, self._on_frame, self._on_closed)
        cell.listen(self._on_header)

    def is_there(self) -> bool:
        """As `alive`, after reading all frames that the event loop has not read yet: init may have died long ago."""
        self._channel.pump()
        return self.alive

    async def request(
        self, verb: str, body: bytes = b"", *, warm: bool = False, wires: Sequence[int] = (), **fields: object
    ) -> InitReply:
        """Asks init to do `verb`. Raises the error that init answers (one of `cloche.errors`), or Gone.

        `warm`: the new process needs all its imports done. `wires`: ends of pipes and sockets for the guest; they
        are closed here, whatever comes of it.
        """
        try:
            future, number = await self._begin_request(verb, body, warm, wires, fields)
        finally:
            close_all(wires)
        try:
            return await future
        except asyncio.CancelledError:
            _close_unclaimed_fds(future)
            raise
        finally:
            self._pending.pop(number, None)

    async def request_descriptor(self, verb: str, **how: Any) -> tuple[InitReply, int]:
        """As `request`, for what exists inside only: with its descriptor, or one of a socket that relays it.

        The caller owns it. Raises ProtocolViolation too.
        """
        if self.cell.passes_descriptors:
            reply = await self.request(verb, **how)
            return reply, take_only_fd(reply)
        ours, theirs = make_socket_pair()
        try:
            return await self.request(verb, wires=(theirs,), relay=True, **how), ours
        except BaseException:
            os.close(ours)
            raise

    async def _begin_request(
        self, verb: str, body: bytes, warm: bool, wires: Sequence[int], fields: dict[str, object]
    ) -> tuple[asyncio.Future[InitReply], int]:
        while self._shut and verb not in ALLOWED_WHILE_FROZEN and not self._channel.closed:
            await self._stirred.wait()
        await self._channel.drain()
        if self._channel.closed:
            raise self._error()
        if warm:
            self.provide_fork_server()
        number = self._send_request(verb, body, fields, wires)
        future: asyncio.Future[InitReply] = self._loop.create_future()
        self._pending[number] = future
        if self._watch is None:
            self._watch = self._loop.call_later(HUNG_SECONDS, self._check_hung, self._heard, number)
        return future, number

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
        """From now on requests wait, except those that work in a frozen sandbox: nothing new starts."""
        self._shut = True

    def open(self) -> None:
        """Undoes `shut`."""
        self._shut = False
        self._stirred.wake_all()

    def tell(self, verb: str, **fields: object) -> None:
        """Sends a request and does not wait for its answer."""
        self._send_request(verb, b"", fields)

    def provide_fork_server(self) -> None:
        """Gives init a fork server, so that the next process starts with all imports done.

        There may be none: the process then starts an interpreter of its own, and needs longer. See
        `guest.zygote.fork_server`.
        """
        if not self._has_seed and self._may_start_fork_server():
            self._start_fork_server()

    def _start_fork_server(self) -> None:
        self._has_seed = True
        try:
            sown = self.cell.make_fork_server()
        except OSError:  # too many files are open
            sown = None
        if sown is None:
            self._channel.send({"do": "seed"})
        else:
            with sown:
                self._channel.send({"do": "seed"}, fds=(sown.fileno(),))

    def _may_start_fork_server(self) -> bool:
        """Limits the rate: a program of root's could kill fork servers as fast as they come."""
        now = self._loop.time()
        self._seeds = min(self._seeds + (now - self._sown_at) / FORK_SERVER_SECONDS, MAX_FORK_SERVERS)
        self._sown_at = now
        if self._seeds < 1:
            return False
        self._seeds -= 1
        return True

    def _on_fork_server_event(self, wanted: bool) -> None:
        """Init has lost its fork server, or wants one for a program's request; it is told if there is none."""
        self._has_seed = False
        if not wanted:
            return
        if self._channel.is_behind:
            raise wire.WireError("it asks for seeds and does not read")
        if self._shut or not self._may_start_fork_server():
            self._channel.send({"do": "seed"})
        else:
            self._start_fork_server()

    def subscribe(self, event: str, subject: object, on_event: OnEvent) -> None:
        """Calls `on_event(header)` for each such event about that subject, also for one that came a moment before."""
        self._subscribers[event, subject] = on_event
        early = self._unclaimed.pop((event, subject), None)
        if early is not None:
            on_event(early)

    def unsubscribe(self, event: str, subject: object) -> None:
        self._subscribers.pop((event, subject), None)

    def count_subscribers(self, event: str) -> int:
        """The number of subscriptions to such events, of all subjects."""
        return sum(1 for each, _subject in self._subscribers if each == event)

    def close(self, error: Callable[[], errors.ClocheError] | None = None) -> None:
        """Closes the channel. Pending and later requests fail with the error of `error`; without it SandboxLost."""
        self.on_lost = None
        self._error = error or self._error
        self._channel.close("the sandbox has ended")
        # Listeners are released at once, with all that they hold, not when the garbage collector runs.
        self._subscribers.clear()
        self._unclaimed.clear()
        self.cell.listen(_ignore_header)

    def _send_request(self, verb: str, body: bytes, fields: dict[str, object], wires: Sequence[int] = ()) -> int:
        self._last_id += 1
        self._channel.send({"id": self._last_id, "do": verb, **fields}, body, wires)
        return self._last_id

    def _check_hung(self, heard: int, number: int) -> None:
        """Closes the channel if init owes an answer and has sent nothing for HUNG_SECONDS: it counts as dead."""
        self._watch = None
        if self._channel.closed or not self._pending:
            return
        if heard == self._heard and number in self._pending:
            self._channel.close(f"it has not answered for {HUNG_SECONDS:.0f} s")
            return
        self._watch = self._loop.call_later(HUNG_SECONDS, self._check_hung, self._heard, next(iter(self._pending)))

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
            self._channel.close(clean_text(str(header.get("message")), MAX_MESSAGE))
            return
        if event in ("seed_wanted", "seed_lost"):
            self._on_fork_server_event(event == "seed_wanted")
            return
        subject = header.get(EVENT_SUBJECTS.get(event, "")) if isinstance(event, str) else None
        if isinstance(event, str) and isinstance(subject, (str, int)):
            self._on_event(event, subject, header)

    def _on_event(self, event: str, subject: object, header: Header) -> None:
        subscriber = self._subscribers.get((event, subject))
        if subscriber is not None:
            subscriber(header)
        else:
            self._unclaimed[event, subject] = header
            if len(self._unclaimed) > MAX_UNCLAIMED_EVENTS:  # the oldest has no caller any more
                del self._unclaimed[next(iter(self._unclaimed))]

    def _on_reply(self, header: Header, body: bytes, fds: list[int]) -> None:
        number = header["id"]
        future = self._pending.pop(number, None) if type(number) is int else None
        if future is None or future.done():
            close_all(fds)  # no caller waits for it any more
            return
        try:
            future.set_result(InitReply(_reply_fields(header), body, fds))
        except errors.ClocheError as error:
            close_all(fds)
            future.set_exception(error)

    def _on_closed(self, why: str) -> None:
        self.alive = False
        self._why_closed = why
        if self._watch is not None:
            self._watch.cancel()
        self._stirred.wake_all()
        pending, self._pending = self._pending, {}
        for future in (*pending.values(), *self._waiting):
            if not future.done():
                future.set_exception(self._error())
        if self.on_lost is not None:
            self.on_lost(why)

    def _lost_error(self) -> errors.SandboxLost:
        return errors.SandboxLost(f"the sandbox has gone: its init does not answer ({self._why_closed})")


def _ignore_header(_header: Header) -> None:
    """The listener of a closed client."""


def error_from_init(described: object) -> errors.ClocheError:
    """The error that an `err` object of init describes."""
    if not isinstance(described, dict):
        return errors.ProtocolViolation("the guest's init sent an error that is not an object")
    code, message = described.get("code"), described.get("message")
    if not isinstance(code, str) or code not in ERRORS_BY_CODE or not isinstance(message, str):
        return errors.ProtocolViolation("the guest's init sent an error of a kind that does not exist")
    return ERRORS_BY_CODE[code](clean_text(message, MAX_MESSAGE))


def _close_unclaimed_fds(answered: asyncio.Future[InitReply]) -> None:
    """Closes the fds of an answer that came as its caller was cancelled."""
    if answered.done() and not answered.cancelled() and answered.exception() is None:
        close_all(answered.result().fds)


def _reply_fields(header: Header) -> dict[str, Any]:
    if "err" in header:
        raise error_from_init(header["err"])
    ok = header.get("ok")
    if not isinstance(ok, dict):
        raise errors.ProtocolViolation("the guest's init sent an answer without a result")
    return ok


# Descriptors that a guest passed: checking their kind, and reading files.

CHUNK_BYTES = 1 << 20

# File systems with "regular files" that are doors into a kernel or a daemon.
REFUSED_FILESYSTEMS = frozenset(
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


def take_only_fd(reply: InitReply) -> int:
    """The one descriptor of a reply. Raises ProtocolViolation."""
    if len(reply.fds) != 1:
        close_all(reply.fds)
        raise errors.ProtocolViolation("the guest's init did not pass the one descriptor that was asked for")
    return reply.fds[0]


def check_regular_file(fd: int) -> os.stat_result:
    """The status of a passed file. Raises PermissionDenied unless it is a regular file that reads like one."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or syscalls.filesystem_type(fd) in REFUSED_FILESYSTEMS:
        raise errors.PermissionDenied("only regular files can be read; this one is a door to something else")
    return status


def read_whole_file(fd: int, size: int) -> bytes:
    """The first `size` bytes, fewer at the end of the file. Blocking: for a thread.

    A regular file gives all at once, so that the content is in memory once only.
    """
    content = os.pread(fd, size, 0)
    while len(content) < size and (rest := os.pread(fd, size - len(content), len(content))):
        content += rest
    return content
