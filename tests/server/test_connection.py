"""What a client may make the server keep before it has asked for anything: a bounded head, for a bounded time."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from cloche import errors
from cloche.api import http
from cloche.cli import connection
from cloche.cli.hosting import UvicornListener, bind_socket
from cloche.config import ServerConfig

MIB = 1 << 20
HANDSHAKE = (
    b"Host: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def talk(url: str, *sent: bytes) -> bytes:
    """All that is answered until the server closes the connection."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as client:
        for each in sent:
            client.sendall(each)
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
    return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", answer)]


@pytest.mark.parametrize(
    "begin, endless",
    [
        (b"GET /", b"a" * MIB),
        (b"GET / HTTP/1.1\r\nX: ", b"a" * MIB),
        (b"GET / HTTP/1.1\r\n", b"a" * MIB),
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 200_000),
        (b"", b"\r\n" * MIB),
        (b"GET / HTTP/1.1\r\n" + HANDSHAKE + b"X: ", b"a" * MIB),
    ],
    ids=["path", "value", "name", "many", "lines", "websocket"],
)
def test_a_head_that_does_not_end_is_refused(server, begin, endless):
    answer = talk(server.url, begin, endless)
    assert statuses(answer) == [431]
    assert b"connection: close" in answer


def test_trailers_that_do_not_end_are_refused(server):
    post = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX: "
    assert statuses(talk(server.url, post, b"a" * MIB)) in ([404, 431], [404])


def test_trailers_are_not_headers(server):
    key = f"X-API-Key: {server.key}\r\n".encode()
    post = b"POST /admin/keys HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    assert statuses(talk(server.url, post + key + b"\r\n")) == [401]


def test_a_large_head_a_body_right_behind_it_and_requests_in_a_row_are_served(server):
    large = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 60_000 + b"\r\n"
    key = f"X-API-Key: {server.key}\r\n".encode()
    post = b"POST /admin/keys HTTP/1.1\r\nHost: x\r\n" + key + b"Content-Length: 1000000\r\n\r\n" + b"a" * 1_000_000
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    last = get + b"Connection: close\r\n\r\n"
    assert statuses(talk(server.url, large + b"\r\n" + last)) == [200, 200]
    assert statuses(talk(server.url, post + last)) == [413, 200]
    assert statuses(talk(server.url, (get + b"\r\n") * 3 + last)) == [200] * 4


def test_a_websockets_handshake_that_cannot_be_read_is_answered(server):
    asked = b"GET /api/v1/x HTTP/1.1\r\n" + HANDSHAKE
    assert statuses(talk(server.url, asked + b"X: " + b"a" * 10_000 + b"\r\n\r\n")) == [400]
    assert statuses(talk(server.url, asked + b"".join(b"X%d: a\r\n" % n for n in range(200)) + b"\r\n")) == [400]


# --- time


class Plain:
    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return PlainTextResponse(str(error), http.status_of(error))


@asynccontextmanager
async def listening(handler: http.Handler):
    """A listener of ours with a handler, as a port of this machine."""
    settings = ServerConfig(port=0)
    with bind_socket(settings) as bound:
        listener = UvicornListener(http.DialectEndpoint(Plain(), handler), bound, settings)
        await listener.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            await listener.stop()


async def talk_slowly(url: str, *sent: bytes, pause: float = 0.0) -> bytes:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        for each in sent:
            writer.write(each)
            await asyncio.sleep(pause)
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\n\r\n"], ids=["first", "second"])
async def test_a_head_that_does_not_come_ends_the_connection(monkeypatch, before):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    async with listening(hello) as url:
        answer = await talk_slowly(url, before + b"GET / HT")
    assert statuses(answer) == ([200] if before else [])


async def test_a_body_that_does_not_come_is_a_client_that_left(monkeypatch):
    monkeypatch.setattr(http, "IDLE_BODY_SECONDS", 0.2)
    seen: list[BaseException] = []

    async def handler(request: Request) -> Response:
        try:
            await http.read_whole_body(request)
        except ClientDisconnect as error:
            seen.append(error)
            raise
        raise AssertionError("it never came")

    async with listening(handler) as url:
        assert await talk_slowly(url, b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc") == b""
    assert len(seen) == 1


async def test_an_unbounded_body_may_take_its_time_and_be_large(monkeypatch):
    monkeypatch.setattr(http, "IDLE_BODY_SECONDS", 0.05)

    async def handler(request: Request) -> Response:
        request.scope["state"]["max_body_bytes"] = 4
        return PlainTextResponse(b"".join([chunk async for chunk in http.read_body_chunks(request, unbounded=True)]))

    begin = b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: 9\r\n\r\nabc"
    async with listening(handler) as url:
        assert (await talk_slowly(url, begin, b"def", b"ghi", pause=0.2)).endswith(b"\r\n\r\nabcdefghi")


async def test_a_message_that_utf8_cannot_hold_is_said_all_the_same():
    async def handler(request: Request) -> Response:
        raise errors.NotFound("there is no \ud800 here")

    async with listening(handler) as url:
        answer = await talk_slowly(url, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert statuses(answer) == [404] and answer.endswith(b"no \\ud800 here")


def segments_with_data(client: socket.socket) -> int:
    """How many have come: `tcpi_data_segs_in`."""
    return int(struct.unpack_from("I", client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160), 152)[0])


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_an_answer_comes_in_one_piece(method: str):
    async def handler(request: Request) -> Response:
        return PlainTextResponse("a" * 400)

    def ask(url: str) -> tuple[bytes, int]:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port), timeout=30) as client:
            client.sendall(f"{method} / HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: client.recv(65536), b""))
            return answer, segments_with_data(client)

    async with listening(handler) as url:
        answer, came = await asyncio.to_thread(ask, url)
    assert statuses(answer) == [200] and answer.endswith(b"a" if method == "GET" else b"\r\n\r\n")
    assert came == 1


async def test_the_head_of_a_stream_does_not_wait_for_its_body():
    later = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        await later.wait()
        yield b"a" * 100_000
        yield b"b"

    async def handler(request: Request) -> Response:
        return StreamingResponse(pieces())

    async with listening(handler) as url:
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(30):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            later.set()
            rest = await reader.read()
        writer.close()
    assert rest == b"186a0\r\n" + b"a" * 100_000 + b"\r\n1\r\nb\r\n0\r\n\r\n"
