"""Ending what a key made: a sandbox has tokens of its own, which hold whatever becomes of the key."""

from __future__ import annotations

import asyncio
import contextlib

from cloche import errors
from cloche.engine.engine import Engine
from cloche.store.keys import StoredKeys

REASON = "the key that it was made with was revoked"
LOOKS = 2
PAUSE_SECONDS = 0.2  # in which what was being made is there, or was cut off


async def kill_made(engine: Engine, keys: StoredKeys, id: str) -> int:
    """Ends all sandboxes here, running and paused, of that key and of those whose place it took. How many it were.

    Raises NotFound for a key that never was.
    """
    line, killed = await keys.line(id), 0
    for look in range(LOOKS):
        await asyncio.sleep(PAUSE_SECONDS if look else 0.0)
        theirs = [each for each in engine.known(None) if each.key_id in line]
        killed += sum(await asyncio.gather(*(_kill(engine, each.id, each.owner) for each in theirs)))
    return killed


async def _kill(engine: Engine, id: str, owner: str) -> int:
    with contextlib.suppress(errors.ClocheError):  # it ended by itself, or another process has it now
        await engine.kill(id, owner, REASON)
        return 1
    return 0
