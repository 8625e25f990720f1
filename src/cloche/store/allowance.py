"""Whether an owner may store more: asked before anything of theirs is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

Allow = Callable[[str, int], Awaitable[None]]
"""Of an owner, so many bytes more. Raises QuotaExceeded."""


async def anything(owner: str, more_bytes: int) -> None:
    """Where there are no quotas."""
