"""Marks, output and frames: what the host makes of bytes that a kernel sends, honest or not."""

from __future__ import annotations

import asyncio
import json
import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche.engine.executions import kernel
from cloche.engine.executions.kernel import MarkedStream
from cloche.engine.executions.program_limits import OutputLimiter
from cloche.events import HIGH_WATER_BYTES, Display, EventQueue, Output, Truncated
from cloche.guest import wire
from cloche.isolation.channel import HostChannel, join_objects

TOKEN = "0123456789abcdef"


def mark(number: int) -> bytes:
    return wire.mark_bytes(TOKEN, number)


class Marked(MarkedStream):
    def __init__(self) -> None:
        self.text = b""
        super().__init__(TOKEN, self._add)

    def _add(self, data: bytes) -> None:
        assert data
        self.text += data


@pytest.mark.parametrize("size", [1, 2, 7, 16, 34, 1000])
def test_a_mark_split_anywhere_is_found_and_never_shown(size: int):
    stream = Marked()
    data = b"before" + mark(1) + b"after"
    for at in range(0, len(data), size):
        if stream.held is None:
            stream.feed(data[at : at + size])
        else:
            stream._rest += data[at : at + size]
    assert (stream.text, stream.held) == (b"before", 1)
    assert stream.release(1)
    assert stream.text == b"before"
    stream.go_on()
    assert (stream.text, stream.held) == (b"beforeafter", None)


def test_a_frame_before_its_mark_was_read_asks_for_more():
    stream = Marked()
    stream.feed(b"a")
    assert not stream.release(1)
    stream.feed(b"b" + mark(1) + b"c")
    assert (stream.text, stream.held) == (b"ab", 1)


def test_unclaimed_marks_do_not_hold_back_output():
    stream = Marked()
    stream.feed(b"a" + mark(900) + b"b" + mark(901) + b"c")
    assert stream.text == b"a"
    stream.let_go()
    assert (stream.text, stream.held) == (b"abc", None)


def test_output_at_a_mark_is_delivered_when_complete():
    stream = Marked()
    stream.feed(b"a" + mark(900) + b"b\x1b]clo")
    assert stream.text == b"a"
    stream.flush()
    assert (stream.text, stream.held) == (b"ab\x1b]clo", None)
    stream.feed(b"c")
    assert stream.text == b"ab\x1b]cloc"


def test_a_thousand_stale_marks_are_one_pass():
    stream = Marked()
    stream.feed(b"".join(mark(number) + b"x" for number in range(5000)))
    assert stream.release(4999)
    assert stream.text == b"x" * 4999


@given(
    st.lists(
        st.sampled_from([b"a", b"\x1b", b"\x1b]cloche;", mark(1)[:-1] + b".", mark(2), b"\x07", b"zz"]), max_size=30
    )
)
@settings(max_examples=200, deadline=None)
def test_only_whole_marks_disappear_from_output(parts: list[bytes]):
    stream = Marked()
    stream._released = 1 << 32
    data = b"".join(parts)
    for at in range(0, len(data), 3):
        stream.feed(data[at : at + 3])
    stream.flush()
    expected = data
    while mark(2) in expected:
        at = expected.index(mark(2))
        expected = expected[:at] + b"\0" + expected[at + len(mark(2)) :]
    assert stream.text == expected.replace(b"\0", b"")


async def collect(limit: int, parts: list[tuple[str, bytes]]) -> list:
    events: list = []
    outlet = OutputLimiter(lambda event, size: events.append(event), limit)
    for stream, data in parts:
        outlet.feed(stream, data)
    outlet.finish()
    return events


async def test_a_character_split_across_reads_is_whole():
    euro = "€".encode()
    assert await collect(100, [("stdout", euro[:1]), ("stdout", euro[1:])]) == [Output(stream="stdout", text="€")]


async def test_bytes_that_are_no_text_are_replaced():
    assert await collect(100, [("stdout", b"\xff\xfe!")]) == [Output(stream="stdout", text="��!")]


async def test_output_over_the_limit_is_counted_and_told_once():
    events = await collect(10, [("stdout", b"x" * 8), ("stderr", b"y" * 8), ("stdout", b"z" * 5)])
    assert events[:2] == [Output(stream="stdout", text="x" * 8), Output(stream="stderr", text="yy")]
    assert events[2:4] == [Truncated(stream="stderr", dropped_bytes=6), Truncated(stream="stdout", dropped_bytes=5)]
    assert isinstance(events[4], Output) and events[4].stream == "stderr" and "limit of 10 bytes" in events[4].text
    assert len(events) == 5


async def test_small_writes_are_one_event():
    assert len(await collect(1 << 20, [("stdout", b"x\n")] * 1000)) == 1


