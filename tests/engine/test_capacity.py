"""Gates: who may begin, who waits, who is refused, and that no place is ever lost or given twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from cloche import errors
from cloche.config.sections import CapacityConfig
from cloche.engine.quotas.capacity import (
    AdmissionQueue,
    CapacityLimit,
    ExecutionSlots,
    Slot,
    max_executions,
    max_sandboxes,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


def gate_of(places: int, enough=None, **config) -> AdmissionQueue:
    return AdmissionQueue(
        "things", CapacityLimit(places=places, because="configured"), CapacityConfig(**config), enough
    )


async def lined_up(gate: AdmissionQueue, owner: str, order: list[str]) -> asyncio.Task[Slot]:
    """One more who waits there, and says so in `order` once it has its place."""

    async def enter() -> Slot:
        place = await gate.enter(owner)
        order.append(owner)
        return place

    task = asyncio.create_task(enter())
    await asyncio.sleep(0)
    return task


async def test_a_full_queue_admits_no_request_until_a_slot_is_released():
    gate = gate_of(2)
    first, _ = await gate.enter("a"), await gate.enter("a")
    waiting = await lined_up(gate, "a", [])
    assert gate.in_use == 2 and gate.waiting == 1 and not waiting.done()
    first.leave()
    (await waiting).leave()
    assert gate.in_use == 1 and gate.waiting == 0


async def test_a_place_is_given_back_once_however_often_that_is_said():
    gate = gate_of(2)
    place = await gate.enter("a")
    for _ in range(3):
        place.leave()
    assert gate.in_use == 0


async def test_a_thousand_requests_of_one_owner_do_not_delay_the_first_of_another():
    gate, order = gate_of(1, queued=2000, queued_per_owner=2000), []
    place = await gate.enter("greedy")
    tasks = [await lined_up(gate, "greedy", order) for _ in range(1000)]
    modest = await lined_up(gate, "modest", order)
    place.leave()
    await modest
    assert order == ["modest"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    (await modest).leave()
    assert gate.in_use == 0 and gate.waiting == 0


async def test_owners_take_turns_and_each_is_served_in_order():
    gate, order = gate_of(1), []
    place = await gate.enter("a")
    tasks = [await lined_up(gate, owner, order) for owner in ("a", "a", "a", "b", "b", "c")]
    for task in asyncio.as_completed(tasks):
        place.leave()
        place = await task
    assert order == ["b", "c", "a", "b", "a", "a"]


async def test_a_cancelled_ticket_leaves_no_trace_and_loses_no_slot():
    gate, order = gate_of(1), []
    place = await gate.enter("a")
    leaver, stayer = await lined_up(gate, "a", order), await lined_up(gate, "a", order)
    leaver.cancel()
    await asyncio.wait((leaver,))
    assert gate.waiting == 1
    place.leave()
    (await stayer).leave()
    assert gate.in_use == 0 and gate.occupancy.owners_waiting == 0


async def test_a_place_that_came_at_the_moment_of_giving_up_goes_to_the_next():
    gate, order = gate_of(1), []
    place = await gate.enter("a")
    leaver, stayer = await lined_up(gate, "a", order), await lined_up(gate, "b", order)
    place.leave()  # it is the leaver's now
    leaver.cancel()
    (await stayer).leave()
    assert order == ["b"] and gate.in_use == 0


async def test_after_its_time_a_request_is_refused_and_told_when_to_come_again():
    gate = gate_of(1, queue_seconds=0.01)
    await gate.enter("a")
    with pytest.raises(errors.Busy, match=r"as many things as it can: try again in \d+ s") as refused:
        await gate.enter("b")
    assert 1 <= refused.value.retry_after_seconds <= 300  # and not how much others have
    assert gate.waiting == 0 and gate.refused == {"busy": 1}


async def test_a_full_queue_of_an_owner_is_reported_as_its_own():
    gate = gate_of(1, queued_per_owner=1)
    await gate.enter("a")
    waiting = await lined_up(gate, "a", [])
    with pytest.raises(errors.QuotaExceeded, match="1 requests of yours wait already") as refused:
        await gate.enter("a")
    assert refused.value.retry_after_seconds
    with pytest.raises(errors.QuotaExceeded):
        gate.check("a")
    waiting.cancel()


async def test_where_all_lines_are_full_the_longest_makes_room_for_an_owner_with_fewer():
    gate, order = gate_of(1, queued=3), []
    await gate.enter("greedy")
    tasks = [await lined_up(gate, "greedy", order) for _ in range(3)]
    modest = await lined_up(gate, "modest", order)
    with pytest.raises(errors.Busy):
        await tasks[-1]  # who came last
    with pytest.raises(errors.Busy):
        await gate.enter("greedy")
    assert gate.waiting == 3 and not modest.done()
    for task in (*tasks, modest):
        task.cancel()


async def test_one_owner_alone_has_all_places_and_leaves_some_once_there_are_others():
    gate = gate_of(20)
    held = [await gate.enter("a") for _ in range(20)]
    assert gate.in_use == 20
    for place in held:
        place.leave()
    (await gate.enter("b")).leave()
    held = [await gate.enter("a") for _ in range(18)]
    waiting = await lined_up(gate, "a", [])
    held += [await asyncio.wait_for(gate.enter("b"), 10), await asyncio.wait_for(gate.enter("c"), 10)]
    assert not waiting.done() and gate.in_use == 20
    waiting.cancel()


@pytest.mark.parametrize(("places", "most"), [(1, 1), (2, 1), (9, 8), (20, 18), (100, 90)])
async def test_shared_slots_are_not_all_given_to_the_first_owner(places: int, most: int):
    gate = gate_of(places)
    gate.share()
    assert sum(gate.enter_now("first") for _ in range(2 * places)) == most
    assert gate.enter_now("second") == (places > 1)  # of a single place none can be kept


async def test_a_resumed_sandbox_leaves_reserved_slots_to_others():
    gate = gate_of(20)
    gate.share()
    paused, other = ExecutionSlots(gate, "a"), ExecutionSlots(gate, "a")
    assert all(paused.enter_now() for _ in range(2))
    paused.rest()
    assert sum(other.enter_now() for _ in range(20)) == 18
    with pytest.raises(errors.Busy):
        paused.reclaim_slots()
    assert gate.enter_now("b")
    for _ in range(3):
        other.leave()
    paused.reclaim_slots()
    assert gate.in_use == 18 and gate.enter_now("c")


async def test_the_engine_itself_never_waits():
    gate = gate_of(1, enough=lambda: False, queued=0)
    await gate.enter("")
    await gate.enter("")
    with pytest.raises(errors.Busy):
        await gate.enter("a")


async def test_without_memory_no_ticket_is_admitted_until_there_is_some():
    enough = False
    gate, order = gate_of(10, enough=lambda: enough), []
    tasks = [await lined_up(gate, "a", order) for _ in range(6)]
    await asyncio.sleep(0.25)  # several looks at the memory
    assert order == []
    enough = True
    await asyncio.gather(*tasks)
    assert gate.in_use == 6


async def test_a_lack_of_memory_is_said():
    gate = gate_of(10, enough=lambda: False, queue_seconds=0.01)
    with pytest.raises(errors.Busy, match="too little memory left"):
        await gate.enter("a")


async def test_closing_refuses_every_waiting_request():
    gate = gate_of(1)
    await gate.enter("a")
    tasks = [await lined_up(gate, owner, []) for owner in ("a", "b", "b")]
    gate.close()
    for task in tasks:
        with pytest.raises(errors.ShuttingDown):
            await task
    with pytest.raises(errors.ShuttingDown):
        await gate.enter("a")


async def test_programs_that_stand_still_hold_no_place_and_take_theirs_again():
    gate = gate_of(2)
    turns, other = ExecutionSlots(gate, "a"), ExecutionSlots(gate, "b")
    assert turns.enter_now() and turns.enter_now()
    turns.rest()
    assert gate.in_use == 0
    assert other.enter_now()
    with pytest.raises(errors.Busy):
        turns.reclaim_slots()
    turns.leave()  # one of them has ended meanwhile
    turns.reclaim_slots()
    assert gate.in_use == 2
    turns.leave()
    other.leave()
    assert gate.in_use == 0


async def test_the_count_stays_right_and_no_ticket_is_lost_under_random_load():
    dice = random.Random(8)
    gate = gate_of(5, queued=30, queued_per_owner=10, queue_seconds=0.05)
    seen: Counter[str] = Counter()

    async def visit(owner: str, stay: float) -> None:
        try:
            place = await gate.enter(owner)
        except (errors.Busy, errors.QuotaExceeded) as refusal:
            seen[refusal.code] += 1
            return
        try:
            assert gate.in_use <= 5
            await asyncio.sleep(stay)
            seen["served"] += 1
        finally:
            place.leave()

    tasks = []
    for number in range(400):
        tasks.append(asyncio.create_task(visit(f"owner-{dice.randrange(6)}", dice.random() / 100)))
        if number % 7 == 0:
            dice.choice(tasks).cancel()
        if number % 11 == 0:
            await asyncio.sleep(0.001)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.in_use == 0 and gate.waiting == 0 and gate.occupancy.owners_waiting == 0
    assert seen["served"] and seen["busy"] + seen["quota_exceeded"]


async def test_capacity_is_derived_from_the_host_unless_configured():
    found = max_sandboxes(CapacityConfig())
    assert found.places >= 1 and found.because in ("memory", "descriptors", "processes")
    assert max_executions(CapacityConfig()).places >= 256
    assert max_sandboxes(CapacityConfig(sandboxes=7)) == CapacityLimit(places=7, because="configured")
    assert max_executions(CapacityConfig(executions=7)).places == 7


@pytest.mark.parametrize("name", ["sandboxes", "executions", "memory_reserve_bytes", "queued", "queue_seconds"])
async def test_a_capacity_that_makes_no_sense_is_named(name: str):
    with pytest.raises(errors.InvalidRequest, match=f"capacity.{name}"):
        CapacityConfig(**{name: -1})


async def test_a_refused_owner_waits_no_more_and_others_are_unaffected():
    gate, order = gate_of(1), []
    place = await gate.enter("a")
    waiting = [await lined_up(gate, owner, order) for owner in ("gone", "stays", "gone")]
    gate.refuse_owner("gone", lambda: errors.Unauthenticated("no"))
    for each in (waiting[0], waiting[2]):
        with pytest.raises(errors.Unauthenticated):
            await each
    assert gate.waiting == 1
    place.leave()
    (await waiting[1]).leave()
    assert (order, gate.in_use, gate.waiting) == (["stays"], 0, 0)
