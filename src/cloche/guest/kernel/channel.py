"""The kernel's end of its channel: frames, the marks that order them among the output, and interrupts.

A process that the user's code forks shares these descriptors until it execs; it must never speak for the
kernel. So they are close-on-exec, are closed in every forked child, and every send checks the process id.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import termios
import threading
from _signal import SIGINT, signal  # type: ignore[import-not-found]  # the enums of `signal` dirty 60 pages of a fork
from _thread import get_ident  # that of `threading` may be replaced by a program
from fcntl import ioctl
from select import POLLIN, POLLOUT, poll  # nor that of `select`, which some programs take away
from typing import Any

from cloche.guest import wire

_NO_BYTES = bytes(4)  # as FIONREAD counts them
WAKE_MILLISECONDS = 200  # Python sees a signal that came just before a blocking call only after it

_open_channels: list = []  # the channel of this process, if it is a kernel


def _close_in_forked_child() -> None:
    while _open_channels:
        _open_channels.pop().abandon()


os.register_at_fork(after_in_child=_close_in_forked_child)


class Interrupts:
    """SIGINT becomes KeyboardInterrupt in the user's code, and only there. All methods are for the main thread.

    Armed for as long as a cell runs. While nothing executes a signal is only remembered, as it may be meant for a cell
    that the kernel has not read yet; while a frame is being written it waits, so that no frame is cut in two.
    """

    def __init__(self) -> None:
        self.armed = False
        self.cancelled = False  # the watched task was cancelled by an interrupt
        self._holds = 0
        self._pending = False
        self._expected = False
        self._early = False
        self._task: Any = None

    def install(self) -> None:
        signal(SIGINT, self._on_signal)

    def expect(self) -> bool:
        """A cell begins: an interrupt from now on is meant for it and waits until it is armed.

        Gives whether one came since the last cell began, which may have been meant for this one: see `recall`.
        """
        self._pending = False
        self._expected = True
        early, self._early = self._early, False
        return early

    def recall(self) -> None:
        """The interrupt that came before the cell was meant for it."""
        self._pending = True

    def arm(self) -> None:
        """Raises the KeyboardInterrupt that came since `expect`."""
        early, self._pending, self._expected = self._pending and self._expected, False, False
        self.armed = True
        if early:
            self._fire()

    def disarm(self) -> None:
        self.armed = False

    def hold(self) -> None:
        self._holds += 1

    def release(self) -> None:
        """Ends a hold. Raises the KeyboardInterrupt that came meanwhile."""
        self._holds -= 1
        if self._pending and self.armed and not self._holds:
            self._pending = False
            self._fire()

    def watch(self, task: Any) -> None:
        """`task` is the loop's task of the cell: cancelled where no user code is on the stack. None: no task."""
        self._task = task
        self.cancelled = False

    def _on_signal(self, _signum: int, _frame: Any) -> None:
        self._early = True
        if not self.armed:
            self._pending = self._expected
            return
        if self._holds:
            self._pending = True
        else:
            self._fire()

    def _fire(self) -> None:
        if not self.armed:
            return
        task, asyncio = self._task, sys.modules.get("asyncio")  # what has no task never imports it
        if asyncio and task is not None and not task.done() and asyncio.current_task(task.get_loop()) is None:
            # The loop sleeps in select: an exception there would tear the loop's own state, cancelling does not.
            self.cancelled = True
            task.get_loop().call_soon_threadsafe(task.cancel)
            return
        raise KeyboardInterrupt


