"""What is remembered of chats that wait for their client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cloche.store import gateway
from cloche.store.database import Database
from cloche.store.gateway import StoredChatTurn, StoredChatTurns, chat_call_id, new_turn_key
from cloche.store.responses import is_json_longer

Work = Callable[[StoredChatTurns], Awaitable[None]]


def use(path: Path, work: Work) -> None:
    async def run() -> None:
        database = Database(path / "store.sqlite3")
        await database.open()
        try:
            await work(StoredChatTurns(database))
        finally:
            await database.aclose()

    asyncio.run(run())


def turn(text: str = "x") -> StoredChatTurn:
    return StoredChatTurn(items=[{"type": "reasoning", "text": text}], calls={"ours": "theirs"}, container="cntr_1")


def test_any_call_of_a_turn_leads_to_it_and_only_its_owner_there(tmp_path: Path):
    async def work(calls: StoredChatTurns) -> None:
        key, other = new_turn_key(), new_turn_key()
        calls.put("me", key, turn())
        calls.put("me", other, turn("y"))
        ids = [chat_call_id(key, 0), chat_call_id(key, 12), chat_call_id(other, 0)]
        assert await calls.find("me", ids) == {ids[0]: turn(), ids[1]: turn(), ids[2]: turn("y")}
        assert await calls.find("you", ids) == {}
        assert await calls.find("me", ["call_abc", "", key, ids[0] + "0", chat_call_id(new_turn_key(), 0)]) == {}

    use(tmp_path, work)


def test_turns_are_forgotten_after_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def work(calls: StoredChatTurns) -> None:
        key = new_turn_key()
        calls.put("me", key, turn())
        monkeypatch.setattr(gateway, "TURN_KEPT_SECONDS", -1.0)
        assert await calls.find("me", [chat_call_id(key, 0)]) == {}
        calls.prune_old()
        monkeypatch.undo()
        assert await calls.find("me", [chat_call_id(key, 0)]) == {}

    use(tmp_path, work)


def test_an_owner_has_so_many_turns_and_none_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def work(calls: StoredChatTurns) -> None:
        keys = [new_turn_key() for _ in range(5)]
        for key in keys:
            calls.put("me", key, turn())
        found = await calls.find("me", [chat_call_id(key, 0) for key in keys])
        assert set(found) == {chat_call_id(key, 0) for key in keys[2:]}, "the oldest are forgotten"
        large = new_turn_key()
        calls.put("me", large, turn("x" * 10_000))
        assert await calls.find("me", [chat_call_id(large, 0)]) == {}

    monkeypatch.setattr(gateway, "MAX_TURNS", 3)
    monkeypatch.setattr(gateway, "MAX_TURN_BYTES", 5_000)
    use(tmp_path, work)


def test_an_owner_and_all_owners_have_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def work(calls: StoredChatTurns) -> None:
        keys = [new_turn_key() for _ in range(4)]
        for key in keys:
            calls.put("me", key, turn("x" * 1000))
        ids = [chat_call_id(key, 0) for key in keys]
        assert set(await calls.find("me", ids)) == set(ids[2:]), "the oldest are forgotten"
        key = new_turn_key()
        calls.put("you", key, turn("x" * 1000))
        calls.prune_old()
        assert set(await calls.find("you", [chat_call_id(key, 0)])) == {chat_call_id(key, 0)}
        assert set(await calls.find("me", ids)) == {ids[3]}

    monkeypatch.setattr(gateway, "MAX_OWNER_TURN_BYTES", 2500)
    monkeypatch.setattr(gateway, "MAX_TURN_BYTES_IN_ALL", 2500)
    use(tmp_path, work)


def test_a_busy_server_does_not_wait_for_the_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def work(calls: StoredChatTurns) -> None:
        keys = [new_turn_key() for _ in range(4)]
        for number, key in enumerate(keys):
            calls.put(f"owner {number}", key, turn("x" * 1000))
        found = [bool(await calls.find(f"owner {number}", [chat_call_id(key, 0)])) for number, key in enumerate(keys)]
        assert found == [False, False, True, True]

    monkeypatch.setattr(gateway, "TURN_BYTES_UNTIL_PRUNED", 1000)
    monkeypatch.setattr(gateway, "MAX_TURN_BYTES_IN_ALL", 2500)
    use(tmp_path, work)


def test_a_request_goes_back_to_the_last_turns_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def work(calls: StoredChatTurns) -> None:
        keys = [new_turn_key() for _ in range(6)]
        for key in keys:
            calls.put("me", key, turn("x" * 1000))
        ids = [chat_call_id(key, number) for key in keys for number in range(2)]
        assert set(await calls.find("me", ids)) == set(ids[-6:])
        monkeypatch.setattr(gateway, "MAX_FOUND_TURN_BYTES", 2500)
        assert set(await calls.find("me", ids)) == set(ids[-4:])

    monkeypatch.setattr(gateway, "MAX_FOUND_TURNS", 3)
    use(tmp_path, work)


def test_lengths_are_known_before_json_is_made():
    value = [{"a": "xxx", "b": [1, None, {"c": "yy"}]}, "z"]
    assert [is_json_longer(value, most) for most in (0, 24, 25)] == [True, True, False]
