"""Files that builds copy, as they are kept: by owner, bounded, and never half."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche import errors
from cloche.store import builds
from cloche.store.builds import BuildFiles
from cloche.store.database import Database


async def chunks(*parts: bytes, then: Exception | None = None) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if then is not None:
        raise then


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[BuildFiles]:
    database = Database(tmp_path / "store.sqlite3")
    await database.open()
    yield BuildFiles(database, tmp_path / "files")
    await database.aclose()


async def content(files: BuildFiles, owner: str, digest: str) -> bytes:
    return b"".join([chunk async for chunk in await files.chunks(owner, digest)])


@pytest.mark.asyncio
async def test_each_owner_has_their_own_under_the_same_digest(files):
    await files.put("a", "d1", chunks(b"mine"), 100)
    assert not await files.has("b", "d1")
    await files.put("b", "d1", chunks(b"theirs"), 100)
    assert await content(files, "a", "d1") == b"mine" and await content(files, "b", "d1") == b"theirs"


@pytest.mark.asyncio
async def test_an_aborted_or_oversized_upload_leaves_the_old_file(files, tmp_path):
    await files.put("a", "d1", chunks(b"whole"), 100)
    with pytest.raises(ConnectionError):
        await files.put("a", "d1", chunks(b"half", then=ConnectionError()), 100)
    with pytest.raises(errors.TooLarge):
        await files.put("a", "d2", chunks(b"x" * 60, b"x" * 60), 100)
    assert await content(files, "a", "d1") == b"whole" and not await files.has("a", "d2")
    assert len(os.listdir(tmp_path / "files")) == 1


@pytest.mark.asyncio
async def test_the_least_recently_used_go_first(files, tmp_path, monkeypatch):
    monkeypatch.setattr(builds, "MAX_OWNER_ARCHIVE_BYTES", 25)
    for digest in ("d1", "d2"):
        await files.put("a", digest, chunks(b"x" * 10), 100)
        await asyncio.sleep(0.01)  # the clock's steps
    assert await files.has("a", "d1")
    await asyncio.sleep(0.01)
    await files.put("a", "d3", chunks(b"x" * 10), 100)
    assert [await files.has("a", digest) for digest in ("d1", "d2", "d3")] == [True, False, True]
    assert len(os.listdir(tmp_path / "files")) == 2
    monkeypatch.setattr(builds, "ARCHIVE_KEPT_SECONDS", -1.0)
    await files.clean()
    assert os.listdir(tmp_path / "files") == []
    with pytest.raises(errors.FileNotFound):
        await files.chunks("a", "d1")


@pytest.mark.asyncio
async def test_an_owner_has_so_many_however_small_they_are(files, tmp_path, monkeypatch):
    monkeypatch.setattr(builds, "MAX_OWNER_ARCHIVES", 2)
    for number in range(4):
        await files.put("a", f"d{number}", chunks(), 100)
    assert [await files.has("a", f"d{number}") for number in range(4)] == [False, False, True, True]
    assert len(os.listdir(tmp_path / "files")) == 2


@pytest.mark.asyncio
async def test_files_that_are_found_missing_can_be_uploaded_again(files, tmp_path):
    await files.put("a", "d1", chunks(b"1"), 100)
    for each in (tmp_path / "files").iterdir():
        each.unlink()
    with pytest.raises(errors.FileNotFound):
        await files.chunks("a", "d1")
    assert not await files.has("a", "d1")
