"""Runs that outlive whoever began them: their events are numbered, kept within bounds, and told from any on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from cloche import errors
from cloche.config.sections import RunsConfig as Limits
from cloche.engine.engine import Engine
from cloche.engine.executions import runs
from cloche.engine.executions.runs import DetachedRuns, RunEventLine
from cloche.engine.instance import Instance
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Ended, Input, NumberedEvent, Output, Raised, RunInfo, Started, Truncated, fold
from cloche.model import SandboxSpec
from cloche.store.database import Database
from cloche.store.runs import RunStore

pytestmark = pytest.mark.asyncio(loop_scope="session")

OWNER = SandboxSpec().owner
KIB = 1024
FLOOD = "import sys\nfor i in range({count}):\n    print(f'{{i:07}} ' + 'x' * 1000); sys.stdout.flush()\n"


async def start(kept: DetachedRuns, box: Sandbox, code: str, **how) -> RunInfo:
    context = box.context()
    return await kept.start(box, context.id, context.execute(code, **how))


async def told(kept: DetachedRuns, id: str, after: int = 0) -> list[NumberedEvent]:
    async with asyncio.timeout(60):
        return [each async for batch in await kept.attach(id, OWNER, after) for each in numbered(batch)]


def numbered(batch: list[RunEventLine]) -> list[NumberedEvent]:
    return [NumberedEvent(line.number, line.event) for line in batch]


class Process:
    """A host process: its records, and the name under which it is known to be alive."""

    def __init__(self, directory: Path, limits: Limits):
        self.instance = Instance(directory / "run")
        self.instance.open()
        self.database = Database(directory / "store.sqlite3")
        self.runs = DetachedRuns(RunStore(self.database, limits), self.instance, limits)

    async def open(self) -> DetachedRuns:
        await self.database.open()
        self.runs.open()
        return self.runs

    async def aclose(self) -> None:
        await self.runs.aclose()
        await self.database.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def small(tmp_path: Path) -> AsyncIterator[DetachedRuns]:
    """With room for little."""
    limits = Limits(events_bytes=512 * KIB, owner_bytes=1280 * KIB, per_owner=5, at_once=3)
    process = Process(tmp_path, limits)
    yield await process.open()
    await process.aclose()
    process.instance.close()


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Readers get everything from the store."""
    monkeypatch.setattr(runs, "TAIL_BYTES", 0)
    yield


async def test_events_are_numbered_from_one_and_told_while_it_runs(engine: Engine, box: Sandbox):
    info = await start(engine.runs, box, "print('a', flush=True)\nn = input()\nprint(n)", input=["b"])
    assert (info.state, info.events, info.outcome, info.sandbox) == ("running", 0, None, box.id)
    events = await told(engine.runs, info.id)
    assert [each.number for each in events] == list(range(1, len(events) + 1))
    assert events[0].event == Started(execution=info.id, count=1)
    assert isinstance(events[-1].event, Ended)
    run = fold(each.event for each in events)
    assert (run.id, run.stdout, run.outcome) == (info.id, "a\nb\n", "ok")
    assert await engine.runs.result(info.id, OWNER) == run


@pytest.mark.usefixtures("no_memory")
async def test_every_place_of_a_run_can_be_attached_to(engine: Engine, box: Sandbox):
    code = "import time\nfor i in range(5):\n    print(i, flush=True); time.sleep(0.02)\n1/0"
    info = await start(engine.runs, box, code)
    whole = await told(engine.runs, info.id)
    assert any(isinstance(each.event, Raised) for each in whole)
    for after in range(len(whole) + 1):
        assert await told(engine.runs, info.id, after) == whole[after:]


async def test_attaching_again_and_again_gives_every_event_once(engine: Engine, box: Sandbox):
    info = await start(engine.runs, box, "import time\nfor i in range(30):\n    print(i, flush=True); time.sleep(0.01)")
    seen: list[NumberedEvent] = []
    while not seen or not isinstance(seen[-1].event, Ended):
        followed = await engine.runs.attach(info.id, OWNER, seen[-1].number if seen else 0)
        seen += numbered(await anext(followed))[:2]  # whatever else came is forgotten with the connection
        await followed.aclose()
    assert [each.number for each in seen] == list(range(1, len(seen) + 1))
    assert fold(each.event for each in seen).stdout == "".join(f"{i}\n" for i in range(30))


async def test_two_readers_and_a_slow_one_see_the_same(engine: Engine, box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "TAIL_BYTES", 64 * KIB)
    info = await start(engine.runs, box, FLOOD.format(count=2000))

    async def slow() -> list[NumberedEvent]:
        seen = []
        async for batch in await engine.runs.attach(info.id, OWNER):
            assert sum(len(line.body) for line in batch) < 2 * runs.PAGE_BYTES
            seen += numbered(batch)
            await asyncio.sleep(0.05)
        return seen

    first, second, third = await asyncio.gather(told(engine.runs, info.id), told(engine.runs, info.id), slow())
    assert first == second == third
    assert fold(each.event for each in first).stdout.count("\n") == 2000


