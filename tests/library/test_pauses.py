"""Pausing, resuming, snapshots and forks in the public library: of an engine in this process, then of a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import RunningServer

import cloche
from cloche import errors

pytestmark = pytest.mark.usefixtures("library")

PATIENCE_SECONDS = 30.0


@pytest.fixture(scope="module")
def server(server_in_place: tuple[Path, RunningServer]) -> RunningServer:
    """A server in a data directory of this worker's own: the tests list all snapshots, and remove them."""
    return server_in_place[1]


@pytest.fixture
def box() -> Iterator[cloche.Sandbox]:
    with cloche.Sandbox() as box:
        yield box


@pytest.fixture
def no_snapshots() -> Iterator[None]:
    yield
    for each in cloche.snapshots.list():
        cloche.snapshots.remove(each)


def until(state: str, box: cloche.Sandbox) -> None:
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while box.info().state != state:
        assert time.monotonic() < ends_at, f"it is not {state}"
        time.sleep(0.02)


# -- pause and resume


def test_variables_files_and_programs_are_as_they_were(box: cloche.Sandbox):
    box.run("x = [1, 2]; open('f', 'w').write('kept')")
    server = box.commands.run("exec sleep 1000", background=True)
    paused = box.pause()
    assert (paused.state, paused.pause_memory) == ("paused", True)
    assert paused.paused_at is not None and box.info() == paused
    again = cloche.Sandbox.connect(box.id)
    assert again.id == box.id and again.info().state == "running" and again.info().paused_at is None
    assert again.run("x.append(3); x, open('f').read()").text == "([1, 2, 3], 'kept')"
    assert box.run("x").text == "[1, 2, 3]"  # the first handle is of the same one
    assert [each.pid for each in box.commands.list()] == [server.pid]


def test_without_memory_files_and_environment_are_kept():
    with cloche.Sandbox(env={"GIVEN": "1"}, metadata={"a": "b"}) as box:
        box.run("x = 1; open('f', 'w').write('kept')")
        box.commands.run("printf '#!/bin/sh\\necho ours\\n' > ~/tool && chmod +x ~/tool")
        assert box.pause(memory=False).pause_memory is False
        info = box.resume()
        assert (info.id, info.state, info.metadata) == (box.id, "running", {"a": "b"})
        assert (
            box.run("import os; os.environ['GIVEN'], open('f').read(), 'x' in globals()").text == "('1', 'kept', False)"
        )
        assert box.commands.run("~/tool").stdout == "ours\n"
        assert box.files.read("f") == b"kept"


def test_any_use_of_a_paused_sandbox_reports_the_pause(box: cloche.Sandbox):
    context = box.contexts.create()
    box.pause()
    for use in (
        lambda: box.run("1"),
        lambda: list(box.stream("1")),
        lambda: context.run("1"),
        context.restart,
        box.contexts.list,
        lambda: box.files.read("f"),
        lambda: box.files.write("f", b""),
        lambda: box.commands.run("true"),
        box.commands.list,
        lambda: box.renew(60),
        box.network.log,
        box.pause,
    ):
        with pytest.raises(errors.SandboxPaused, match=f"{box.id} is paused already, .*resume"):
            use()
    box.resume()
    assert context.run("1").text == "1"


def test_resuming_one_that_runs_changes_nothing_but_its_deadline(box: cloche.Sandbox):
    box.run("x = 1")
    assert box.resume().state == "running" and box.run("x").text == "1"
    before = time.time()
    info = cloche.Sandbox.connect(box.id, timeout=100).info()
    assert info.deadline_at is not None and before + 99 < info.deadline_at < time.time() + 101
    info = box.resume(timeout=500)
    assert info.deadline_at is not None and before + 499 < info.deadline_at


def test_a_program_that_runs_stands_still_and_goes_on(box: cloche.Sandbox):
    seen: list[str] = []
    code = "import sys, time\nprint('begun', flush=True)\nsys.stdin.read if 0 else None\nwhile True:\n"
    code += "    try: open('/mnt/data/go'); break\n    except OSError: time.sleep(0.01)\nprint('done')"
    begun = threading.Event()

    def run() -> None:
        seen.append(
            box.run(code, timeout=60, on_event=lambda event: begun.set() if "begun" in str(event) else None).stdout
        )

    running = threading.Thread(target=run)
    running.start()
    assert begun.wait(PATIENCE_SECONDS)
    box.pause()
    running.join(0.3)
    assert running.is_alive()
    box.resume()
    box.files.write("go", b"")
    running.join(PATIENCE_SECONDS)
    assert seen == ["begun\ndone\n"]