async def test_a_slow_reader_stops_the_writer_and_lets_it_go_on():
    calls: list[str] = []
    events: EventQueue[str] = EventQueue(lambda: calls.append("pause"), lambda: calls.append("resume"))
    events.put("a", HIGH_WATER_BYTES + 1)
    events.put("b", 1)
    assert calls == ["pause"]
    assert await events.next_event() == "a"
    assert calls == ["pause", "resume"]


HEADERS = st.dictionaries(
    st.sampled_from(["ev", "parts", "id", "main", "name", "value", "prompt", "file", "wait", "count", "cpu"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    ),
)


def display(header: dict, body: bytes) -> Display:
    return kernel.parse_display(header, kernel.split_parts(header, body))


@given(HEADERS, st.binary(max_size=20))
@settings(max_examples=300, deadline=None)
def test_no_frame_makes_more_than_an_event_or_a_protocol_error(header: dict, body: bytes):
    for make in (display, kernel.parse_raised):
        try:
            make(header, body)
        except wire.WireError:
            pass
    for make_from_header in (kernel.parse_input, kernel.parse_wrote, kernel.parse_cleared):
        try:
            make_from_header(header)
        except wire.WireError:
            pass
    assert kernel.number_field(header, "cpu") >= 0


def test_parts_of_a_bundle_are_decoded_by_their_type():
    parts = [("text/plain", b"a\xff"), ("image/png", b"\x89PNG"), ("application/vnd.x+json", b'{"a": [1]}')]
    header = {"parts": [[mime, len(content)] for mime, content in parts], "main": True}
    event = display(header, b"".join(content for _mime, content in parts))
    assert event.data == {"text/plain": "a�", "image/png": b"\x89PNG", "application/vnd.x+json": {"a": [1]}}


class Peer:
    """A channel of ours, and a hostile other side."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.frames: list[tuple[dict, bytes, int]] = []
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.channel = HostChannel(ours, self._on_frame, self.closed.set_result, max_body=1000)

    def _on_frame(self, header: dict, body: bytes, fds: list[int]) -> None:
        self.frames.append((header, body, len(fds)))
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(
    "data",
    [
        wire.FRAME_PREFIX.pack(wire.MAX_HEADER + 1, 0),
        wire.FRAME_PREFIX.pack(2, 1001) + b"{}",
        wire.FRAME_PREFIX.pack(2, 0) + b"[]",
        wire.FRAME_PREFIX.pack(3, 0) + b"{x}",
        wire.FRAME_PREFIX.pack(4, 0) + b"\xff\xff\xff\xff",
        wire.encode_frame({"fds": 1}),
        wire.encode_frame({"fds": -1}),
        wire.encode_frame({"fds": "1"}),
        wire.encode_frame({"a": 1})[:-1].replace(b"1", b"[" * 1),
    ],
)
async def test_a_frame_that_breaks_a_rule_ends_the_channel(data: bytes):
    peer = Peer()
    peer.theirs.sendall(data)
    peer.theirs.shutdown(socket.SHUT_WR)
    await asyncio.wait_for(peer.closed, 5)
    assert peer.frames == []


async def test_deep_json_ends_the_channel_and_not_us():
    peer = Peer()
    deep = b"[" * 200_000
    peer.theirs.sendall(wire.FRAME_PREFIX.pack(len(deep), 0) + deep)
    assert "protocol violation" in await asyncio.wait_for(peer.closed, 5)


async def test_descriptors_that_no_frame_announces_are_closed():
    peer = Peer()
    read, write = os.pipe()
    wire_frame = wire.encode_frame({"n": 1})
    for _ in range(4 * wire.MAX_FDS + 1):
        socket.send_fds(peer.theirs, [wire_frame], [write])
    os.close(write)
    await asyncio.wait_for(peer.closed, 5)
    os.set_blocking(read, False)
    assert os.read(read, 1) == b""  # end of file: no writer is left anywhere
    os.close(read)


async def test_more_than_the_socket_holds_is_sent_in_order():
    peer = Peer()
    body = os.urandom(3 << 20)
    peer.channel.send({"n": 1}, body)
    peer.channel.send({"n": 2})
    reader = wire.FrameReader(peer.theirs)
    first = await asyncio.to_thread(reader.next)
    second = await asyncio.to_thread(reader.next)
    assert (first[0], first[1] == body, second[0]) == ({"n": 1}, True, {"n": 2})
    peer.channel.close()


def test_headers_keep_lone_surrogates():
    assert json.loads(wire.encode_frame({"a": "\ud800"})[8:]) == {"a": "\ud800"}


def test_objects_are_joined_also_with_an_empty_one():
    assert join_objects(b'{"a":1}', b'{"b":2}') == b'{"a":1,"b":2}'
    assert join_objects(b'{"a":1}', b"{}") == b'{"a":1}'
