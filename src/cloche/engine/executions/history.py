"""The history of a sandbox: every executed cell with its outputs, within a memory budget.

Recording must cost next to nothing while a cell runs: events are kept as they are, and become a notebook's
outputs on request. Over the budget, first outputs are dropped, then cells, the oldest first.

A cell that has ended contains nothing that the garbage collector tracks, and no cycle: there are hundreds
of thousands, and the whole process waits while it collects.
"""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from cloche import notebook
from cloche.events import Cleared, Display, Ended, Event, Output, Raised, Started
from cloche.notebook import Cell, History, NotebookOutput

if TYPE_CHECKING:
    from cloche.engine.sandboxes.sandbox import Sandbox

DEFAULT_HISTORY_BYTES = 8 << 20
EVENT_BYTES = 256  # the cost of one beside its content
MAX_COPIES = 4096  # contexts with a remembered origin
CELL_BYTES = 1024  # the cost of one beside its code and outputs


class HistoryBudget:
    """The memory of all histories together. While it is exceeded, a growing history is cut to an even share."""

    def __init__(self, max_bytes: int = 1 << 62):
        self.bytes = 0
        self.transcripts = 0
        self._max_bytes = max_bytes

    @property
    def is_full(self) -> bool:
        return self.bytes > self._max_bytes

    @property
    def share_bytes(self) -> int:
        return self._max_bytes // max(self.transcripts, 1)


class SandboxHistory:
    """The history of one sandbox. It takes `max_bytes` of memory at most, a single cell's outputs half of that."""

    def __init__(self, max_bytes: int = DEFAULT_HISTORY_BYTES, archive: HistoryBudget | None = None):
        self.max_bytes = max_bytes
        self.dropped = 0
        self._archive = archive or HistoryBudget()
        self._archive.transcripts += 1
        self._bytes = 0
        self._cells: deque[CellRecording] = deque()
        self._with_outputs: deque[CellRecording] = deque()
        self._named: dict[tuple[str, str], list[tuple[CellRecording, _NamedDisplay]]] = {}
        self._begun = 0
        self._origins: dict[str, tuple[str, int]] = {}  # of a context: another, and how many had begun by then

    def __del__(self) -> None:
        self._archive.transcripts -= 1
        self._archive.bytes -= self._bytes

    def start_recording(self, context: str, language: str, code: str) -> CellRecording:
        """A recording for an execution, which is in the history from its start on."""
        return CellRecording(transcript=weakref.ref(self), context=context, language=language, code=code)

    def cells(self, context: str | None = None) -> History:
        """In the order in which they began: all, or those of that context and of the contexts it was copied from."""
        found: Iterable[CellRecording] = self._cells
        if context is not None:
            until = self._context_lineage(context)
            found = (each for each in self._cells if each.number < until.get(each.context, 0))
        return History((each.cell() for each in found), self.dropped)

    def branch(self, origin: str, copies: Iterable[str]) -> None:
        """Registers these contexts as copies of that one as it is now: its cells are also in their history."""
        for copy in copies:
            self._origins[copy] = (origin, self._begun)
            if len(self._origins) > MAX_COPIES:
                del self._origins[next(iter(self._origins))]

    def _context_lineage(self, context: str) -> dict[str, int]:
        """That context and those it was copied from, each with the number of cells begun when it was copied."""
        until, lineage = self._begun, {context: self._begun}
        while (origin := self._origins.get(context)) is not None and origin[0] not in lineage:
            context, until = origin[0], min(until, origin[1])
            lineage[context] = until
        return lineage

    # -- for recordings

    def begin(self, recording: CellRecording) -> None:
        recording.number, self._begun = self._begun, self._begun + 1
        self._cells.append(recording)
        self.count(CELL_BYTES + sys.getsizeof(recording.code))

    def has_outputs(self, recording: CellRecording) -> None:
        self._with_outputs.append(recording)

    def count(self, size: int) -> None:
        """Adds to the memory in use; `size` may be negative."""
        self._bytes += size
        self._archive.bytes += size
        if size > 0 and self._bytes > self.max_bytes:
            self._make_room(self.max_bytes)
        if size > 0 and self._archive.is_full:
            self._make_room(self._archive.share_bytes)

    def name(self, recording: CellRecording, id: str, shown: _NamedDisplay) -> None:
        self._named.setdefault((recording.context, id), []).append((recording, shown))

    def named(self, context: str, id: str) -> list[tuple[CellRecording, _NamedDisplay]]:
        """The displays under that id, with their cells: a later cell may replace an earlier one's display."""
        return self._named.get((context, id), [])

    def forget(self, context: str, shown: _NamedDisplay) -> None:
        left = [each for each in self.named(context, shown.id) if each[1] is not shown]
        self._named[context, shown.id] = left
        if not left:
            del self._named[context, shown.id]

    def _make_room(self, most: int) -> None:
        while self._bytes > most and self._with_outputs:
            self._with_outputs.popleft().drop_outputs(self)
        while self._bytes > most and self._cells:
            oldest = self._cells.popleft()
            oldest.drop_outputs(self)
            self.dropped += 1
            self.count(-CELL_BYTES - sys.getsizeof(oldest.code))


