"""What comes in pieces: frames of guests, envelopes of Connect, events, forms, requests and handshakes of programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from tests.fuzz.mutations import EXAMPLES, Claim, bodies, holds, only_our_errors, streams

from cloche import errors
from cloche.api import multipart
from cloche.api.e2b import connect
from cloche.api.jupyter import messages as jupyter
from cloche.egress import client_hello, http1
from cloche.egress.packages import npm, pypi
from cloche.egress.packages.upstream import UpstreamError
from cloche.egress.streams import EgressRefusal
from cloche.engine.executions import assistance, kernel, variables
from cloche.engine.sandboxes import files
from cloche.gateway.upstream import sse
from cloche.guest import wire
from cloche.isolation.channel import HostChannel
from cloche.model import Completions
from cloche.protocol import responses

DISPLAY = {"op": "display", "parts": [["text/plain", 2], ["application/json", 7]], "main": True, "id": "a"}
FILE = {"path": "/a", "name": "a", "kind": "file", "size": 1, "mode": 420, "owner": "u", "group": "u", "mtime": 1.5}
HEADERS = [DISPLAY, {"op": "raised", "name": "E", "value": "v"}, {"op": "wrote", "file": FILE}, {"op": "ended"}]
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    b'--b\r\nContent-Disposition: form-data; name="f"; filename="d/x.csv"\r\n'
    b"Content-Type: text/csv\r\n\r\na,b\r\n--b--\r\n"
)
REQUEST = b"POST http://a.test/x HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nX: y\r\n\r\nhello"
CHUNKED = b"PUT /x HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
UNBOUNDED = b"HTTP/1.0 200\r\nX: y\r\n\r\nhi"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nSet-Cookie: a=b\r\n\r\nhi"
EVENTS = b': c\n\nevent: a\ndata: {"type": "x"}\ndata: y\n\nid: 7\nretry: 5\ndata: z\n\n'
TOLD = (
    b'id: 1\ndata: {"type":"output","stream":"stdout","text":"a"}\n\n: quiet\n\ndata: {"type":"accepted","id":"x"}\n\n'
)
PAGE = {"files": [{"filename": "a-1.whl", "url": "a.whl", "hashes": {"sha256": "ab"}, "yanked": False}]}
HTML = b'<!-- x --><base href="/b/"><a href="a-1.whl#sha256=ab" data-requires-python="&gt;3">a-1.whl</a>'
VERSION = {"dist": {"tarball": "https://r/a.tgz", "integrity": "sha512-AA==", "shasum": "ab"}}
PACKUMENT = {"name": "a", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": VERSION}}


def hello() -> bytes:
    name = b"a.test"
    names = b"\0" + len(name).to_bytes(2, "big") + name
    inner = len(names).to_bytes(2, "big") + names
    extensions = b"\0\0" + len(inner).to_bytes(2, "big") + inner
    fields = b"\3\3" + bytes(32) + b"\0" + b"\0\2\x13\1" + b"\1\0" + len(extensions).to_bytes(2, "big") + extensions
    message = b"\1" + len(fields).to_bytes(3, "big") + fields
    return b"\x16\3\1" + len(message).to_bytes(2, "big") + message


def envelope(*messages: Any) -> bytes:
    return b"".join(connect.encode_frame(each) for each in messages)


async def _chunks(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def reading(read: Callable[[asyncio.StreamReader], Awaitable[object]], allowed: type[Exception]) -> Callable[..., None]:
    """What of a connection's bytes: read to their end, or refused."""

    async def go(pieces: list[bytes]) -> None:
        reader = asyncio.StreamReader(limit=1 << 16)
        for piece in pieces:
            reader.feed_data(piece)
        reader.feed_eof()
        try:
            await read(reader)
        except (allowed, asyncio.IncompleteReadError):
            pass

    return lambda pieces: asyncio.run(go(pieces))


async def _request(reader: asyncio.StreamReader) -> None:
    while (head := await http1.read_head(reader)) is not None:
        async for _ in http1.read_body(reader, head.body_length):
            pass