async def test_the_oldest_events_make_room_and_that_is_said(small: DetachedRuns, box: Sandbox):
    info = await start(small, box, "print('first')\n" + FLOOD.format(count=3000) + "print('last')\n'value'")
    run = await small.result(info.id, OWNER)
    lines = run.stdout.splitlines()
    assert "first" not in lines and lines[-1] == "last" and run.text == "'value'"
    assert 256 * KIB < len(run.stdout) < 512 * KIB
    events = await told(small, info.id)
    assert isinstance(events[0].event, Started)
    gap = events[1]
    assert isinstance(gap.event, Truncated) and gap.event.stream == "stdout"
    assert gap.event.dropped_bytes + len(run.stdout) == len("first\nlast\n") + 3000 * 1009
    assert [each.number for each in events[1:]] == list(range(gap.number, events[-1].number + 1))
    assert f"{gap.event.dropped_bytes} bytes of stdout" in run.stderr
    assert await told(small, info.id, after=1) == events[1:]
    assert await told(small, info.id, after=gap.number) == events[2:]


async def test_an_event_that_is_larger_than_a_run_may_be_is_told_as_truncated(small: DetachedRuns, box: Sandbox):
    code = "from IPython.display import HTML, display\ndisplay(HTML('x' * 600_000))\n'end'"
    info = await start(small, box, code)
    events = [each.event for each in await told(small, info.id)]
    (cut,) = (each for each in events if isinstance(each, Truncated))
    assert cut.stream == "display" and cut.dropped_bytes > 600_000
    assert (await small.result(info.id, OWNER)).text == "'end'"


async def test_an_owner_has_so_many_runs_and_the_first_that_ended_goes(small: DetachedRuns, box: Sandbox):
    made = []
    for number in range(7):
        made.append((await start(small, box, f"print({number})")).id)
        assert (await small.result(made[-1], OWNER)).outcome == "ok"
    assert [each.id for each in await small.list(OWNER)] == made[:1:-1]
    with pytest.raises(errors.RunNotFound):
        await small.info(made[0], OWNER)


async def test_an_owner_has_so_much_room(small: DetachedRuns, box: Sandbox):
    made = []
    for _ in range(4):
        made.append((await start(small, box, FLOOD.format(count=480))).id)
        await small.result(made[-1], OWNER)
    left = [each.id for each in await small.list(OWNER)]
    assert left == made[:1:-1]


async def test_too_many_at_once_are_refused(small: DetachedRuns, box: Sandbox):
    waiting = [await start(small, box, "import time; time.sleep(60)") for _ in range(3)]
    with pytest.raises(errors.InvalidRequest, match="3 detached runs go on"):
        await start(small, box, "1")
    for each in reversed(waiting):
        assert await small.interrupt(each.id, OWNER)
        await small.result(each.id, OWNER)
    last = await start(small, box, "1")
    assert (await small.result(last.id, OWNER)).text == "1"


async def test_one_that_waits_for_its_turn_can_be_interrupted(engine: Engine, box: Sandbox):
    first = await start(engine.runs, box, "import time; time.sleep(60)")
    second = await start(engine.runs, box, "print('never')")
    assert await engine.runs.interrupt(second.id, OWNER)
    run = await engine.runs.result(second.id, OWNER)
    assert (run.outcome, run.reason, run.stdout) == ("interrupted", runs.INTERRUPTED_BEFORE_START, "")
    assert await engine.runs.interrupt(first.id, OWNER)
    assert (await engine.runs.result(first.id, OWNER)).outcome == "interrupted"
    assert not await engine.runs.interrupt(first.id, OWNER)
    third = await start(engine.runs, box, "'still here'")
    assert (await engine.runs.result(third.id, OWNER)).text == "'still here'"


async def test_one_that_has_only_just_begun_can_be_interrupted_and_removed(engine: Engine, box: Sandbox):
    for _ in range(5):
        info = await start(engine.runs, box, "import time; time.sleep(60)")
        assert engine.runs._live[info.id].interrupt()  # before its task has taken a step
        assert (await engine.runs.result(info.id, OWNER)).outcome == "interrupted"
        info = await start(engine.runs, box, "import time; time.sleep(60)")
        await engine.runs._live[info.id].end()
        assert (await engine.runs.info(info.id, OWNER)).outcome == "interrupted"
    again = await start(engine.runs, box, "'free'")
    assert (await engine.runs.result(again.id, OWNER)).text == "'free'"


