"""The event stream: one stream per execution, its fold, queue and JSON. Every protocol is a map or a fold of it.

The first event is `Started`; the last is exactly one `Ended`, in every case.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar, dataclass_transform

import msgspec

from cloche.json_text import decode_lenient_utf8
from cloche.model import FileInfo, Outcome, Stream, ToolCall, Usage

T = TypeVar("T")
E = TypeVar("E")

Bundle = dict[str, Any]
"""Values by MIME type: `bytes` for BINARY_MIMES, any JSON value for `*json` types, `str` for all others."""


@dataclass_transform(frozen_default=True, kw_only_default=True)  # for mypy
class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", gc=False):
    """Base of all events. None is part of a cycle, so the garbage collector need not know of them: there are many."""


class Started(Event, tag="started"):
    execution: str
    count: int


class Output(Event, tag="output"):
    stream: Stream
    text: str


class Display(Event, tag="display"):
    """A rich result. `main` marks the value of the cell's last expression; `update` replaces the display named `id`."""

    data: Bundle
    main: bool = False
    id: str | None = None
    update: bool = False


class Cleared(Event, tag="cleared"):
    """`clear_output()`: discard all that was shown; with `wait`, when the next output comes."""

    wait: bool = False


class Raised(Event, tag="raised"):
    name: str
    value: str
    traceback: str


class Input(Event, tag="input"):
    """The program waits for a line: answer with `Execution.answer(text)`."""

    prompt: str
    secret: bool = False


class ToolsCalled(Event, tag="tools_called"):
    """The program waits for these tools, all at once: answer with `Execution.answer_tools(results)`."""

    calls: tuple[ToolCall, ...]


class Wrote(Event, tag="wrote"):
    """A file below /mnt/data that this execution made or changed."""

    file: FileInfo


class Truncated(Event, tag="truncated"):
    stream: str  # "stdout", "stderr" or "display"
    dropped_bytes: int


class Ended(Event, tag="ended"):
    outcome: Outcome
    usage: Usage = Usage()
    reason: str | None = None
    exit_code: int | None = None  # the program's own: of SystemExit, or of its process if that ended by itself


AnyEvent = Started | Output | Display | Cleared | Raised | Input | ToolsCalled | Wrote | Truncated | Ended


class Exited(Event, tag="exited"):
    """The last event of a process. A process that a signal ended has exit code 128 + signal, as in a shell."""

    exit_code: int
    outcome: Outcome = "ok"
    reason: str | None = None
    signal: int | None = None  # that ended it


ProcessEvent = Output | Truncated | Exited