async def _answer(reader: asyncio.StreamReader) -> None:
    head = await http1.read_answer(reader)
    length = head.answer_length
    if length != http1.UNTIL_CLOSED:
        async for _ in http1.read_body(reader, length, http1.BadAnswer):
            pass


def form(pieces: list[bytes]) -> None:
    async def go() -> None:
        async for part in multipart.iterate_form_parts(_chunks(pieces), b"b", lenient=True):
            async for _ in part.chunks:
                pass

    asyncio.run(go())


def server_events(pieces: list[bytes]) -> None:
    async def go() -> None:
        async for event in sse.read_server_events(_chunks(pieces), max_event_bytes=200, max_stream_bytes=2000):
            assert len(event.data) <= 200

    asyncio.run(go())


def told_events(pieces: list[bytes]) -> None:
    events = responses.EventStreamParser()
    for piece in pieces:
        list(events.feed_numbered(piece))


def envelopes(pieces: list[bytes]) -> None:
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while connect.take_frame(buffer) is not None:
            pass


def wire_frames(pieces: list[bytes]) -> None:
    decoder = wire.FrameDecoder(1 << 16, 200)
    try:
        for piece in pieces:
            decoder.feed(piece)
            for header, _ in decoder.frames():
                assert isinstance(header, dict)
    except wire.WireError:
        pass


def guest_reader(pieces: list[bytes]) -> None:
    """The guest's side of a channel, with a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(pieces))
        theirs.shutdown(socket.SHUT_WR)
        reader = wire.FrameReader(ours)
        try:
            while reader.next() is not None:
                pass
        except wire.WireError:
            pass


def host_channel(pieces: list[bytes]) -> None:
    """The host's side: whatever comes, it ends closed, and says why."""

    async def go() -> None:
        ours, theirs = socket.socketpair()
        closed = asyncio.get_running_loop().create_future()
        HostChannel(ours, lambda header, body, fds: None, closed.set_result, max_fds=0)
        with theirs:
            theirs.sendall(b"".join(pieces))
        assert await closed

    asyncio.run(go())


def event_frame(body: bytes) -> None:
    """A frame of a kernel as an event."""
    try:
        header = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(header, dict):
        return
    for decode in (
        lambda: kernel.parse_display(header, kernel.split_parts(header, b'"1"{"a":1}')),
        lambda: kernel.parse_raised(header, b"traceback"),
        lambda: kernel.parse_wrote(header),
        lambda: kernel.parse_input(header),
        lambda: kernel.parse_cleared(header),
        lambda: (kernel.number_field(header, "id"), kernel.exit_code_field(header)),
    ):
        try:
            decode()
        except wire.WireError as error:
            assert len(str(error)) < 2000


def page(body: bytes) -> None:
    for kind in ("application/vnd.pypi.simple.v1+json", "text/html"):
        try:
            project = pypi.read_page("a", body, kind, "https://pypi.test/simple/a/")
        except pypi.BadIndexPage:
            continue
        assert pypi.write_json(project) and pypi.write_html(project)


def packument(body: bytes) -> None:
    try:
        npm._check_packument(body, "application/json", "https://r/a")
        npm._rewrite_packument(body, "https://r/")
        npm._version_manifest(body, "1.0.0", "https://r/")
    except UpstreamError:
        pass


JUPYTER = {"header": {"msg_id": "a", "msg_type": "execute_request"}, "channel": "shell", "content": {"code": "1"}}
JUPYTER_V1 = jupyter.join_v1([b"shell", json.dumps(JUPYTER["header"]).encode(), b"{}", b"{}", b'{"code": "1"}'])


def jupyter_message(body: bytes) -> None:
    jupyter.decode_content(jupyter.decode_text_message(body), jupyter.ExecuteRequestContent)


def jupyter_frame(pieces: list[bytes]) -> None:
    for v1 in (True, False):
        with contextlib.suppress(errors.InvalidRequest):
            message = jupyter.decode_binary_message(b"".join(pieces), v1=v1)
            jupyter.decode_content(message, jupyter.HistoryRequestContent)