async def test_a_sandbox_that_is_killed_ends_its_runs(engine: Engine):
    box = await engine.create(SandboxSpec())
    going = await start(engine.runs, box, "print('on', flush=True)\nimport time; time.sleep(60)")
    waiting = await start(engine.runs, box, "1")
    async for batch in await engine.runs.attach(going.id, OWNER):
        if any(isinstance(each.event, Output) for each in batch):
            await box.kill()
    run = await engine.runs.result(going.id, OWNER)
    assert (run.outcome, run.reason, run.stdout) == ("died", "sandbox killed", "on\n")
    assert (await engine.runs.result(waiting.id, OWNER)).reason == "sandbox killed"


async def test_a_deadline_ends_a_run(engine: Engine):
    box = await engine.create(SandboxSpec(lifetime_seconds=0.5))
    info = await start(engine.runs, box, "print('on', flush=True)\nimport time; time.sleep(60)")
    run = await engine.runs.result(info.id, OWNER)
    assert (run.outcome, run.reason) == ("died", "deadline")


async def test_after_the_last_one_its_sandbox_ends(engine: Engine):
    box = await engine.create(SandboxSpec())
    info = await engine.runs.start(box, "default", box.context().execute("'last'"), last=True)
    await box.wait_ended()
    assert (await engine.runs.result(info.id, OWNER)).text == "'last'"


async def test_one_without_lines_for_input_is_told_so(engine: Engine, box: Sandbox):
    info = await start(engine.runs, box, "input('? ')")
    run = await engine.runs.result(info.id, OWNER)
    assert run.outcome == "raised" and run.error is not None


@pytest.mark.parametrize("id", ["", "x", "x" * 21, "x' OR 1=1 --aaaaaaaaaa", "\ud800", "x" + "0" * 20, 7, None])
async def test_an_unknown_run_is_not_found(engine: Engine, id: object):
    for ask in (engine.runs.info, engine.runs.attach, engine.runs.result, engine.runs.interrupt, engine.runs.remove):
        with pytest.raises(errors.RunNotFound, match="there is no run"):
            await ask(id, OWNER)


async def test_a_foreign_run_is_as_one_that_never_was(engine: Engine, box: Sandbox):
    info = await start(engine.runs, box, "1")
    await engine.runs.result(info.id, OWNER)
    for ask in (engine.runs.info, engine.runs.attach, engine.runs.result, engine.runs.interrupt, engine.runs.remove):
        said = []
        for id in (info.id, "x" + "0" * 20):
            with pytest.raises(errors.RunNotFound) as refused:
                await ask(id, "somebody else")
            said.append(str(refused.value).replace(id, "ID"))
        assert said[0] == said[1]
    assert await engine.runs.list("somebody else") == []
    assert (await engine.runs.info(info.id, None)).id == info.id


@pytest.mark.parametrize("after", [-1, 10**6, 10**30])
async def test_a_place_that_does_not_exist_is_refused(engine: Engine, box: Sandbox, after: int):
    info = await start(engine.runs, box, "1")
    await engine.runs.result(info.id, OWNER)
    with pytest.raises(errors.InvalidRequest, match=r"0 to \d+ so far"):
        await engine.runs.attach(info.id, OWNER, after)


async def test_a_removed_run_is_gone_and_one_that_goes_on_ends(engine: Engine, box: Sandbox):
    info = await start(engine.runs, box, "import time; time.sleep(60)")
    reader = asyncio.create_task(told(engine.runs, info.id))
    while (await engine.runs.info(info.id, OWNER)).events == 0:
        await asyncio.sleep(0.01)
    await engine.runs.remove(info.id, OWNER)
    assert isinstance((await reader)[-1].event, Ended)
    with pytest.raises(errors.RunNotFound):
        await engine.runs.info(info.id, OWNER)
    again = await start(engine.runs, box, "'free'")
    assert (await engine.runs.result(again.id, OWNER)).text == "'free'"


async def test_another_process_can_read_and_says_when_the_first_has_died(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.02)
    first, second = Process(tmp_path, Limits()), Process(tmp_path, Limits())
    here, there = await first.open(), await second.open()
    whole = await start(here, box, "print('whole')")
    assert fold(each.event for each in await told(there, whole.id)).stdout == "whole\n"
    going = await start(here, box, "print('half', flush=True)\nimport time; time.sleep(60)")
    with pytest.raises(errors.InvalidRequest, match="another process"):
        await there.interrupt(going.id, OWNER)
    seen: list[NumberedEvent] = []
    async for batch in await there.attach(going.id, OWNER):
        seen += numbered(batch)
        if any(isinstance(each.event, Output) for each in batch):
            first.instance.close()  # as if it had died: what it writes from here on counts no more
    assert [each.number for each in seen] == [1, 2, 3]
    assert seen[-1].event == Ended(outcome="died", reason="its host process died")
    info = await there.info(going.id, OWNER)
    assert (info.state, info.outcome, info.reason) == ("ended", "died", "its host process died")
    run = await there.result(going.id, OWNER)
    assert (run.stdout, run.outcome) == ("half\n", "died")
    assert await told(there, going.id, after=2) == seen[2:]
    box.context().interrupt()
    await first.aclose()
    assert await told(there, going.id) == seen
    await second.aclose()
    second.instance.close()


