"""Bytes between a program and where it was let through to, counted, for as long as both want."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from cloche.egress.connect import Streams
from cloche.egress.door import Visit
from cloche.egress.streams import OverLimit, Refusal

CHUNK_BYTES = 32 << 10

Count = Callable[[int], None]


class Stalled(Refusal):
    """Nothing has moved for too long."""

    status, socks_code = 504, 1
    verdict = "failed"


class Meter:
    """Counts what moves for one visit, and ends what moves too much, or no more."""

    def __init__(self, visit: Visit):
        self._visit = visit
        self._loop = asyncio.get_running_loop()
        self._limit: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Raises Stalled where nothing moves for too long, either way."""
        idle_seconds = self._visit.door.config.idle_seconds
        try:
            async with asyncio.timeout(idle_seconds) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            raise Stalled(f"nothing moved for {idle_seconds:g} s") from None
        finally:
            self._limit = None

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
        if self._limit is not None:
            self._limit.reschedule(self._loop.time() + door.config.idle_seconds)


async def relay(visit: Visit, far: Streams, opening: AsyncIterator[bytes]) -> None:
    """Until both sides have ended; when one has, the other still can speak.

    `opening` gives what was read of the program's first words. What the server says does not wait for that. Raises
    OverLimit, and what `opening` raises.
    """
    meter = Meter(visit)
    reader, writer = far

    async def up() -> None:
        async for part in opening:
            await pass_on(part, writer, meter.sent)
        await pump(visit.reader, writer, meter.sent)

    try:
        async with meter.watching():
            await both(up(), pump(reader, visit.writer, meter.received))
    except OSError:
        visit.attempt.stop(who_broke_off(visit, reader))
        visit.reset()
    except Stalled as stalled:
        visit.attempt.stop(str(stalled))
        visit.reset()


def who_broke_off(visit: Visit, far: asyncio.StreamReader) -> str:
    """Where a connection did not end but was reset, or got lost."""
    if visit.reader.exception() is not None:
        return "the program broke it off"
    return "the server broke it off" if far.exception() is not None else "it broke off"


async def both(one: Awaitable[None], other: Awaitable[None]) -> None:
    """Until both have ended. Where one raises, the other is ended, and has ended."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Count) -> None:
    while part := await reader.read(CHUNK_BYTES):
        await pass_on(part, writer, count)
    writer.write_eof()


async def pass_on(part: bytes, writer: asyncio.StreamWriter, count: Count) -> None:
    """Counted first: what is over a limit does not go out."""
    count(len(part))
    writer.write(part)
    await writer.drain()
