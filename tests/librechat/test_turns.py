"""Whose program runs next, and how many requests may wait for that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2
import pytest
from tests.librechat.conftest import no_engine

from cloche.api.auth import Gatekeeper
from cloche.api.librechat import LibreChatApi, context
from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.limits import ProgramQueue, ProgramQueueLimits, RequestMemory, RequestMemoryShare
from cloche.api.librechat.replies import LibreChatRefusal
from cloche.config import Config
from cloche.model import Principal
from cloche.store.gateway import GatewayStore

ANN, BEN, EVE = (
    LibreChatCaller(owner="chat", tenant="acme", user=name, source="jwt") for name in ("ann", "ben", "eve")
)


class Crowd:
    """Callers at a server's turns. What they wait for is seen after the loop has gone round."""

    def __init__(self, **capacity: int):
        self.turns = ProgramQueue(ProgramQueueLimits(**capacity))
        self.running: list[tuple[LibreChatCaller, asyncio.Event]] = []

    async def come(self, caller: LibreChatCaller, count: int = 1) -> list[asyncio.Task[None]]:
        tasks = [asyncio.ensure_future(self._run(caller)) for _ in range(count)]
        await _settle()
        return tasks

    async def end_one_of(self, caller: LibreChatCaller) -> None:
        _, event = next(each for each in self.running if each[0] == caller)
        event.set()
        await _settle()

    def count(self, caller: LibreChatCaller) -> int:
        return sum(1 for each, _ in self.running if each == caller)

    async def _run(self, caller: LibreChatCaller) -> None:
        with self.turns.hold_ticket(caller) as ticket:
            async with ticket.turn():
                mine = (caller, asyncio.Event())
                self.running.append(mine)
                try:
                    await mine[1].wait()
                finally:
                    self.running.remove(mine)


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_user_with_many_programs_leaves_turns_for_others() -> None:
    crowd = Crowd()
    await crowd.come(ANN, 200)
    assert crowd.count(ANN) == 64
    await crowd.come(BEN, 40)
    assert 10 <= crowd.count(BEN) < 40
    await crowd.come(EVE)
    assert crowd.count(EVE) == 1


async def test_the_next_turn_goes_to_the_user_with_fewest_programs() -> None:
    crowd = Crowd(at_once=4)
    await crowd.come(ANN, 20)
    await crowd.come(BEN, 20)
    assert (crowd.count(ANN), crowd.count(BEN)) == (3, 1)
    await crowd.end_one_of(ANN)
    assert (crowd.count(ANN), crowd.count(BEN)) == (2, 2)
    await crowd.come(EVE)
    await crowd.end_one_of(BEN)
    assert (crowd.count(ANN), crowd.count(BEN), crowd.count(EVE)) == (2, 1, 1)


async def test_those_of_one_caller_run_in_their_order() -> None:
    turns, order = ProgramQueue(ProgramQueueLimits(at_once=1)), []

    async def run(number: int) -> None:
        with turns.hold_ticket(ANN) as ticket:
            async with ticket.turn():
                order.append(number)
                await asyncio.sleep(0)

    await asyncio.gather(*map(run, range(20)))
    assert order == list(range(20))


async def test_leaving_the_queue_takes_no_turn() -> None:
    crowd = Crowd(at_once=2)
    (first,) = await crowd.come(ANN)
    await crowd.come(BEN)
    waiting = await crowd.come(EVE, 3)
    for each in waiting[:2]:
        each.cancel()
    first.cancel()  # at the same moment: the turn may have been given to one that is leaving
    await _settle()
    assert (crowd.count(ANN), crowd.count(BEN), crowd.count(EVE)) == (0, 1, 1)
    waiting[2].cancel()
    await _settle()
    await crowd.come(ANN)
    assert crowd.count(ANN) == 1


async def test_leaving_at_the_moment_of_a_turn_loses_no_turn() -> None:
    turns = ProgramQueue(ProgramQueueLimits(at_once=1))
    await turns.take(ANN)
    waiting = asyncio.ensure_future(turns.take(EVE))
    await _settle()
    waiting.cancel()
    turns.give_back(ANN)  # it is found in the queue, and passed over, before it knows
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await turns.take(BEN)


async def test_of_too_many_that_wait_the_last_is_sent_away_and_may_come_again() -> None:
    crowd = Crowd(at_once=1, waiting=6)
    await crowd.come(ANN, 4)
    (refused,) = await crowd.come(ANN)
    with pytest.raises(LibreChatRefusal, match="3 programs of yours wait") as refusal:
        await refused
    assert refusal.value.status == 503 and refusal.value.body["error"] == "too_many_programs"
    assert refusal.value.headers["retry-after"] == str(refusal.value.body["retry_after_seconds"])
    await crowd.come(BEN, 3)  # half of the room is never one caller's
    (refused,) = await crowd.come(EVE)
    with pytest.raises(LibreChatRefusal, match="6 programs wait"):
        await refused
    await crowd.end_one_of(ANN)
    (waits,) = await crowd.come(EVE)
    assert not waits.done()


async def test_bytes_are_bounded_while_they_come_and_free_when_a_request_ends() -> None:
    room = RequestMemory(bytes=1000)

    def held(stack: contextlib.ExitStack, caller: LibreChatCaller, bytes: int) -> RequestMemoryShare:
        share = stack.enter_context(room.share(caller))
        share.add_bytes(bytes)
        return share

    for _ in range(2):
        with contextlib.ExitStack() as stack:
            first = held(stack, ANN, 400)
            with pytest.raises(LibreChatRefusal, match="memory"):
                held(stack, ANN, 101)
            held(stack, BEN, 500)
            with pytest.raises(LibreChatRefusal, match="memory"):
                held(stack, EVE, 101)
            first.settle(100)
            held(stack, EVE, 400)
            with pytest.raises(LibreChatRefusal, match="memory"):
                first.settle(101)


async def test_bytes_of_all_kinds_of_programs_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API without what runs code: none of these requests gets as far."""
    monkeypatch.setattr(context, "REQUEST_MEMORY_BYTES", 1000)
    gatekeeper, config = Gatekeeper(None, Principal(owner="local")), Config(data_dir=str(tmp_path))
    app = LibreChatApi(no_engine(config), GatewayStore(tmp_path, 1.0), gatekeeper, config, b"secret")
    is_held, is_enough = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncGenerator[bytes, None]:
        yield b" " * 300
        is_held.set()
        await is_enough.wait()
        yield b"{}"

    transport, url = httpx2.ASGITransport(app), "http://localhost/librechat/v1"
    async with httpx2.AsyncClient(transport=transport, base_url=url) as client:
        held = asyncio.ensure_future(client.post("/exec/programmatic", content=slowly()))
        await is_held.wait()
        for path in ("/exec", "/exec/programmatic"):
            refused = await client.post(path, content=b" " * 300)
            assert (refused.status_code, refused.json()["error"]) == (503, "too_many_programs")
        is_enough.set()
        assert (await held).status_code == 400
        assert (await client.post("/exec/programmatic", content=b" " * 300)).status_code == 400