async def test_runs_that_ended_long_ago_are_removed(engine: Engine, box: Sandbox, tmp_path: Path):
    process = Process(tmp_path, Limits(kept_hours=1))
    kept = await process.open()
    old, new = [(await start(kept, box, "1")).id for _ in range(2)]
    await kept.result(new, OWNER)
    ended_at = (time.time() - 3601, old)
    await process.database.do(
        lambda db: db.execute("UPDATE runs SET ended_at = ? WHERE id = ?", ended_at).connection.commit()
    )
    kept.open()
    assert [each.id for each in await kept.list(OWNER)] == [new]
    left = await process.database.do(lambda db: db.execute("SELECT DISTINCT run FROM run_events").fetchall())
    assert left == [(new,)]
    await process.aclose()
    process.instance.close()


async def test_writing_is_batched(engine: Engine, box: Sandbox, tmp_path: Path):
    process = Process(tmp_path, Limits())
    kept = await process.open()
    info = await start(kept, box, "from IPython.display import display\nfor i in range(3000): display(i)")
    assert len((await kept.result(info.id, OWNER)).results) == 3000
    rows = await process.database.do(lambda db: db.execute("SELECT COUNT(*) FROM run_events").fetchone())
    assert rows[0] < 100
    await process.aclose()
    process.instance.close()


async def test_a_paused_run_stands_still_and_goes_on(engine: Engine):
    box = await engine.create(SandboxSpec())
    code = "import time\nfor i in range(50):\n    print(i, flush=True); time.sleep(0.01)"
    info = await start(engine.runs, box, code, timeout_seconds=30)
    while (await engine.runs.info(info.id, OWNER)).events < 3:
        await asyncio.sleep(0.01)
    await engine.pause(box.id, OWNER)
    before, now = None, await engine.runs.info(info.id, OWNER)
    while now != before:  # what it had said is still written
        await asyncio.sleep(0.3)
        before, now = now, await engine.runs.info(info.id, OWNER)
    assert now.state == "running"
    await engine.resume(box.id, OWNER)
    run = await engine.runs.result(info.id, OWNER)
    assert run.stdout == "".join(f"{i}\n" for i in range(50)) and run.outcome == "ok"
    await engine.kill(box.id, OWNER)


async def test_a_pause_without_memory_ends_a_run_and_says_so(engine: Engine):
    box = await engine.create(SandboxSpec())
    info = await start(engine.runs, box, "print('on', flush=True)\nimport time; time.sleep(60)")
    while (await engine.runs.info(info.id, OWNER)).events < 2:
        await asyncio.sleep(0.01)
    await engine.pause(box.id, OWNER, memory=False)
    run = await engine.runs.result(info.id, OWNER)
    assert (run.outcome, run.stdout) == ("died", "on\n") and "paused" in (run.reason or "")
    await engine.kill(box.id, OWNER)


async def test_a_disk_that_is_full_for_a_while_loses_nothing(box: Sandbox, tmp_path: Path):
    process = Process(tmp_path, Limits())
    kept = await process.open()
    code = "input('fill')\nprint('x' * 100_000, flush=True)\ninput('empty')\nprint('end')"
    info = await start(kept, box, code, input=True)
    seen: list[NumberedEvent] = []
    async for batch in await kept.attach(info.id, OWNER):
        seen += numbered(batch)
        asked = [each.event.prompt for each in numbered(batch) if isinstance(each.event, Input)]
        if asked:
            await fill_disk(process.database, asked == ["fill"])
            assert (await kept.info(info.id, OWNER)).events - seen[-1].number <= (0 if asked == ["fill"] else -1)
            box.context()._running.answer("")
    assert await told(kept, info.id) == seen
    assert (await kept.result(info.id, OWNER)).stdout == "x" * 100_000 + "\nend\n"
    await process.aclose()
    process.instance.close()


async def fill_disk(database: Database, full: bool) -> None:
    pages = await database.do(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    await database.do(lambda db: db.execute(f"PRAGMA max_page_count = {pages if full else 1 << 30}").fetchone())
