"""One run of a piece of code: a single-use stream of events that always ends with exactly one `Ended`."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from cloche import errors
from cloche.engine.executions import kernel
from cloche.engine.executions.kernel import KernelClient
from cloche.engine.executions.program_limits import FreezeCallback, OutputLimiter, PausableTimer, memory_of_text
from cloche.engine.executions.tools import ToolOffer, ToolRounds, tool_call_bytes
from cloche.engine.sandboxes.endings import KERNEL_NOT_KILLED, KernelExit, out_of_memory_reason
from cloche.events import AnyEvent, Ended, EventQueue, Input, Output, Run, RunFold, Started, ToolsCalled
from cloche.guest import wire
from cloche.input_answers import NO_MORE_ANSWERS, InputSource, answer_failure_message, make_input_answers
from cloche.isolation.channel import Header, join_objects, require_protocol
from cloche.model import DisplayOptions, ExecutionRequest, Limits, Outcome, Stream, ToolResult, Usage

if TYPE_CHECKING:
    from cloche.engine.executions.context import Context

# Stops a program that runs on a kernel: interrupts, its time limit, and at last a kill.

GRACE_SECONDS = 2.0  # between SIGINT and SIGKILL
KILL_SECONDS = 10.0  # after SIGKILL; a cell that does not manage that is broken
STUBBORN_SECONDS = 10.0  # an interrupt repeated after this kills
INTERRUPT_REPEAT_SECONDS = 1.0  # Python misses a signal that lands just before a call that blocks
INTERRUPT_REPEATS = 3
STOPPED_WHEN_RESUMED = "its sandbox is paused: the program is stopped when that goes on"


class ProgramStopper:
    """Made when the program is given to its kernel. Calls `give_up()` if it cannot even be killed.

    While programs are frozen, so are all these timers: a frozen program cannot end.
    """

    def __init__(self, kernel: KernelClient, timeout_seconds: float | None, give_up: Callable[[], None]):
        self.timed_out = False
        self.killed = False
        self._kernel = kernel
        self._give_up: Callable[[], None] | None = give_up
        self._began = False
        self._interrupted_at: float | None = None
        self._time = kernel.time
        self._repeat: PausableTimer | None = None
        self._timer: PausableTimer | None = None
        self._standstill: FreezeCallback | None = None
        self._clock = None if timeout_seconds is None else PausableTimer(timeout_seconds, self._on_timeout, self._time)

    @property
    def interrupted(self) -> bool:
        return self._interrupted_at is not None

    def begin(self) -> None:
        """The program runs: an interrupt that came before reaches it now."""
        self._began = True
        if self.interrupted:
            self._send_interrupt()

    def interrupt(self) -> None:
        """See `Execution.interrupt`."""
        now = self._time.now()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at > STUBBORN_SECONDS:
            self._kill_kernel()
            return
        if self._began:
            self._send_interrupt()

    def interrupt_firmly(self) -> None:
        """Interrupts, and kills where that is not enough."""
        if not self.killed:
            self._interrupted_at = self._time.now() if self._interrupted_at is None else self._interrupted_at
            self._send_interrupt()
            self._set_timer(GRACE_SECONDS, self._kill_kernel)

    def call_when_frozen(self, call: Callable[[], None]) -> None:
        """Calls it if programs are frozen before this one has ended, or are already."""
        if self._standstill is not None:
            self._standstill.stop()
        self._standstill = FreezeCallback(call, self._time)

    def hold_clock(self) -> None:
        """Stops the time limit until `release_clock` was called as often."""
        if self._clock is not None:
            self._clock.hold()

    def release_clock(self) -> None:
        if self._clock is not None:
            self._clock.go_on()

    def close(self) -> None:
        """The program has ended: nothing more is done to it."""
        self._give_up = None
        for each in (self._clock, self._timer, self._repeat, self._standstill):
            if each is not None:
                each.stop()

    def _on_timeout(self) -> None:
        self.timed_out = True
        self.interrupt_firmly()

    def _send_interrupt(self, repeats: int = INTERRUPT_REPEATS) -> None:
        if self._repeat is not None:
            self._repeat.stop()
        if not self.killed:
            self._kernel.interrupt()
            if repeats:
                self._repeat = PausableTimer(
                    INTERRUPT_REPEAT_SECONDS, partial(self._send_interrupt, repeats - 1), self._time
                )

    def _kill_kernel(self) -> None:
        self.killed = True
        self._kernel.kill()
        if self._give_up is not None:
            self._set_timer(KILL_SECONDS, self._give_up)

    def _set_timer(self, seconds: float, call: Callable[[], None]) -> None:
        for each in (self._clock, self._timer):
            if each is not None:
                each.stop()
        self._timer = PausableTimer(seconds, call, self._time)


# The execute message to a kernel: settings and code, each encoded once.

RUN_ID_LENGTH = 20  # of the random part of an execution's id
MAX_SETTINGS_BYTES = wire.MAX_HEADER - 100  # the rest is for the verb, the run and its number


def encode_settings(request: ExecutionRequest, limits: Limits, has_input: bool) -> bytes:
    """The part of the execute header that the request decides, as JSON. Raises InvalidRequest if it is too long.

    A value that is short for a program can be long in a frame: JSON has six characters for each control character.
    """
    encoded = wire.encode_json(
        {
            "env": request.env,
            "cwd": request.cwd,
            "input": has_input,
            "display_bytes": limits.output_bytes,
            "argv": None if request.argv is None else list(request.argv),
            "show": [name for name in DisplayOptions.__struct_fields__ if getattr(request.showing, name)],
        }
    )
    if len(encoded) > MAX_SETTINGS_BYTES:
        raise errors.InvalidRequest(
            f"a request of {len(encoded)} bytes is over the limit of {MAX_SETTINGS_BYTES}: put long values "
            "of the environment or argv into a file"
        )
    return encoded


def encode_program(code: str) -> bytes:
    """Code as a kernel gets it. Raises InvalidRequest if it is too long.

    Lone surrogates pass: Python reports them to the program.
    """
    content = code.encode("utf-8", "surrogatepass")
    if len(content) > wire.MAX_BODY_FROM_HOST:
        raise errors.InvalidRequest(f"code of {len(content)} bytes is more than the {wire.MAX_BODY_FROM_HOST} possible")
    return content


MAX_FRAMES = 100_000  # of displays and the like, per execution

_KERNEL_OUTCOMES: dict[str, Outcome] = {"ok": "ok", "raised": "raised", "interrupted": "interrupted"}


class Execution:
    """Use as `async with context.execute(..) as execution: async for event in execution: ..`, or `await .result()`.

    Leaving the `async with` early interrupts the program, waits 2 s, then kills its kernel.
    """

    def __init__(
        self,
        context: Context,
        request: ExecutionRequest,
        *,
        timeout_seconds: float | None,
        input: InputSource = None,
        offer: ToolOffer | None = None,
        on_event: Callable[[AnyEvent, int], None] | None = None,  # of every event, whether it is consumed or not
    ):
        self.id = "x" + secrets.token_hex(RUN_ID_LENGTH // 2)
        self.started = self.left = False
        self.ended: Ended | None = None
        self._context = context
        self._code = encode_program(request.code)
        self._answers = None if input is None else make_input_answers(input)
        self._settings = encode_settings(request, context.limits, input is not None and input is not False)
        self._timeout_seconds = timeout_seconds
        self._rounds = None if offer is None else ToolRounds(offer, self._on_round)
        self._kernel: KernelClient | None = None
        self._stopping: ProgramStopper | None = None
        self._used = False
        self._frames_left = MAX_FRAMES
        self._folding: RunFold | None = None
        self._answering: asyncio.Task[None] | None = None
        self._began_at = 0.0
        self._events: EventQueue[AnyEvent] = EventQueue(on_event=on_event)
        self._outlet = OutputLimiter(self._events.put, context.limits.output_bytes)

    # -- the consumer's side

    async def __aenter__(self) -> Execution:
        await self._start_execution()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Execution:
        return self

    async def __anext__(self) -> AnyEvent:
        if not self._used:
            await self._start_execution()
        event = await self._events.next_event()
        if event is None:
            raise StopAsyncIteration
        return event

    async def next_events(self) -> list[AnyEvent]:
        """All events that are there, at least one; an empty list after `Ended`."""
        if not self._used:
            await self._start_execution()
        return await self._events.next_events()

    @property
    def begun(self) -> bool:
        """Whether its turn has come."""
        return self._kernel is not None or self.ended is not None

    async def result(self) -> Run:
        """Runs to the end and folds the events that were not iterated. All callers get the same."""
        folding = self._folding
        if folding is None:
            folding = self._folding = RunFold()
            self._events.divert_events(folding.feed)
        if not self._used:
            await self._start_execution()
        try:
            await self._events.wait_closed()
        finally:
            await self.aclose()
        return folding.run()

    async def aclose(self) -> None:
        """Ends the execution if it still runs: interrupt, 2 s of grace, kill. Events that wait are dropped.

        If the programs are frozen, it is reported as ended at once, and its program is stopped when it is thawed.
        """
        if self._stopping is None or self.ended is not None:
            return
        self.left = True
        self._events.divert_events(_ignore_event)
        self._stopping.interrupt_firmly()
        self._stopping.call_when_frozen(self._report_frozen_end)
        await self._events.wait_closed()

    def interrupt(self) -> None:
        """Sends SIGINT to the program, and again a few times, a second apart, for as long as it goes on.

        Interrupting again does the same, and from 10 s on kills.
        """
        if self._stopping is not None and self.ended is None:
            self._stopping.interrupt()

    def answer(self, text: str | None) -> None:
        """The line that the program's `input()` waits for (see the Input event). None: the input is at its end.

        Raises InvalidRequest for a flood of answers that the program does not read.
        """
        if self._kernel is not None and self.ended is None:
            self._kernel.answer({"error": "EOF when reading a line"} if text is None else {"text": text})

    def refuse_answer(self, problem: str) -> None:
        """There is no line: `input()` raises an EOFError with that message."""
        if self._kernel is not None and self.ended is None:
            self._kernel.answer({"error": problem})

    def answer_tools(self, results: Iterable[ToolResult]) -> None:
        """Takes results of tool calls (see ToolsCalled). Raises InvalidRequest for calls that were never made."""
        if self._rounds is None:
            raise errors.InvalidRequest("this execution has no tools")
        if self.ended is None:
            self._rounds.answer(results)

    # -- as the runner of a program that calls tools: see `cloche.engine.executions.tools`

    def hold_clock(self) -> None:
        if self._stopping is not None:
            self._stopping.hold_clock()

    def release_clock(self) -> None:
        if self._stopping is not None:
            self._stopping.release_clock()

    def catch_up(self) -> None:
        if self._kernel is not None:
            self._kernel.catch_up()
            self._outlet.flush()

    async def is_active(self) -> bool:
        return self._kernel is not None and await self._kernel.is_active()

    # -- the life of it

    async def _start_execution(self) -> None:
        if self._used:
            raise errors.InvalidRequest("an execution can be used once only")
        self._used = True
        kernel = await self._enter_context()
        self._began_at = time.monotonic()
        if kernel is None:
            self.finish("died", self._context.ending)
            return
        self._kernel = kernel
        self._events.slow_down(kernel.pause, kernel.resume, kernel.unread)
        self._stopping = ProgramStopper(kernel, self._timeout_seconds, self._abandon_cell)
        try:
            kernel.execute(self, self._settings, self._code)
            self._code = self._settings = b""  # they can be large
            if self._rounds is not None:
                self._rounds.begin(self)
        except BaseException:
            self.finish("died", "the program could not be given to its kernel")  # else the context stays occupied
            raise

    async def _enter_context(self) -> KernelClient | None:
        try:
            if self._rounds is not None:
                self._settings = join_objects(self._settings, wire.encode_json(await self._rounds.open()))
            return await self._context.enter(self)
        except BaseException:
            if self._rounds is not None:
                self._rounds.close()
            raise

    def finish(
        self, outcome: Outcome, reason: str | None = None, usage: Usage | None = None, exit_code: int | None = None
    ) -> None:
        """Reports the end. Only the first call counts."""
        if self.ended is None:
            self._emit_end(outcome, reason, usage or Usage(), exit_code)
        if self._stopping is not None:
            self._stopping.close()
        kernel, self._kernel = self._kernel, None  # from now on it is the next one's
        if kernel is not None:
            kernel.execution = None
            kernel.resume()
            self._context.leave(self)

    def _report_frozen_end(self) -> None:
        """Reports the end of a frozen program. Its kernel is not free until the program has ended, after the thaw."""
        if self.ended is None and self._kernel is not None:
            self._emit_end("interrupted", STOPPED_WHEN_RESUMED, Usage(), None)
            self._kernel.resume()

    def _emit_end(self, outcome: Outcome, reason: str | None, usage: Usage, exit_code: int | None) -> None:
        if self._answering is not None:
            self._answering.cancel()
        if self._rounds is not None:
            self._rounds.close()
        self._begin_stream(0)
        self._outlet.finish()
        wall = time.monotonic() - self._began_at
        self.ended = Ended(
            outcome=outcome,
            reason=reason,
            exit_code=exit_code,
            usage=Usage(wall_seconds=wall, cpu_seconds=usage.cpu_seconds, memory_peak_bytes=usage.memory_peak_bytes),
        )
        self._events.put(self.ended, 0)
        self._events.close()

    def _begin_stream(self, count: int) -> None:
        if self.started:
            return
        self.started = True
        self._events.put(Started(execution=self.id, count=count), 0)
        notice = self._context.take_notice()
        if notice is not None:
            self._events.put(Output(stream="stderr", text=notice), 0)
        for stream, data in self._kernel.take_idle_output() if self._kernel else ():
            self._outlet.feed(stream, data)

    # -- messages of the kernel

    def on_output(self, stream: Stream, data: bytes) -> None:
        if self.ended is None:
            self._outlet.feed(stream, data)

    def on_frame(self, header: Header, body: bytes) -> None:
        event = header.get("ev")
        handle = _FRAME_HANDLERS.get(event) if isinstance(event, str) else None
        require_protocol(handle is not None, "a kernel sent an event that does not exist")
        assert handle is not None
        self._outlet.flush()
        if self.ended is None or event in ("started", "ended"):
            handle(self, header, body)

    def on_kernel_exit(self, exit: KernelExit) -> None:
        usage = Usage(cpu_seconds=exit.cpu_seconds, memory_peak_bytes=exit.memory_peak_bytes)
        oom, stopping = self._context.out_of_memory(), self._stopping
        assert stopping is not None  # a kernel knows no execution that was not given to it
        if exit.over_memory or (oom and exit.signal == signal.SIGKILL and not stopping.killed):
            self.finish("out_of_memory", out_of_memory_reason(self._context.limits), usage)
        elif stopping.timed_out:
            self.finish("timed_out", f"{self._timeout_reason()}; the program did not stop, its state is lost", usage)
        elif stopping.killed and stopping.interrupted:
            self.finish("interrupted", "the program did not stop when interrupted; its state is lost", usage)
        else:
            self.finish("died", f"{exit}; the context's state is lost", usage, exit.code)

    def _on_started(self, header: Header, body: bytes) -> None:
        self._begin_stream(int(kernel.number_field(header, "count")))
        if self._stopping is not None:
            self._stopping.begin()

    def _on_display(self, header: Header, body: bytes) -> None:
        parts = kernel.split_parts(header, body)
        parsed_bytes = kernel.estimate_parsed_bytes(parts)
        self._emit_event(lambda: kernel.parse_display(header, parts), len(body), parsed_bytes)

    def _on_cleared(self, header: Header, body: bytes) -> None:
        self._emit_event(lambda: kernel.parse_cleared(header), 0)

    def _on_wrote(self, header: Header, body: bytes) -> None:
        event = kernel.parse_wrote(header)
        self._emit_event(lambda: event, len(event.file.path))

    def _on_raised(self, header: Header, body: bytes) -> None:
        event = kernel.parse_raised(header, body)
        if self._frames_left > 0:  # not charged: the caller needs the reason of the failure most
            self._frames_left -= 1
            self._events.put(event, memory_of_text(event.traceback) + memory_of_text(event.value))

    def _on_input(self, header: Header, body: bytes) -> None:
        event = kernel.parse_input(header)
        self._emit_event(lambda: event, len(event.prompt))
        if self._answers is not None:
            self._answering = asyncio.create_task(self._answer_input(event))
            self._answering.add_done_callback(self._on_answered)

    def _on_round(self, event: ToolsCalled) -> None:
        self._begin_stream(0)
        self._events.put(event, sum(map(tool_call_bytes, event.calls)))

    def _on_truncated(self, header: Header, body: bytes) -> None:
        self._outlet.drop("display", int(kernel.number_field(header, "dropped")))

    def _on_ended(self, header: Header, body: bytes) -> None:
        outcome = _KERNEL_OUTCOMES.get(kernel.text_field(header, "outcome"))
        if outcome is None:
            require_protocol(False, "a kernel sent an outcome that does not exist")
            return
        memory = int(kernel.number_field(header, "rss"))
        usage = Usage(cpu_seconds=kernel.number_field(header, "cpu"), memory_peak_bytes=memory)
        if self._stopping is not None and self._stopping.timed_out:
            self.finish("timed_out", f"{self._timeout_reason()}; the context's state was kept", usage)
        else:
            self.finish(outcome, None, usage, kernel.exit_code_field(header))

    def _emit_event(self, event: Callable[[], AnyEvent], size: int, parsed_bytes: int = 0) -> None:
        self._begin_stream(0)
        if self._frames_left <= 0:
            self._outlet.drop("display", size)
        elif self._outlet.charge(size, parsed_bytes):
            self._frames_left -= 1
            self._events.put(event(), size + parsed_bytes)

    async def _answer_input(self, event: Input) -> None:
        assert self._answers is not None
        try:
            self.answer(await self._answers.next(event))
        except StopAsyncIteration:
            self.refuse_answer(NO_MORE_ANSWERS)

    def _on_answered(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.refuse_answer(answer_failure_message(error))

    def _abandon_cell(self) -> None:
        self._context.abandon(KERNEL_NOT_KILLED)

    def _timeout_reason(self) -> str:
        return f"the time limit of {self._timeout_seconds:g} s was reached"


def _ignore_event(event: AnyEvent) -> None:
    """Drops an event: there is no reader any more."""


_FRAME_HANDLERS: dict[str, Callable[[Execution, Header, bytes], None]] = {
    "started": Execution._on_started,
    "display": Execution._on_display,
    "cleared": Execution._on_cleared,
    "input": Execution._on_input,
    "raised": Execution._on_raised,
    "wrote": Execution._on_wrote,
    "truncated": Execution._on_truncated,
    "ended": Execution._on_ended,
}
