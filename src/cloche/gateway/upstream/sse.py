"""Reads an upstream's server-sent events, with limits: an upstream is not trusted with our memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from cloche import errors
from cloche.model import MIB, Struct

MAX_EVENT_BYTES = 32 * MIB  # a picture that an upstream has made is one event
MAX_STREAM_BYTES = 512 * MIB


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # may stand before a text in UTF-8
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
LONGEST_FIELD_NAME = len(b"event:")


class ServerEvent(Struct):
    """`event: name`, `data: ..`; a name that was not sent is empty."""

    name: str
    data: bytes


def begins_stream(begun: bytes) -> bool:
    """Whether a body that begins so is a stream of events: JSON begins otherwise."""
    return begun.removeprefix(_BYTE_ORDER_MARK).lstrip(b"\r\n").startswith(_FIELDS)


async def read_server_events(
    chunks: AsyncIterator[bytes],
    *,
    max_event_bytes: int = MAX_EVENT_BYTES,
    max_stream_bytes: int = MAX_STREAM_BYTES,
) -> AsyncGenerator[ServerEvent, None]:
    """The events in a body, which may be cut anywhere. One that ends without its blank line counts.

    Raises UpstreamFailed for an event, or a stream, over its limit.
    """
    reader = _EventReader(max_event_bytes)
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > max_stream_bytes:
            raise errors.UpstreamFailed(f"The upstream's answer is over {max_stream_bytes} bytes")
        for event in reader.feed(chunk):
            yield event
    for event in reader.feed(b"\n\n"):
        yield event


class _EventReader:
    def __init__(self, max_event_bytes: int):
        self._max_event_bytes = max_event_bytes
        self._begun: list[bytes] = []  # the pieces of a line that has not ended
        self._is_new = True
        self._name = b""
        self._data: list[bytes] = []
        self._size = 0  # of the event that has begun, its unfinished line included
        self._after_return = False  # the last line ended with \r: a \n that comes first belongs to it

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        if self._after_return and chunk.startswith(b"\n"):
            chunk, self._after_return = chunk[1:], False
        if chunk:
            self._after_return = chunk.endswith(b"\r")
        for line in chunk.splitlines(keepends=True):
            self._grow_event(len(line))
            ended = line.rstrip(b"\r\n")
            self._begun.append(ended)
            if len(ended) == len(line):
                continue  # more of it comes
            whole, self._begun = b"".join(self._begun), []
            if self._is_new:
                whole, self._is_new = whole.removeprefix(_BYTE_ORDER_MARK), False
            event = self._take_line(whole)
            if event is not None:
                yield event

    def _grow_event(self, size: int) -> None:
        self._size += size
        if self._size > self._max_event_bytes:
            raise errors.UpstreamFailed(f"An event of the upstream is over {self._max_event_bytes} bytes")

    def _take_line(self, line: bytes) -> ServerEvent | None:
        """Takes a line; a blank one ends the event."""
        if not line:
            return self._finish_event()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        elif not field and not self._data:
            self._size = 0  # a comment: heartbeats are no event that grows
        return None

    def _finish_event(self) -> ServerEvent | None:
        name, data = self._name, self._data
        self._name, self._data, self._size = b"", [], 0
        return ServerEvent(name=name.decode("utf-8", "replace"), data=b"\n".join(data)) if data else None
