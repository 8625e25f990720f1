"""On whose behalf something is done: set where a request is admitted, read where it is counted or written down.

Tasks inherit it from the one that made them, so it is there however deep in the engine something happens. Where nobody
asked by a key (a library's own engine, a sandbox's own token, the engine itself) there is none.
"""

from __future__ import annotations

from contextvars import ContextVar

from cloche.model import Principal

_ACTING: ContextVar[Principal | None] = ContextVar("acting", default=None)


def act_for(principal: Principal | None) -> None:
    """From here on, this task and those that it makes act for them; with None for nobody who asked by a key."""
    _ACTING.set(principal)


def acting() -> Principal | None:
    """Who that is; None where nobody asked by a key."""
    return _ACTING.get()
