"""The gateway's own HTTP client, against a server that writes down every byte itself."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import ssl
import subprocess
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
import uvloop

from cloche.gateway.upstream.http import root_cause_name
from cloche.gateway.upstream.http_client import MAX_HEAD_BYTES, MAX_UNREAD_BYTES, HttpClient, HttpTimeouts

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy:pytest.PytestDeprecationWarning")

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy(), uvloop.EventLoopPolicy()], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """The server runs on the one, a library's user may run on the other."""
    return request.param


class Place:
    """Where a server listens, and what it saw."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.requests: list[bytes] = []


@asynccontextmanager
async def server(answers: list[list[bytes | None]]) -> AsyncIterator[Place]:
    place = Place()
    coming = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                place.requests.append(head + await reader.readexactly(size))
                for piece in next(coming):
                    if piece is None:
                        writer.close()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with listening(serve, place):
        yield place


@asynccontextmanager
async def listening(
    serve: Serve, place: Place | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Place]:
    """What `serve` leaves open is closed at the end."""
    place = place or Place()
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await serve(reader, writer)

    accepting = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    place.url = f"http{'s' if tls else ''}://127.0.0.1:{accepting.sockets[0].getsockname()[1]}/v1/"
    async with accepting:
        yield place
        for writer in writers:
            writer.transport.abort()


def client_of(place: Place, read_seconds: float = 5.0, write_seconds: float = 5.0) -> HttpClient:
    timeouts = HttpTimeouts(connect=5.0, read=read_seconds, write=write_seconds, queue=5.0)
    return HttpClient(httpx2.URL(place.url), {"x-ours": "1"}, timeouts, connections=2, idle=2, idle_seconds=60.0)


async def posted(client: HttpClient) -> tuple[int, dict[str, str], bytes]:
    async with client.post("/chat", b"{}", {"x-mine": "2"}) as answer:
        return answer.status_code, answer.headers, b"".join([piece async for piece in answer.aiter_bytes()])


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\n yo\r\n0\r\n\r\n"


async def test_a_request_has_all_that_it_needs():
    async with server([[CHUNKED]]) as place:
        assert await posted(client_of(place)) == (200, {"transfer-encoding": "chunked"}, b"hello yo")
    lines = place.requests[0].split(b"\r\n")
    assert lines[0] == b"POST /v1/chat HTTP/1.1" and lines[-1] == b"{}"
    assert {b"x-ours: 1", b"x-mine: 2", b"content-length: 2"} < set(lines)
    assert any(line.startswith(b"host: 127.0.0.1:") for line in lines)


async def test_a_header_is_sent_once_however_it_is_written():
    async with server([[CHUNKED]]) as place:
        timeouts = HttpTimeouts(connect=5.0, read=5.0, write=5.0, queue=5.0)
        ours = {"Content-Type": "text/plain", "X-Ours": "1"}
        client = HttpClient(httpx2.URL(place.url), ours, timeouts, connections=1, idle=1, idle_seconds=60.0)
        async with client.post("/chat", b"{}", {"content-type": "application/json"}):
            pass
    names = [line.partition(b":")[0] for line in place.requests[0].split(b"\r\n")[1:-2]]
    assert sorted(names) == [b"content-length", b"content-type", b"host", b"x-ours"]
    assert b"content-type: application/json\r\n" in place.requests[0]


@pytest.mark.parametrize(
    "pieces",
    [
        [bytes([byte]) for byte in CHUNKED],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhel", b"lo yo"],
        [b"HTTP/1.1 200 OK\r\n\r\nhello", b" yo", None],  # it ends with the connection
        [b"HTTP/1.1 100 Continue\r\n\r\n", CHUNKED],
        [b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + CHUNKED],
        [CHUNKED[:-2], b"x-sum: 1\r\ntransfer-encoding: gzip\r\n", b"\r\n"],  # trailers
        [b"HTTP/1.0 200 OK\r\ncontent-length: 8\r\n\r\nhello yo", None],
    ],
)
async def test_answers_in_every_shape_are_read(pieces: list[bytes | None]):
    async with server([pieces]) as place:
        status, _, content = await posted(client_of(place))
    assert (status, content) == (200, b"hello yo")


async def test_connections_are_used_again_and_those_that_died_are_replaced():
    async with server([[CHUNKED], [CHUNKED], [CHUNKED, None], [CHUNKED]]) as place:
        client = client_of(place)
        for _ in range(4):
            assert (await posted(client))[2] == b"hello yo"
            await asyncio.sleep(0.02)
        await client.aclose()
    assert place.connections == 2


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([None], httpx2.RemoteProtocolError),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf", None], httpx2.RemoteProtocolError),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], httpx2.RemoteProtocolError),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"x" * 200_000], httpx2.RemoteProtocolError),
        ([b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000 + b"\r\n"], httpx2.RemoteProtocolError),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n"], httpx2.RemoteProtocolError),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" * 3000], httpx2.RemoteProtocolError),
        ([CHUNKED[:-2], b"x: " + b"x" * 200_000], httpx2.RemoteProtocolError),  # trailers without an end
        ([CHUNKED[:-5] + b"5;" + b"x" * 200_000], httpx2.RemoteProtocolError),
        ([CHUNKED[:-5] + b"zz\r\n"], httpx2.RemoteProtocolError),
        ([b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"], httpx2.RemoteProtocolError),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe"], httpx2.ReadTimeout),
    ],
)
async def test_errors_are_raised_as_httpx2s(pieces: list[bytes | None], error: type[Exception]):
    async with server([pieces]) as place:
        with pytest.raises(error):
            await posted(client_of(place, read_seconds=0.3 if error is httpx2.ReadTimeout else 30.0))


async def test_an_absent_server_is_a_connect_error():
    async with server([]) as place:
        pass
    with pytest.raises(httpx2.ConnectError):
        await posted(client_of(place))


async def test_an_answer_that_is_not_read_to_its_end_ends_its_connection():
    async with server([[b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello"], [CHUNKED]]) as place:
        client = client_of(place)
        async with client.post("/chat", b"{}", {}):
            pass
        assert (await posted(client))[2] == b"hello yo"
    assert place.connections == 2


async def test_more_requests_than_connections_wait_for_one():
    async with server([[CHUNKED]] * 8) as place:
        client = client_of(place)
        answers = await asyncio.gather(*(posted(client) for _ in range(8)))
    assert [content for _, _, content in answers] == [b"hello yo"] * 8
    assert place.connections <= 2


async def test_closing_ends_open_reads():
    async with server([[b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello"]]) as place:
        client = client_of(place)
        with pytest.raises(httpx2.RemoteProtocolError):
            async with client.post("/chat", b"{}", {}) as answer:
                async for _ in answer.aiter_bytes():
                    await client.aclose()


# -- whose answer it is


def answer(content: bytes, name: bytes = b"x-of") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%s: %s\r\ncontent-length: %d\r\n\r\n%s" % (name, content, len(content), content)


async def request(reader: asyncio.StreamReader) -> bytes:
    """The body of the next one."""
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))


@pytest.mark.parametrize("pause", [True, False], ids=["later", "at once"])
async def test_unsolicited_bytes_are_never_the_next_answer(pause: bool):
    place = Place()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place.connections += 1
        while content := await request(reader):
            writer.write(answer(content))
            if pause:
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.write(answer(b"stale", b"x-stale"))

    async with listening(serve, place):
        client = client_of(place)
        for number in range(4):
            content = b"mine %d" % number
            async with client.post("/chat", content, {}) as heard:
                assert b"".join([piece async for piece in heard.aiter_bytes()]) == content
                assert heard.headers["x-of"] == content.decode() and "x-stale" not in heard.headers
            if pause:
                await asyncio.sleep(0.05)
        await client.aclose()
    assert place.connections == 4


async def test_bytes_unread_by_the_loop_count():
    place = Place()
    stale = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place.connections += 1
        while content := await request(reader):
            writer.write(answer(content))
            await stale.wait()
            writer.write(answer(b"stale"))

    async with listening(serve, place):
        client = client_of(place)
        assert (await posted(client))[2] == b"{}"
        stale.set()
        await asyncio.sleep(0)  # the server writes, and this does not read before it asks again
        assert (await posted(client))[2] == b"{}"
        await client.aclose()
    assert place.connections == 2


async def test_a_server_that_speaks_first_is_no_server():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n")

    async with listening(serve) as place:
        with pytest.raises(httpx2.RemoteProtocolError):
            await posted(client_of(place))


@pytest.mark.parametrize("after", [b"garbage", b"HTTP/1.1 200 OK\r\nbad\x00header", CHUNKED, b"\0" * 300_000])
async def test_bytes_after_an_answer_take_nothing_from_it(after: bytes):
    async with server([[answer(b"whole") + after], [answer(b"next")]]) as place:
        client = client_of(place)
        status, headers, content = await posted(client)
        assert (status, headers["x-of"], content) == (200, "whole", b"whole")
        assert (await posted(client))[2] == b"next"
    assert place.connections == 2


# -- asking again


async def test_a_request_is_sent_again_once_and_over_a_fresh_connection():
    place = Place()
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place.connections += 1
        content = await request(reader)
        writer.write(answer(content))
        asked.append(await request(reader))  # and hangs up without a word
        writer.close()

    async with listening(serve, place):
        client = client_of(place)
        await asyncio.gather(posted(client), posted(client))  # two that are idle
        assert (await posted(client))[2] == b"{}"
        await client.aclose()
    assert len(asked) == 1 and place.connections == 3


async def test_a_request_is_not_sent_again_after_a_word_of_an_answer():
    half = b"HTTP/1.1 200 O"
    async with server([[CHUNKED], [half, None], [CHUNKED]]) as place:
        client = client_of(place)
        await posted(client)
        with pytest.raises(httpx2.RemoteProtocolError):
            await posted(client)
    assert len(place.requests) == 2


async def test_a_request_is_not_sent_again_over_connections_that_are_fresh():
    async with server([[None]] * 5) as place:
        with pytest.raises(httpx2.RemoteProtocolError):
            await posted(client_of(place))
    assert len(place.requests) == 1


# -- large ones, slow ones, hidden ones


async def test_a_request_may_take_long_as_long_as_it_gets_on():
    content = bytes(24 * 1024 * 1024)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        left = len(content)
        while left:
            left -= len(await reader.read(1024 * 1024))
            await asyncio.sleep(0.01)
        writer.write(CHUNKED)

    async with listening(serve) as place, asyncio.timeout(30):
        client = client_of(place, write_seconds=0.8)
        async with client.post("/chat", content, {}) as heard:
            assert heard.status_code == 200
        await client.aclose()


async def test_an_unread_request_is_given_up():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    async with listening(serve) as place:
        with pytest.raises(httpx2.WriteTimeout):
            async with client_of(place, write_seconds=0.3).post("/chat", bytes(32 * 1024 * 1024), {}):
                pass


async def test_a_server_that_refuses_before_all_was_sent_is_heard():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")

    async with listening(serve) as place:
        client = client_of(place)
        async with client.post("/chat", bytes(32 * 1024 * 1024), {}) as heard:
            assert heard.status_code == 413
            assert [piece async for piece in heard.aiter_bytes()] == [b"big"]
        assert not client._idle  # what is left of the request would be the next one's beginning
        await client.aclose()


@pytest.mark.parametrize(("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_a_body_that_is_compressed_without_being_asked_for_is_read(
    encoding: str, encode: Callable[[bytes], bytes]
):
    plain = bytes(10_000_000) + b"end"
    body = encode(plain)
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: {encoding}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with server([[head + body[:100], body[100:]]]) as place:
        client = client_of(place)
        async with client.post("/chat", b"{}", {}) as heard:
            pieces = [piece async for piece in heard.aiter_bytes()]
    assert b"".join(pieces) == plain
    assert max(map(len, pieces)) <= 64 * 1024


async def test_bytes_after_a_compressed_body_are_not_read():
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n"
    async with server([[head + gzip.compress(b"hello"), *[bytes(100_000)] * 10]]) as place:  # and it never ends
        client = client_of(place)
        assert (await posted(client))[2] == b"hello"
        assert not client._idle and not client._busy


@pytest.mark.parametrize(("encoding", "said"), [("br", "'br'"), ("gzip", "damaged")])
async def test_a_body_that_cannot_be_decoded_says_so(encoding: str, said: str):
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: {encoding}\r\ncontent-length: 5\r\n\r\nhello".encode()
    async with server([[head]]) as place:
        with pytest.raises(httpx2.DecodingError, match=said):
            await posted(client_of(place))


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/v1", f"http://{'a' * 70}.example/v1", "http://a..b/v1"])
async def test_an_address_that_cannot_be_is_an_error_of_connecting(url: str):
    try:
        place = Place()
        place.url = url
        client = client_of(place)
    except httpx2.InvalidURL:
        return  # that is known at once
    with pytest.raises(httpx2.ConnectError):
        await posted(client)


# -- with TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost".split()
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return folder


def tls_of(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return context


async def test_with_tls_connections_are_used_again_unless_something_came_unasked(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    place = Place()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place.connections += 1
        while content := await request(reader):
            writer.write(answer(content))
            await writer.drain()
            if content == b"last":
                await asyncio.sleep(0.02)
                writer.write(answer(b"stale"))

    async def said(content: bytes) -> bytes:
        async with client.post("/chat", content, {}) as heard:
            return b"".join([piece async for piece in heard.aiter_bytes()])

    async with listening(serve, place, tls_of(certificate)):
        client = client_of(place)
        for content in (b"one", b"last"):
            assert await said(content) == content
            await asyncio.sleep(0.1)
        assert await said(b"two") == b"two"
        assert place.connections == 2
        await client.aclose()


async def test_an_untrusted_certificate_is_a_connect_error(certificate: Path):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    async with listening(serve, None, tls_of(certificate)) as place:
        with pytest.raises(httpx2.ConnectError, match="SSLCertVerificationError") as caught:
            await posted(client_of(place))
    assert root_cause_name(caught.value) == "SSLCertVerificationError"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_reader_that_is_slow_makes_the_server_wait(
    tls: bool, certificate: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    written, whole = 0, 64 * MAX_UNREAD_BYTES

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % whole)
        while written < whole:
            writer.write(bytes(MAX_UNREAD_BYTES))
            await writer.drain()
            written += MAX_UNREAD_BYTES

    async with listening(serve, None, tls_of(certificate) if tls else None) as place:
        client = client_of(place)
        async with client.post("/chat", b"{}", {}) as heard:
            before = -1
            while written > before:  # until it does not get on any more
                before = written
                await asyncio.sleep(0.1)
            assert written < whole
            assert heard._connection._unread < 3 * MAX_UNREAD_BYTES
            assert sum([len(piece) async for piece in heard.aiter_bytes()]) == whole
        assert client._idle  # and it can be used again
        await client.aclose()
