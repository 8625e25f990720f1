"""Processes as the system sees them: who has ended, who belongs to a session, and how to end all of one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

_KILL_SECONDS = 1.0
_LOOK_SECONDS = 0.0005


def reap() -> Iterator[tuple]:
    """Collects children that have ended: (pid, wait status, resource usage) of each. Does not wait."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status, usage


def session_of(pid: int) -> int | None:
    """The session of a process that still runs; None for one that has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[3]) if len(fields) > 3 and fields[0] != b"Z" else None


def children_of(pid: int) -> list:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def signal_session(session: int, number: int) -> None:
    """Signals every process of a session.

    The leader is one even if it has only just been forked and has not come to make its session.
    """
    if number == signal.SIGKILL:
        _kill_session(session)
    else:
        _signal_all(_members(session), number)


def _kill_session(session: int) -> None:
    """All are stopped first: a fork bomb outruns one-by-one.

    Who was in the middle of a fork when it was stopped finishes it, and its child comes after we have looked. So we
    look until nobody is left; who cannot be ended within a second is in the kernel's hands, and ends there.
    """
    stopped: set = set()
    while (members := _members(session)) - stopped:
        _signal_all(members - stopped, signal.SIGSTOP)
        stopped |= members
    until = time.monotonic() + _KILL_SECONDS
    while members and time.monotonic() < until:
        _signal_all(members, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
        members = _members(session)


def _members(session: int) -> set:
    leader = {session} if session_of(session) is not None else set()
    return leader | {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if session_of(pid) == session}


def _signal_all(pids: set, number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
