"""The public library, as a user of it sees it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

import cloche
from cloche import errors
from cloche.events import AnyEvent, Ended, Output, Started

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture
def box() -> Iterator[cloche.Sandbox]:
    with cloche.Sandbox() as box:
        yield box


def test_the_readme_example(box: cloche.Sandbox):
    run = box.run("import pandas as pd; df = pd.DataFrame({'x': [1, 2]}); df")
    assert run.outcome == "ok" and run.error is None
    assert run.results[0].html is not None and "<table" in run.results[0].html
    assert box.run("df['x'].sum()").text in ("3", "np.int64(3)")
    assert [event.text for event in box.stream("for i in range(3): print(i)") if isinstance(event, Output)] == [
        "0\n1\n2\n"
    ]
    box.files.write("/mnt/data/a.csv", b"x\n1\n")
    assert [info.name for info in box.files.list("/mnt/data")] == ["a.csv"]
    assert "a.csv" in box.commands.run("ls -l /mnt/data").stdout


def test_one_shot():
    assert cloche.run("6*7").text == "42"
    assert asyncio.run(cloche.arun("input()", input="x")).text == "'x'"


def test_every_event_is_seen_by_on_event(box: cloche.Sandbox):
    seen: list[AnyEvent] = []
    run = box.run("print(1)\n2", on_event=seen.append)
    assert isinstance(seen[0], Started) and isinstance(seen[-1], Ended)
    assert (run.text, run.stdout) == ("2", "1\n")


def test_leaving_a_stream_early_interrupts(box: cloche.Sandbox):
    box.run("x = 1")
    for event in box.stream("import time\nprint('in', flush=True)\ntime.sleep(60)"):
        if isinstance(event, Output):
            break
    del event
    assert box.run("x", timeout=30).text == "1"
    with box.stream("import time\nprint('in', flush=True)\ntime.sleep(60)") as stream:
        next(stream)
    assert list(stream) == []


def test_a_stream_can_be_answered_and_interrupted(box: cloche.Sandbox):
    stream = box.stream("name = input('who? ')\nprint(name, flush=True)\nimport time; time.sleep(60)", input=True)
    outcomes = []
    for event in stream:
        if event.__class__.__name__ == "Input":
            stream.answer("me")
        if isinstance(event, Output) and "me" in event.text:
            stream.interrupt()
        if isinstance(event, Ended):
            outcomes.append(event.outcome)
    assert outcomes == ["interrupted"]


def test_contexts(box: cloche.Sandbox):
    context = box.contexts.create(cwd="/tmp")
    assert context.run("import os; os.getcwd()").text == "'/tmp'"
    context.run("a = 1")
    assert box.run("a", context=context).text == "1"
    assert box.run("a", context=context.id).text == "1"
    assert box.run("a").outcome == "raised"
    assert [each.id for each in box.contexts.list()] == ["default", context.id]
    context.restart()
    assert context.run("a").outcome == "raised"
    box.contexts.remove(context)
    with pytest.raises(errors.ContextNotFound):
        box.run("1", context=context.id)
    with pytest.raises(errors.InvalidRequest, match="python"):
        box.contexts.create("cobol")


def test_interrupt_from_another_thread(box: cloche.Sandbox):
    context = box.contexts.get("default")

    def interrupt(event: AnyEvent) -> None:
        if isinstance(event, Output):
            threading.Thread(target=context.interrupt).start()

    assert box.run("import time\nprint('in', flush=True)\ntime.sleep(60)", on_event=interrupt).outcome == "interrupted"


def test_several_threads_share_a_sandbox(box: cloche.Sandbox):
    box.run("seen = []")
    threads = [threading.Thread(target=box.run, args=(f"seen.append({i})",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert box.run("sorted(seen)").text == str(list(range(8)))


def test_files_in_chunks_both_ways(box: cloche.Sandbox):
    box.files.write("big", (bytes([number]) * 100_000 for number in range(40)))
    assert b"".join(box.files.read_chunks("big")) == box.files.read("big")
    assert len(box.files.read("big")) == 4_000_000
    with box.files.watch(".") as changes:
        box.files.write("new", "x")
        assert next(changes).path == "/mnt/data/new"


def test_commands_in_the_background(box: cloche.Sandbox):
    process = box.commands.run("cat; exit 3", background=True, stdin=True)
    process.send_stdin("typed")
    process.close_stdin()
    result = process.wait()
    assert (result.stdout, result.exit_code, process.running) == ("typed", 3, False)
    assert box.commands.run("exit 9").exit_code == 9
    with pytest.raises(errors.InvalidRequest):
        box.commands.run("cat", stdin=True)  # type: ignore[call-overload]


def test_a_closed_sandbox_says_so():
    box = cloche.Sandbox(metadata={"a": "b"})
    assert cloche.Sandbox.connect(box.id).run("1").text == "1"
    assert box.info().metadata == {"a": "b"}
    box.close()
    box.close()
    assert box.info().state == "ended"
    for use in (
        lambda: box.run("1"),
        lambda: box.files.read("a"),
        lambda: cloche.Sandbox.connect(box.id),
        box.contexts.list,
    ):
        with pytest.raises(errors.SandboxKilled, match="was killed at"):
            use()


def test_a_lifetime_can_be_given_and_renewed():
    with cloche.Sandbox(timeout=50) as box:
        before = box.info().deadline_at
        after = box.renew(500).deadline_at
        assert before is not None and after is not None and after > before


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"template": "no-such"}, errors.TemplateNotFound),
        ({"template": "../x"}, errors.TemplateNotFound),
        ({"timeout": -1}, errors.InvalidRequest),
        ({"limits": {"memory": 1}}, errors.InvalidRequest),
        ({"limits": {"memory_bytes": -1}}, errors.InvalidRequest),
        ({"limits": 7}, errors.InvalidRequest),
        ({"env": "A=b"}, errors.InvalidRequest),
        ({"env": {"a": "x" * 200_000}}, errors.InvalidRequest),
        ({"env": {str(n): "x" * 100_000 for n in range(11)}}, errors.InvalidRequest),
        ({"metadata": 7}, errors.InvalidRequest),
        ({"network": 7}, errors.InvalidRequest),
        ({"env": {"a\0": "b"}}, errors.InvalidRequest),
        ({"metadata": {"a": 1}}, errors.InvalidRequest),
        ({"network": {"allow": ["https://pypi.org/"]}}, errors.InvalidRequest),
        ({"url": "ftp://x"}, errors.InvalidRequest),
        ({"url": "http://"}, errors.InvalidRequest),
        ({"url": "http://127.0.0.1:1", "api_key": "x"}, errors.Unavailable),
        ({"url": "unix:/nowhere/control.sock"}, errors.Unavailable),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(how: dict, error: type[Exception]):
    with pytest.raises(error) as caught:
        cloche.Sandbox(**how)
    assert len(str(caught.value)) > 15


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"cwd": ""}, errors.InvalidPath),
        ({"cwd": "a\0"}, errors.InvalidPath),
        ({"cwd": 7}, errors.InvalidPath),
        ({"env": 7}, errors.InvalidRequest),
        ({"env": {str(n): "x" * 100_000 for n in range(11)}}, errors.InvalidRequest),
        ({"input": 7}, errors.InvalidRequest),
        ({"input": ["x" * (1 << 20) + "x"]}, errors.InvalidRequest),
        ({"input": "y\n" + "x" * (1 << 20) + "x"}, errors.InvalidRequest),
        ({"tools": "x"}, errors.InvalidRequest),
        ({"detach": "yes"}, errors.InvalidRequest),
    ],
)
def test_a_run_that_makes_no_sense_is_refused_before_it_starts(box: cloche.Sandbox, how: dict, error: type[Exception]):
    for run in (box.run, box.contexts.get("default").run):
        with pytest.raises(error):
            run("x = 1", **how)
    assert box.run("'x' in globals()").text == "False"


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"cwd": ""}, errors.InvalidPath),
        ({"user": "nobody"}, errors.InvalidRequest),
        ({"user": ["root"]}, errors.InvalidRequest),
        ({"env": 7}, errors.InvalidRequest),
        ({"env": {str(n): "x" * 50_000 for n in range(11)}}, errors.InvalidRequest),
        ({"stdin": 7}, errors.InvalidRequest),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(box: cloche.Sandbox, how: dict, error: type[Exception]):
    command = ["true", *["x" * 100_000] * 5]
    with pytest.raises(error):
        box.commands.run(command, **how)
    assert box.commands.run(command).exit_code == 0


def test_default_values_may_be_passed_explicitly(box: cloche.Sandbox):
    assert box.run("1", tools=None, detach=False).text == "1"
    assert box.contexts.get("default").run("2", tools=None, detach=False).text == "2"


def test_limits_as_a_mapping_and_no_network():
    with cloche.Sandbox(limits={"output_bytes": 1000}, network={"allow": []}) as box:
        assert len(box.run("print('x' * 5000)").stdout) == 1000


def test_use_after_fork_is_a_clear_error(box: cloche.Sandbox):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            box.run("1")
        except errors.UsedAfterFork as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert b"forked child" in os.read(read, 1000)
    os.close(read)
    assert box.run("1").text == "1"
