"""All of a group but one stand still, in each version of control groups, and nobody outruns that."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.linux.test_cgroups import dead_or_gone, eventually, instance, plan_of

from cloche.linux import cgroups

FALLING_ASLEEP_NANOSECONDS = 1_000_000  # one who counts as frozen may have some steps left to go in the kernel

ECHO = "while True: print(input(), flush=True)"
# Each forks the next and ends: whoever lists them finds only those that are gone. A byte of each goes to stdout.
RELAY = """
import os
while True:
    os.write(1, b".")
    if os.fork(): os._exit(0)
"""


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def parent(request: pytest.FixtureRequest) -> Iterator[cgroups.InstanceGroups]:
    found = plan_of(request.param)
    if "freezer" in found.missing:
        pytest.skip(f"no freezer of version {request.param} here")
    made = found.parent(instance("programs"))
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


class Program:
    """A Python program that begins once it is in the group."""

    def __init__(self, group: cgroups.Group, code: str) -> None:
        argv = [sys.executable, "-S", "-c", "input()\n" + code]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.pid = self.process.pid
        group.add(self.pid)
        self.say(b"begin")

    def say(self, line: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + b"\n")

    def hear(self) -> bytes:
        assert self.process.stdout
        return self.process.stdout.readline()

    def is_silent(self) -> bool:
        """By now all that it can say is there: nobody who runs needs this long for one line."""
        return not select.select([self.process.stdout], [], [], 0.1)[0]


@contextlib.contextmanager
def programs(group: cgroups.Group, *codes: str) -> Iterator[list[Program]]:
    started = [Program(group, code) for code in codes]
    try:
        yield started
    finally:
        for each in started:
            each.process.kill()
        group.thaw()
        for each in started:
            each.process.communicate()


def test_all_but_one_stand_still_and_go_on(group: cgroups.Group) -> None:
    with programs(group, ECHO, ECHO, ECHO) as (init, *others):
        for _ in range(3):
            assert group.freeze_programs(init.pid)
            for each in (init, *others):
                each.say(b"hello")
            assert init.hear() == b"hello\n"
            assert all(each.is_silent() for each in others)
            group.thaw_programs()
            assert [each.hear() for each in others] == [b"hello\n"] * 2


def test_processes_started_since_are_stopped_as_well(group: cgroups.Group) -> None:
    with programs(group, ECHO, ECHO) as (init, old):
        group.freeze_programs(init.pid)
        group.thaw_programs()
        with programs(group, ECHO) as (new,):
            group.freeze_programs(init.pid)
            old.say(b"?")
            new.say(b"?")
            assert old.is_silent()
            assert new.is_silent()
            assert set(group.pids()) == {init.pid, old.pid, new.pid}


def test_a_child_of_the_one_that_is_awake_runs(group: cgroups.Group) -> None:
    """As that of a sandbox's init which copies the files of a paused sandbox."""
    forks = "import os\nwhile input():\n  if not os.fork(): print('born', flush=True); os._exit(0)"
    with programs(group, forks, ECHO) as (init, _):
        group.freeze_programs(init.pid)
        init.say(b"fork")
        assert init.hear() == b"born\n"


def test_a_forking_chain_does_not_escape(group: cgroups.Group) -> None:
    with programs(group, ECHO, RELAY) as (init, relay):
        assert relay.process.stdout
        for _ in range(3):
            relay.process.stdout.read(1)
            group.freeze_programs(init.pid)
            while not relay.is_silent():
                relay.process.stdout.read(1 << 20)
            assert relay.is_silent()
            group.thaw_programs()
        assert relay.process.stdout.read(1)
        group.kill()


def test_their_cpu_time_stands_still(group: cgroups.Group) -> None:
    with programs(group, ECHO, "while True: pass", "while True: pass") as (init, *others):
        group.freeze_programs(init.pid)
        before = [_cpu_nanoseconds(each.pid) for each in others]
        assert all(each.is_silent() for each in others)
        assert sum(_cpu_nanoseconds(each.pid) for each in others) - sum(before) < FALLING_ASLEEP_NANOSECONDS
        group.thaw_programs()
        eventually(lambda: all(_cpu_nanoseconds(each.pid) > since for each, since in zip(others, before, strict=True)))


