"""Ends everything of one owner, so that nothing of theirs is written again while it is removed."""

from __future__ import annotations

import asyncio
import contextlib

from cloche import errors
from cloche.engine.engine import Engine

OWNER_ERASED = "its owner was erased"


async def end_all_of_owner(engine: Engine, owner: str) -> int:
    """Ends their builds and sandboxes, running and paused, and drops their volumes. Returns how many sandboxes."""
    await engine.builds.stop(owner)
    ended = 0
    for _ in range(3):  # objects in the making are found at the next pass
        here = engine.list(owner)
        if not here:
            break
        ended += sum(await asyncio.gather(*(_end_sandbox(engine, each.id, owner) for each in here)))
    await engine.volumes.discard(owner)
    engine.quotas.forget(owner)
    return ended


async def _end_sandbox(engine: Engine, id: str, owner: str) -> int:
    with contextlib.suppress(errors.ClocheError):  # it ended by itself, or another process has it now
        await engine.kill(id, owner, OWNER_ERASED)
        return 1
    return 0
