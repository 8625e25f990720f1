"""How long a program may take to say what it wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from cloche.egress.refusal import TooSlow
from cloche.egress.visit import Visit


@contextlib.asynccontextmanager
async def patience(visit: Visit) -> AsyncIterator[None]:
    """Raises TooSlow."""
    seconds = visit.door.config.request_seconds
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise TooSlow(f"it did not say within {seconds:g} s what it wants") from None
