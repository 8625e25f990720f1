"""The event stream: one stream per execution. Every protocol is a map or a fold of it.

The first event is `Started`; the last is exactly one `Ended`, in every case.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple, dataclass_transform

import msgspec

from cloche.model import FileInfo, Outcome, Stream, ToolCall, Usage

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
