"""Whoever asks for their own records costs the store no look at everybody else's: it has one thread for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cloche.store.gateway import StepQuery, StoredSteps
from cloche.store.sandboxes import SqliteSandboxRecords

OTHERS = 20_000
STEPS = 100  # of SQLite's machine, between two counts
NUMBERS = f"""WITH RECURSIVE numbers(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM numbers WHERE n < {OTHERS})"""
FILL = (
    """INSERT INTO steps (id, request, owner, kind, started_at, seconds, outcome, fields, captured)
    SELECT n, n, 'others', 'request', n, 0, 'ok', '{}', '{}' FROM numbers""",
    """INSERT INTO sandboxes (id, owner, template, state, instance, created_at, ended_at, metadata, limits)
    SELECT n, 'others', 't', 'killed', 'h', n, n, '{}', '{}' FROM numbers""",
)

Asking = Callable[[SqliteSandboxRecords], Awaitable[object]]
ASKED: dict[str, Asking] = {
    "requests": lambda records: StoredSteps(records.database).requests(StepQuery(owner="me", limit=51)),
    "requests of a model": lambda records: StoredSteps(records.database).requests(
        StepQuery(owner="me", model="m", limit=51)
    ),
    "a request by an id": lambda records: StoredSteps(records.database).requests(
        StepQuery(owner="me", id="none", limit=51)
    ),
    "sandboxes that ended": lambda records: records.recent("me", 500),
}


@pytest.mark.parametrize("asking", ASKED.values(), ids=list(ASKED))
async def test_ones_own_are_found_without_a_look_at_others(tmp_path: Path, asking: Asking):
    records = SqliteSandboxRecords(tmp_path / "store.sqlite3")
    await records.open()
    for fill in FILL:
        await records.database.do(lambda db, fill=fill: db.execute(f"{NUMBERS} {fill}"))
    counted: list[int] = []
    await records.database.do(lambda db: db.set_progress_handler(lambda: counted.append(1), STEPS))
    assert await asking(records) == []
    assert len(counted) * STEPS < OTHERS
    await records.aclose()
