"""Sandboxes that come and go leave nothing behind. `make soak` runs the same with 2,000 of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import cloche
from cloche.model import Template

pytestmark = pytest.mark.alone

CYCLES = int(os.environ.get("SOAK_CYCLES", "60"))
ALIVE = int(os.environ.get("SOAK_ALIVE", "40"))
SETTLE_SECONDS = 5.0


@pytest.fixture(autouse=True)
def _own_data_dir(template: Template, data_dir: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLOCHE_DATA_DIR", data_dir)


class Census:
    """What this process and its descendants hold right now."""

    def __init__(self) -> None:
        self.processes = len(_descendants(os.getpid()))
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
        self.cgroups = sum(len(found) for found in _cgroups_of_our_cells())
        self.threads = len(os.listdir("/proc/self/task"))


def _descendants(pid: int) -> list[int]:
    below = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            below += [child, *_descendants(child)]
    return below


def _cgroups_of_our_cells() -> list[list[Path]]:
    """The directories beside the one that our nursery's processes are in."""
    nursery = _descendants(os.getpid())[-1:] or [os.getpid()]
    lines = Path(f"/proc/{nursery[0]}/cgroup").read_text().splitlines()
    parents = [line.split(":", 2)[1:] for line in lines if "/cloche-" in line]
    roots = [Path("/sys/fs/cgroup", kind or "", path.lstrip("/")).parent for kind, path in parents]
    return [list(root.glob("cell-*")) for root in roots if root.is_dir()]


def _network_namespaces() -> int | None:
    """How many the kernel holds; None where it does not say."""
    try:
        rows = Path("/proc/slabinfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(row.split()[1]) for row in rows if row.startswith("net_namespace ")), None)


def _resident_bytes() -> int:
    """What this process and its descendants hold; the host's own figures would count everybody else's too."""
    pages = 0
    for pid in (os.getpid(), *_descendants(os.getpid())):
        pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def _settled(before: Census) -> Census:
    """A census once it equals `before`, or after some seconds as it is."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while vars(now := Census()) != vars(before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def _few_more_than(networks: int) -> bool:
    """Whether that is so soon: the kernel takes networks apart in the background, many at a time."""
    end = time.monotonic() + 30
    while (_network_namespaces() or 0) - networks >= 16 and time.monotonic() < end:
        time.sleep(0.1)
    return (_network_namespaces() or 0) - networks < 16


def test_sandboxes_that_came_and_went_leave_nothing():
    with cloche.Sandbox() as box:
        box.run("1")
    time.sleep(1)  # the pool fills up again
    before, memory, networks = Census(), _resident_bytes(), _network_namespaces()
    for number in range(CYCLES):
        with cloche.Sandbox() as box:
            if number % 10 == 0:
                assert box.run("6 * 7").text == "42"
                box.files.write("/mnt/data/a", b"x" * 100_000)
                assert box.commands.run("cat a | wc -c").stdout == "100000\n"
    after = _settled(before)
    assert vars(after) == vars(before)
    assert _resident_bytes() - memory < 64 << 20, "memory is not flat"
    if networks is not None:
        assert _few_more_than(networks), "network namespaces pile up"


def test_many_sandboxes_live_at_once_and_answer():
    boxes = [cloche.Sandbox() for _ in range(ALIVE)]
    try:
        for number, box in enumerate(boxes):
            box.run(f"mine = {number}")
        assert [box.run("mine").text for box in boxes] == [str(number) for number in range(ALIVE)]
    finally:
        for box in boxes:
            box.close()
