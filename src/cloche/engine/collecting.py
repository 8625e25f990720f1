"""Collecting what nobody needs, while a server runs: see `collection`."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from cloche import errors
from cloche.engine.collection import Collection, Found
from cloche.engine.engine import Engine
from cloche.telemetry import log


@contextlib.asynccontextmanager
async def collecting(engine: Engine) -> AsyncIterator[None]:
    """Now, and every so often; in a thread, so that nobody waits for it."""
    task = asyncio.create_task(_collect(engine))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _collect(engine: Engine) -> None:
    compact = True  # at the start only: nobody can write meanwhile, so only a small store is written anew
    while True:
        work = Collection(engine.config, engine.instance.is_live, compact=compact)
        tell(engine, await asyncio.to_thread(work.run))
        for why in work.failed:
            log.error("disk.not_collected", why=why)
        try:
            await engine.builds.clean()
        except (errors.ClocheError, sqlite3.Error, OSError) as error:
            log.error("disk.not_collected", error=type(error).__name__, why=str(error))
        compact = False
        await asyncio.sleep(engine.config.disk.collect_hours * 3600.0)


def tell(engine: Engine, found: Sequence[Found]) -> None:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for each in found:
        counts[each.kind] += each.things
        sizes[each.kind] += each.bytes
        if each.kind == "template":
            engine.trail.note("template.removed", "", id=each.name, about=each.why, bytes=each.bytes, itself=True)
    for kind, count in counts.items():
        log.info("disk.collected", kind=kind, count=count, bytes=sizes[kind])