FRAMES = b"".join(wire.encode_frame(header, b"x" * number) for number, header in enumerate(HEADERS))
COMPLETIONS = {"start": 0, "end": 1, "matches": ["a"], "types": ["function"]}
LIST = {"files": [{**FILE, "size_bytes": 1, "modified_at": 1.0}]}
CLAIMS = [
    Claim("frames of a channel", wire_frames, streams(FRAMES)),
    Claim("a guest's channel", guest_reader, streams(FRAMES)),
    Claim("a host's channel", host_channel, streams(FRAMES)),
    Claim("a kernel's event", event_frame, bodies(*HEADERS)),
    Claim("a kernel's variables", lambda body: variables.parse_variables({"more": 0}, body), bodies([{"name": "x"}])),
    Claim("a kernel's completions", lambda body: assistance.decode_answer(body, Completions), bodies(COMPLETIONS)),
    Claim("a message of Jupyter's", jupyter_message, bodies(JUPYTER)),
    Claim("a binary message of Jupyter's", jupyter_frame, streams(JUPYTER_V1)),
    Claim("a guest's list of files", files._parse_listing, bodies(LIST)),
    Claim("envelopes of Connect", envelopes, streams(envelope({"a": 1}, {"b": "c" * 50}))),
    Claim("a form", form, streams(FORM)),
    Claim("events of an upstream", server_events, streams(EVENTS, EVENTS.replace(b"\n", b"\r\n"))),
    Claim("events of a server", told_events, streams(TOLD)),
    Claim("requests of a program", reading(_request, EgressRefusal), streams(REQUEST + CHUNKED, CHUNKED + REQUEST)),
    Claim("answers of a server", reading(_answer, EgressRefusal), streams(ANSWER, UNBOUNDED)),
    Claim("a ClientHello", reading(client_hello.read_hello, EgressRefusal), streams(hello())),
    Claim("a page of an index", page, bodies(PAGE) | streams(HTML).map(b"".join)),
    Claim("a package of npm", packument, bodies(PACKUMENT)),
]


@EXAMPLES
@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.name for claim in CLAIMS])
def test_any_stream_is_decoded_or_refused(claim: Claim, examples: int) -> None:
    holds(lambda value: only_our_errors(claim.decode, value), claim.inputs, examples)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@EXAMPLES
def test_frames_come_out_as_they_went_in_however_they_are_cut(examples: int) -> None:
    sent = st.lists(st.tuples(st.dictionaries(st.text(max_size=5), json_values, max_size=3), st.binary(max_size=40)))

    def check(value: tuple[list[tuple[dict[str, Any], bytes]], int]) -> None:
        written, step = value
        raw = b"".join(wire.encode_frame(header, body) for header, body in written)
        decoder, found = wire.FrameDecoder(100, 1000), []
        for start in range(0, len(raw), step):
            decoder.feed(raw[start : start + step])
            found += list(decoder.frames())
        assert found == written

    holds(check, st.tuples(sent, st.integers(1, 30)), examples)


@EXAMPLES
def test_envelopes_come_out_as_they_went_in(examples: int) -> None:
    def check(written: list[Any]) -> None:
        buffer = bytearray(envelope(*written))
        found = []
        while (data := connect.take_frame(buffer)) is not None:
            found.append(json.loads(data))
        assert found == written and not buffer

    holds(check, st.lists(st.dictionaries(st.text(max_size=5), st.integers(-(2**53), 2**53)), max_size=5), examples)


def test_a_frame_over_the_limit_is_refused_before_it_is_there() -> None:
    decoder = wire.FrameDecoder(10, 10)
    decoder.feed(wire.FRAME_PREFIX.pack(5, 11))
    with pytest.raises(wire.WireError, match="over the limit"):
        list(decoder.frames())
    with pytest.raises(errors.InvalidRequest, match="over the limit"):
        connect.take_frame(bytearray(b"\0" + (connect.MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")))
