"""SIGKILL of the process that holds sandboxes, at any moment: nothing of them is left, and the next start cleans up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from cloche.config import Config
from cloche.engine.operations import doctor as checkup_leftovers

pytestmark = pytest.mark.alone


def in_test_all(moment: float) -> ParameterSet:
    """Each moment is another chance to find the host in the middle of something; `make test` has a few of them."""
    return pytest.param(moment, marks=pytest.mark.long)


HOST = """
import threading, time, cloche
boxes = [cloche.Sandbox() for _ in range(3)]
threading.Thread(target=lambda: boxes[0].run("import time; time.sleep(100)"), daemon=True).start()
boxes[1].commands.run("sleep 1000 & setsid sleep 1000 & echo started")
print("up", flush=True)
time.sleep(100)
"""
PAUSED = """
import threading, time, cloche
boxes = [cloche.Sandbox() for _ in range(3)]
for number, box in enumerate(boxes):
    box.run(f"import os; x = 1; print('kept {number}', file=open('kept', 'w'))")
threading.Thread(target=lambda: boxes[0].run("while True: pass"), daemon=True).start()
boxes[1].commands.run("sleep 1000 & setsid sleep 1000 & echo started")
time.sleep(0.1)
for box in boxes[:2]: box.pause()
boxes[2].pause(memory=False)
print(*[box.id for box in boxes], flush=True)
time.sleep(100)
"""
RESUMED = """
import sys, cloche
for id in sys.argv[1:]:
    with cloche.Sandbox.connect(id) as box:
        print(box.run("'x' in globals(), open('kept').read()").text)
"""
LASTING = """
import cloche
box = cloche.Sandbox()
box.run("import hashlib, os; data = os.urandom(20_000_000); _ = open('kept', 'wb').write(data)")
box.run("print(hashlib.sha256(data).hexdigest(), file=open('digest', 'w'), end='')")
print(box.id, flush=True)
for number in range(1000):
    box.pause()
    box.resume()
    box.snapshot(f"made-{number}")
"""
WHOLE = """
import sys, cloche
def is_whole(box):
    code = "import hashlib; hashlib.sha256(open('kept', 'rb').read()).hexdigest() == open('digest').read()"
    return box.run(code).text
for each in cloche.snapshots.list(sandbox=sys.argv[1]):
    with cloche.Sandbox(template=each) as box: print(is_whole(box))
    cloche.snapshots.remove(each)
try:
    with cloche.Sandbox.connect(sys.argv[1]) as box: print(is_whole(box))
except cloche.errors.Gone: pass
print("done")
"""
NEXT = "import cloche\nwith cloche.Sandbox() as box: print(box.run('6 * 7').text)"


def descendants(pid: int) -> set[tuple[int, str]]:
    """All processes below `pid`, each with its start time, so that a reused pid is not taken for it."""
    below = set()
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return below
    for child in children:
        below |= {(child, started(child)), *descendants(child)}
    return below


def started(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def gone(processes: set[tuple[int, str]], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(begun and started(pid) == begun for pid, begun in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def start(bare_dir: str):
    environ = {**os.environ, "CLOCHE_DATA_DIR": bare_dir}

    def run(code: str, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, env=environ)

    return run


@pytest.mark.parametrize("after_seconds", [0.2, 0.5, None, *map(in_test_all, (0.1, 0.3, 0.4, 0.7, 0.9))])
def test_a_killed_host_leaves_no_process_and_the_next_one_starts(start, bare_dir: str, after_seconds: float | None):
    instances = Path(bare_dir, "run")
    instances.mkdir(exist_ok=True)  # it may be killed before it comes to that
    host = start(HOST)
    if after_seconds is None:
        assert host.stdout and host.stdout.readline() == "up\n"
    else:
        time.sleep(after_seconds)  # the moment of its death is what varies
    below = descendants(host.pid)
    assert after_seconds is not None or len(below) >= 10
    host.kill()
    host.wait()
    assert gone(below), "processes outlived their host"
    dead = {path.name for path in instances.iterdir() if path.name.startswith("h")}
    assert start(NEXT).communicate(timeout=120)[0] == "42\n"
    left = {path.name for path in instances.iterdir()}
    assert not dead & left or all(_is_locked(instances / name) for name in dead & left)
    for name in dead - left:
        assert not list(Path("/sys/fs/cgroup").glob(f"**/cloche-{name}")), "cgroups outlived the next start"


def test_a_host_killed_with_paused_sandboxes_keeps_their_files_and_leaves_nothing_else(start, bare_dir: str):
    host = start(PAUSED)
    assert host.stdout
    ids = host.stdout.readline().split()
    below = descendants(host.pid)
    host.kill()
    host.wait()
    dead = {path.name for path in Path(bare_dir, "run").iterdir() if not _is_locked(path)}
    assert dead and leftovers(bare_dir) >= dead
    answers = start(RESUMED, *ids).communicate(timeout=120)[0].splitlines()
    assert answers == [rf"(False, 'kept {number}\n')" for number in range(3)]
    assert gone(below), "frozen processes outlived the next start"
    for name in dead:
        assert not list(Path("/sys/fs/cgroup").glob(f"**/cloche-{name}")), "cgroups outlived the next start"
    assert not leftovers(bare_dir) & dead


@pytest.mark.parametrize("after_seconds", [0.1, in_test_all(0.3)])
def test_a_host_killed_while_it_pauses_and_keeps_leaves_whole_things_or_none(
    start, bare_dir: str, after_seconds: float
):
    host = start(LASTING)
    assert host.stdout
    id = host.stdout.readline().strip()
    time.sleep(after_seconds)  # the moment of its death is what varies
    below = descendants(host.pid)
    host.kill()
    host.wait()
    dead = {path.name for path in Path(bare_dir, "run").iterdir() if not _is_locked(path)}
    answers = start(WHOLE, id).communicate(timeout=120)[0].splitlines()
    assert answers[-1:] == ["done"] and set(answers[:-1]) <= {"True"}
    assert gone(below)
    assert not leftovers(bare_dir) & dead
    assert not [path for path in Path(bare_dir, "images").glob("*") if path.name.rpartition("-")[2] in dead]


def leftovers(data_dir: str) -> set[str]:
    """The dead hosts of which, as `cloche doctor` says, something is left."""
    (found,) = checkup_leftovers.leftover_checks(Config(data_dir=data_dir))
    return set(re.findall(r"\bh[a-z0-9]{20}\b", found.detail))


def _is_locked(instance: Path) -> bool:
    """Another test's host, running beside this one."""
    return subprocess.run(["flock", "--nonblock", str(instance / "lock"), "true"], check=False).returncode != 0