def read_history(sandbox: Sandbox, context: str | None = None) -> History:
    """Its cells, or those of one context, also of one that was removed. Raises ContextNotFound, Gone."""
    sandbox.check_running()
    found = sandbox.history.cells(context)
    if context is not None and not found:
        sandbox.context(context)
    return found


async def export_notebook(sandbox: Sandbox, context: str | None = None) -> bytes:
    """The cells of one context, the default one without, as a file for Jupyter. Raises ContextNotFound, Gone."""
    found = read_history(sandbox, context or sandbox.context().id)
    language = found[0].language if found else sandbox.context(context).language
    return await asyncio.to_thread(_encode_notebook, found, language)  # megabytes, perhaps


def _encode_notebook(cells: History, language: str) -> bytes:
    return notebook.encode_notebook(notebook.build_notebook(cells, language, cells.dropped))


class _StreamText:
    """Consecutive output to one stream, in a cell that runs."""

    __slots__ = ("stream", "texts")

    def __init__(self, event: Output):
        self.stream = event.stream
        self.texts = [event.text]

    def whole(self) -> Output:
        return Output(stream=self.stream, text="".join(self.texts))


class _NamedDisplay(msgspec.Struct, gc=False):
    """A display with an id, by which it can be replaced."""

    id: str
    event: Display
    size: int


