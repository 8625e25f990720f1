"""The principal that the current task acts for: set where a request is admitted, read where it is counted.

Tasks inherit it from the task that made them, so it is known however deep in the engine something happens.
There is none for work that no key asked for: a library's own engine, a sandbox's own token, the engine
itself.
"""

from __future__ import annotations

from contextvars import ContextVar

from cloche.model import Principal

_CURRENT_PRINCIPAL: ContextVar[Principal | None] = ContextVar("acting", default=None)


def set_current_principal(principal: Principal | None) -> None:
    """From here on this task, and those that it makes, act for that principal; with None for no key."""
    _CURRENT_PRINCIPAL.set(principal)


def current_principal() -> Principal | None:
    """The principal that this task acts for; None where no key asked."""
    return _CURRENT_PRINCIPAL.get()
