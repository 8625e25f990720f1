"""Detached runs by the library: in this process and on a server alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

import cloche
from cloche import errors
from cloche.events import Ended, Input, Output, Started, fold

pytestmark = pytest.mark.usefixtures("library")

COUNT = "import time\nfor i in range({count}):\n    print(i, flush=True); time.sleep(0.01)\n"
LONG = "print('on', flush=True)\nimport time; time.sleep(60)"


@pytest.fixture(scope="module")
def box(library: str) -> Iterator[cloche.Sandbox]:
    with cloche.Sandbox() as made:
        yield made


def test_a_run_goes_on_and_its_events_come_from_any_on(box: cloche.Sandbox):
    run = box.run(COUNT.format(count=10) + "'done'", detach=True)
    assert (run.state, run.outcome, run.last_event, run.sandbox) == ("running", None, 0, box.id)
    assert repr(run) == f"<cloche.DetachedRun {run.id} running>"
    seen = []
    for event in box.attach(run.id, after=run.last_event):
        seen.append(event)
        if isinstance(event, Output):
            break  # and whoever read it leaves
    with box.attach(run.id, after=len(seen)) as attached:
        rest = list(attached)
    assert attached.last_event == len(seen + rest) and attached.last_event == run.info().events
    done = fold(seen + rest)
    assert (done.stdout, done.text) == ("".join(f"{i}\n" for i in range(10)), "'done'")
    assert run.result() == done and (run.state, run.outcome, run.last_event) == ("ended", "ok", 0)
    assert repr(run) == f"<cloche.DetachedRun {run.id} ok>"
    assert list(box.attach(run.id, after=attached.last_event)) == []


def test_a_run_object_knows_its_seen_events(box: cloche.Sandbox):
    run = box.run(COUNT.format(count=5), detach=True)
    seen = []
    while run.state == "running":
        seen.append(next(run.events()))
        assert run.last_event == len(seen)
    assert isinstance(seen[0], Started) and isinstance(seen[-1], Ended)
    assert fold(seen).stdout == "0\n1\n2\n3\n4\n"


def test_several_read_at_once(box: cloche.Sandbox):
    run = box.run(COUNT.format(count=20), detach=True)
    read: list[list] = [[], [], []]
    threads = [threading.Thread(target=lambda to=to: to.extend(box.attach(run.id))) for to in read]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert read[0] == read[1] == read[2] and isinstance(read[0][-1], Ended)


def test_a_wait_in_another_thread_is_released(box: cloche.Sandbox):
    run, seen = box.run(LONG, detach=True), []
    attached, begun = run.events(), threading.Event()

    def read() -> None:
        for event in attached:
            seen.append(event)
            if isinstance(event, Output):
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    attached.close()
    reader.join(60)
    assert not reader.is_alive() and len(seen) == 2
    assert run.info().state == "running" and run.interrupt()
    assert fold(seen + list(run.events())).outcome == "interrupted"


def test_runs_are_listed_and_forgotten(box: cloche.Sandbox):
    first, second = box.run("1", detach=True), box.run("2", detach=True)
    second.result()
    assert [each.id for each in box.runs()][:2] == [second.id, first.id]
    first.remove()
    assert first.id not in [each.id for each in box.runs()]
    for ask in (first.info, first.result, first.interrupt, first.remove, first.events):
        with pytest.raises(errors.RunNotFound):
            ask()


def test_one_is_interrupted_and_the_next_takes_its_turn(box: cloche.Sandbox):
    going, waiting, last = (box.run(code, detach=True) for code in (LONG, "'never'", "'last'"))
    assert waiting.interrupt()
    assert next(event for event in going.events() if isinstance(event, Output)).text == "on\n"
    assert going.interrupt()
    assert (going.result().outcome, waiting.result().outcome, last.result().text) == (
        "interrupted",
        "interrupted",
        "'last'",
    )
    assert not going.interrupt()


def test_it_is_found_by_its_id_when_its_sandbox_has_ended():
    with cloche.Sandbox() as box:
        whole, half = box.run("print('x'); 6 * 7", detach=True), box.run(LONG, detach=True)
        assert whole.result().text == "42"
        assert next(event for event in half.events() if isinstance(event, Output)).text == "on\n"
    found = cloche.DetachedRun.connect(whole.id)
    assert (found.state, found.result().stdout) == ("ended", "x\n")
    died = cloche.DetachedRun.connect(half.id).result()
    assert (died.outcome, died.reason, died.stdout) == ("died", "sandbox killed", "on\n")
    assert [each.id for each in box.runs()] == [half.id, whole.id]
    assert fold(box.attach(half.id)) == died


def test_how_it_runs_can_be_said(box: cloche.Sandbox):
    context = box.contexts.create(cwd="/tmp")
    code = "import os; print(os.getcwd(), os.environ['A'], input(), input())"
    run = context.run(code, detach=True, env={"A": "1"}, cwd="/", input="x\ny")
    assert run.result().stdout == "/ 1 x y\n" and run.info().context == context.id
    assert box.run("import time; time.sleep(60)", detach=True, timeout=0.1).result().outcome == "timed_out"
    asked = box.run("input('who? ')", detach=True)
    assert asked.result().outcome == "raised" and not any(isinstance(e, Input) for e in asked.events())


@pytest.mark.parametrize(
    "how",
    [
        {"tools": {"f": len}},
        {"on_event": print},
        {"input": True},
        {"input": lambda prompt: "x"},
        {"input": ["x" * ((1 << 20) + 1)]},
        {"cwd": ""},
        {"timeout": -1},
        {"env": 7},
        {"context": "none"},
    ],
    ids=lambda how: "-".join(how),
)
def test_invalid_arguments_are_refused_before_the_start(box: cloche.Sandbox, how: dict):
    before = [each.id for each in box.runs()]
    with pytest.raises((errors.InvalidRequest, errors.ContextNotFound)):
        box.run("1", detach=True, **how)
    assert [each.id for each in box.runs()] == before


@pytest.mark.parametrize("id", ["", "x", "..", "x/../../y", "\ud800", "\0", "x" + "0" * 20, 7, None])
def test_an_unknown_run_is_not_found(box: cloche.Sandbox, id):
    with pytest.raises(errors.RunNotFound):
        box.attach(id)
    with pytest.raises(errors.RunNotFound):
        cloche.DetachedRun.connect(id)


@pytest.mark.parametrize("after", [-1, 99, 1.5, "1", True, None, 10**30])
def test_a_place_that_does_not_exist_is_refused(box: cloche.Sandbox, after):
    run = box.run("1", detach=True)
    run.result()
    with pytest.raises(errors.InvalidRequest, match="after"):
        box.attach(run.id, after=after)


async def test_the_same_with_an_event_loop(library: str):
    async with cloche.AsyncSandbox() as box:
        run = await box.run(COUNT.format(count=10), detach=True)
        assert run.state == "running" and [each.id for each in await box.runs()] == [run.id]
        seen = []
        while run.state == "running":
            try:
                async with asyncio.timeout(0.03):  # whoever is called off goes on where they were
                    async for event in run.events():
                        seen.append(event)
            except TimeoutError:
                pass
        assert fold(seen).stdout == "".join(f"{i}\n" for i in range(10))
        assert await run.result() == fold(seen)
        async with box.attach(run.id, after=2) as attached:
            assert [event async for event in attached] == seen[2:]
        context = await box.contexts.get("default")
        other = await context.run(LONG, detach=True)
        assert await other.interrupt() and (await other.info()).id == other.id
        assert (await other.result()).outcome == "interrupted"
        await other.remove()
        with pytest.raises(errors.RunNotFound):
            await anext(aiter(box.attach(other.id)))
    found = await cloche.AsyncDetachedRun.connect(run.id)
    assert (found.state, (await found.result()).outcome) == ("ended", "ok")


async def test_one_attachment_goes_on_after_it_was_called_off(library: str):
    async with cloche.AsyncSandbox() as box:
        run = await box.run(COUNT.format(count=10), detach=True)
        seen, attached = [], run.events()
        while run.state == "running":
            try:
                async with asyncio.timeout(0.03):
                    async for event in attached:
                        seen.append(event)
            except TimeoutError:
                pass
        assert fold(seen).stdout == "".join(f"{i}\n" for i in range(10))
