"""The server that TLS names in the clear: read as a server would read it, or refused."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.egress.client_hello import MAX_HELLO_BYTES, BadClientHello, parse_hello, read_hello


def real_hello(name: str | None) -> bytes:
    """What OpenSSL says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def vector(size: int, body: bytes) -> bytes:
    return len(body).to_bytes(size, "big") + body


def extension(kind: int, body: bytes) -> bytes:
    return kind.to_bytes(2, "big") + vector(2, body)


def server_name(*names: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(2, b"".join(bytes([kind]) + vector(2, name) for name in names)))


def hello(*extensions: bytes, after: bytes = b"") -> bytes:
    """A handshake message."""
    listed = vector(2, b"".join(extensions)) if extensions else b""
    body = b"\x03\x03" + bytes(32) + vector(1, bytes(32)) + vector(2, b"\x13\x01") + vector(1, b"\0") + listed + after
    return b"\x01" + vector(3, body)


def records(message: bytes, size: int = 16384) -> bytes:
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + vector(2, part) for part in parts)


async def read(raw: bytes, first: int = 0, step: int = 0) -> str | None:
    """The name in it, where `first` bytes were read before, and the rest comes in pieces."""
    reader = asyncio.StreamReader()
    rest = raw[first:]
    for at in range(0, len(rest), step or len(rest) or 1):
        reader.feed_data(rest[at : at + (step or len(rest))])
    reader.feed_eof()
    found = await read_hello(reader, raw[:first])
    assert found.raw == raw
    return found.name


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("step", [0, 1, 7])
async def test_the_name_in_openssls_hello_is_read(first: int, step: int) -> None:
    assert await read(real_hello("Good.Test"), first, step) == "good.test"
    assert await read(real_hello(None), first, step) is None


@pytest.mark.parametrize("size", [8, 50, 100])
async def test_a_hello_in_many_records_is_one_hello(size: int) -> None:
    message = real_hello("good.test")[5:]
    if size == 8:
        message = hello(server_name(b"good.test"))
    assert await read(records(message, size), 1, 3) == "good.test"


async def test_a_hello_without_extensions_names_no_host() -> None:
    assert await read(records(hello())) is None


async def test_a_hello_of_many_kilobytes_is_read() -> None:
    """Keys that withstand quantum computers are long."""
    padding = [extension(51, bytes(30_000)), extension(21, bytes(20_000))]
    assert await read(records(hello(padding[0], server_name(b"good.test"), padding[1]))) == "good.test"


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x2e\x01\x03\x01" + bytes(60),  # SSL 2
        b"\x16\x02\x00\x00\x05hello",
        b"\x17\x03\x03\x00\x05hello",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x40\x01" + bytes(16385),
        b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
        records(hello(server_name(b"good.test")))[:-1],
        records(hello(server_name(b"good.test")) + b"\x01"),
        records(hello(server_name(b"good.test"), server_name(b"good.test"))),
        records(hello(server_name(b"good.test", b"other.test"))),
        records(hello(server_name(b"good.test", kind=1))),
        records(hello(server_name(b""))),
        records(hello(server_name("bücher.test".encode()))),
        records(hello(extension(0, b""))),
        records(hello(extension(0, vector(2, b"\x00\x00\xffgood")))),
        records(hello(server_name(b"good.test"), after=b"\x00")),
        records(hello(server_name(b"good.test")), 1) if len(hello(server_name(b"good.test"))) > 64 else b"",
        records(b"\x01" + (MAX_HELLO_BYTES + 1).to_bytes(3, "big") + bytes(100)),
        b"",
    ],
)
async def test_malformed_hellos_are_refused(raw: bytes) -> None:
    with pytest.raises(BadClientHello):
        await read(raw)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_hello_or_refused(raw: bytes) -> None:
    try:
        name, has_early_data = parse_hello(b"\x01\x00\x00\x00" + raw)
    except BadClientHello:
        return
    assert name is None or name == name.lower()
    assert has_early_data in (True, False)


@given(st.data())
def test_a_hello_with_a_changed_byte_never_names_another_host_unnoticed(data: st.DataObject) -> None:
    """Whatever is changed: it names what stands in its one name, or it is refused."""
    message = bytearray(
        hello(extension(10, b"\x00\x02\x00\x1d"), server_name(b"good.test"), extension(43, b"\x02\x03\x04"))
    )
    at = data.draw(st.integers(4, len(message) - 1))
    message[at] = data.draw(st.integers(0, 255))
    try:
        name, _ = parse_hello(bytes(message))
    except BadClientHello:
        return
    assert name is None or name.encode() in bytes(message).lower()
