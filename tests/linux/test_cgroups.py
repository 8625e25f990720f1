"""Groups of the real kernel, in whichever version this host has each controller."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche.linux import cgroups
from cloche.linux.cgroups.files import Hierarchy, parse_hierarchies

MEBIBYTE = 1024 * 1024
SECONDS = 20.0  # to give up after; never what decides


def mounted() -> list[Hierarchy]:
    return parse_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


def instance(label: str) -> str:
    return f"test-{label}-{os.getpid()}"


@pytest.fixture(params=["as found", "v1 only", "v2 only"])
def parent(request: pytest.FixtureRequest) -> Iterator[cgroups.InstanceGroups]:
    """The host's own mixture; and each version for itself, as far as it goes."""
    version = {"v1 only": 1, "v2 only": 2}.get(request.param)
    found = cgroups.plan_cgroups(hierarchy for hierarchy in mounted() if version in (None, hierarchy.version))
    if found.missing == set(cgroups.CONTROLLERS):
        pytest.skip(f"no groups can be made here ({request.param}): {found.report[0].advice}")
    made = found.parent(instance("parent"))
    yield made
    directories = made.directories
    made.remove()
    assert not any(map(os.path.exists, directories)), "a test left a group behind"


@pytest.fixture
def group(parent: cgroups.InstanceGroups) -> Iterator[cgroups.Group]:
    made = parent.create("group")
    yield made
    made.kill()
    eventually(lambda: not made.pids())
    eventually(made.remove)


