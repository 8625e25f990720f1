"""Frames over a UNIX socket, and bytes over pipes, on the event loop. The other side is hostile."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cloche import errors
from cloche.guest import wire

Header = dict[str, Any]
OnFrame = Callable[[Header, bytes, list[int]], None]
OnClosed = Callable[[str], None]

READ_BYTES = 256 << 10
FRAMES_PER_TURN = 64
TURN_SECONDS = 0.005
WRITE_HIGH_BYTES = 4 << 20
_SO_PASSRIGHTS = 83  # Linux 6.16


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def clean_text(text: str, limit: int) -> str:
    """`text` from a guest, cut to `limit` characters and without lone surrogates, so that it can be encoded."""
    text = text[:limit]
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def require_protocol(condition: bool, what: str) -> None:
    """Raises WireError with `what`, the rule that a guest broke, unless `condition`."""
    if not condition:
        raise wire.WireError(what)


def join_objects(first: bytes, second: bytes) -> bytes:
    """One JSON object with the members of two. The first is not empty."""
    return first if second == b"{}" else first[:-1] + b"," + second[1:]


def _refuse_descriptors(sock: socket.socket) -> None:
    """Lets the sender fail, where the kernel can; else descriptors are closed as they come."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


class HostChannel:
    """One end of a channel. `on_frame(header, body, fds)` owns the fds; `on_closed(why)` is called once, at the
    end.

    `on_frame` may raise `wire.WireError`: like any malformed frame that closes the channel. So does a descriptor
    where `max_fds` allows none: closing a foreign descriptor can take long, and a program chooses how long. Must
    be made on the running event loop. Owns `sock`.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: OnFrame,
        on_closed: OnClosed,
        *,
        max_body: int = wire.MAX_BODY_FROM_GUEST,
        max_fds: int = wire.MAX_FDS,
    ):
        sock.setblocking(False)
        if max_fds == 0:
            _refuse_descriptors(sock)
        self._max_fds = max_fds
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._decoder = wire.FrameDecoder(max_body, wire.MAX_VALUES_FROM_GUEST)
        self._fds: list[int] = []
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self._drained: list[asyncio.Future[None]] = []
        self._reading = False
        self._behind = False  # frames have come that were not handled yet
        self._turn_is_due = False
        self.closed = False
        self.resume()

    def resume(self) -> None:
        """Reads frames as they come (the state after construction)."""
        if not self.closed and not self._reading:
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
            self._schedule_turn()

    def pause(self) -> None:
        """Leaves frames where they are until `resume` or `pump`."""
        if not self.closed and self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    def pump(self) -> bool:
        """One turn now: some of the frames that are there, without waiting. False once there are none."""
        return not self.closed and self._take_turn()

    def send(self, header: Header, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Sends a frame, now or as soon as the other side reads. Does nothing if closed: `on_closed` was called.

        The caller may close `fds` at once. Raises InvalidRequest, with nothing sent, if the header is too large.
        """
        if self.closed:
            return
        if fds:
            header = {**header, "fds": len(fds)}
        self.send_encoded(wire.encode_json(header), body, fds)

    def send_encoded(self, head: bytes, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """As `send`, with the header as JSON."""
        if self.closed:
            return
        if len(head) > wire.MAX_HEADER:
            raise errors.InvalidRequest(f"a request of {len(head)} bytes is over the limit of {wire.MAX_HEADER}")
        data = memoryview(wire.FRAME_PREFIX.pack(len(head), len(body)) + head + body)
        if not self._unsent:
            sent = self._send_some(data, fds)
            if sent == len(data):
                return
            data, fds = data[sent:], fds if sent == 0 else ()
            if self.closed:
                return
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        self._unsent.append((data, [os.dup(fd) for fd in fds]))
        self._unsent_bytes += len(data)

    @property
    def is_behind(self) -> bool:
        """Whether the other side has left much of the sent data unread."""
        return self._unsent_bytes > WRITE_HIGH_BYTES

    async def drain(self) -> None:
        """Waits while more than a few MiB are unsent, so that a stalled guest stalls its own callers only."""
        while self.is_behind and not self.closed:
            future = self._loop.create_future()
            self._drained.append(future)
            await future

    def close(self, why: str = "closed by us") -> None:
        """Ends the channel and calls `on_closed`. Harmless when closed."""
        if self.closed:
            return
        self.pause()
        if self._unsent:
            self._loop.remove_writer(self._sock.fileno())
        self.closed = True
        self._sock.close()
        close_all(self._fds)
        self._fds.clear()
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()
        self._wake_drained()
        self._on_closed(why)

    def _on_readable(self) -> None:
        if not self._behind:
            self._take_turn()

    def _take_turn(self) -> bool:
        """Handles frames that have come, or reads if there are none. False if nothing was there."""
        try:
            if self._behind:
                self._handle_some()
                return True
            return self._receive_some()
        except wire.WireError as error:
            self.close(f"protocol violation: {error}")
            return False

    def _receive_some(self) -> bool:
        try:
            data, fds = wire.receive_some(self._sock, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.close(f"reading failed: {error}")
            return False
        self._fds += fds
        if len(self._fds) > 4 * self._max_fds:
            raise wire.WireError("descriptors that no frame announces")
        if not data:
            self.close("the other side closed it")
            return False
        self._decoder.feed(data)
        self._handle_some()
        return True

    def _handle_some(self) -> None:
        """The loop is not ours alone: a flood of frames is handled in turns. Nothing is read before all are handled."""
        until = self._loop.time() + TURN_SECONDS
        self._behind = False
        for count, (header, body) in enumerate(self._decoder.frames(), 1):
            self._on_frame(header, body, self._claim_descriptors(header.pop("fds", 0)))
            if self.closed:
                return
            if count == FRAMES_PER_TURN or self._loop.time() > until:
                self._behind = True
                self._schedule_turn()
                return

    def _schedule_turn(self) -> None:
        if self._behind and not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._turn_is_due = False
        if self._reading and self._behind:
            self._take_turn()

    def _claim_descriptors(self, count: object) -> list[int]:
        if type(count) is not int or not 0 <= count <= min(self._max_fds, len(self._fds)):
            raise wire.WireError(f"a frame announces {count!r} descriptors, {len(self._fds)} came")
        claimed, self._fds = self._fds[:count], self._fds[count:]
        return claimed

    def _send_some(self, data: memoryview, fds: Sequence[int]) -> int:
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                return self._sock.sendmsg([data], rights)
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # Not closed here: messages that the peer sent before it closed are still to be read.
            return len(data)

    def _on_writable(self) -> None:
        data, fds = self._unsent.popleft()
        sent = self._send_some(data, fds)
        self._unsent_bytes -= sent
        if sent:
            close_all(fds)
        if sent < len(data):
            self._unsent.appendleft((data[sent:], fds if sent == 0 else ()))
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())
        if self._unsent_bytes <= WRITE_HIGH_BYTES:
            self._wake_drained()

    def _wake_drained(self) -> None:
        waiting, self._drained = self._drained, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


# Ends of pipes and sockets for a guest. The host makes them: a reply needs to carry none.


def make_output_pipe() -> tuple[int, int]:
    """The host's end, and the guest's, which its user may open again by name (`> /dev/stderr`).

    Only programs that may look into a process see its pipes there: the mode admits none but them. Raises Unavailable.
    """
    ours, theirs = _make_ends(lambda: os.pipe2(os.O_CLOEXEC))
    os.fchmod(theirs, 0o666)  # its owner is the host's user, whom a sandbox may not know
    return ours, theirs


def make_input_pipe() -> tuple[int, int]:
    """The same for what the guest reads."""
    theirs, ours = _make_ends(lambda: os.pipe2(os.O_CLOEXEC))
    return ours, theirs


class KernelWires(NamedTuple):
    """Channel, stdout and stderr of a kernel, both ends, and its token."""

    token: str
    ours: tuple[int, int, int]
    theirs: tuple[int, int, int]


def make_kernel_wires() -> KernelWires:
    """The caller closes `theirs` when a kernel has them. Raises Unavailable."""
    made: list[tuple[int, int]] = []
    try:
        made += [make_socket_pair(), make_output_pipe(), make_output_pipe()]
    except errors.Unavailable:
        close_all([fd for ends in made for fd in ends])
        raise
    channel, out, err = made
    return KernelWires(secrets.token_hex(8), (channel[0], out[0], err[0]), (channel[1], out[1], err[1]))


def make_socket_pair() -> tuple[int, int]:
    """The host's end, and the guest's. Raises Unavailable."""

    def make() -> tuple[int, int]:
        ours, theirs = socket.socketpair()
        return ours.detach(), theirs.detach()

    return _make_ends(make)


def _make_ends(make: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    try:
        return make()
    except OSError as error:
        raise errors.Unavailable(f"no pipe could be made for a program: {error.strerror}") from None


# Pipes and terminals of a guest, read and written without ever blocking.

PIPE_READ_BYTES = 64 << 10
MAX_CAPACITY_BYTES = 1 << 20
PIPE_BYTES = 1 << 20


class _ReadBuffer(threading.local):
    """The read buffer of all pipes of a thread: a new one each time would be 64 KiB of zeros to write."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIPE_READ_BYTES))


_read_buffer = _ReadBuffer()


class OutputPipe:
    """Passes the bytes of `fd` to `on_data`; calls `on_end` once when all writers are gone. Owns `fd`.

    `gate`, if given, is called before each read; when it returns False, nothing is read this time.
    """

    def __init__(
        self,
        fd: int,
        on_data: Callable[[bytes], None],
        on_end: Callable[[], None] | None = None,
        gate: Callable[[], bool] | None = None,
    ):
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_data = on_data
        self._on_end = on_end
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._reading = False
        self.closed = False

    def resume(self) -> None:
        if not self.closed and not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def pause(self) -> None:
        if not self.closed and self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def read_now(self) -> int:
        """Reads once, without waiting: the number of bytes, 0 when there is nothing now or ever."""
        if self.closed:
            return 0
        try:
            data = read_available(self._fd)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # EIO: the other side of a PTY was closed
            data = b""
        if data:
            self._on_data(data)
        else:
            self.close()
            if self._on_end is not None:
                self._on_end()
        return len(data)

    @property
    def capacity_bytes(self) -> int:
        """The most bytes that were written before now and are not read yet; later bytes are newer."""
        try:
            return min(fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ), MAX_CAPACITY_BYTES)
        except OSError:  # a terminal, or closed
            return MAX_CAPACITY_BYTES

    def close(self) -> None:
        if self.closed:
            return
        self.pause()
        self.closed = True
        os.close(self._fd)

    def _on_readable(self) -> None:
        if self._gate is None or self._gate():
            self.read_now()


def read_available(fd: int) -> bytes:
    """Up to PIPE_READ_BYTES that are there now; b"" at the end. Raises BlockingIOError if there is nothing.

    Whether `os.read` waits is a property of the open file, which the guest that passed it shares with us and can change
    at any moment; this asks for it call by call. (Terminals, and pipes before Linux 6.4, do not know it.)
    """
    view = _read_buffer.view
    try:
        return bytes(view[: os.preadv(fd, [view], -1, os.RWF_NOWAIT)])
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    return os.read(fd, PIPE_READ_BYTES)


def write_available(fd: int, data: memoryview) -> int:
    """The same for writing: how many bytes were taken. Raises BlockingIOError if there is no room."""
    try:
        return os.pwritev(fd, [data], -1, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    return os.write(fd, data)


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
        """Waits until all is in the pipe. Raises BrokenPipeError when the reader is gone, or after `close`."""
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
        """Callers that wait in `write` get BrokenPipeError."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_writer(self._fd)
            os.close(self._fd)
            self._fd = None
        if self._room is not None:
            _set_done(self._room)

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
        loop.add_writer(fd, _set_done, self._room)
        try:
            await self._room
        finally:
            self._room = None
            if self._fd is not None:
                loop.remove_writer(fd)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
