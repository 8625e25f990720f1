"""How long an upstream's answer is waited for: in all, and after its last word."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import httpx2

from cloche import errors
from cloche.gateway.sse import ServerEvent

T = TypeVar("T")

LEAST_SECONDS = 3600.0
TIMEOUTS = 6  # of a server that may be silent for long
END_SECONDS = 0.2  # for the end of a stream in which all was said: then its connection can be used again
USAGE_SECONDS = 2.0  # for what follows the last word, and need not come


class Waiting:
    """The time that one answer may take. Only waiting counts, not what is done with the events meanwhile.

    A server that sends comments is never silent, so that the limit of silence does not end it.
    """

    def __init__(self, seconds: float):
        self._left = seconds

    async def next(self, events: AsyncIterator[ServerEvent]) -> ServerEvent | None:
        """None at the end. Raises UpstreamFailed when the time is over, and what the events raise."""
        return await self.whole(anext(events, None))

    async def last(self, events: AsyncIterator[ServerEvent], seconds: float) -> ServerEvent | None:
        """One more after the answer is whole. None if nothing comes in that time: also if something breaks."""
        with contextlib.suppress(TimeoutError, errors.UpstreamFailed, httpx2.HTTPError):
            return await self._counted(anext(events, None), min(seconds, self._left))
        return None

    async def whole(self, work: Awaitable[T]) -> T:
        """What `work` gives. Raises UpstreamFailed when the time is over, and what it raises."""
        try:
            return await self._counted(work, self._left)
        except TimeoutError:
            raise errors.UpstreamFailed(
                "The upstream of this model took too long to say all of its answer", status=504
            ) from None

    async def _counted(self, work: Awaitable[T], seconds: float) -> T:
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                return await work
        finally:
            self._left -= time.monotonic() - began


def answer_seconds(timeout_seconds: float) -> float:
    """For one answer of a server that may be silent for so long."""
    return max(LEAST_SECONDS, TIMEOUTS * timeout_seconds)