def _cpu_nanoseconds(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def test_a_stopped_process_stays_stopped(group: cgroups.Group) -> None:
    with programs(group, ECHO, ECHO) as (init, other):
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        group.freeze_programs(init.pid)
        group.thaw_programs()
        other.say(b"hello")
        assert other.is_silent()
        os.kill(other.pid, signal.SIGCONT)
        assert other.hear() == b"hello\n"


def test_a_signal_waits_until_they_go_on(group: cgroups.Group) -> None:
    # It may be stopped in the middle of its first print: a handler that prints, too, would come in between.
    handles = (
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os.write(1, b'heard\\n'))\nprint(flush=True)\n"
    )
    with programs(group, ECHO, handles + "while True: signal.pause()") as (init, other):
        other.hear()
        group.freeze_programs(init.pid)
        os.kill(other.pid, signal.SIGTERM)
        assert other.is_silent()
        group.thaw_programs()
        assert other.hear() == b"heard\n"


def test_the_frozen_are_killed_before_they_can_go_on(group: cgroups.Group) -> None:
    with programs(group, ECHO, ECHO) as (init, other):
        group.freeze_programs(init.pid)
        other.say(b"last words")
        group.kill()
        assert [each.process.wait(20) for each in (init, other)] == [-signal.SIGKILL] * 2
        assert other.hear() == b""


def test_a_failed_freeze_leaves_all_running(group: cgroups.Group) -> None:
    """No descriptor is left, at each point where one is needed."""
    with programs(group, ECHO, ECHO) as (init, other):
        for spare in range(3):
            with _descriptors_left(spare), pytest.raises(OSError, match="Too many open files"):
                group.freeze_programs(init.pid)
            other.say(b"hello")
            assert other.hear() == b"hello\n"
        group.freeze_programs(init.pid)
        other.say(b"hello")
        with _descriptors_left(0):
            group.thaw_programs()
        assert other.hear() == b"hello\n"


@contextlib.contextmanager
def _descriptors_left(spare: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_a_group_that_is_gone_cannot_be_frozen(parent: cgroups.InstanceGroups) -> None:
    group = parent.create("gone")
    assert group.remove()
    with pytest.raises(FileNotFoundError):
        group.freeze_programs(os.getpid())
    group.thaw_programs()


def test_dying_processes_are_reaped_later_with_their_group(parent: cgroups.InstanceGroups) -> None:
    group = parent.create("busy")
    with programs(group, ECHO, ECHO) as (init, _):
        group.freeze_programs(init.pid)
        assert not group.remove()
        assert not parent.sweep_busy()
    eventually(parent.sweep_busy)


@pytest.mark.parametrize("version", [None, 1, 2])
def test_frozen_leftovers_of_an_instance_are_killed_and_removed(version: int | None) -> None:
    found = plan_of(version)
    if "freezer" in found.missing:
        pytest.skip("no groups can be made here")
    name = instance("frozen")
    pids = _dying_instance(found, name)
    assert name in found.remove_leftovers(lambda other: other != name)
    for pid in pids:
        eventually(lambda pid=pid: dead_or_gone(pid))
    assert name not in found.remove_leftovers(lambda other: other != name)


def _dying_instance(found: cgroups.Cgroups, name: str) -> list[int]:
    """The pids in the group of an instance that was killed: one awake, one frozen."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        group = found.parent(name).create("cell")
        children = [subprocess.Popen(["sleep", "1000"]).pid for _ in range(2)]
        for child in children:
            group.add(child)
        group.freeze_programs(children[0])
        os.write(writing, b"%d %d" % (children[0], children[1]))
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        return [int(word) for word in pipe.read().split()]


def test_limits_apply_to_moved_processes(parent: cgroups.InstanceGroups) -> None:
    """They are in a group of the freezer's own, or below the one that has the limits."""
    group = parent.create("limited")
    if "memory" in group.missing:
        group.remove()
        pytest.skip("the memory controller is not to be had here")
    group.set_memory(32 * 1024 * 1024)
    with programs(group, ECHO, "input(); x = b'x' * 100_000_000") as (init, other):
        group.freeze_programs(init.pid)
        group.thaw_programs()
        other.say(b"grow")
        assert other.process.wait(20) == -signal.SIGKILL
        assert group.oom_kills() == 1
    eventually(group.remove)
