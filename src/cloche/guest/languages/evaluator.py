"""The kernel of R and of Java: an interpreter with a program of ours in it, and this process, which speaks for it.

The program reads requests from `REQUESTS` and answers them on `REPORTS`, one after the other. What the user's code
writes goes to descriptors 1 and 2, which are the kernel's own, so that it is there while the cell still runs. Messages
are lists of bytes: u32 how many, then of each its u32 length and itself, all big endian.

  request  run, code, directory or "", name, value, ..     of the variables that hold for this cell
           configure, directory or "", name, value, ..
           inspect
           shown                                            after each `display`: its place in the output is kept
           interrupt                                        only where the interpreter hears no signal
  report   begun                                            from now on an interrupt is for this cell
           display, "main" or "", type, content, ..
           ended, "ok" | "raised" | "interrupted", name, value, traceback
           inspected, how many more, then of each variable: name, type, length, dimensions "2,3", preview
           configured

Separate from `languages` so that only such a kernel imports it.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
from collections.abc import Sequence

from cloche.guest import wire
from cloche.guest.kernel.channel import Interrupts, KernelChannel
from cloche.guest.kernel.display_writer import DEFAULT_DISPLAY_BYTES, DisplayWriter
from cloche.guest.kernel.written_files import WrittenFiles
from cloche.guest.languages.interpreter import InterpreterProcess, ignores_interrupts

REQUESTS, REPORTS = 60, 61  # descriptors of the interpreter; low enough for `ulimit -n 64`
_SIZE = struct.Struct(">I")
_READ_BYTES = 1 << 16
_STOPPED = b"interrupted", b"Interrupted", b"the program was interrupted", b"Interrupted: the program was interrupted\n"
_AGAIN_MILLISECONDS = 1


def main(channel_fd: int, stdout_fd: int, stderr_fd: int, token: str, command: Sequence[str], by_signal: bool) -> None:
    """Serves one channel in a fresh fork. Never returns: it ends as the interpreter does."""
    channel = KernelChannel(channel_fd, stdout_fd, stderr_fd, token, Interrupts())
    EvaluatorKernel(channel, EvaluatorProcess(command, by_signal)).serve()
    os._exit(0)


class EvaluatorProcess(InterpreterProcess):
    """An interpreter and the messages to and from it. `by_signal`: whether SIGINT interrupts its cells."""

    def __init__(self, command: Sequence[str], by_signal: bool) -> None:
        requests, self._requests = os.pipe2(os.O_CLOEXEC)
        self._reports, reports = os.pipe2(os.O_CLOEXEC)
        super().__init__(command, {REQUESTS: requests, REPORTS: reports}, subprocess.DEVNULL)
        os.close(requests)
        os.close(reports)
        self._by_signal = by_signal
        self._received = bytearray()
        self.interrupted = self._running = self._undelivered = False

    def send(self, *parts: str | bytes) -> None:
        encoded = [part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape") for part in parts]
        message = b"".join([_SIZE.pack(len(encoded)), *(_SIZE.pack(len(part)) + part for part in encoded)])
        try:
            while message:
                message = message[os.write(self._requests, message) :]
        except BrokenPipeError:
            self.follow()

    def receive(self) -> list:
        """The next report. Does not return if the interpreter ends."""
        (count,) = _SIZE.unpack(self._receive_bytes(_SIZE.size))
        report = [self._receive_bytes(_SIZE.unpack(self._receive_bytes(_SIZE.size))[0]) for _ in range(count)]
        if report[:1] == [b"begun"]:
            self._running = True
            if self.interrupted:
                self._deliver_interrupt()
        elif report[:1] == [b"ended"]:
            self._running = False
        return report

    def _receive_bytes(self, size: int) -> bytes:
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        while len(self._received) < size:
            ready = {fd for fd, _ in poll.poll(_AGAIN_MILLISECONDS if self._undelivered else None)}
            if self._undelivered and not ready:
                self._deliver_interrupt()
            more = os.read(self._reports, _READ_BYTES) if self._reports in ready else b""
            if ready and not more:
                self.follow()
            self._received += more
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def interrupt(self) -> None:
        """Interrupts the cell that runs, or the next one, unless `interrupted` is reset before."""
        self.interrupted = True
        if self._running:
            self._deliver_interrupt()

    def takes_interrupt(self) -> bool:
        """Whether the cell ended before a second interrupt: the first one has ended the program that it waited for."""
        undelivered, self._undelivered = self._undelivered, False
        return undelivered

    def _deliver_interrupt(self) -> None:
        """What ignores SIGINT, as R does while it waits in `system`, gets another as soon as it no longer does."""
        self._undelivered = False
        try:
            if self._by_signal:
                self._undelivered = ignores_interrupts(self.pid)
                os.killpg(self.pid, signal.SIGINT)
            else:
                self.send("interrupt")
        except OSError:
            pass  # it has ended, which `receive` finds out


class EvaluatorKernel:
    def __init__(self, channel: KernelChannel, interpreter: EvaluatorProcess):
        self._channel = channel
        self._interpreter = interpreter
        self._written = WrittenFiles()
        self._screen = DisplayWriter()
        self._count = 0
        signal.signal(signal.SIGINT, lambda *_: interpreter.interrupt())

    def serve(self) -> None:
        self._channel.send({"ev": "ready"})
        while True:
            self._interpreter.await_frame(self._channel)
            frame = self._channel.receive()
            if frame is None:
                return
            header, body = frame
            if header.get("do") == "execute":
                self._execute_cell(header, body)
            elif header.get("do") == "configure":
                self._request("configure", header.get("cwd") or "", *_flatten(header.get("env") or {}))
            elif header.get("do") == "inspect":
                self._channel.send(*_encode_variables(self._request("inspect"), header.get("ask")))

    def _request(self, *parts: str | bytes) -> list:
        self._interpreter.send(*parts)
        return self._interpreter.receive()

    def _execute_cell(self, header: dict, body: bytes) -> None:
        run, interpreter = header["run"], self._interpreter
        self._count += 1
        interpreter.interrupted = False
        self._channel.send({"ev": "started", "run": run, "count": self._count})
        interpreter.set_oom_score(b"1000")
        self._screen.start(self._channel, run, header.get("display_bytes") or DEFAULT_DISPLAY_BYTES)
        self._written.start()
        before = interpreter.cpu_seconds
        interpreter.send("run", body, header.get("cwd") or "", *_flatten(header.get("env") or {}))
        _, outcome, name, value, traceback = self._show_displays()
        if interpreter.takes_interrupt() and outcome == b"ok":
            outcome, name, value, traceback = _STOPPED
        self._screen.stop()
        if outcome != b"ok":
            raised = {"name": _text(name), "value": _text(value)}
            self._channel.post({"ev": "raised", "run": run, **raised}, _text(traceback).encode())
        for info in self._written.changed():
            self._channel.send({"ev": "wrote", "run": run, "file": info})
        used = {"cpu": max(interpreter.cpu_seconds - before, 0.0), "rss": interpreter.peak_bytes}
        interpreter.set_oom_score(b"0")
        self._channel.post({"ev": "ended", "run": run, "outcome": _text(outcome), "exit": None, **used})

    def _show_displays(self) -> list:
        """Shows what the cell displays; returns the report of its end."""
        while True:
            report = self._interpreter.receive()
            if report[0] == b"ended":
                return report
            if report[0] == b"display":
                _, main, *parts = report
                bundle = {
                    _text(mime): _content(_text(mime), part) for mime, part in zip(parts[::2], parts[1::2], strict=True)
                }
                self._screen.show(bundle, main=main == b"main")
                self._interpreter.send("shown")


def _flatten(env: dict) -> list:
    return [each for pair in env.items() for each in pair]


def _text(part: bytes) -> str:
    return part.decode("utf-8", "replace")


def _content(mime: str, part: bytes) -> str | bytes:
    return _text(part) if mime.startswith("text/") or mime.endswith(("json", "xml")) else part


def _encode_variables(report: list, ask: object) -> tuple:
    """The frame that answers an `inspect`: header and body."""
    _, more, *fields = report
    body = [_encode_variable(*map(_text, fields[at : at + 5])) for at in range(0, len(fields), 5)]
    return {"ev": "inspected", "ask": ask, "more": int(more)}, wire.encode_json(body)


def _encode_variable(name: str, kind: str, length: str, dimensions: str, preview: str) -> dict:
    told: dict = {"name": name, "type": kind, "preview": preview}
    if dimensions:
        told["shape"] = [int(each) for each in dimensions.split(",")]
    elif length:
        told["length"] = int(length)
    return told
