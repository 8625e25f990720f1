"""Copies and counts bytes between a program and its server, for as long as both want."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from cloche.egress.connect import Streams
from cloche.egress.door import EgressConnection
from cloche.egress.streams import EgressRefusal, TransferOverLimit

CHUNK_BYTES = 32 << 10

Count = Callable[[int], None]


class TransferStalled(EgressRefusal):
    """Nothing has moved for too long."""

    status, socks_code = 504, 1
    verdict = "failed"


class TransferMeter:
    """Counts the bytes of one connection, and ends it when it moves too many, or none for too long."""

    def __init__(self, visit: EgressConnection):
        self._visit = visit
        self._loop = asyncio.get_running_loop()
        self._limit: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def limit_idle(self) -> AsyncIterator[None]:
        """Raises TransferStalled where nothing moves for too long, either way."""
        idle_seconds = self._visit.door.config.idle_seconds
        try:
            async with asyncio.timeout(idle_seconds) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            raise TransferStalled(f"nothing moved for {idle_seconds:g} s") from None
        finally:
            self._limit = None

    def count_sent(self, count: int) -> None:
        self._visit.attempt.sent_bytes += count
        self._count_bytes(count)

    def count_received(self, count: int) -> None:
        self._visit.attempt.received_bytes += count
        self._count_bytes(count)

    def _count_bytes(self, count: int) -> None:
        door = self._visit.door
        door.moved_bytes += count
        if door.moved_bytes > door.config.sandbox_bytes:
            raise TransferOverLimit(f"the sandbox has moved more than {door.config.sandbox_bytes} bytes")
        if self._limit is not None:
            self._limit.reschedule(self._loop.time() + door.config.idle_seconds)


async def relay_streams(visit: EgressConnection, far: Streams, opening: AsyncIterator[bytes]) -> None:
    """Copies until both sides have ended; when one has, the other can still send.

    `opening` yields the program's first bytes. The server's bytes do not wait for it. Raises TransferOverLimit,
    and the errors of `opening`.
    """
    meter = TransferMeter(visit)
    reader, writer = far

    async def up() -> None:
        async for part in opening:
            await send_counted(part, writer, meter.count_sent)
        await copy_stream(visit.reader, writer, meter.count_sent)

    try:
        async with meter.limit_idle():
            await run_both(up(), copy_stream(reader, visit.writer, meter.count_received))
    except OSError:
        visit.attempt.stop(disconnect_reason(visit, reader))
        visit.reset()
    except TransferStalled as stalled:
        visit.attempt.stop(str(stalled))
        visit.reset()


def disconnect_reason(visit: EgressConnection, far: asyncio.StreamReader) -> str:
    """The side that reset or lost a connection which did not end properly."""
    if visit.reader.exception() is not None:
        return "the program broke it off"
    return "the server broke it off" if far.exception() is not None else "it broke off"


async def run_both(one: Awaitable[None], other: Awaitable[None]) -> None:
    """Runs both to their end. Where one raises, the other is cancelled and awaited."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Count) -> None:
    while part := await reader.read(CHUNK_BYTES):
        await send_counted(part, writer, count)
    writer.write_eof()


async def send_counted(part: bytes, writer: asyncio.StreamWriter, count: Count) -> None:
    """Sends a part, counted first: bytes over a limit do not go out."""
    count(len(part))
    writer.write(part)
    await writer.drain()