class CellRecording(msgspec.Struct, gc=False, kw_only=True):
    """One execution's part of the history. `hear` takes its events, in their order."""

    transcript: weakref.ref[SandboxHistory]  # which has us: a cycle would be there for good
    context: str
    language: str
    code: str
    number: int = 0  # how many had begun before it
    _id: str = ""
    _count: int = 0
    _started_at: float = 0.0
    _ended: Ended | None = None
    _outputs: Any = []  # Display, _Shown, Raised; for text _Text until the cell ends, then Output
    _bytes: int = 0  # of outputs
    _cut_bytes: int = 0  # of outputs that came when there was no more room
    _is_listed: bool = False
    _closed: bool = False
    _outputs_dropped: bool = False
    _clear_next: bool = False

    def on_event(self, event: Event, size: int) -> None:
        """Takes an event, and the memory that its content takes."""
        handler, transcript = _EVENT_HANDLERS.get(type(event)), self.transcript()
        if handler is not None and transcript is not None and self._ended is None:
            handler(self, transcript, event, size + EVENT_BYTES)

    def _on_started(self, transcript: SandboxHistory, event: Started, size: int) -> None:
        self._id, self._count, self._started_at = event.execution, event.count, time.time()
        transcript.begin(self)

    def _on_output(self, transcript: SandboxHistory, event: Output, size: int) -> None:
        self._clear_if_due(transcript)
        if not self._has_room(transcript, size):
            return
        last = self._outputs[-1] if self._outputs else None
        if type(last) is _StreamText and last.stream == event.stream:
            last.texts.append(event.text)
        else:
            self._outputs.append(_StreamText(event))
        transcript.count(size)

    def _on_display(self, transcript: SandboxHistory, event: Display, size: int) -> None:
        if event.update and event.id is not None:
            self._replace_display(transcript, event, event.id, size)
            return
        self._clear_if_due(transcript)
        if not self._has_room(transcript, size):
            return
        if event.id is None:
            self._outputs.append(event)
        else:
            shown = _NamedDisplay(event.id, event, size)
            self._outputs.append(shown)
            transcript.name(self, event.id, shown)
        transcript.count(size)

    def _replace_display(self, transcript: SandboxHistory, event: Display, id: str, size: int) -> None:
        for recording, shown in transcript.named(self.context, id):
            if recording._has_room(transcript, size - shown.size):
                grown, shown.size = size - shown.size, size
                shown.event = Display(data=event.data, main=shown.event.main, id=id)
                transcript.count(grown)

    def _on_raised(self, transcript: SandboxHistory, event: Raised, size: int) -> None:
        """Kept even where there is no more room for outputs: a reader needs the cause of a failure most."""
        if not self._closed:
            self._register_outputs(transcript)
            self._outputs.append(event)
            self._bytes += size
            transcript.count(size)

    def _on_cleared(self, transcript: SandboxHistory, event: Cleared, size: int) -> None:
        self._clear_next = event.wait
        if not event.wait:
            self._clear_outputs(transcript)

    def _on_ended(self, transcript: SandboxHistory, event: Ended, size: int) -> None:
        self._ended = event
        self._outputs = tuple(each.whole() if type(each) is _StreamText else each for each in self._outputs)

    def _has_room(self, transcript: SandboxHistory, size: int) -> bool:
        """Whether so much more may be kept; if so it is counted here, and the caller counts it in the history."""
        if self._closed or self._bytes + size > transcript.max_bytes // 2:
            self._cut_bytes += max(size, 0)
            return False
        self._register_outputs(transcript)
        self._bytes += size
        return True

    def _register_outputs(self, transcript: SandboxHistory) -> None:
        if not self._is_listed:
            self._is_listed = True
            transcript.has_outputs(self)

    def _clear_if_due(self, transcript: SandboxHistory) -> None:
        if self._clear_next:
            self._clear_next = False
            self._clear_outputs(transcript)

    def _clear_outputs(self, transcript: SandboxHistory) -> None:
        freed, self._bytes, self._cut_bytes = self._bytes, 0, 0
        for each in self._outputs:
            if type(each) is _NamedDisplay:
                transcript.forget(self.context, each)
        self._outputs = [] if self._ended is None else ()
        transcript.count(-freed)

    def drop_outputs(self, transcript: SandboxHistory) -> None:
        """Drops the outputs to make room. From now on only the cell's end is recorded."""
        self._outputs_dropped = self._outputs_dropped or bool(self._outputs)
        self._closed = True
        self._clear_outputs(transcript)

    # -- queries

    def cell(self) -> Cell:
        ended = self._ended
        return Cell(
            id=self._id,
            context=self.context,
            language=self.language,
            count=self._count,
            code=self.code,
            started_at=self._started_at,
            seconds=None if ended is None else ended.usage.wall_seconds,
            outcome=None if ended is None else ended.outcome,
            reason=None if ended is None else ended.reason,
            outputs=[*map(self._to_notebook_output, self._outputs), *self._closing_outputs()],
            outputs_dropped=self._outputs_dropped,
        )

    def _to_notebook_output(self, kept: Any) -> NotebookOutput:
        if type(kept) is _StreamText:
            kept = kept.whole()
        if type(kept) is Output:
            return notebook.stream_output(kept.stream, kept.text)
        if type(kept) is Raised:
            return notebook.error_output(kept)
        return notebook.display_output(kept.event if type(kept) is _NamedDisplay else kept, self._count)

    def _closing_outputs(self) -> list[NotebookOutput]:
        said = []
        if self._cut_bytes and not self._outputs_dropped:
            what = f"[cloche] {self._cut_bytes} more bytes of this cell's outputs are not in the history\n"
            said.append(notebook.stream_output("stderr", what))
        ended = self._ended
        if ended is not None and ended.outcome != "ok" and not any(type(each) is Raised for each in self._outputs):
            said.append(notebook.stopped_output(ended))
        return said


_EVENT_HANDLERS: dict[type[Event], Callable[[CellRecording, SandboxHistory, Any, int], None]] = {
    Started: CellRecording._on_started,
    Output: CellRecording._on_output,
    Display: CellRecording._on_display,
    Raised: CellRecording._on_raised,
    Cleared: CellRecording._on_cleared,
    Ended: CellRecording._on_ended,
}