def eventually(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not claim():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def needs(group: cgroups.Group, controller: str) -> None:
    if controller in group.missing:
        pytest.skip(f"the {controller} controller is not to be had here")


@contextlib.contextmanager
def program(group: cgroups.Group, code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that begins once it is in the group."""
    argv = [sys.executable, "-S", "-c", "input()\n" + code]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    group.add(process.pid)
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_process_over_the_limit_is_killed_and_counted(group: cgroups.Group) -> None:
    needs(group, "memory")
    group.set_memory(32 * MEBIBYTE)
    with program(group, "x = b'x' * 100_000_000") as process:
        assert process.wait(SECONDS) == -signal.SIGKILL
    assert group.oom_kills() == 1
    assert (group.memory_peak_bytes() or 0) > 30 * MEBIBYTE


def test_within_the_limit_one_lives_and_is_measured(group: cgroups.Group) -> None:
    needs(group, "memory")
    group.set_memory(128 * MEBIBYTE)
    with program(group, "x = b'x' * 40_000_000; print('here', flush=True); input()") as process:
        assert process.stdout
        assert process.stdout.readline() == "here\n"
        assert 40_000_000 < (group.memory_bytes() or 0) < 128 * MEBIBYTE
    assert group.oom_kills() == 0


def test_the_memory_limit_can_be_raised_and_lowered(group: cgroups.Group) -> None:
    needs(group, "memory")
    for size_bytes in (64 * MEBIBYTE, 256 * MEBIBYTE, 32 * MEBIBYTE):
        group.set_memory(size_bytes)
    with program(group, "x = b'x' * 100_000_000") as process:
        assert process.wait(SECONDS) == -signal.SIGKILL


FORKS = """
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0: time.sleep(1000)
        made += 1
except BlockingIOError: pass
print(made, flush=True)
input()
"""


def test_the_limit_of_processes_stops_forks(group: cgroups.Group) -> None:
    needs(group, "pids")
    group.set_processes(5)
    with program(group, FORKS) as process:
        assert process.stdout
        assert process.stdout.readline() == "4\n"
        assert group.processes() == 5
        assert len(group.pids()) == 5
        group.kill()


def test_a_quota_throttles(group: cgroups.Group) -> None:
    needs(group, "cpu")
    group.set_cpus(0.1)
    code = "import time\nend = time.monotonic() + 0.7\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    with program(group, code) as process:
        assert process.stdout
        # Ten periods of 100 ms at most, of which each gives 10 ms and the kernel's slice.
        assert float(process.stdout.readline()) < 0.35


def test_cpu_time_is_counted(group: cgroups.Group) -> None:
    before = group.cpu_seconds()
    if before is None:
        pytest.skip("neither cpuacct nor v2 is to be had here")
    with program(group, "import time\nwhile time.process_time() < 0.1: pass\nprint()") as process:
        assert process.stdout
        process.stdout.readline()
        assert (group.cpu_seconds() or 0) - before > 0.05


def test_frozen_processes_stand_still_and_thawed_ones_go_on(group: cgroups.Group) -> None:
    needs(group, "freezer")
    with program(group, "while True: print(input(), flush=True)") as process:
        assert process.stdin
        assert process.stdout
        group.freeze()
        eventually(group.frozen)
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert not select.select([process.stdout], [], [], 0.05)[0]
        group.thaw()
        assert process.stdout.readline() == "hello\n"


def test_kill_ends_all_also_a_fork_bomb_that_is_frozen(group: cgroups.Group) -> None:
    group.set_processes(50)
    bomb = "import os, signal\nsignal.alarm(60)\nfor _ in range(4): os.fork()\nprint(flush=True)\nwhile True: pass"
    with program(group, bomb) as process:
        assert process.stdout
        process.stdout.readline()
        group.freeze()
        group.kill()
        process.wait(SECONDS)
        eventually(lambda: not group.pids())


def test_a_busy_group_is_removed_by_a_later_sweep(parent: cgroups.InstanceGroups) -> None:
    group = parent.create("busy")
    with program(group, "input()"):
        assert not group.remove()
        assert not parent.sweep_busy()
    eventually(parent.sweep_busy)


def test_a_group_can_be_made_only_once(parent: cgroups.InstanceGroups) -> None:
    group = parent.create("once")
    with pytest.raises(FileExistsError):
        parent.create("once")
    assert group.remove()
    again = parent.create("once")
    assert again.remove()


@pytest.mark.parametrize("name", ["", "..", "a/b", "cgroup.procs", "-x", "a b"])
def test_a_name_is_one_component(name: str, parent: cgroups.InstanceGroups) -> None:
    with pytest.raises(ValueError, match="cannot name a group"):
        parent.create(name)


def test_a_process_that_is_gone_cannot_be_added(group: cgroups.Group) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(ProcessLookupError):
        group.add(process.pid)


def test_a_process_can_move_itself_in(group: cgroups.Group) -> None:
    entrances = group.open_entrances()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        for entrance in entrances:
            os.write(entrance, b"0")
        os.read(reading, 1)
        os._exit(0)
    for entrance in entrances:
        os.close(entrance)
    eventually(lambda: group.pids() == [pid] and group.processes() in (None, 1))
    os.close(reading)
    os.close(writing)
    assert os.waitpid(pid, 0) == (pid, 0)


def test_kill_and_remove_of_a_missing_group_do_nothing(parent: cgroups.InstanceGroups) -> None:
    group = parent.create("gone")
    assert group.remove()
    group.kill()
    assert group.remove()


# What dead instances leave


def plan_of(version: int | None) -> cgroups.Cgroups:
    return cgroups.plan_cgroups(hierarchy for hierarchy in mounted() if version in (None, hierarchy.version))


@pytest.mark.parametrize("version", [None, 1, 2])
def test_leftovers_of_a_killed_instance_are_killed_and_removed(version: int | None) -> None:
    found = plan_of(version)
    if "freezer" in found.missing:
        pytest.skip("no groups can be made here")
    name = instance("dead")
    child = dying_instance(found, name)
    assert name not in found.remove_leftovers(lambda instance: True)
    assert os.path.exists(f"/proc/{child}")
    assert name in found.remove_leftovers(lambda instance: instance != name)
    eventually(lambda: dead_or_gone(child))
    assert name not in found.remove_leftovers(lambda instance: instance != name)


def dead_or_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def dying_instance(found: cgroups.Cgroups, name: str) -> int:
    """The pid of a frozen process in the group of an instance whose process was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        group = found.parent(name).create("cell")
        child = subprocess.Popen(["sleep", "1000"])
        group.add(child.pid)
        group.freeze()
        os.write(writing, b"%d" % child.pid)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        return int(pipe.read())


def test_a_living_instance_is_never_taken_for_a_leftover(parent: cgroups.InstanceGroups) -> None:
    group = parent.create("cell")
    assert not cgroups.remove_dead(parent.directories)
    assert all(map(os.path.exists, parent.directories))
    assert group.remove()


def test_an_instance_in_use_cannot_be_made_again() -> None:
    found = cgroups.probe_cgroups()
    if found.missing == set(cgroups.CONTROLLERS):
        pytest.skip(f"no groups can be made here: {found.report[0].advice}")
    parent = found.parent(instance("again"))
    with pytest.raises(BlockingIOError):
        cgroups.probe_cgroups().parent(instance("again"))
    assert all(map(os.path.exists, parent.directories))
    parent.remove()


def test_where_nothing_is_to_be_had_a_group_does_nothing_and_says_so() -> None:
    found = cgroups.plan_cgroups([])
    assert found.missing == set(cgroups.CONTROLLERS)
    assert [line.version for line in found.report] == [None] * 4
    assert all(line.advice for line in found.report)
    parent = found.parent("none")
    group = parent.create("none")
    group.set_memory(1)
    group.add(os.getpid())
    group.kill()
    assert (group.memory_bytes(), group.pids(), group.missing) == (None, [], found.missing)
    assert group.remove()
    assert parent.remove()


UNREAD = """
import socket, sys
kept, sent = [], 0
for _ in range(300):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0)); sock.connect(sock.getsockname()); sock.setblocking(False); kept.append(sock)
    for _ in range(4): sock.send(bytes(40_000))
held = 0
for sock in kept:
    try:
        while True: held += len(sock.recv(65536))
    except BlockingIOError: pass
print(held, flush=True)
"""


def test_buffers_of_sockets_are_limited(group: cgroups.Group) -> None:
    """In version 1 by a limit of their own: packets beyond it are dropped. In version 2 they are memory."""
    needs(group, "memory")
    group.set_memory(32 * MEBIBYTE)
    group.set_sockets(4 * MEBIBYTE)
    with program(group, UNREAD) as process:
        assert process.stdout
        held = process.stdout.readline()
        assert int(held) < 32 * MEBIBYTE if held else process.wait(SECONDS) == -signal.SIGKILL
