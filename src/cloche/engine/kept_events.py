"""A detached run's events between memory and the store. Pure.

An event's number is its place in the run. It is kept as the line of JSON that most readers want, and that takes as much
memory as it says: what is parsed can take thirty times that.

What made room for later events is told by Truncated events that stand in the last places of the gap, so that a reader
goes on from their numbers as from any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from cloche.event_json import decode_event, encode_event
from cloche.events import AnyEvent, Folding, Output, Run, Truncated
from cloche.store.runs import Chunk, Page

CHUNK_BYTES = 64 << 10

_TYPE = b'{"type":"'
_OTHER = "display"  # what Truncated calls all that is not output


class Line(NamedTuple):
    """An event of a detached run, written. The first is number 1."""

    number: int
    body: bytes

    @property
    def kind(self) -> bytes:
        """Its type, which is written first."""
        return self.body[len(_TYPE) : self.body.index(b'"', len(_TYPE))]

    @property
    def event(self) -> AnyEvent:
        return decode_event(self.body)


class Written(NamedTuple):
    """A line, and what is lost with it, should it be dropped."""

    line: Line
    stream: str
    size: int


def written(events: Iterable[AnyEvent], first: int, max_event_bytes: int) -> list[Written]:
    """The events from number `first` on. One that is larger than all of a run may be is told as truncated."""
    return [_written(number, event, max_event_bytes) for number, event in enumerate(events, first)]


def _written(number: int, event: AnyEvent, max_event_bytes: int) -> Written:
    body = encode_event(event)
    stream, size = _OTHER, len(body)
    if isinstance(event, Output):
        stream, size = event.stream, len(event.text.encode("utf-8", "surrogatepass"))
    if len(body) > max_event_bytes:
        body = encode_event(Truncated(stream=stream, dropped_bytes=size))
    return Written(Line(number, body), stream, size)


def chunks_of(events: Sequence[Written]) -> Iterator[Chunk]:
    """Event 1 is one of its own, which is never dropped."""
    begin, size = 0, 0
    for at, (line, _, _) in enumerate(events):
        size += len(line.body)
        if line.number == 1 or size >= CHUNK_BYTES or at == len(events) - 1:
            yield _chunk(events[begin : at + 1])
            begin, size = at + 1, 0


def _chunk(events: Sequence[Written]) -> Chunk:
    sizes: dict[str, int] = {}
    for _, stream, size in events:
        sizes[stream] = sizes.get(stream, 0) + size
    body = b"\n".join(line.body for line, _, _ in events)
    return Chunk(first=events[0].line.number, last=events[-1].line.number, body=body, sizes=sizes)


def lines_in(page: Page, after: int) -> list[Line]:
    """The events of a page that come after number `after`."""
    told: list[Line] = []
    expected = after + 1
    for chunk in page.chunks:
        if chunk.first > expected:
            told += gap(expected, chunk.first - 1, page.record.dropped)
        bodies = enumerate(chunk.body.split(b"\n"), chunk.first)
        told += [Line(number, body) for number, body in bodies if number > after]
        expected = chunk.last + 1
    return told


def gap(first: int, last: int, dropped: dict[str, int]) -> list[Line]:
    """What stands for the events `first` to `last`, of which nothing is left."""
    events = [Truncated(stream=name, dropped_bytes=size) for name, size in dropped.items()]
    events = events or [Truncated(stream=_OTHER, dropped_bytes=0)]  # it could not be written: the disk was full
    places = range(last - len(events) + 1, last + 1)
    told = zip(places, events, strict=True)
    return [Line(number, encode_event(event)) for number, event in told if number >= first]


def with_notice(folding: Folding, dropped: dict[str, int]) -> Run:
    """The run that they are, whose stderr begins with what is missing."""
    run = folding.run()
    if not dropped:
        return run
    parts = ", ".join(f"{size} bytes of {name}" for name, size in dropped.items())
    notice = f"[cloche] the events of this run were too many to be kept; the oldest are missing: {parts}\n"
    return msgspec.structs.replace(run, stderr=notice + run.stderr)
