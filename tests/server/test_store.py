"""The store's thread outlives what is asked of it, and old records go."""

from __future__ import annotations

import asyncio
import time

import pytest

from cloche.model import SandboxSpec
from cloche.store import sandboxes
from cloche.store.base import SandboxRecord
from cloche.store.database import Database


@pytest.mark.parametrize("raised", [ValueError, MemoryError, SystemExit], ids=lambda kind: kind.__name__)
async def test_an_error_of_one_job_reaches_its_caller_and_the_next_is_done(tmp_path, raised):
    database = Database(tmp_path / "store.sqlite3")
    await database.open()

    def failing(db: object) -> None:
        raise raised("never said")

    async with asyncio.timeout(30):
        with pytest.raises(raised):
            await database.do(failing)
        database.do_later(failing)
        assert await database.do(lambda db: db.execute("SELECT 6*7").fetchone()) == (42,)
        await database.aclose()


async def test_records_are_removed_when_they_are_old_and_not_only_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(sandboxes, "PRUNE_SECONDS", 0.05)
    kept = sandboxes.SqliteSandboxRecords(tmp_path / "store.sqlite3")
    await kept.open()
    ended_at = time.time() - sandboxes.KEPT_SECONDS
    spec = SandboxSpec(owner="alice", template="python@1")
    about = {"spec": spec, "state": "killed", "instance": "i", "created_at": 0.0}
    kept.put(SandboxRecord(id="old", ended_at=ended_at - 1, **about))
    kept.put(SandboxRecord(id="young", ended_at=ended_at + 3600, **about))
    async with asyncio.timeout(30):
        while await kept.get("old") is not None:
            await asyncio.sleep(0.02)
    assert await kept.get("young") is not None
    await kept.aclose()
