"""SIGKILL of the process that holds sandboxes, at any moment: nothing of them is left, and the next start cleans up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

HOST = """
import threading, time, cloche
boxes = [cloche.Sandbox() for _ in range(3)]
threading.Thread(target=lambda: boxes[0].run("import time; time.sleep(100)"), daemon=True).start()
boxes[1].commands.run("sleep 1000 & setsid sleep 1000 & echo started")
print("up", flush=True)
time.sleep(100)
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

    def run(code: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ)

    return run


@pytest.mark.parametrize("after_seconds", [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, None])
def test_a_killed_host_leaves_no_process_and_the_next_one_starts(start, bare_dir: str, after_seconds: float | None):
    instances = Path(bare_dir, "run")
    host = start(HOST)
    if after_seconds is None:
        assert host.stdout and host.stdout.readline() == "up\n"
    else:
        time.sleep(after_seconds)
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


def _is_locked(instance: Path) -> bool:
    """Another test's host, running beside this one."""
    return subprocess.run(["flock", "--nonblock", str(instance / "lock"), "true"], check=False).returncode != 0
