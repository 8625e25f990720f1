"""HTTP/1, read so that nobody else can read it differently."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.egress import http1
from cloche.egress.forward import check_host, split_target
from cloche.egress.http1 import BadAnswer, BadRequest, HttpHead
from cloche.egress.rules import InvalidDestination, parse_authority
from cloche.egress.tunnel import MAX_LINE_BYTES, FirstLineDetector


def reader_of(raw: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(64 << 10, loop=asyncio.new_event_loop())
    reader.feed_data(raw)
    reader.feed_eof()
    return reader


def run(awaited):
    """What is there already needs no loop, though it may let others have their turn."""
    try:
        while True:
            assert awaited.send(None) is None, "it waits"
    except StopIteration as done:
        return done.value


def head_of(raw: bytes) -> HttpHead:
    found = run(http1.read_head(reader_of(raw)))
    assert found is not None
    return found


def body_of(raw: bytes, length: int | None) -> bytes:
    async def read() -> bytes:
        return b"".join([part async for part in http1.read_body(reader_of(raw), length)])

    return run(read())


def request(*lines: bytes, start: bytes = b"POST http://good.test/ HTTP/1.1") -> bytes:
    return b"\r\n".join([start, *lines]) + b"\r\n\r\n"


def test_a_request_is_read() -> None:
    head = head_of(request(b"Host: good.test", b"X-A:  1 \t", b"x-a: 2", b"Empty:"))
    assert head.start == ("POST", "http://good.test/", "HTTP/1.1")
    assert head.headers == (("host", "good.test"), ("x-a", "1"), ("x-a", "2"), ("empty", ""))


def test_nothing_is_no_request() -> None:
    assert run(http1.read_head(reader_of(b""))) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n" + request(b"Host: good.test"),
        b"GET / HTTP/1.1\n\n",
        b"GET / HTTP/1.1\r\nHost: good.test\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.test\r\n\n",
        b"GET / HTTP/1.1\r\nHost: good.test\r\n",
        b"GET / HTTP/1.1\r\n Host: good.test\r\n\r\n",
        request(b"Host: good.test", b" folded"),
        request(b"Host: good.test", b"\tfolded"),
        request(b"Host : good.test"),
        request(b"Host\t: good.test"),
        request(b"Host"),
        request(b": good.test"),
        request(b"Ho st: good.test"),
        request(b"Host: good.test\rX: y"),
        request(b"Host: good.test\x00"),
        request(b"Ho\xc3\xb6st: good.test"),
        request(start=b"GET  / HTTP/1.1"),
        request(start=b"GET / HTTP/1.1 "),
        request(start=b"GET /\tHTTP/1.1"),
        request(start=b"GET / HTTP/1.1 x"),
        request(start=b"GET / a HTTP/1.1"),
        request(start=b"GET /"),
        request(start=b"GET / HTTP/2.0"),
        request(start=b"GET / HTTP/1.2"),
        request(start=b"GET / http/1.1"),
        request(start=b"G[T / HTTP/1.1"),
        request(start=b"GET /\x7f HTTP/1.1"),
        request(start=b"GET /\xc3\xb6 HTTP/1.1"),
        request(*[b"A: b"] * (http1.MAX_HEADERS + 1)),
        request(b"A: " + b"b" * http1.MAX_HEAD_BYTES),
        request(*[b"A: " + b"b" * 1000] * 80),
        b"A" * 100_000,
    ],
)
def test_ambiguous_input_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        head_of(raw)


@pytest.mark.parametrize(
    "lines",
    [
        [b"Content-Length: 5", b"Transfer-Encoding: chunked"],
        [b"Content-Length: 5", b"Content-Length: 5"],
        [b"Content-Length: 5", b"Content-Length: 6"],
        [b"Content-Length: 5, 5"],
        [b"Content-Length: +5"],
        [b"Content-Length: -5"],
        [b"Content-Length: 0x5"],
        [b"Content-Length: 5 "[:-1] + b"\x0b"[:0] + b" 5"],
        [b"Content-Length:"],
        [b"Content-Length: \xb2"],  # a digit of latin-1, says str.isdigit
        [b"Content-Length: 1e1"],
        [b"Content-Length: 9999999999999999"],
        [b"Transfer-Encoding: gzip, chunked"],
        [b"Transfer-Encoding: chunked, chunked"],
        [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: identity"],
        [b"Transfer-Encoding: xchunked"],
        [b'Transfer-Encoding: "chunked"'],
        [b"Transfer-Encoding: chunked;q=1"],
        [b"Transfer-Encoding:"],
        [b"Transfer-Encoding: chunked\xa0"],
    ],
)
def test_a_body_has_one_end(lines: list[bytes]) -> None:
    with pytest.raises(BadRequest):
        head_of(request(*lines)).body_length


def test_chunks_are_not_of_http_1_0() -> None:
    with pytest.raises(BadRequest):
        head_of(request(b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.0")).body_length


def test_lengths() -> None:
    assert head_of(request()).body_length == 0
    assert head_of(request(b"Content-Length: 17")).body_length == 17
    assert head_of(request(b"Transfer-Encoding: Chunked")).body_length is None


def test_chunks_are_read() -> None:
    assert body_of(b'5\r\nhello\r\n6;a="b"\r\n world\r\n0\r\nX: y\r\n\r\n', None) == b"hello world"
    assert body_of(b"0\r\n\r\nGET / HTTP/1.1", None) == b""
    assert body_of(b"hello and more", 5) == b"hello"


def parts_of(raw: bytes) -> list[bytes]:
    async def read() -> list[bytes]:
        return [part async for part in http1.read_body(reader_of(raw), None)]

    return run(read())


def test_chunks_that_are_there_together_come_as_one() -> None:
    """Each costs an `await` that does not wait: a body of small ones would keep everybody else waiting."""
    parts = parts_of(b"14\r\n01234567890123456789\r\n" * 1000 + b"0\r\n\r\n")
    assert b"".join(parts) == b"01234567890123456789" * 1000
    assert len(parts) == -(-1000 // http1.CHUNKS_AT_ONCE)


def test_others_have_their_turn_between_chunks() -> None:
    async def read() -> list[bytes]:
        raw = b"14\r\n01234567890123456789\r\n" * 1000 + b"0\r\n\r\n"
        return [part async for part in http1.read_body(reader_of(raw), None)]

    reading, turns = read(), 0
    with pytest.raises(StopIteration):
        while True:
            reading.send(None)
            turns += 1
    assert turns >= 1000 // http1.CHUNKS_AT_ONCE


@pytest.mark.parametrize("bad", [BadRequest, BadAnswer])
def test_a_body_of_crumbs_is_refused(bad: type[BadRequest]) -> None:
    async def read(raw: bytes) -> bytes:
        return b"".join([part async for part in http1.read_body(reader_of(raw), None, bad)])

    some = b"1\r\na\r\n" * http1.MAX_SMALL_CHUNKS
    assert run(read(some + b"0\r\n\r\n")) == b"a" * http1.MAX_SMALL_CHUNKS
    with pytest.raises(bad, match="chunks of less than 16 bytes"):
        run(read(some + b"1\r\na\r\n0\r\n\r\n"))


async def test_a_request_sent_byte_by_byte_is_parsed() -> None:
    reader = asyncio.StreamReader()
    said = bytearray()
    reader.feed_data(b"1\r\na\r\n")
    async for part in http1.read_body(reader, None):
        said += part
        reader.feed_data(b"1\r\na\r\n" if len(said) < 3000 else b"0\r\n\r\n")
    assert said == b"a" * 3000


def test_trailers_have_an_end() -> None:
    with pytest.raises(BadRequest, match="no trailers"):
        body_of(b"0\r\n" + (b"A: " + b"b" * 2000 + b"\r\n") * 50 + b"\r\n", None)


@pytest.mark.parametrize(
    "raw",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello\r\n0\r\n\n",
        b"5\r\nhello",
        b"5\r\nhello\r\n",
        b"5\r\nhello\r\n0\r\n",
        b"4\r\nhello\r\n0\r\n\r\n",
        b"6\r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"\r\n5\r\nhello\r\n0\r\n\r\n",
        b"5;a\nb\r\nhello\r\n0\r\n\r\n",
        b"5;a\rb\r\nhello\r\n0\r\n\r\n",
        b"FFFFFFFFFFFFFFFFF\r\nhello\r\n0\r\n\r\n",
        b"5;" + b"a" * 2000 + b"\r\nhello\r\n0\r\n\r\n",
        b"5;" + b"a" * 200_000 + b"\r\nhello\r\n0\r\n\r\n",
        b"0\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"0\r\nGET / HTTP/1.1\r\n\r\n",
        b"0\r\n folded\r\n\r\n",
        b"",
    ],
)
def test_chunks_that_are_none_are_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        body_of(raw, None)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 99 OK\r\n\r\n",
        b"HTTP/1.1 600 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\nA: b\n\n",
        b"HTTP/1.1 200 O\x00K\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"",
    ],
)
def test_a_bad_answer_is_the_servers_fault(raw: bytes) -> None:
    with pytest.raises(BadAnswer):
        run(http1.read_answer(reader_of(raw)))


def test_headers_between_two_hops_do_not_go_on() -> None:
    head = head_of(
        request(
            b"Connection: keep-alive, X-Mine",
            b"X-Mine: 1",
            b"X-Other: 2",
            b"Proxy-Authorization: Basic x",
            b"Proxy-Connection: close",
            b"Upgrade: h2c",
            b"TE: trailers",
            b"Keep-Alive: 5",
        )
    )
    assert http1.end_to_end_headers(head) == [("x-other", "2")]


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        ("http://good.test", "good.test:80", "/"),
        ("HTTP://Good.Test:8080/a?b", "good.test:8080", "/a?b"),
        ("http://good.test?a=b/c", "good.test:80", "/?a=b/c"),
        ("http://[::1]:81/", "[::1]:81", "/"),
        ("http://good.test//other.test/", "good.test:80", "//other.test/"),
    ],
)
def test_a_target_is_taken_apart(target: str, host: str, path: str) -> None:
    asked, rest = split_target(target)
    assert (str(asked), rest) == (host, path)


@pytest.mark.parametrize(
    "target",
    [
        "https://good.test/",
        "ftp://good.test/",
        "good.test:80",
        "*",
        "http:/good.test/",
        "http:///path",
        "http://user@good.test/",
        "http://good.test@other.test/",
        "http://other.test#@good.test/",
        "http://good.test/#x",
        "http://good.test\\@other.test/",
        "http://good.test\\other.test/",
        "http://good.test:80:81/",
        "http://good.test:/",
        "http://good%2etest/",
        "http://[good.test]/",
    ],
)
def test_a_target_that_can_be_read_in_two_ways_is_refused(target: str) -> None:
    with pytest.raises((BadRequest, InvalidDestination)):
        split_target(target)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b"Host: other.test"],
        [b"Host: good.test:81"],
        [b"Host: good.test", b"Host: good.test"],
        [b"Host: good.test, other.test"],
        [b"Host: good.test@other.test"],
        [b"Host: good.test other.test"],
        [b"Host:"],
        [b"Host: http://good.test"],
    ],
)
def test_the_host_is_the_targets(lines: list[bytes]) -> None:
    with pytest.raises(BadRequest):
        check_host(head_of(request(*lines)), parse_authority("good.test:80", None))


HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["Host", "Content-Length", "Transfer-Encoding", "X-A", "Host ", " Host", "content-length"]),
        st.sampled_from([": ", ":", " : ", ":\t"]),
        st.sampled_from(["good.test", "5", "chunked", "0", "5\n", "a\r\n b", "a\rb", "\x0bchunked", "gzip, chunked"]),
        st.sampled_from(["\r\n", "\n", "\r\n", "\r\n", "\r"]),
    ),
    max_size=6,
)


@given(HEADERS, st.sampled_from(["\r\n", "\n"]))
def test_a_rewritten_request_parses_the_same(headers: list[tuple[str, str, str, str]], end: str) -> None:
    """Also by a lenient reader, who takes any line end and overlooks spaces: then nothing can be smuggled past us."""
    raw = "GET http://good.test/ HTTP/1.1\r\n" + "".join("".join(each) for each in headers) + end
    try:
        head = head_of(raw.encode())
        length = head.body_length
    except BadRequest:
        return
    written = http1.write_head(" ".join(head.start), head.headers)
    assert run(http1.read_head(reader_of(written))) == head
    assert leniently(raw) == leniently(written.decode())
    assert length == head_of(written).body_length


def leniently(raw: str) -> list[tuple[str, str]]:
    lines = raw.replace("\r\n", "\n").replace("\r", "\n").split("\n\n")[0].split("\n")[1:]
    parts = (line.partition(":") for line in lines if line.strip())
    return [(name.strip().lower(), value.strip()) for name, _, value in parts]


@given(st.text("AG /\r\n\t\v\0HTP1", max_size=40).map(str.encode), st.integers(0, 40))
def test_the_first_line_is_the_same_in_any_portions(said: bytes, at: int) -> None:
    lines = FirstLineDetector(), FirstLineDetector(), FirstLineDetector()
    portions = [said], [said[:at], said[at:]], [bytes([each]) for each in said]
    for line, parts in zip(lines, portions, strict=True):
        for part in parts:
            if not line.is_over:
                line.take(part)
    assert len({(bytes(line.said), line.is_over, line.is_http) for line in lines}) == 1


def test_bytes_after_the_first_line_are_left() -> None:
    line = FirstLineDetector()
    assert line.take(b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n") == 16
    assert line.is_over and line.is_http and line.said == b"GET / HTTP/1.1\r\n"
    with pytest.raises(BadRequest):
        FirstLineDetector().take(b"A" * (MAX_LINE_BYTES + 1))


@pytest.mark.parametrize("said", [b"\x85\0\0\1more", b"\xa0\0\0\1more"])
def test_bytes_that_begin_with_a_nul_are_no_http_and_pass_at_once(said: bytes):
    line = FirstLineDetector()
    line.take(said)
    assert line.is_over and not line.is_http
