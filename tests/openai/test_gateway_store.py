"""What is kept is removed when its time is over, and what nobody knows is removed too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from cloche import errors
from cloche.store import blobs
from cloche.store.base import SHUT_DOWN_REASON
from cloche.store.files import COPY_PREFIX, StoredContainerFile, new_container_file_id, new_file_id
from cloche.store.gateway import GatewayStore


async def content(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data


@pytest.fixture
async def gateway_store(tmp_path: Path) -> AsyncGenerator[GatewayStore, None]:
    async with GatewayStore(tmp_path, 30) as opened:
        yield opened


def names(tmp_path: Path) -> set[str]:
    return set(os.listdir(tmp_path / "blobs"))


async def test_a_file_goes_when_it_expires(gateway_store: GatewayStore, tmp_path: Path):
    ids = [new_file_id(), new_file_id()]
    for id, seconds in zip(ids, (0.001, 3600), strict=True):
        await gateway_store.files.put_content(id, content(b"x"), 10)
        await gateway_store.files.add(id, "me", filename="x", purpose="batch", bytes=1, seconds=seconds)
    await asyncio.sleep(0.01)  # a machine can add the second one within the first one's millisecond
    with pytest.raises(errors.FileNotFound):
        await gateway_store.files.get("me", ids[0])
    await gateway_store.prune_files()
    assert names(tmp_path) == {ids[1]}
    assert (await gateway_store.files.get("me", ids[1])).id == ids[1]


async def test_a_containers_file_goes_after_the_days_that_are_configured(gateway_store: GatewayStore, tmp_path: Path):
    now = time.time()
    old, new = (
        StoredContainerFile(
            id=new_container_file_id(),
            sandbox="i",
            owner="me",
            path=f"/mnt/data/{at}",
            source="user",
            bytes=1,
            created_at=at,
            kept=True,
        )
        for at in (now - 31 * 86400, now)
    )
    for file in (old, new):
        await gateway_store.blobs.put(file.id, content(b"x"), 10)
    await gateway_store.container_files.register([old, new])
    await gateway_store.prune_files()
    assert names(tmp_path) == {new.id}
    assert await gateway_store.container_files.list_by_sandbox("me", "i") == [new]
    assert await gateway_store.container_files.list_by_sandbox("you", "i") == []


async def test_orphans_and_drafts_go_once_they_are_old(
    gateway_store: GatewayStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    known, orphan = new_file_id(), new_file_id()
    for id in (known, orphan):
        await gateway_store.files.put_content(id, content(b"x"), 10)
    await gateway_store.files.add(known, "me", filename="x", purpose="batch", bytes=1)
    (tmp_path / "blobs/.draft-x").touch()
    (tmp_path / "blobs/somebody-elses").touch()
    await gateway_store.prune_files()
    assert len(names(tmp_path)) == 4  # what is new may become known yet
    monkeypatch.setattr(blobs, "ORPHAN_SECONDS", -1.0)
    await gateway_store.prune_files()
    assert names(tmp_path) == {known, "somebody-elses"}


async def test_a_path_is_registered_once(gateway_store: GatewayStore):
    first = StoredContainerFile(
        id=new_container_file_id(), sandbox="i", owner="me", path="/mnt/data/a", source="user", bytes=1, created_at=1.0
    )
    await gateway_store.container_files.register([first])
    again = msgspec.structs.replace(first, id=new_container_file_id(), source="assistant")
    assert await gateway_store.container_files.register([again]) == [first]


async def test_an_oversized_file_leaves_nothing(gateway_store: GatewayStore, tmp_path: Path):
    with pytest.raises(errors.TooLarge):
        await gateway_store.files.put_content(new_file_id(), content(b"x" * 11), 10)
    assert names(tmp_path) == set()


def of_me(sandbox: str, origin: str | None = None, size: int = 5) -> StoredContainerFile:
    id = new_container_file_id()
    return StoredContainerFile(
        id=id,
        sandbox=sandbox,
        owner="me",
        path=f"/mnt/data/{id[-6:]}",
        source="user",
        bytes=size,
        created_at=time.time(),
        kept=True,
        origin=origin,
    )


async def test_a_link_takes_room_once_the_file_is_gone_that_it_is_of(gateway_store: GatewayStore):
    id = new_file_id()
    await gateway_store.files.put_content(id, content(b"12345"), 10)
    await gateway_store.files.add(id, "me", filename="x", purpose="batch", bytes=5)
    await gateway_store.container_files.register(
        [of_me("i", id), of_me("i", COPY_PREFIX + id, 7), of_me("i", "sha256:1", 11)]
    )
    assert await gateway_store.container_files.kept_bytes("me", "i") == (18, 18)
    assert await gateway_store.container_files.kept_bytes("me", "j") == (18, 0)
    await gateway_store.files.remove("me", id)
    assert await gateway_store.container_files.kept_bytes("me", "i") == (23, 23)


async def test_files_of_sandboxes_that_their_owners_killed_go(gateway_store: GatewayStore, tmp_path: Path):
    files = {name: of_me(name) for name in ("killed", "stopped", "expired", "just-now")}
    ends = {"killed": ("killed", "by its owner", 1.0), "stopped": ("killed", SHUT_DOWN_REASON, 1.0)}
    ends |= {"expired": ("expired", None, 1.0), "just-now": ("killed", "by its owner", time.time())}
    await gateway_store.container_files.register(files.values())
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite3")) as db, db:
        for id, (state, reason, ended_at) in ends.items():
            row = (id, "me", "t", state, "x", 1.0, ended_at, reason, "{}", "{}")
            columns = "id, owner, template, state, instance, created_at, ended_at, end_reason, metadata, limits"
            db.execute(f"INSERT INTO sandboxes ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    await gateway_store.prune_files()
    left = {name for name in files if await gateway_store.container_files.list_by_sandbox("me", name)}
    assert left == {"stopped", "expired", "just-now"}