def test_at_its_deadline_it_is_paused_and_use_resumes_it():
    with cloche.Sandbox(timeout=600, on_timeout="pause", auto_resume=True) as box:
        box.run("x = 1")
        assert (box.info().on_deadline, box.info().auto_resume) == ("pause", True)
        box.renew(0.05)
        until("paused", box)
        assert box.run("x").text == "1"
        info = box.info()
        assert info.state == "running" and info.deadline_at is not None and info.deadline_at > time.time() + 500


@pytest.mark.parametrize("memory", [True, False])
def test_any_use_can_resume_it(memory: bool):
    with cloche.Sandbox(auto_resume=True) as box:
        box.files.write("f", b"kept")
        context = box.contexts.create() if memory else None
        uses = [
            lambda: box.files.read("f"),
            lambda: box.files.list(),
            lambda: box.commands.run("true"),
            lambda: box.commands.list(),
            lambda: list(box.stream("1")),
            lambda: box.contexts.list(),
            lambda: box.renew(600),
            lambda: box.network.log(),
            *([lambda: context.run("1")] if context is not None else []),
        ]
        for use in uses:
            box.pause(memory=memory)
            use()
            assert box.info().state == "running"
        box.pause(memory=memory)
        with box.files.watch(".") as changes:
            box.files.write("g", b"")
            assert next(iter(changes)).path == "/mnt/data/g"


def test_at_its_deadline_its_memory_can_be_let_go():
    with cloche.Sandbox(timeout=600, on_timeout="pause", pause_memory=False) as box:
        box.run("x = 1; open('f', 'w').write('kept')")
        box.renew(0.05)
        until("paused", box)
        assert box.info().pause_memory is False
        with pytest.raises(errors.SandboxPaused):
            box.run("x")
        assert (
            cloche.Sandbox.connect(box.id, timeout=60).run("open('f').read(), 'x' in globals()").text
            == "('kept', False)"
        )


@pytest.mark.parametrize("memory", [True, False])
def test_closing_a_paused_one_kills_it(memory: bool):
    with cloche.Sandbox() as box:
        box.pause(memory=memory)
    assert box.info().state == "ended" and "killed" in (box.info().end_reason or "")
    with pytest.raises(errors.SandboxKilled):
        cloche.Sandbox.connect(box.id)
    with pytest.raises(errors.SandboxKilled):
        box.resume()
    box.kill()


def test_sandboxes_are_listed_by_their_state(box: cloche.Sandbox):
    with cloche.Sandbox() as other:
        other.pause()
        listed = {each.id: each.state for each in cloche.Sandbox.list()}
        assert (listed[box.id], listed[other.id]) == ("running", "paused")
        running = {each.id for each in cloche.Sandbox.list("running")}
        paused = {each.id for each in cloche.Sandbox.list("paused")}
        assert box.id in running - paused and other.id in paused - running
    assert other.id not in {each.id for each in cloche.Sandbox.list()}


# -- snapshots and forks


@pytest.mark.usefixtures("no_snapshots")
def test_a_snapshot_is_a_template_by_itself_its_id_and_its_name():
    with cloche.Sandbox(env={"GIVEN": "1"}) as box:
        box.run("x = 1; open('f', 'w').write('before')")
        snapshot = box.snapshot("after-load")
        box.run("open('f', 'w').write('after')")
        assert box.run("x").text == "1"  # it went on
    assert (snapshot.name, snapshot.sandbox, snapshot.template) == ("after-load", box.id, box.info().template)
    assert snapshot.size_bytes > 0
    for template in (snapshot, snapshot.id, "after-load"):
        with cloche.Sandbox(template, env={"OTHER": "2"}) as made:
            told = made.run(
                "import os; open('f').read(), os.environ['GIVEN'], os.environ['OTHER'], 'x' in globals()"
            ).text
            assert told == "('before', '1', '2', False)"
            assert made.id != box.id and made.info().template == snapshot.template


@pytest.mark.usefixtures("no_snapshots")
def test_snapshots_are_listed_found_and_removed(box: cloche.Sandbox):
    first, second = box.snapshot("x/y:z"), box.snapshot()
    with cloche.Sandbox() as other:
        third = other.snapshot("x/y:z")
    assert [each.id for each in cloche.snapshots.list()] == [third.id, second.id, first.id]
    assert {each.id for each in cloche.snapshots.list(box.id)} == {first.id, second.id}
    assert cloche.snapshots.get("x/y:z") == third and cloche.snapshots.get(first) == first
    with cloche.Sandbox(third) as made:
        cloche.snapshots.remove(third)
        assert made.run("1").text == "1"
    assert cloche.snapshots.get("x/y:z") == first
    cloche.snapshots.remove("x/y:z")
    with pytest.raises(errors.SnapshotNotFound, match="x/y:z"):
        cloche.snapshots.get("x/y:z")
    with pytest.raises(errors.SnapshotNotFound):
        cloche.snapshots.remove(third)
    with pytest.raises(errors.TemplateNotFound):
        cloche.Sandbox("x/y:z")


