"""Bytes between a program and where it was let through to, counted, for as long as both want."""

from __future__ import annotations

import asyncio

from cloche.egress.dialling import Streams
from cloche.egress.door import Visit

CHUNK_BYTES = 64 << 10


class OverLimit(Exception):
    """Its text says over which."""


class Meter:
    """Counts what moves for one visit, and ends what moves too much."""

    def __init__(self, visit: Visit):
        self._visit = visit

    def sent(self, count: int) -> None:
        self._visit.attempt.sent_bytes += count
        self._count(count)

    def received(self, count: int) -> None:
        self._visit.attempt.received_bytes += count
        self._count(count)

    def _count(self, count: int) -> None:
        door = self._visit.door
        door.moved_bytes += count
        if door.moved_bytes > door.config.sandbox_bytes:
            raise OverLimit(f"the sandbox has moved more than {door.config.sandbox_bytes} bytes")


async def relay(visit: Visit, far: Streams, first: bytes = b"") -> None:
    """Until both sides have ended. `first` goes before what the program sends. Raises OverLimit."""
    meter = Meter(visit)
    reader, writer = far
    try:
        if first:
            meter.sent(len(first))
            writer.write(first)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(visit.reader, writer, meter.sent, visit.door.config.idle_seconds))
            group.create_task(_pump(reader, visit.writer, meter.received, visit.door.config.idle_seconds))
    except* OverLimit as group_error:
        raise group_error.exceptions[0] from None
    except* (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


async def _pump(reader, writer, count, idle_seconds: float) -> None:  # type: ignore[no-untyped-def]
    while True:
        async with asyncio.timeout(idle_seconds):
            part = await reader.read(CHUNK_BYTES)
        if not part:
            break
        count(len(part))
        writer.write(part)
        async with asyncio.timeout(idle_seconds):
            await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
