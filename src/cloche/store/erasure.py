"""Erases all data of one owner from a data directory: every row, and every file that a row names.

Files go first, rows after them: an erasure that was killed can be repeated and finds the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cloche.store import librechat

IsLive = Callable[[str], bool]

OWNED_TABLES: tuple[str, ...] = (
    "sandboxes",
    "keys",
    "quotas",
    "usage",
    "files",
    "container_files",
    "responses",
    "response_items",
    "conversations",
    "chat_calls",
    "steps",
    "code_files",
    "code_sessions",
    "code_room",
    "snapshots",
    "runs",
    "built_templates",
    "template_builds",
    "template_files",
    "volumes",
)
"""Every table with a column `owner`. A test sees to it that none is forgotten."""

DEPENDENT_TABLES: Mapping[str, tuple[str, str, str]] = {
    "response_events": ("response", "id", "responses"),
    "conversation_items": ("conversation", "id", "conversations"),
    "code_workspaces": ("key", "key", "code_sessions"),
    "snapshot_bodies": ("id", "id", "snapshots"),
    "run_events": ("run", "id", "runs"),
    "template_tags": ("template", "id", "built_templates"),
    "template_build_logs": ("id", "id", "template_builds"),
}
"""Tables without an owner of their own: their column, and the column and table that it points to."""

_THEIRS = {"code_sessions": "(owner = ?1 OR (json_valid(owner) AND json_extract(owner, '$[0]') = ?1))"}
_BUSY = {  # rows that another process works with: it would write them again
    "sandboxes": "state IN ('running', 'paused') AND instance IN (SELECT value FROM json_each(?2))",
    "volumes": "instance IN (SELECT value FROM json_each(?2))",
    "runs": "instance IN (SELECT value FROM json_each(?2))",
    "responses": "instance IN (SELECT value FROM json_each(?2))",
    "template_builds": "state IN ('waiting', 'building') AND instance IN (SELECT value FROM json_each(?2))",
}


def erase_owner(db: sqlite3.Connection, data_dir: Path, owner: str, live: Iterable[str]) -> dict[str, int]:
    """Returns the removed rows by table, and `file_bytes`.

    Raises OSError, sqlite3.Error; it can be repeated then.

    `live` are other host processes that run: their data in use of that owner stays, see `count_left`.
    """
    asked = (owner, _encode_names(live))
    removed: Counter[str] = Counter(file_bytes=0)
    for path in _list_files(db, data_dir, asked):
        removed["file_bytes"] += _unlink_file(path)
    with db:
        for table, (column, target, above) in DEPENDENT_TABLES.items():
            query = (
                f"DELETE FROM {table} WHERE {column} IN (SELECT {target} FROM {above} WHERE {_row_condition(above)})"
            )
            removed[table] += db.execute(query, _fit_parameters(query, asked)).rowcount
        for table in OWNED_TABLES:
            query = f"DELETE FROM {table} WHERE {_row_condition(table)}"
            removed[table] += db.execute(query, _fit_parameters(query, asked)).rowcount
    return {name: count for name, count in removed.items() if count}


def count_left(db: sqlite3.Connection, owner: str, live: Iterable[str]) -> dict[str, int]:
    """Counts rows of that owner that other host processes use, by table: those must be asked, or end, first."""
    asked = (owner, _encode_names(live))
    counts = {
        table: db.execute(f"SELECT COUNT(*) FROM {table} WHERE owner = ?1 AND {busy}", asked).fetchone()[0]
        for table, busy in _BUSY.items()
    }
    return {table: count for table, count in counts.items() if count}


def find_instances(db: sqlite3.Connection, owner: str) -> set[str]:
    """Returns the host processes that use, or used, data of that owner."""
    found: set[str] = set()
    for table in _BUSY:
        query = f"SELECT DISTINCT instance FROM {table} WHERE owner = ? AND instance IS NOT NULL"
        found |= {name for (name,) in db.execute(query, (owner,))}
    return found


def _row_condition(table: str) -> str:
    theirs = _THEIRS.get(table, "owner = ?1")
    return f"{theirs} AND NOT COALESCE({_BUSY[table]}, 0)" if table in _BUSY else theirs


def _fit_parameters(query: str, asked: tuple[str, str]) -> tuple[str, ...]:
    return asked if "?2" in query else asked[:1]


def _encode_names(live: Iterable[str]) -> str:
    return json.dumps(sorted(live))


def _list_files(db: sqlite3.Connection, data_dir: Path, asked: tuple[str, str]) -> Iterable[Path]:
    """Yields all files that the owner's rows name."""
    images = (
        f"SELECT image FROM snapshots WHERE {_row_condition('snapshots')}",
        f"SELECT image FROM volumes WHERE image IS NOT NULL AND {_row_condition('volumes')}",
        f"""SELECT json_extract(revival, '$.image') FROM sandboxes
            WHERE json_extract(revival, '$.image') IS NOT NULL AND {_row_condition("sandboxes")}""",
    )
    for query in images:
        yield from (data_dir / "images" / Path(name).name for (name,) in _select_rows(db, query, asked))
    blobs = (
        "SELECT id FROM files WHERE owner = ?1",
        "SELECT id FROM container_files WHERE owner = ?1 AND kept",
        f"SELECT '{librechat.CODE_FILE_PREFIX}' || id FROM code_files WHERE owner = ?1",
    )
    for query in blobs:
        yield from (data_dir / "blobs" / Path(name).name for (name,) in _select_rows(db, query, asked))
    archives = _select_rows(db, "SELECT id FROM template_files WHERE owner = ?1", asked)
    yield from (data_dir / "build-files" / Path(name).name for (name,) in archives)


def _select_rows(db: sqlite3.Connection, query: str, asked: tuple[str, str]) -> list[tuple[str]]:
    return db.execute(query, _fit_parameters(query, asked)).fetchall()


def _unlink_file(path: Path) -> int:
    """Removes a file. Returns its size; 0 if it is gone already."""
    with contextlib.suppress(FileNotFoundError):
        size = os.stat(path).st_size
        path.unlink()
        return size
    return 0
