"""What an admin looks at in the console, told to the audit log: pages that have others' things in them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from starlette.requests import Request

from cloche.api.ui.house import Page, Visitor
from cloche.api.witness import id_of

Noted = Callable[..., None]  # as `Trail.note`

TOLD = frozenset({"sandboxes", "requests", "network", "keys", "usage", "audit", "templates"})
AGAIN_SECONDS = 900.0  # a page that is open asks every few seconds, and is told of once in so many
MOST = 10_000  # that are remembered


class Looks:
    def __init__(self, noted: Noted, clock: Callable[[], float] = time.monotonic):
        self._noted = noted
        self._clock = clock
        self._told: dict[tuple[str, str, str], float] = {}  # when, by session, page and id; the oldest first

    def note(self, request: Request, visitor: Visitor, page: Page) -> None:
        """They were shown that page. Whether they asked for all of it or for a part is no matter."""
        noun, id = page.path.split("/")[1], id_of(request.scope)
        what, now = (visitor.csrf, page.path, id), self._clock()
        if not visitor.is_admin or request.method != "GET" or noun not in TOLD:
            return
        if now - self._told.get(what, -math.inf) < AGAIN_SECONDS:
            return
        self._told.pop(what, None)
        if len(self._told) >= MOST:
            del self._told[next(iter(self._told))]
        self._told[what] = now
        self._noted(f"admin.{noun}.read", visitor.owner, id=id, about=f"GET /ui{page.path}")
