"""Forks for callers who want all of them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cloche import errors
from cloche.engine.sandbox import Sandbox


async def all_made(made: Sequence[Sandbox | errors.ClocheError]) -> list[Sandbox]:
    """What `Engine.fork` gave, if none failed. Raises why the first failed; the others have ended then."""
    failures = [each for each in made if isinstance(each, errors.ClocheError)]
    forks = [each for each in made if isinstance(each, Sandbox)]
    if failures:
        await asyncio.gather(*(each.kill("not all of its siblings could be made") for each in forks))
        raise failures[0]
    return forks
