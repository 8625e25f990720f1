"""Pauses, snapshots and forks by the command line, and what of them outlives a server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_with_server import CLOCHE, Call, calling, control_socket, wait_until
from tests.conftest import RunningServer, serving

import cloche
from cloche import errors


@pytest.fixture
def box(place_of_server: str) -> Iterator[cloche.Sandbox]:
    with cloche.Sandbox(url=f"unix:{control_socket(Path(place_of_server))}") as made:
        yield made


@pytest.fixture(scope="module")
def call(place_of_server: str) -> Call:
    return calling(Path(place_of_server))


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sandboxes_are_paused_and_resumed(call: Call, box: cloche.Sandbox):
    box.run("x = 42")
    assert said(call("pause", box.id)) == f"paused {box.id}\n"
    (line,) = [each for each in said(call("ps")).splitlines() if box.id in each]
    assert "paused" in line.split() and line.split()[-1] == "-"  # when it ends
    assert said(call("resume", box.id, "--timeout", "60")) == f"resumed {box.id}\n"
    assert box.run("x").text == "42"
    assert said(call("pause", "--files", box.id)) == f"paused {box.id}\n"
    assert said(call("shell", box.id, stdin="'x' in globals()\n")) == "False\n"  # which resumed it
    box.pause(memory=False)
    assert "paused (files)" in said(call("ps"))
    assert said(call("kill", box.id)) == f"killed {box.id}\n"
    lines = said(call("logs", box.id))
    assert all(each in lines for each in ("sandbox.paused", "sandbox.resumed", "sandbox.ended"))


@pytest.mark.parametrize("word, done", [("pause", "paused"), ("resume", "resumed"), ("kill", "killed")])
def test_one_that_is_not_there_keeps_no_other_from_it(call: Call, box: cloche.Sandbox, word: str, done: str):
    if word == "resume":
        box.pause()
    answer = call(word, "nope", box.id, "neither")
    assert (answer.returncode, answer.stdout) == (125, f"{done} {box.id}\n")
    assert [line.split(":")[1].strip() for line in answer.stderr.splitlines()] == ["nope", "neither"]


def test_an_interrupt_names_the_work_that_continues_on_the_server(own_data_dir: Path):
    with serving(own_data_dir) as server:
        server.process.send_signal(signal.SIGSTOP)
        command = [CLOCHE, "--data-dir", str(own_data_dir), "pause", "i0"]
        asking = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: has_socket(asking.pid))  # which is to the server, so that it is asking
        asking.send_signal(signal.SIGINT)
        said = asking.communicate(timeout=60)[1]
        server.process.send_signal(signal.SIGCONT)
    assert asking.returncode == 130 and "the server completes the request" in said and "Aborted" not in said


def has_socket(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it opens and closes others meanwhile
        return any(os.readlink(each).startswith("socket:") for each in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_snapshots_are_made_listed_run_and_removed(call: Call, box: cloche.Sandbox):
    box.files.write("f", b"kept")
    id = said(call("snapshot", box.id, "mine")).strip()
    assert said(call("run", "--template", "mine", "-c", "open('f').read()")) == "'kept'\n"
    assert said(call("run", "--alone", "--template", id, "--memory", "1GiB", "-c", "open('f').read()")) == "'kept'\n"
    head, line = said(call("snapshots")).splitlines()
    assert head.split()[:3] == ["ID", "NAME", "OWNER"] and line.split()[:4] == [id, "mine", "local", box.id]
    (told,) = json.loads(said(call("snapshots", "--json")))
    assert told["id"] == id
    assert said(call("snapshot", "rm", "mine")) == "removed mine\n"
    again = call("snapshot", "rm", id)
    assert again.returncode == 125 and "there is no snapshot" in again.stderr


def test_forks_are_printed(call: Call, box: cloche.Sandbox):
    box.files.write("f", b"kept")
    ids = said(call("fork", box.id, "-n", "2", "--timeout", "60")).split()
    assert len({*ids, box.id}) == 3
    assert said(call("shell", ids[0], "--lang", "bash", stdin="cat f\n")) == "kept"
    said(call("kill", *ids))


@pytest.mark.parametrize("words", [["snapshot", "rm"], ["snapshot", "a", "b", "c"]])
def test_wrong_words_are_refused(call: Call, words: list[str]):
    assert call(*words).returncode == 2


def test_without_a_server(own_data_dir: Path):
    alone = calling(own_data_dir)
    refused = alone("pause", "i0")
    assert refused.returncode == 125 and "no server runs" in refused.stderr
    assert len(said(alone("snapshots")).splitlines()) == 1
    assert "there is no snapshot" in alone("snapshot", "rm", "never").stderr


def test_files_outlive_a_server_and_memory_does_not(own_data_dir: Path):
    """`docs/state.md` has a table of it; tests/faults/test_host_death.py has what a SIGKILL leaves."""
    code = "import os; open('f').read(), os.environ['E'], 'x' in globals()"
    with serving(own_data_dir) as server:
        paused, due, killed = made(server), made(server, timeout=3600, on_timeout="pause"), made(server)
        paused.pause()
        kept = killed.snapshot("mine")
    with serving(own_data_dir) as server:
        listed = {each.id: each.pause_memory for each in cloche.Sandbox.list("paused", **where(server))}
        assert listed == {paused.id: False, due.id: False}
        for each in (paused, due):
            assert cloche.Sandbox.connect(each.id, **where(server)).run(code).text == "('kept', '1', False)"
        with pytest.raises(errors.SandboxKilled, match="shut down"):
            cloche.Sandbox.connect(killed.id, **where(server))
        assert cloche.Snapshots(**where(server)).list() == [kept]
        assert cloche.Sandbox("mine", **where(server)).run(code).text == "('kept', '1', False)"


def where(server: RunningServer) -> dict[str, Any]:
    return {"url": server.url, "api_key": server.key}


def made(server: RunningServer, **more: Any) -> cloche.Sandbox:
    box = cloche.Sandbox(env={"E": "1"}, **more, **where(server))
    box.run("x = 1; open('f', 'w').write('kept')")
    return box
