"""Making sandboxes for clients that may leave while they wait for a place."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from cloche.api.http import unless_left
from cloche.engine.engine import Engine

T = TypeVar("T")


async def while_wanted(request: Request, engine: Engine, making: Coroutine[Any, Any, T]) -> T:
    """What `making` gives. Where it has to wait for a place, it is given up when the client leaves.

    Else the place would be taken by a sandbox whose id nobody ever hears. Where there is room, nobody leaves that fast,
    and nothing is watched. The request's body must have been read. Raises ClientDisconnect, and what `making` does.
    """
    return await (unless_left(request, making) if engine.housing.admission.crowded else making)
