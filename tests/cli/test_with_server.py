"""The command line and a server that runs in the same data directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import RunningServer, serving, wait_until, with_template

import cloche
from cloche import errors
from cloche.model import Template

CLOCHE = Path(sys.executable).with_name("cloche")
PATIENCE_SECONDS = 90

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def place(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tmp_path_factory.mktemp("cli") / "data", template)


@pytest.fixture(scope="module")
def running(place: Path) -> Iterator[RunningServer]:
    with serving(place) as server:
        yield server


@pytest.fixture
def box(running: RunningServer) -> Iterator[cloche.Sandbox]:
    with cloche.Sandbox(url=running.url, api_key=running.key, metadata={"for": "a\x1b[31mtest"}) as made:
        yield made


@pytest.fixture(scope="module")
def call(running: RunningServer, place: Path) -> Call:
    return calling(place)


def calling(place: Path) -> Call:
    """Runs `cloche ARGS` to its end, and gives what it said."""

    def call(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [CLOCHE, "--data-dir", str(place), *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=PATIENCE_SECONDS)

    return call


def control_socket(place: Path) -> str:
    (found,) = place.glob("run/*/control.sock")
    return str(found)


def test_ps_lists_the_sandboxes_of_all_owners(call: Call, running: RunningServer, place: Path, box: cloche.Sandbox):
    key = call("key", "add", "--owner", "somebody").stdout.split()
    (theirs,) = [word for word in key if word.startswith("e2b_")]
    with cloche.Sandbox(url=running.url, api_key=theirs) as other:
        listed = call("ps").stdout
        assert box.id in listed and other.id in listed and "somebody" in listed and "\x1b" not in listed
        infos = {each["id"]: each for each in json.loads(call("ps", "--json").stdout)}
        assert infos[other.id]["owner"] == "somebody"
        with pytest.raises(errors.SandboxNotFound):
            cloche.Sandbox.connect(box.id, url=running.url, api_key=theirs)
        assert cloche.Sandbox.connect(other.id, url=f"unix:{control_socket(place)}").run("1").text == "1"
        assert call("kill", other.id).returncode == 0
        with pytest.raises(errors.SandboxKilled):
            other.run("1")


def test_kill_and_logs_say_why_a_sandbox_ended(call: Call, box: cloche.Sandbox):
    assert (call("kill", box.id).stdout, call("kill", box.id).returncode) == (f"killed {box.id}\n", 125)
    assert "was killed at" in call("kill", box.id).stderr
    lines = call("logs", box.id).stdout.splitlines()
    assert any("sandbox.ended" in line and "killed by its owner" in line for line in lines)
    assert all(box.id in line for line in lines)
    unknown = call("kill", "i00000000000000000000")
    assert unknown.returncode == 125 and "there is no sandbox" in unknown.stderr


def test_logs_can_be_followed(running: RunningServer, place: Path):
    command = [CLOCHE, "--data-dir", str(place), "logs", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        with cloche.Sandbox(url=running.url, api_key=running.key) as box:
            pass
        assert any("sandbox.ended" in line and box.id in line for line in following.stdout)
        following.send_signal(signal.SIGINT)
        assert following.wait(PATIENCE_SECONDS) == 0


def test_a_programs_output_is_in_no_log(call: Call, box: cloche.Sandbox):
    box.run("print('a-secret-of-mine')")
    box.kill()
    assert "a-secret-of-mine" not in call("logs").stdout


@pytest.mark.parametrize("lang", ["python", "bash"])
def test_a_shell_in_a_sandbox_of_the_server(call: Call, box: cloche.Sandbox, lang: str):
    box.run("x = 6 * 7; open('/mnt/data/f', 'w').write('42')")
    script = "x\nx = 7\nexit(3)\n" if lang == "python" else "cat f; echo; exit 3\n"
    done = call("shell", box.id, "--lang", lang, stdin=script)
    assert (done.stdout, done.returncode) == ("42\n", 3)
    assert box.run("x").text == ("7" if lang == "python" else "42")  # it lives on


def test_a_shell_in_a_sandbox_that_is_none(call: Call):
    done = call("shell", "i00000000000000000000", stdin="1\n")
    assert done.returncode == 125 and "there is no sandbox" in done.stderr


def test_without_a_server_that_is_said(template: Template, tmp_path: Path):
    alone = calling(with_template(tmp_path / "data", template))
    for command in (["ps"], ["kill", "i0"], ["logs"], ["shell", "i0"]):
        done = alone(*command)
        assert done.returncode == 125 and "no server runs" in done.stderr and "cloche serve" in done.stderr


def test_run_uses_the_server(call: Call, running: RunningServer):
    where = "import os; os.environ.get('HOSTNAME'); open('/proc/uptime').read() and 'ran'"
    before = len(call("logs").stdout.splitlines())
    assert call("run", "-c", where).stdout == "'ran'\n"
    assert len(call("logs").stdout.splitlines()) > before
    before = len(call("logs").stdout.splitlines())
    assert call("run", "--alone", "-c", where).stdout == "'ran'\n"
    assert len(call("logs").stdout.splitlines()) == before


def test_files_and_images_come_from_the_server_too(call: Call, tmp_path: Path):
    (tmp_path / "in.txt").write_text("hello")
    code = "import matplotlib.pyplot as plt; plt.plot([1]); open('new.txt', 'w').write(open('in.txt').read().upper())"
    out = tmp_path / "out"
    done = call("run", "--file", str(tmp_path / "in.txt"), "--out", str(out), "-c", code)
    assert done.returncode == 0, done.stderr
    assert (out / "new.txt").read_text() == "HELLO"
    assert (out / "display-1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_a_run_that_is_ended_leaves_nothing_on_the_server(call: Call, place: Path, number: signal.Signals):
    command = [CLOCHE, "--data-dir", str(place), "run", "-c", "print('in', flush=True)\nimport time; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as started:
        assert started.stdout is not None and started.stdout.readline() == b"in\n"
        (box,) = json.loads(call("ps", "--json").stdout)
        os.kill(started.pid, number)
        status = started.wait(PATIENCE_SECONDS)
    assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while box["id"] in call("ps").stdout:
        assert time.monotonic() < deadline


@pytest.mark.long
def test_a_server_that_is_told_to_stop_does_not_wait_for_attached_clients(own_data_dir: Path, tmp_path: Path):
    following = [CLOCHE, "--data-dir", str(own_data_dir), "logs", "-f"]
    prompting = [CLOCHE, "--data-dir", str(own_data_dir), "shell"]
    pipe = subprocess.PIPE
    with (
        serving(own_data_dir, log=tmp_path / "log") as server,
        subprocess.Popen(following, stdout=pipe, stderr=pipe, text=True) as logs,
        subprocess.Popen(prompting, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as shell,
    ):
        assert shell.stdin is not None and shell.stdout is not None and logs.stdout is not None
        shell.stdin.write("print('up')\n")
        shell.stdin.flush()
        assert shell.stdout.readline() == "up\n" and logs.stdout.readline()
        server.process.terminate()
        assert server.process.wait(PATIENCE_SECONDS) == 0
        assert "the server has ended" in logs.communicate()[1]
        shell.communicate()
    assert "http.failed" not in (tmp_path / "log").read_text()


# --- runs that go on by themselves


def test_a_run_that_is_detached_goes_on_and_its_sandbox_ends_with_it(call: Call, place: Path, tmp_path: Path):
    (tmp_path / "data.txt").write_text("from a file")
    code = (
        "import sys, time; print('on', *sys.argv[1:], flush=True); time.sleep(0.3); print(open('data.txt').read()); 7"
    )
    begun = call("run", "--detach", "--file", str(tmp_path / "data.txt"), "-c", code, "--", "a")
    assert (begun.returncode, begun.stderr) == (0, "")
    id = begun.stdout.strip()
    shown = call("attach", id)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "on a\nfrom a file\n7\n", "")
    told = [json.loads(line) for line in call("attach", id, "--events", "--after", "2").stdout.splitlines()]
    assert [each["type"] for each in told] == ["output", "display", "ended"]
    run = cloche.DetachedRun.connect(id, url=f"unix:{control_socket(place)}")
    wait_until(lambda: run.sandbox not in call("ps").stdout)


def test_the_exit_status_of_a_detached_run_is_its_own(call: Call):
    id = call("run", "--detach", "-c", "raise SystemExit(7)").stdout.strip()
    shown = call("attach", id, "--json")
    assert shown.returncode == 7 and json.loads(shown.stdout)["exit_code"] == 7


@pytest.mark.long
def test_a_detached_run_is_answered_by_stdin_as_it_was(call: Call):
    id = call("run", "--detach", "-c", "print(input(), input())", stdin="Ada\r\nÅngström").stdout.strip()
    assert call("attach", id).stdout == "Ada Ångström\n"
    nothing = call("run", "--detach", "-c", "input()").stdout.strip()
    assert "more often than answers were given" in call("attach", nothing).stderr
    refused = call("run", "--detach", "-c", "1", stdin="x" * (1 << 20) + "\n")
    assert refused.returncode == 125 and "1 MiB" in refused.stderr


def test_an_attached_client_may_leave(call: Call, place: Path):
    id = call("run", "--detach", "-c", "print('on', flush=True)\nimport time; time.sleep(60)").stdout.strip()
    attached = subprocess.Popen(
        [CLOCHE, "--data-dir", str(place), "attach", id], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert attached.stdout is not None and attached.stdout.readline() == "on\n"
    attached.send_signal(signal.SIGINT)
    assert attached.wait(60) == 130
    run = cloche.DetachedRun.connect(id, url=f"unix:{control_socket(place)}")
    assert run.state == "running" and run.interrupt() and run.result().outcome == "interrupted"


@pytest.mark.long
def test_invalid_options_of_a_detached_run_are_refused(call: Call, tmp_path: Path):
    for option in (["--out", str(tmp_path)], ["--json"]):
        refused = call("run", "--detach", *option, "-c", "1")
        assert refused.returncode == 125 and f"--detach and {option[0]} do not go together" in refused.stderr
    for id in ("x" + "0" * 20, "../sandboxes"):
        unknown = call("attach", id)
        assert unknown.returncode == 125 and "there is no run" in unknown.stderr
    nowhere = calling(tmp_path)("run", "--detach", "-c", "1")
    assert nowhere.returncode == 125 and "no server runs" in nowhere.stderr