@pytest.mark.usefixtures("no_snapshots")
@pytest.mark.parametrize("memory", [True, False])
def test_a_paused_one_can_be_kept_and_forked_and_stays_paused(box: cloche.Sandbox, memory: bool):
    box.run("open('f', 'w').write('kept')")
    box.pause(memory=memory)
    snapshot, (fork,) = box.snapshot(), box.fork()
    assert box.info().state == "paused"
    with cloche.Sandbox(snapshot) as made, fork:
        assert made.files.read("f") == fork.files.read("f") == b"kept"


def test_forks_begin_where_it_is_and_go_their_own_way(box: cloche.Sandbox):
    box.run("open('f', 'w').write('same')")
    forks = box.fork(3, timeout=60)
    assert len({box.id, *(each.id for each in forks)}) == 4
    for number, each in enumerate(forks):
        assert each.run(f"before = open('f').read(); open('f', 'w').write('{number}'); before").text == "'same'"
        deadline_at = each.info().deadline_at
        assert deadline_at is not None and deadline_at < time.time() + 61
    assert [each.files.read("f") for each in forks] == [b"0", b"1", b"2"] and box.files.read("f") == b"same"
    for each in forks:
        each.close()
    assert cloche.snapshots.list(box.id) == []


# -- with await


@pytest.mark.usefixtures("no_snapshots")
async def test_the_same_with_await():
    async with cloche.AsyncSandbox(timeout=600, on_timeout="pause", auto_resume=True) as box:
        await box.run("x = 1; open('f', 'w').write('kept')")
        assert (await box.pause()).state == "paused"
        assert box.id in {each.id for each in await cloche.AsyncSandbox.list("paused")}
        assert (await box.run("x")).text == "1"  # which resumed it
        await box.pause(memory=False)
        again = await cloche.AsyncSandbox.connect(box.id, timeout=300)
        assert (await again.run("'x' in globals()")).text == "False"
        assert (await box.resume()).state == "running"
        snapshot = await box.snapshot("awaited")
        found = cloche.AsyncSnapshots()
        assert await found.get("awaited") == snapshot and snapshot in await found.list(box.id)
        async with cloche.AsyncSandbox(snapshot) as made:
            assert await made.files.read("f") == b"kept"
        await found.remove(snapshot)
        (fork,) = await box.fork()
        async with fork:
            assert await fork.files.read("f") == b"kept"


# -- what makes no sense


def test_invalid_arguments_are_refused_and_change_nothing(box: cloche.Sandbox):
    wrong: list[object] = ["", "a b", "a" * 129, "-a", "python", "base", "s" + "0" * 20, 1]
    for name in wrong:
        with pytest.raises(errors.InvalidRequest):
            box.snapshot(name)  # type: ignore[arg-type]
    for count in (0, -1, 21, 1.5, True, "2"):
        with pytest.raises(errors.InvalidRequest):
            box.fork(count)  # type: ignore[arg-type]
    for seconds in (0, -1, float("nan"), "1"):
        for use in (box.resume, box.fork):
            with pytest.raises(errors.InvalidRequest):
                use(timeout=seconds)  # type: ignore[operator]
        with pytest.raises(errors.InvalidRequest):
            cloche.Sandbox.connect(box.id, timeout=seconds)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidRequest):
        box.pause(memory="no")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidRequest):
        cloche.Sandbox.list("ended")  # type: ignore[arg-type]
    for more in ({"on_timeout": "sleep"}, {"auto_resume": 1}, {"pause_memory": "yes"}):
        with pytest.raises(errors.InvalidRequest):
            cloche.Sandbox(**more)  # type: ignore[arg-type]
    for ref in ("", None, 3):
        with pytest.raises(errors.InvalidRequest):
            cloche.snapshots.get(ref)  # type: ignore[arg-type]
    assert cloche.snapshots.list(box.id) == [] and box.run("1").text == "1"


def test_a_sandbox_that_never_was_cannot_be_resumed():
    for id in ("i" + "0" * 20, "", "../x"):
        with pytest.raises(errors.SandboxNotFound):
            cloche.Sandbox.connect(id)
