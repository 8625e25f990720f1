"""What ran in a sandbox: every cell with its outputs, as far as there is room for them.

Recording must cost next to nothing while a cell runs: events are kept as they are, and become a notebook's outputs when
somebody asks. What is too much goes: first outputs, then cells, the oldest first.

Of a cell that has ended, nothing is for the garbage collector to look at, and nothing is part of a cycle: there are
hundreds of thousands, and everybody waits while it looks.
"""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from cloche import notebook
from cloche.events import Cleared, Display, Ended, Event, Output, Raised, Started
from cloche.notebook import Cell, History, NotebookOutput

if TYPE_CHECKING:
    from cloche.engine.executions.context import Context

DEFAULT_BYTES = 8 << 20
EVENT_BYTES = 256  # what one costs beside its content
MAX_COPIES = 4096  # of contexts, of which is remembered what they are copies of
CELL_BYTES = 1024  # what one costs beside its code and outputs


class Archive:
    """What the histories of all sandboxes take together: while that is too much, whoever grows has an even share."""

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


class Transcript:
    """The history of one sandbox. It takes `max_bytes` of memory at most, a single cell's outputs half of that."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES, archive: Archive | None = None):
        self.max_bytes = max_bytes
        self.dropped = 0
        self._archive = archive or Archive()
        self._archive.transcripts += 1
        self._bytes = 0
        self._cells: deque[Recording] = deque()
        self._with_outputs: deque[Recording] = deque()
        self._named: dict[tuple[str, str], list[tuple[Recording, _Shown]]] = {}
        self._begun = 0
        self._origins: dict[str, tuple[str, int]] = {}  # of a context: another, and how many had begun by then

    def __del__(self) -> None:
        self._archive.transcripts -= 1
        self._archive.bytes -= self._bytes

    def recording(self, context: str, language: str, code: str) -> Recording:
        """For an execution, which is in the history from its begin on."""
        return Recording(transcript=weakref.ref(self), context=context, language=language, code=code)

    def cells(self, context: str | None = None) -> History:
        """In the order in which they began: all, or those of that context, and of what it is a copy of."""
        found: Iterable[Recording] = self._cells
        if context is not None:
            until = self._lineage(context)
            found = (each for each in self._cells if each.number < until.get(each.context, 0))
        return History((each.cell() for each in found), self.dropped)

    def branch(self, origin: str, copies: Iterable[str]) -> None:
        """These contexts are copies of that one as it is now: what ran there, ran for them."""
        for copy in copies:
            self._origins[copy] = (origin, self._begun)
            if len(self._origins) > MAX_COPIES:
                del self._origins[next(iter(self._origins))]

    def _lineage(self, context: str) -> dict[str, int]:
        """That context and those that it is a copy of, each with how many had begun when it was copied."""
        until, lineage = self._begun, {context: self._begun}
        while (origin := self._origins.get(context)) is not None and origin[0] not in lineage:
            context, until = origin[0], min(until, origin[1])
            lineage[context] = until
        return lineage

    # -- for recordings

    def begin(self, recording: Recording) -> None:
        recording.number, self._begun = self._begun, self._begun + 1
        self._cells.append(recording)
        self.count(CELL_BYTES + sys.getsizeof(recording.code))

    def has_outputs(self, recording: Recording) -> None:
        self._with_outputs.append(recording)

    def count(self, size: int) -> None:
        """More memory is used, or less."""
        self._bytes += size
        self._archive.bytes += size
        if size > 0 and self._bytes > self.max_bytes:
            self._make_room(self.max_bytes)
        if size > 0 and self._archive.is_full:
            self._make_room(self._archive.share_bytes)

    def name(self, recording: Recording, id: str, shown: _Shown) -> None:
        self._named.setdefault((recording.context, id), []).append((recording, shown))

    def named(self, context: str, id: str) -> list[tuple[Recording, _Shown]]:
        """What is shown under that id, and where: a later cell may replace what an earlier one has shown."""
        return self._named.get((context, id), [])

    def forget(self, context: str, shown: _Shown) -> None:
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


class Kept(Protocol):
    """A sandbox, as far as its history is concerned."""

    transcript: Transcript

    def check_running(self) -> None: ...

    def context(self, id: str | None = None) -> Context: ...


def history_of(sandbox: Kept, context: str | None = None) -> History:
    """Its cells, or those of one context, also of one that was removed. Raises ContextNotFound, Gone."""
    sandbox.check_running()
    found = sandbox.transcript.cells(context)
    if context is not None and not found:
        sandbox.context(context)
    return found


async def notebook_of(sandbox: Kept, context: str | None = None) -> bytes:
    """The cells of one context, the default one without, as a file for Jupyter. Raises ContextNotFound, Gone."""
    found = history_of(sandbox, context or sandbox.context().id)
    language = found[0].language if found else sandbox.context(context).language
    return await asyncio.to_thread(_encoded, found, language)  # megabytes, perhaps


def _encoded(cells: History, language: str) -> bytes:
    return notebook.encode(notebook.notebook(cells, language, cells.dropped))


class _Text:
    """What was written to one stream before anything else was shown, in a cell that runs."""

    __slots__ = ("stream", "texts")

    def __init__(self, event: Output):
        self.stream = event.stream
        self.texts = [event.text]

    def whole(self) -> Output:
        return Output(stream=self.stream, text="".join(self.texts))


class _Shown(msgspec.Struct, gc=False):
    """What has a name by which it can be replaced."""

    id: str
    event: Display
    size: int


class Recording(msgspec.Struct, gc=False, kw_only=True):
    """One execution's part of the history. `hear` is for its events, in their order."""

    transcript: weakref.ref[Transcript]  # which has us: a cycle would be there for good
    context: str
    language: str
    code: str
    number: int = 0  # how many had begun before it
    _id: str = ""
    _count: int = 0
    _started_at: float = 0.0
    _ended: Ended | None = None
    _outputs: Any = []  # Display, _Shown, Raised; of what was written _Text until it ends, then Output
    _bytes: int = 0  # of outputs
    _cut_bytes: int = 0  # of what came when there was no more room
    _is_listed: bool = False
    _closed: bool = False
    _outputs_dropped: bool = False
    _clear_next: bool = False

    def hear(self, event: Event, size: int) -> None:
        """An event, and how much memory its content takes."""
        heard, transcript = _HEARD.get(type(event)), self.transcript()
        if heard is not None and transcript is not None and self._ended is None:
            heard(self, transcript, event, size + EVENT_BYTES)

    def _on_started(self, transcript: Transcript, event: Started, size: int) -> None:
        self._id, self._count, self._started_at = event.execution, event.count, time.time()
        transcript.begin(self)

    def _on_output(self, transcript: Transcript, event: Output, size: int) -> None:
        self._clear_if_due(transcript)
        if not self._has_room(transcript, size):
            return
        last = self._outputs[-1] if self._outputs else None
        if type(last) is _Text and last.stream == event.stream:
            last.texts.append(event.text)
        else:
            self._outputs.append(_Text(event))
        transcript.count(size)

    def _on_display(self, transcript: Transcript, event: Display, size: int) -> None:
        if event.update and event.id is not None:
            self._replace(transcript, event, event.id, size)
            return
        self._clear_if_due(transcript)
        if not self._has_room(transcript, size):
            return
        if event.id is None:
            self._outputs.append(event)
        else:
            shown = _Shown(event.id, event, size)
            self._outputs.append(shown)
            transcript.name(self, event.id, shown)
        transcript.count(size)

    def _replace(self, transcript: Transcript, event: Display, id: str, size: int) -> None:
        for recording, shown in transcript.named(self.context, id):
            if recording._has_room(transcript, size - shown.size):
                grown, shown.size = size - shown.size, size
                shown.event = Display(data=event.data, main=shown.event.main, id=id)
                transcript.count(grown)

    def _on_raised(self, transcript: Transcript, event: Raised, size: int) -> None:
        """Kept even where there is no more room for outputs: why a cell failed is what its reader needs most."""
        if not self._closed:
            self._list(transcript)
            self._outputs.append(event)
            self._bytes += size
            transcript.count(size)

    def _on_cleared(self, transcript: Transcript, event: Cleared, size: int) -> None:
        self._clear_next = event.wait
        if not event.wait:
            self._clear(transcript)

    def _on_ended(self, transcript: Transcript, event: Ended, size: int) -> None:
        self._ended = event
        self._outputs = tuple(each.whole() if type(each) is _Text else each for each in self._outputs)

    def _has_room(self, transcript: Transcript, size: int) -> bool:
        """Whether so much more may be kept; if so it is counted here, and the caller tells the transcript."""
        if self._closed or self._bytes + size > transcript.max_bytes // 2:
            self._cut_bytes += max(size, 0)
            return False
        self._list(transcript)
        self._bytes += size
        return True

    def _list(self, transcript: Transcript) -> None:
        if not self._is_listed:
            self._is_listed = True
            transcript.has_outputs(self)

    def _clear_if_due(self, transcript: Transcript) -> None:
        if self._clear_next:
            self._clear_next = False
            self._clear(transcript)

    def _clear(self, transcript: Transcript) -> None:
        freed, self._bytes, self._cut_bytes = self._bytes, 0, 0
        for each in self._outputs:
            if type(each) is _Shown:
                transcript.forget(self.context, each)
        self._outputs = [] if self._ended is None else ()
        transcript.count(-freed)

    def drop_outputs(self, transcript: Transcript) -> None:
        """They make room. Nothing more is kept of it but how it ends."""
        self._outputs_dropped = self._outputs_dropped or bool(self._outputs)
        self._closed = True
        self._clear(transcript)

    # -- for whoever asks

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
            outputs=[*map(self._output, self._outputs), *self._last_words()],
            outputs_dropped=self._outputs_dropped,
        )

    def _output(self, kept: Any) -> NotebookOutput:
        if type(kept) is _Text:
            kept = kept.whole()
        if type(kept) is Output:
            return notebook.stream(kept.stream, kept.text)
        if type(kept) is Raised:
            return notebook.raised(kept)
        return notebook.shown(kept.event if type(kept) is _Shown else kept, self._count)

    def _last_words(self) -> list[NotebookOutput]:
        said = []
        if self._cut_bytes and not self._outputs_dropped:
            what = f"[cloche] {self._cut_bytes} more bytes of this cell's outputs are not in the history\n"
            said.append(notebook.stream("stderr", what))
        ended = self._ended
        if ended is not None and ended.outcome != "ok" and not any(type(each) is Raised for each in self._outputs):
            said.append(notebook.stopped(ended))
        return said


_HEARD: dict[type[Event], Callable[[Recording, Transcript, Any, int], None]] = {
    Started: Recording._on_started,
    Output: Recording._on_output,
    Display: Recording._on_display,
    Raised: Recording._on_raised,
    Cleared: Recording._on_cleared,
    Ended: Recording._on_ended,
}
