"""Files of LibreChat's users: who finds which, how long they are kept, and how many they may be."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from cloche import errors
from cloche.api.librechat.replies import new_code_id
from cloche.store import librechat
from cloche.store.gateway import GatewayStore
from cloche.store.librechat import CodeFile, FileSpace, TenantScope, WorkspaceEntry, new_code_file

MINE = FileSpace(owner="chat", tenant="t", kind="user", id="ann")
HOUR = 3600.0


@pytest.fixture
async def gateway_store(tmp_path: Path) -> AsyncGenerator[GatewayStore, None]:
    async with GatewayStore(tmp_path, 30) as opened:
        await opened.prune_files()  # it does so itself in the beginning, beside what a test does then
        yield opened


async def chunks(*data: bytes) -> AsyncGenerator[bytes, None]:
    for each in data:
        yield each


async def put(
    gateway_store: GatewayStore,
    space: FileSpace = MINE,
    name: str = "a.txt",
    data: bytes = b"data",
    age_hours: float = 0,
) -> CodeFile:
    content = await gateway_store.code_files.put_content(new_code_id(), chunks(data), 1000)
    made = new_code_file(content, space, session=new_code_id(), user=space.id, name=name, content_type="text/plain")
    then = time.time() - age_hours * HOUR
    made = msgspec.structs.replace(made, created_at=then, used_at=then)
    await gateway_store.code_files.add([made])
    return made


async def is_there(gateway_store: GatewayStore, file: CodeFile, space: FileSpace | TenantScope = MINE) -> bool:
    try:
        return (await gateway_store.code_files.get(space, *file.ref)).id == file.id
    except errors.FileNotFound:
        return False


def contents(tmp_path: Path) -> set[str]:
    return {name.removeprefix(librechat.CODE_FILE_PREFIX) for name in os.listdir(tmp_path / "blobs")}


async def test_a_file_is_found_again_as_it_was_put(gateway_store: GatewayStore):
    made = await put(gateway_store, name="ordner/ein bild é 画.png", data=b"\x00\xff")
    found = await gateway_store.code_files.get(MINE, made.session, made.id)
    assert found == made
    assert b"".join([chunk async for chunk in await gateway_store.code_files.chunks(found)]) == b"\x00\xff"
    assert found.sha256 == hashlib.sha256(b"\x00\xff").hexdigest()


@pytest.mark.parametrize(
    "space",
    [
        FileSpace(owner="other", tenant="t", kind="user", id="ann"),
        FileSpace(owner="chat", tenant="u", kind="user", id="ann"),
        FileSpace(owner="chat", tenant="t", kind="user", id="bob"),
        FileSpace(owner="chat", tenant="t", kind="agent", id="ann"),
        FileSpace(owner="chat", tenant="t", kind="skill", id="ann", version="1"),
        FileSpace(owner="chat", tenant='t","user","ann', kind="user", id=""),
        TenantScope(owner="chat", tenant=""),
        TenantScope(owner="other", tenant="t"),
    ],
)
async def test_a_file_of_one_space_is_not_there_for_another(
    gateway_store: GatewayStore, space: FileSpace | TenantScope
):
    made = await put(gateway_store)
    assert not await is_there(gateway_store, made, space)
    assert await gateway_store.code_files.of_session(space, made.session, 10) == []
    assert await is_there(gateway_store, made)


async def test_a_file_needs_its_own_session(gateway_store: GatewayStore):
    one, other = await put(gateway_store), await put(gateway_store)
    with pytest.raises(errors.FileNotFound):
        await gateway_store.code_files.get(MINE, other.session, one.id)


async def test_many_references_are_looked_up_at_once_and_each_by_its_own_right(gateway_store: GatewayStore):
    skill = FileSpace(owner="chat", tenant="t", kind="skill", id="s", version="2")
    mine, shared, foreign = (
        await put(gateway_store),
        await put(gateway_store, skill),
        await put(gateway_store, FileSpace(owner="x")),
    )
    asked = [(MINE, mine.ref), (skill, shared.ref), (MINE, foreign.ref), (MINE, ("no" * 10, "x" * 21))]
    assert set(await gateway_store.code_files.find(asked)) == {mine.ref, shared.ref}
    assert set(await gateway_store.code_files.find([(skill, mine.ref), (MINE, shared.ref)])) == set()
    assert set(await gateway_store.code_files.find([(MINE, mine.ref), (skill, mine.ref)])) == {mine.ref}
    assert await gateway_store.code_files.find([]) == {}


async def test_a_file_goes_a_day_after_its_last_use(gateway_store: GatewayStore, tmp_path: Path):
    used, unused = await put(gateway_store, age_hours=23.9), await put(gateway_store, age_hours=24.1)
    found = await gateway_store.code_files.get(MINE, *used.ref)
    assert found.used_at > time.time() - 60  # being found was a use
    assert await gateway_store.code_files.get(MINE, *used.ref) == found
    assert not await is_there(gateway_store, unused)
    await gateway_store.prune_files()
    assert contents(tmp_path) == {used.id}


async def test_a_file_of_a_session_lives_as_long_as_that(gateway_store: GatewayStore, tmp_path: Path):
    old, older = await put(gateway_store, age_hours=50), await put(gateway_store, age_hours=50)
    await gateway_store.code_sessions.save_workspace("key", "chat", [entry(old, "a/b.txt")])
    await gateway_store.prune_files()
    assert contents(tmp_path) == {old.id}
    assert await is_there(gateway_store, old)
    assert not await is_there(gateway_store, older)


def entry(file: CodeFile, path: str) -> WorkspaceEntry:
    return WorkspaceEntry(path=path, session=file.session, file=file.id)


async def test_a_workspace_is_the_last_saved_state(gateway_store: GatewayStore):
    one, two = await put(gateway_store), await put(gateway_store)
    empty = WorkspaceEntry(path="empty")
    await gateway_store.code_sessions.save_workspace("key", "chat", [entry(one, "one")])
    await gateway_store.code_sessions.save_workspace("key", "chat", [entry(two, "two"), empty])
    assert await gateway_store.code_sessions.workspace("key", "chat") == [empty, entry(two, "two")]
    assert await gateway_store.code_sessions.workspace("key", "other") is None
    assert await gateway_store.code_sessions.workspace("other", "chat") is None
    await gateway_store.code_sessions.forget("key", "other")
    assert await gateway_store.code_sessions.workspace("key", "chat") is not None
    await gateway_store.code_sessions.forget("key", "chat")
    assert await gateway_store.code_sessions.workspace("key", "chat") is None


async def test_a_session_is_forgotten_a_day_after_its_last_use(tmp_path: Path):
    async with GatewayStore(tmp_path, 30) as gateway_store:
        made = await put(gateway_store, age_hours=0)
        await gateway_store.code_sessions.save_workspace("key", "chat", [entry(made, "x")])
    async with GatewayStore(tmp_path, 30, code_hours=-1) as gateway_store:  # all that is there has been unused for long
        assert await gateway_store.code_sessions.workspace("key", "chat") is None
        await gateway_store.prune_files()
        assert contents(tmp_path) == set()
    async with GatewayStore(tmp_path, 30) as gateway_store:
        assert await gateway_store.code_sessions.workspace("key", "chat") is None


async def test_removed_files_are_gone_with_their_content(gateway_store: GatewayStore, tmp_path: Path):
    made, other = await put(gateway_store), await put(gateway_store)
    await gateway_store.code_sessions.save_workspace("key", "chat", [entry(made, "x"), entry(other, "y")])
    await gateway_store.code_files.remove([made])
    await gateway_store.code_files.remove([made])
    assert contents(tmp_path) == {other.id}
    assert await gateway_store.code_sessions.workspace("key", "chat") == [entry(other, "y")]


async def test_a_content_that_became_no_file_is_removed(
    gateway_store: GatewayStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cloche.store.blobs.ORPHAN_SECONDS", -1.0)
    made = await put(gateway_store)
    await gateway_store.code_files.put_content(new_code_id(), chunks(b"lost"), 100)
    await gateway_store.prune_files()
    assert contents(tmp_path) == {made.id}


async def test_an_owner_and_each_user_have_so_much_room(gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(librechat, "MAX_USER_FILES", 2)
    monkeypatch.setattr(librechat, "MAX_OWNER_BYTES", 100)
    room = gateway_store.code_files.check_room
    made = [await put(gateway_store, data=b"x" * 20) for _ in range(2)]
    with pytest.raises(errors.TooLarge, match="You have 2 files of 40 bytes, and 2 "):
        await room("chat", "t", "ann")
    await room("chat", "t", "bob", bytes=60)
    with pytest.raises(errors.TooLarge, match="100 bytes are possible: delete some"):
        await room("chat", "t", "bob", bytes=61)
    await room("other", "t", "ann", bytes=100)
    await gateway_store.code_files.remove(made)
    await gateway_store.code_files.remove(made)
    await room("chat", "t", "ann", files=2, bytes=100)


async def test_expired_files_take_no_space(gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(librechat, "MAX_OWNER_FILES", 1)
    await put(gateway_store, age_hours=30)
    await gateway_store.code_files.check_room("chat")
    await put(gateway_store)
    with pytest.raises(errors.TooLarge):
        await gateway_store.code_files.check_room("chat")


async def test_of_too_many_sessions_the_one_that_was_not_used_for_longest_is_forgotten(
    gateway_store: GatewayStore,
) -> None:
    for key in ("first", "second", "first", "third"):
        await gateway_store.code_sessions.save_workspace(key, "ann", [WorkspaceEntry(path="d")], most=2)
    await gateway_store.code_sessions.save_workspace("other", "ben", [], most=2)
    known = [
        await gateway_store.code_sessions.workspace(key, "ann") is not None for key in ("first", "second", "third")
    ]
    assert known == [True, False, True] and await gateway_store.code_sessions.workspace("other", "ben") == []