class KernelChannel:
    """Frames to and from the host. Sends may come from any thread; receiving is the main loop's."""

    def __init__(self, channel_fd: int, stdout_fd: int, stderr_fd: int, token: str, interrupts: Interrupts):
        self.pid = os.getpid()
        self._sock = socket.socket(fileno=channel_fd)
        self.pipes = (stdout_fd, stderr_fd)
        for fd in (channel_fd, stdout_fd, stderr_fd):
            os.set_inheritable(fd, False)
        self._token = token
        self._mark = 0
        self._held: list = []
        self.interrupts = interrupts
        self._reader = wire.FrameReader(self._sock)
        self._frames: list = []
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident
        self._sender = 0
        _open_channels.append(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def ours(self) -> bool:
        """False in a process that was forked off the kernel."""
        return os.getpid() == self.pid

    def close(self) -> None:
        _open_channels.remove(self)
        self.abandon()

    def abandon(self) -> None:
        """Closes the descriptors in a forked child, without a word to the host."""
        for fd in (self._sock.detach(), *self.pipes):
            try:
                os.close(fd)
            except OSError:
                pass

    def send(self, header: dict, body: bytes = b"") -> None:
        """Sends one frame that has no place in the order of the output."""
        if self.ours:
            self._run_exclusively(self._send_bytes, wire.encode_frame(header, body))

    def hold(self, header: dict, body: bytes = b"") -> None:
        """Keeps a marked frame back until the next `post`: nothing of the program can come in between."""
        self._held.append((header, body))

    def post(self, header: dict, body: bytes = b"") -> None:
        """Sends the held frames and this marked frame, behind one mark."""
        if not self.ours:
            return
        self._held.append((header, body))
        if self._sender != get_ident():  # else: a flush below called the program, which displays; it goes along
            self._run_exclusively(self._send_held)

    def _run_exclusively(self, step: Any, *given: Any) -> None:
        sender = get_ident()
        main = sender == self._main
        if main:
            self.interrupts.hold()
        try:
            with self._lock:
                self._sender = sender
                try:
                    step(*given)
                finally:
                    self._sender = 0
        finally:
            if main:
                self.interrupts.release()

    def _send_held(self) -> None:
        flush_quietly(sys.stdout)
        flush_quietly(sys.stderr)
        frames, self._held = self._held, []
        if not frames:
            return  # another thread has taken them along
        if frames[-1][0]["ev"] == "ended" and self._is_output_read():
            mark = None
        else:
            mark = self._mark = self._mark + 1
            for pipe in self.pipes:
                _write_mark(pipe, wire.mark_bytes(self._token, mark))
        self._send_bytes(b"".join([wire.encode_frame({**header, "mark": mark}, body) for header, body in frames]))

    def _is_output_read(self) -> bool:
        """Whether the host has all that was written until now, and so before a frame that is sent next."""
        try:
            unread = [ioctl(pipe, termios.FIONREAD, _NO_BYTES) for pipe in self.pipes]
        except OSError:
            return False
        return unread == [_NO_BYTES, _NO_BYTES]

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError:
            os._exit(1)  # the host is gone, or the program closed our descriptor: nobody can be told

    def receive(self) -> tuple | None:
        """The next (header, body) from the host, descriptors as the header's `wires`; None at the end of the stream."""
        while not self._frames:
            try:
                self._poll_incoming().poll()
                if not self._reader.pump():
                    return None
            except (OSError, ValueError, wire.WireError):  # ValueError: it is closed
                return None
            self._frames += self._reader.take()
        header, body, fds = self._frames.pop(0)
        if fds:
            header["wires"] = fds
        return header, body

    @property
    def has_frame(self) -> bool:
        return bool(self._frames)

    def interrupts_run(self, run: Any) -> bool:
        """Whether the host has announced an interrupt of that run in the frames received so far."""
        incoming = self._poll_incoming()
        try:
            while incoming.poll(0) and self._reader.pump():
                self._frames += self._reader.take()
        except (OSError, wire.WireError):
            pass  # who receives next hears of it
        return any(header.get("do") == "interrupt" and header.get("run") == run for header, *_ in self._frames)

    def wait(self) -> None:
        """Blocks until `receive` would not. An interrupt may break it without losing a byte."""
        if not self._frames:
            incoming = self._poll_incoming()
            while not incoming.poll(WAKE_MILLISECONDS):
                continue

    def _poll_incoming(self) -> poll:
        """A poll object for received bytes.

        A wait in recvmsg would also wake when the host reads bytes sent earlier.

        A new one each time: a signal handler of the program may wait on the channel during this wait.
        """
        incoming = poll()
        incoming.register(self._sock, POLLIN)
        return incoming


def flush_quietly(stream: Any) -> None:
    try:
        stream.flush()
    except BaseException:  # noqa: BLE001 - a stream that the program put there may do anything
        pass


def _write_mark(fd: int, data: bytes) -> None:
    while True:
        try:
            os.write(fd, data)  # shorter than PIPE_BUF: all or nothing
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return
            # The program made the pipe non-blocking: its flag is shared with us.
            room = poll()
            room.register(fd, POLLOUT)
            room.poll()
