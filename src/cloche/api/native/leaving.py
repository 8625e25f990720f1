"""Work that is done for a client that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives. A client that leaves cancels it. The request's body must have been read.

    Raises ClientDisconnect, once the work has ended.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
