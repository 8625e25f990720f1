"""What a server says over a WebSocket, with secrets' values covered in it.

Its frames are understood and written anew: a value may be cut by the header of a frame, and a message ends where its
last frame does, so that nothing of it has to wait longer. Without extensions frames can be cut in any other way.

Raises BadAnswer, IncompleteReadError.
"""

from __future__ import annotations

import asyncio
from asyncio import IncompleteReadError, StreamReader
from collections.abc import AsyncIterator
from typing import NamedTuple

from cloche.egress.http1 import BadAnswer
from cloche.egress.masking import Mask, MaskedStream
from cloche.egress.relay import CHUNK_BYTES, Count

MAX_CONTROL_BYTES = 125
_LAST, _RESERVED, _CONTROL, _OPCODE, _MASKED = 0x80, 0x70, 0x08, 0x0F, 0x80


class Frame(NamedTuple):
    opcode: int
    is_last: bool  # of its message
    length: int


async def frames(reader: StreamReader, mask: Mask, count: Count) -> AsyncIterator[bytes]:
    """As they can go on, until the server ends. `count` is told how many bytes have come."""
    message: MaskedStream | None = None
    opcode = 0
    while (frame := await _read_frame(reader, count)) is not None:
        await asyncio.sleep(0)  # thousands of small ones may be there already: others have their turn
        if frame.opcode & _CONTROL:
            yield await _control(reader, frame, mask, count)
            continue
        if (frame.opcode == 0) != (message is not None):
            raise BadAnswer("the server's WebSocket has frames of one message in another")
        message, opcode = message or MaskedStream(mask), frame.opcode or opcode
        ready, left = b"", frame.length
        async for part in _parts(reader, frame.length, count):
            ready, left = await message.feed(part), left - len(part)
            if ready and (left or not frame.is_last):
                yield _written(opcode, False, ready)
                opcode = 0
        if frame.is_last:
            yield _written(opcode, True, ready + message.end())
            message = None
    if message is not None:
        raise BadAnswer("the server's WebSocket broke off in the middle of a message")


async def _control(reader: StreamReader, frame: Frame, mask: Mask, count: Count) -> bytes:
    """They come between the frames of a message, and are whole."""
    whole = MaskedStream(mask)
    content = [await whole.feed(part) async for part in _parts(reader, frame.length, count)]
    return _written(frame.opcode, True, b"".join(content) + whole.end())


async def _read_frame(reader: StreamReader, count: Count) -> Frame | None:
    try:
        first, second = await reader.readexactly(2)
    except IncompleteReadError as error:
        if error.partial:
            raise
        return None
    if first & _RESERVED or second & _MASKED:
        raise BadAnswer("the server's WebSocket has frames that no server sends without extensions")
    more = {126: 2, 127: 8}.get(second, 0)
    length = int.from_bytes(await reader.readexactly(more), "big") if more else second
    count(2 + more)
    frame = Frame(first & _OPCODE, bool(first & _LAST), length)
    if frame.opcode & _CONTROL and (not frame.is_last or frame.length > MAX_CONTROL_BYTES):
        raise BadAnswer("the server's WebSocket has a control frame that is not whole")
    return frame


async def _parts(reader: StreamReader, length: int, count: Count) -> AsyncIterator[bytes]:
    while length:
        part = await reader.read(min(length, CHUNK_BYTES))
        if not part:
            raise IncompleteReadError(b"", length)
        count(len(part))
        length -= len(part)
        yield part


def _written(opcode: int, is_last: bool, content: bytes) -> bytes:
    first, size = opcode | (_LAST if is_last else 0), len(content)
    if size < 126:
        return bytes((first, size)) + content
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2, "big") + content
    return bytes((first, 127)) + size.to_bytes(8, "big") + content
