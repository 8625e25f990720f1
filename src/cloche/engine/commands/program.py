"""One program in a sandbox: start, stdin, signals and end. Subclasses handle its output."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from cloche import errors
from cloche.engine.executions import kernel
from cloche.engine.executions.kernel import OUTPUT_STREAMS
from cloche.engine.executions.program_limits import FreezeCallback, PausableTimer
from cloche.engine.sandboxes.init_client import InitClient, InitReply
from cloche.events import Exited
from cloche.isolation.channel import Header, OutputPipe, PipeWriter, close_all, make_input_pipe, make_output_pipe
from cloche.model import Outcome, Stream, Struct, Usage, check_terminal_size

KILL_SECONDS = 10.0
PAUSED_NOTICE = "; its sandbox is paused: it ends when that goes on"


class PythonScript(Struct):
    """A Python program that runs as `python3 NAME ARGV...` would if `source` were in that file.

    `awaits` allows await outside of functions. `tools` is an offer of tools: its functions are among the
    globals.
    """

    source: str
    name: str = "main.py"
    argv: tuple[str, ...] = ()
    awaits: bool = False
    tools: dict[str, Any] | None = None

    def header(self) -> dict[str, Any]:
        """All but the source, for init."""
        return {"name": self.name, "argv": list(self.argv), "awaits": self.awaits, "tools": self.tools}


class ProgramSpec(Struct):
    """The program to start. Exactly one of `command` (for the shell), `argv` and `script`."""

    user: str
    cwd: str
    command: str | None = None
    argv: tuple[str, ...] | None = None
    script: PythonScript | None = None
    env: dict[str, str] = {}
    stdin: bool = False
    pty: tuple[int, int] | None = None  # rows, columns
    make_cwd: bool = True  # else a working directory that is not there is an error


class SandboxProgram:
    """Calls `on_end(program)` once, after the end. Subclasses take the output, and decide when to pause."""

    def __init__(
        self, guest: InitClient, id: str, *, oom_kills: Callable[[], int], on_end: Callable[[SandboxProgram], None]
    ):
        self.id = id
        self.pid = 0
        self.exited: Exited | None = None
        self.usage = Usage()  # of the program and those that it waited for; known at its end
        self._guest = guest
        self._oom_kills = oom_kills
        self._oom_kills_before = oom_kills()
        self._on_end = on_end
        self._pipes: list[OutputPipe] = []
        self._stdin: PipeWriter | None = None
        self._has_terminal = False
        self._is_paused = False
        self._clock: PausableTimer | None = None
        self._last_resort: PausableTimer | None = None
        self._standstill: FreezeCallback | None = None
        self._ending: tuple[Outcome, str] | None = None

    async def start(self, ask: ProgramSpec, timeout_seconds: float | None) -> None:
        """Raises the error that init answers."""
        try:
            warm = ask.script is not None
            order = {"body": _request_body(ask), "warm": warm, "process": self.id, **_request_fields(ask)}
            if ask.pty:
                reply, terminal = await self._guest.request_descriptor("process_start", **order)
                self._take_terminal(terminal)
            else:
                reply = await self._guest.request("process_start", wires=self._make_pipes(ask), **order)
            self._take_reply(reply)
        except BaseException:
            self._close_pipes()
            # A caller that is cancelled here does not know whether init has started it already.
            self._send_signal(signal.SIGKILL)
            raise
        if timeout_seconds is not None:
            self._clock = PausableTimer(timeout_seconds, partial(self._on_timeout, timeout_seconds), self._guest.time)
        # Last: its end may be known already, and is then reported at once.
        self._guest.subscribe("process_exited", self.id, self._on_exited)

    # -- control

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signals the process with everything in its session."""
        if self.exited is None:
            if number == signal.SIGKILL and self._ending is None:
                self._ending = ("interrupted", "killed by its caller")
                self._arm_last_resort()
            self._send_signal(number)

    async def send_stdin(self, data: bytes) -> None:
        """Raises InvalidRequest if the process has no stdin or has closed it."""
        if self._stdin is None or self._stdin.closed:
            raise errors.InvalidRequest(f"process {self.id} has no stdin, or it was closed")
        try:
            await self._stdin.write(data)
        except OSError:
            raise errors.InvalidRequest(f"process {self.id} does not read its stdin any more") from None

    def close_stdin(self) -> None:
        """The end of its input; a terminal gets Ctrl-D from its user instead."""
        if self._stdin is not None and not self._has_terminal:
            self._stdin.close()

    def resize(self, rows: int, columns: int) -> None:
        """Raises InvalidRequest if it is no terminal or the size is invalid."""
        if self._stdin is None or not self._has_terminal:
            raise errors.InvalidRequest(f"process {self.id} has no terminal")
        check_terminal_size((rows, columns))
        try:
            if self._guest.cell.passes_descriptors or self._stdin.closed:
                self._stdin.resize(rows, columns)
            else:
                self._guest.tell("terminal_resize", process=self.id, rows=rows, columns=columns)
        except OSError:
            raise errors.InvalidRequest(f"process {self.id} has closed its terminal") from None

    # -- as the runner of a program that calls tools: see `cloche.engine.executions.tools`

    def hold_clock(self) -> None:
        """Stops its time limit until `release_clock` was called as often."""
        if self._clock is not None:
            self._clock.hold()

    def release_clock(self) -> None:
        if self._clock is not None:
            self._clock.go_on()

    async def is_active(self) -> bool:
        """Whether anything in its session runs just now, and does not wait. Raises Gone."""
        return (await self._guest.request("stirring", process=self.id)).ok.get("stirring") is True

    def catch_up(self) -> None:
        """Reads its output so far, unless its reader is slow and makes it wait."""
        if not self._is_paused:
            self._drain_pipes()

    # -- the life of it

    def finish(self, exited: Exited) -> None:
        """Reports the end. Only the first call counts."""
        if self.exited is not None:
            return
        self.exited = exited
        for each in (self._clock, self._last_resort, self._standstill):
            if each is not None:
                each.stop()
        self._guest.unsubscribe("process_exited", self.id)
        self._drain_pipes()
        self._close_pipes()
        self._on_exit(exited)
        self._on_end(self)

    def _on_output(self, stream: Stream, data: bytes) -> None:
        """Takes output."""
        raise NotImplementedError

    def _on_exit(self, exited: Exited) -> None:
        """Takes the end, after all output."""
        raise NotImplementedError

    def _make_pipes(self, ask: ProgramSpec) -> list[int]:
        """Makes its pipes, and returns the guest's ends."""
        theirs: list[int] = []
        try:
            for stream in OUTPUT_STREAMS:
                ours, end = make_output_pipe()
                theirs.append(end)
                self._pipes.append(OutputPipe(ours, partial(self._on_output, stream)))
            if ask.stdin:
                ours, end = make_input_pipe()
                theirs.append(end)
                self._stdin = PipeWriter(ours)
        except BaseException:
            close_all(theirs)
            raise
        return theirs

    def _take_reply(self, reply: InitReply) -> None:
        if self.exited is not None:
            raise errors.SandboxLost("the sandbox ended while a process was being started in it")
        pid = reply.ok.get("pid")
        self.pid = pid if type(pid) is int and 0 < pid < 1 << 32 else 0
        self._begin_reading()

    def _take_terminal(self, terminal: int) -> None:
        if self._guest.cell.passes_descriptors and not os.isatty(terminal):
            os.close(terminal)
            raise errors.ProtocolViolation("the guest's init did not pass the terminal of a process")
        self._has_terminal = True
        self._pipes = [OutputPipe(terminal, partial(self._on_output, "stdout"))]
        self._stdin = PipeWriter(os.dup(terminal))

    def _begin_reading(self) -> None:
        """Starts reading its pipes."""
        self._resume_pipes()

    def _pause_pipes(self) -> None:
        self._is_paused = True
        for pipe in self._pipes:
            pipe.pause()

    def _resume_pipes(self) -> None:
        self._is_paused = False
        for pipe in self._pipes:
            pipe.resume()

    def _on_exited(self, header: Header) -> None:
        status = header.get("status")
        code = os.waitstatus_to_exitcode(status) if type(status) is int and 0 <= status < 1 << 16 else 0
        outcome, reason = self._ending or self._exit_outcome(code)
        self.usage = _parse_usage(header)
        number = -code if code < 0 else None
        self.finish(Exited(exit_code=128 - code if number else code, outcome=outcome, reason=reason, signal=number))

    def _exit_outcome(self, code: int) -> tuple[Outcome, str | None]:
        if code >= 0:
            return "ok", None
        if code == -signal.SIGKILL and self._oom_kills() > self._oom_kills_before:
            return "out_of_memory", "the sandbox ran out of memory"
        return "died", f"killed by signal {-code}"

    def _on_timeout(self, seconds: float) -> None:
        self._ending = ("timed_out", f"the time limit of {seconds:g} s was reached")
        self._arm_last_resort()
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: int) -> None:
        still = self._guest.time.is_frozen
        self._guest.tell("process_signal", process=self.id, signal=int(number), brief=still)

    def _arm_last_resort(self) -> None:
        """Guarantees an end to waiting callers even if init does nothing; in a frozen sandbox at once."""
        for each in (self._clock, self._last_resort, self._standstill):
            if each is not None:
                each.stop()
        self._last_resort = PausableTimer(KILL_SECONDS, self._presume_killed, self._guest.time)
        self._standstill = FreezeCallback(partial(self._presume_killed, PAUSED_NOTICE), self._guest.time)

    def _presume_killed(self, why: str = "") -> None:
        outcome, reason = self._ending or ("died", "it could not be killed")
        reason += why
        self.finish(Exited(exit_code=128 + signal.SIGKILL, outcome=outcome, reason=reason, signal=signal.SIGKILL))

    def _drain_pipes(self) -> None:
        # Its children may hold the pipes open: the data of now is read, the rest is theirs.
        for pipe in self._pipes:
            room = pipe.capacity_bytes
            while room > 0 and (got := pipe.read_now()):
                room -= got

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []  # they refer to us: else only the garbage collector would release the unread data
        if self._stdin is not None:
            self._stdin.close()


def _parse_usage(header: Header) -> Usage:
    cpu_seconds, peak_bytes = kernel.number_field(header, "cpu"), kernel.number_field(header, "rss")
    return Usage(cpu_seconds=cpu_seconds, memory_peak_bytes=int(peak_bytes))


def _request_body(ask: ProgramSpec) -> bytes:
    return ask.script.source.encode("utf-8", "surrogatepass") if ask.script else b""


def _request_fields(ask: ProgramSpec) -> dict[str, Any]:
    what: dict[str, Any] = {"argv": list(ask.argv)} if ask.argv else {"command": ask.command}
    if ask.script is not None:
        what = {"script": ask.script.header()}
    how = {"user": ask.user, "env": ask.env, "cwd": ask.cwd, "stdin": ask.stdin, "pty": ask.pty}
    return {**what, **how, "make_cwd": ask.make_cwd}