class Error(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: str
    traceback: str

    def __str__(self) -> str:
        return self.traceback or f"{self.name}: {self.value}"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One rich result. Images and PDFs are bytes; `data` and `chart` are JSON values; all else is text."""

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: bytes | None = None
    jpeg: bytes | None = None
    pdf: bytes | None = None
    latex: str | None = None
    json: Any = None
    javascript: str | None = None
    data: Any = None
    chart: Any = None
    extra: Bundle = {}
    is_main_result: bool = False

    FIELDS: ClassVar[dict[str, str]] = {
        "text/plain": "text",
        "text/html": "html",
        "text/markdown": "markdown",
        "image/svg+xml": "svg",
        "image/png": "png",
        "image/jpeg": "jpeg",
        "application/pdf": "pdf",
        "text/latex": "latex",
        "application/json": "json",
        "application/javascript": "javascript",
        "application/vnd.cloche.data+json": "data",
        "application/vnd.cloche.chart+json": "chart",
    }

    @classmethod
    def from_bundle(cls, bundle: Bundle, *, main: bool) -> Result:
        known = {cls.FIELDS[mime]: value for mime, value in bundle.items() if mime in cls.FIELDS}
        extra = {mime: value for mime, value in bundle.items() if mime not in cls.FIELDS}
        return cls(**known, extra=extra, is_main_result=main)

    def formats(self) -> list[str]:
        """The names of the fields that have a value, then the MIME types in `extra`."""
        return [name for name in self.FIELDS.values() if getattr(self, name) is not None] + list(self.extra)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        known = {mime: getattr(self, name) for mime, name in self.FIELDS.items() if getattr(self, name) is not None}
        return {**known, **self.extra}

    def _repr_html_(self) -> str | None:
        return self.html

    def _repr_markdown_(self) -> str | None:
        return self.markdown

    def _repr_svg_(self) -> str | None:
        return self.svg

    def _repr_png_(self) -> bytes | None:
        return self.png

    def _repr_jpeg_(self) -> bytes | None:
        return self.jpeg

    def _repr_latex_(self) -> str | None:
        return self.latex

    def __str__(self) -> str:
        return self.text or ""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one execution: the fold of its events."""

    id: str
    results: list[Result]
    stdout: str
    stderr: str
    error: Error | None
    outcome: Outcome
    usage: Usage
    reason: str | None = None
    count: int = 0
    files: list[FileInfo] = []
    exit_code: int | None = None  # see Ended

    @property
    def text(self) -> str | None:
        """The text of the cell's last expression, if it had one."""
        return next((result.text for result in self.results if result.is_main_result), None)

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


class ProcessResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command. `outcome` is ok whenever it ended by itself, with any exit code."""

    exit_code: int
    stdout: str
    stderr: str
    outcome: Outcome = "ok"
    reason: str | None = None


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A detached run: it goes on without a connection, and is kept for a while."""

    id: str
    sandbox: str
    context: str
    state: Literal["running", "ended"]
    events: int  # how many there are so far: the number of the last one
    created_at: float
    ended_at: float | None = None
    outcome: Outcome | None = None
    reason: str | None = None


class NumberedEvent(NamedTuple):
    """An event of a detached run. The first is number 1."""

    number: int
    event: AnyEvent


class RunFold:
    """A fold in progress: feed it events one by one, then call `run()`."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._ended: Ended | None = None
        self._shown: list[Display] = []
        self._output: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._error: Error | None = None
        self._files: dict[str, FileInfo] = {}
        self._clear_next = False

    def feed(self, event: Event) -> None:
        if isinstance(event, (Output, Display)) and self._clear_next:
            self._clear_outputs()
        match event:
            case Output():
                self._output[event.stream].append(event.text)
            case Display():
                self._add_display(event)
            case Started():
                self._started = event
            case Ended():
                self._ended = event
            case Raised():
                self._error = Error(name=event.name, value=event.value, traceback=event.traceback)
            case Wrote():
                self._files[event.file.path] = event.file
            case Cleared(wait=True):
                self._clear_next = True
            case Cleared():
                self._clear_outputs()

    def _add_display(self, event: Display) -> None:
        if not event.update:
            self._shown.append(event)
            return
        for at, shown in enumerate(self._shown):
            if shown.id == event.id:
                self._shown[at] = msgspec.structs.replace(shown, data=event.data)

    def _clear_outputs(self) -> None:
        self._clear_next = False
        self._shown.clear()
        for texts in self._output.values():
            texts.clear()

    def run(self) -> Run:
        """Returns the Run so far; outcome `died` if no `Ended` came."""
        ended = self._ended or Ended(outcome="died", reason="the stream of events broke off")
        return Run(
            id=self._started.execution if self._started else "",
            count=self._started.count if self._started else 0,
            results=[Result.from_bundle(shown.data, main=shown.main) for shown in self._shown],
            stdout="".join(self._output["stdout"]),
            stderr="".join(self._output["stderr"]),
            error=self._error,
            outcome=ended.outcome,
            usage=ended.usage,
            reason=ended.reason,
            files=list(self._files.values()),
            exit_code=ended.exit_code,
        )


def fold(events: Iterable[Event]) -> Run:
    """Folds the events of one execution into one Run."""
    folding = RunFold()
    for event in events:
        folding.feed(event)
    return folding.run()


# The queue of events of one execution or process, between their source and their consumer.

HIGH_WATER_BYTES = 4 << 20
LOW_WATER_BYTES = 1 << 20
EVENT_OVERHEAD_BYTES = 256  # what an event costs beside its content
SANDBOX_QUEUE_BYTES = 32 << 20  # of the queues of one sandbox together; above it each is full at LEAST_QUEUE_BYTES
LEAST_QUEUE_BYTES = 128 << 10


class Signal:
    """Wakes all waiting tasks."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self) -> asyncio.Future[None]:
        """A future that is done at the next `wake_all`. Each caller gets its own: cancelling one wakes no other."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = [future, *(each for each in self._waiting if not each.done())]
        return future

    def wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class QueueBudget:
    """The bytes that the queues of one sandbox hold together.

    They are in the host's memory, which no limit of a sandbox bounds: hundreds of programs with unread output
    would take megabytes each.
    """

    __slots__ = ("held_bytes",)

    def __init__(self) -> None:
        self.held_bytes = 0

    @property
    def high_bytes(self) -> int:
        """The size at which one of them is full."""
        return HIGH_WATER_BYTES if self.held_bytes <= SANDBOX_QUEUE_BYTES else LEAST_QUEUE_BYTES


class DroppedEvents(Protocol[E]):
    """Takes the place of events that were dropped."""

    def add(self, dropped: E) -> None: ...

    def take(self) -> list[E]:
        """Returns the events that report the dropped ones, once."""


class EventQueue(Generic[E]):
    """Single producer; each event goes to one consumer, and the end to all.

    Calls `pause` above 4 MiB and `resume` below 1 MiB. After `lose(gap)`, until `keep()`, it drops the oldest
    events above 4 MiB instead, and `gap` reports them at their place. `on_event(event, size)` gets all events that
    are put in. While the queues of its `share` hold too much together, the limit is lower than 4 MiB.
    """

    def __init__(
        self,
        pause: Callable[[], None] | None = None,
        resume: Callable[[], None] | None = None,
        on_event: Callable[[E, int], None] | None = None,
        share: QueueBudget | None = None,
    ):
        self._on_event = on_event
        self._share = share or QueueBudget()
        self._pause = pause or _do_nothing
        self._resume = resume or _do_nothing
        self._gap: DroppedEvents[E] | None = None
        self._losing = False
        self._events: deque[tuple[E, int]] = deque()
        self._bytes = 0
        self._paused = False
        self._closed = False
        self._bell = Signal()
        self._divert: Callable[[E], None] | None = None

    def put(self, event: E, size: int) -> None:
        if self._on_event is not None:
            self._on_event(event, size)
        if self._divert is not None:
            self._divert(event)
            return
        self._events.append((event, size + EVENT_OVERHEAD_BYTES))
        self._bytes += size + EVENT_OVERHEAD_BYTES
        self._share.held_bytes += size + EVENT_OVERHEAD_BYTES
        self._check_room()
        self._bell.wake_all()

    def __del__(self) -> None:
        self._share.held_bytes -= self._bytes  # the unread events

    def slow_down(self, pause: Callable[[], None], resume: Callable[[], None], share: QueueBudget) -> None:
        """Sets the callbacks and the budget once the producer is known."""
        self._pause, self._resume = pause, resume
        share.held_bytes += self._bytes
        self._share = share

    def lose(self, gap: DroppedEvents[E]) -> None:
        """From now on the producer is never paused: events over the limit are dropped, the oldest first."""
        self._gap, self._losing = gap, True
        self._check_room()
        self._resume_producer()

    def keep(self) -> None:
        """From now on nothing is dropped: events over the limit pause the producer."""
        self._losing = False
        self._check_room()

    def close(self) -> None:
        """Ends the queue: no more events come, and its references to the producer are dropped."""
        self._closed = True
        self._pause = self._resume = _do_nothing
        self._bell.wake_all()

    def divert_events(self, to: Callable[[E], None]) -> None:
        """From now on events go straight to `to`, first those that wait. `wait_closed` returns at the end."""
        for event in self.take():
            to(event)
        self._divert = to

    async def wait_closed(self) -> None:
        while not self._closed:
            await self._bell.wait()

    async def next_events(self) -> list[E]:
        """All events that are there, at least one; an empty list at the end."""
        while not self._events and not self._closed:
            await self._bell.wait()
        return self.take()

    async def next_event(self) -> E | None:
        """The next event; None at the end."""
        while not self._events and not self._closed:
            await self._bell.wait()
        self._insert_gap()
        if not self._events:
            return None
        event, size = self._events.popleft()
        self._release_bytes(size)
        return event

    def take(self) -> list[E]:
        """The events that are there now."""
        self._insert_gap()
        events = [event for event, _size in self._events]
        self._events.clear()
        self._release_bytes(self._bytes)
        return events

    def _check_room(self) -> None:
        if self._losing and self._gap is not None:
            while self._bytes > self._share.high_bytes:
                event, size = self._events.popleft()
                self._bytes -= size
                self._share.held_bytes -= size
                self._gap.add(event)
        elif self._bytes > self._share.high_bytes and not self._paused:
            self._paused = True
            self._pause()

    def _insert_gap(self) -> None:
        if self._gap is not None:
            self._events.extendleft((event, 0) for event in reversed(self._gap.take()))

    def _release_bytes(self, size: int) -> None:
        self._bytes -= size
        self._share.held_bytes -= size
        if self._bytes < LOW_WATER_BYTES:
            self._resume_producer()

    def _resume_producer(self) -> None:
        if self._paused:
            self._paused = False
            self._resume()


def _do_nothing() -> None:
    """The callback where there is no producer to pause or resume."""


# Events as JSON: encoding and decoding, for the wire and for the store.


def encode_json(value: object) -> bytes:
    """Encodes a value as JSON. A program's lone surrogates pass as escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        plain = json.loads(json.dumps(msgspec.to_builtins(value)), parse_constant=_null_constant)
        return json.dumps(plain, separators=(",", ":")).encode()


def decode_json(raw: bytes | str, kind: type[T] | Any, max_slow_bytes: int | None = None) -> T:
    """Decodes JSON into `kind`. Raises msgspec.ValidationError for another value, ValueError for invalid JSON.

    With `max_slow_bytes`, ValueError also for a longer text that only the slow parser takes. What comes from outside is
    measured before: `check_json`.
    """
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            if max_slow_bytes is not None and len(raw) > max_slow_bytes:
                raise ValueError(f"it needs care (a lone surrogate?), and is over {max_slow_bytes} bytes") from None
            return msgspec.convert(json.loads(decode_lenient_utf8(raw), parse_constant=_refuse_constant), kind)
    except RecursionError:  # of either parser
        raise ValueError("it is nested too deeply") from None


class DisplayMessage(Event, tag="display"):
    """A Display in which the values named in `binary` are base64."""

    data: Bundle
    main: bool = False
    id: str | None = None
    update: bool = False
    binary: list[str] = []


StoredEvent = Started | Output | DisplayMessage | Cleared | Raised | Input | ToolsCalled | Wrote | Truncated | Ended


def encode_event(event: Event) -> bytes:
    """One event as JSON: a single line."""
    if not isinstance(event, Display):
        return encode_json(event)
    told = DisplayMessage(
        data=event.data, main=event.main, id=event.id, update=event.update, binary=binary_mimes(event.data)
    )
    return encode_json(told)


def decode_execution_event(raw: bytes) -> AnyEvent:
    """Decodes an execution's event. Raises ValueError or msgspec.ValidationError for anything else."""
    event: Any = decode_json(raw, StoredEvent)
    return to_display(event) if isinstance(event, DisplayMessage) else event


def to_display(told: DisplayMessage) -> Display:
    """Decodes the base64 values. Raises ValueError."""
    return Display(data=decode_binary(told.data, told.binary), main=told.main, id=told.id, update=told.update)


def binary_mimes(bundle: Bundle) -> list[str]:
    return [mime for mime, value in bundle.items() if isinstance(value, bytes)]


def decode_binary(bundle: Bundle, binary: Iterable[str]) -> Bundle:
    """The bundle with its `binary` values decoded. Raises ValueError for a value that is not base64."""
    return {**bundle, **{mime: _decode_base64(bundle.get(mime)) for mime in binary}}


def _decode_base64(value: object) -> bytes:
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("a value that is said to be base64 is not") from None


def _null_constant(constant: str) -> None:
    """JSON has no NaN and no infinity: both become null, as in the fast encoder."""


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"there is no {constant} in JSON")
