"""The ClientHello, the first message of TLS, in which a program names its server in the clear."""

from __future__ import annotations

import asyncio
import re
from asyncio import IncompleteReadError, StreamReader
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from cloche.egress.streams import EgressRefusal

MAX_HELLO_BYTES = 64 << 10
MAX_RECORD_BYTES = 16 << 10
MAX_RECORDS = 64  # some clients divide it, to confuse middleboxes; no client sends thousands of records

_CHANGE_CIPHER, _ALERT, _HANDSHAKE, _DATA = 20, 21, 22, 23
_BETWEEN = (_CHANGE_CIPHER, _ALERT, _HANDSHAKE)  # records that may come before another ClientHello
_CLIENT_HELLO = 1
_HEAD_BYTES = 4  # of a message: its kind, its length
_MOST_BYTES = 131_396  # that the fields of a ClientHello can have; servers take as many
_RECORDS_BETWEEN = 1000  # that may come before another ClientHello; early data is most of them
_RECORDS_AT_ONCE = 64
_SERVER_NAME, _EARLY_DATA = 0, 42
_HOST_NAME = 0
_NAME = re.compile(rb"[A-Za-z0-9._:-]{1,255}")


class BadClientHello(EgressRefusal):
    """It is not TLS, or no ClientHello of it, or one that could be read in two ways."""


class ClientHello(NamedTuple):
    raw: bytes  # the records, as they came
    name: str | None  # the server that is meant, in lower case
    has_early_data: bool = False  # data may follow before the server has answered


async def read_hello(reader: StreamReader, first: bytes = b"") -> ClientHello:
    """A whole ClientHello. `first` are the bytes of it that were read already. Raises BadClientHello."""
    raw, message = bytearray(), bytearray()
    take = _PrefixedReader(reader, first).take
    try:
        for _ in range(MAX_RECORDS):
            head = await take(5)
            body = await take(_record_length(head))
            raw += head + body
            message += body
            if _is_complete(message):
                return ClientHello(bytes(raw), *parse_hello(bytes(message)))
    except IncompleteReadError:
        raise BadClientHello("the TLS handshake breaks off") from None
    raise BadClientHello("the TLS handshake begins in too many pieces")


async def follow_handshake(
    reader: StreamReader, hello: ClientHello, check: Callable[[ClientHello], None]
) -> AsyncIterator[bytes]:
    """The program's records after its ClientHello, for as long as a second one can come, which is given to
    `check`.

    A server that knows no key of the first asks for a second, and some go by the name in that. Raises
    BadClientHello.
    """
    held = b""
    try:
        for count in range(1, _RECORDS_BETWEEN):
            held = await reader.readexactly(5)
            kind, length = held[0], int.from_bytes(held[3:5], "big")
            if kind == _HANDSHAKE and length:
                held += await reader.readexactly(min(length, _HEAD_BYTES))
                yield await _read_second_hello(reader, held, check)
                return
            if kind not in _BETWEEN and not (kind == _DATA and hello.has_early_data):
                yield held
                return
            yield held + await reader.readexactly(length)
            held = b""
            if not count % _RECORDS_AT_ONCE:  # they may all be there already, and others have their turn
                await asyncio.sleep(0)
    except IncompleteReadError as error:
        yield held + error.partial  # and it says no more
        return
    raise BadClientHello("too much follows on the ClientHello before the handshake continues")


async def _read_second_hello(reader: StreamReader, start: bytes, check: Callable[[ClientHello], None]) -> bytes:
    """The bytes read of a handshake message, checked if it is a second ClientHello. Raises BadClientHello."""
    message = start[5:]
    if message[0] != _CLIENT_HELLO or int.from_bytes(message[1:].ljust(_HEAD_BYTES - 1, b"\0"), "big") > _MOST_BYTES:
        return start  # or it is enciphered, and looks like anything
    second = await read_hello(reader, start)
    check(second)
    return second.raw


class _PrefixedReader:
    """A reader with some bytes put back in front."""

    def __init__(self, reader: StreamReader, first: bytes):
        self._reader, self._first = reader, first

    async def take(self, count: int) -> bytes:
        taken, self._first = self._first[:count], self._first[count:]
        return taken + await self._reader.readexactly(count - len(taken))


def looks_like_tls(first: bytes) -> bool:
    """Whether the first two bytes of a connection are a handshake of SSL 3 or later."""
    return first[:2] == b"\x16\x03"


def _record_length(head: bytes) -> int:
    if not looks_like_tls(head) or head[2] > 4:
        raise BadClientHello("the first bytes are not TLS")
    length = int.from_bytes(head[3:5], "big")
    if not 0 < length <= MAX_RECORD_BYTES:
        raise BadClientHello("the TLS handshake has a record of a length that cannot be")
    return length


def _is_complete(message: bytearray) -> bool:
    """Whether all of the ClientHello is there. Raises BadClientHello where something else is, or more."""
    if message[0] != _CLIENT_HELLO:
        raise BadClientHello("the TLS handshake does not begin with a ClientHello")
    if len(message) < 4:
        return False
    length = 4 + int.from_bytes(message[1:4], "big")
    if length > MAX_HELLO_BYTES:
        raise BadClientHello(f"a ClientHello can have {MAX_HELLO_BYTES} bytes")
    if len(message) > length:
        raise BadClientHello("more follows on the ClientHello than can be")
    return len(message) == length


def parse_hello(message: bytes) -> tuple[str | None, bool]:
    """The name in a whole ClientHello, None where it has none, and whether early data follows. Raises
    BadClientHello.
    """
    fields = _HelloFields(message[4:])
    fields.take(2 + 32)  # version, random
    fields.take_vector(1)  # session
    fields.take_vector(2)  # ciphers
    fields.take_vector(1)  # compression
    if fields.is_empty:
        return None, False
    extensions = _HelloFields(fields.take_vector(2))
    fields.check_empty()
    names, kinds = [], set()
    while not extensions.is_empty:
        kind, body = int.from_bytes(extensions.take(2), "big"), extensions.take_vector(2)
        kinds.add(kind)
        if kind == _SERVER_NAME:
            names.append(_server_name(body))
    if len(names) > 1:
        raise BadClientHello("the ClientHello names two servers")
    return (names[0] if names else None), _EARLY_DATA in kinds


def _server_name(body: bytes) -> str:
    fields = _HelloFields(body)
    entries = _HelloFields(fields.take_vector(2))
    fields.check_empty()
    kind, name = entries.take(1)[0], entries.take_vector(2)
    entries.check_empty()
    if kind != _HOST_NAME or not _NAME.fullmatch(name):
        raise BadClientHello("the ClientHello names a server in a way that is not known")
    return name.decode().lower()


class _HelloFields:
    """Bytes that are taken from the front. Missing bytes raise BadClientHello."""

    def __init__(self, raw: bytes):
        self._raw, self._at = raw, 0

    @property
    def is_empty(self) -> bool:
        return self._at == len(self._raw)

    def take(self, count: int) -> bytes:
        taken = self._raw[self._at : self._at + count]
        if len(taken) < count:
            raise BadClientHello("the ClientHello is shorter than it says")
        self._at += count
        return taken

    def take_vector(self, size: int) -> bytes:
        return self.take(int.from_bytes(self.take(size), "big"))

    def check_empty(self) -> None:
        if not self.is_empty:
            raise BadClientHello("the ClientHello is longer than it says")
