"""Events of upstreams, however they are cut, and never more than can be held."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche import errors
from cloche.gateway.upstream.sse import ServerEvent, read_server_events

DATA = st.binary(max_size=40).filter(lambda data: not set(data) & set(b"\r\n"))
LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


async def read(chunks, **limits):
    async def given():
        for chunk in chunks:
            yield chunk

    return [event async for event in read_server_events(given(), **limits)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "response.created"]), st.lists(DATA, min_size=1))),
    LINE_ENDS,
    st.data(),
)
async def test_any_cut_gives_the_same_events(events, end, data):
    body = b""
    for name, lines in events:
        body += b": a comment" + end + (f"event: {name}".encode() + end if name else b"")
        body += b"".join(b"data: " + line + end for line in lines) + end
    places = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=10)))
    chunks = [body[start:stop] for start, stop in zip([0, *places], [*places, len(body)], strict=True)]
    assert await read(chunks) == [ServerEvent(name=name, data=b"\n".join(lines)) for name, lines in events]


async def test_the_last_event_needs_no_blank_line():
    assert await read([b"data: 1\n\ndata: 2"]) == [ServerEvent(name="", data=b"1"), ServerEvent(name="", data=b"2")]


async def test_an_event_over_its_limit_is_refused():
    with pytest.raises(errors.UpstreamFailed, match="over 100 bytes"):
        await read([b"data: "] + [b"x" * 10] * 20, max_event_bytes=100)
    with pytest.raises(errors.UpstreamFailed, match="over 100 bytes"):
        await read([b"data: x\n"] * 20, max_event_bytes=100)


async def test_heartbeats_and_small_events_are_no_event_that_grows():
    assert len(await read([b": beat\n\n"] * 100 + [b"data: x\n\n"] * 100, max_event_bytes=20)) == 100
    assert await read([b": beat\n"] * 100, max_event_bytes=20) == []


async def test_a_stream_over_its_limit_is_refused():
    with pytest.raises(errors.UpstreamFailed, match="over 100 bytes"):
        await read([b"data: x\n\n"] * 20, max_stream_bytes=100)
