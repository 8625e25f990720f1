"""Sessions of processes: ended children, the members of a session, and how to end all of them."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import os
import signal
import time
from collections.abc import Iterator

_KILL_SECONDS = 1.0
_BRIEF_SECONDS = 0.01
_LOOK_SECONDS = 0.0005
_parents: dict = {}  # session that somebody asked init for (see `warm_python`) -> the session of who asked
_leaderless: set = set()  # of these, whose leader has ended


def listen_for_children() -> int:
    """A descriptor that can be read when a child has ended. Children set their own signals.

    By the C module, as in `default_signals`: an init that goes through enumerations writes to 20 pages more.
    """
    ended, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    _signal.signal(_signal.SIGCHLD, _on_child)
    _signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    return ended


def stop_listening(ended: int) -> None:
    """Undoes `listen_for_children`, but for the handler."""
    os.close(signal.set_wakeup_fd(-1))
    os.close(ended)


def _on_child(*_) -> None:
    """A handler must be set for the wake-up descriptor to be written to."""


def reap_children() -> Iterator[tuple]:
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


def adopt_session(session: int, asker: int) -> None:
    """From now on `session` belongs to that of the process `asker`, as if that process had started its programs."""
    try:
        _parents[session] = os.getsid(asker)
    except ProcessLookupError:
        pass  # its client is gone, and it will be ended


def ended(pid: int) -> int | None:
    """Handles the end of a child. If it led an adopted session, returns the session that first asked for it."""
    if pid not in _parents:
        return None
    _leaderless.add(pid)
    first = pid
    for _ in range(len(_parents)):
        first = _parents.get(first, first)
    return first


def remove_empty_sessions() -> None:
    """Removes adopted sessions without processes: their numbers may come again."""
    if _leaderless:
        gone = _leaderless - {session_of(pid) for pid in _list_pids()}
        for session in gone:
            del _parents[session]
        _leaderless.difference_update(gone)


def session_lineage(pid: int) -> list:
    """The session of a process that still runs, then the session that asked for it, and so on."""
    found: list = []
    session = session_of(pid)
    while session is not None and session not in found:
        found.append(session)
        session = _parents.get(session)
    return found


def is_active(session: int) -> bool:
    """Whether a process of it runs, or would if it got a processor.

    All others wait for something, or have ended.
    """
    return any(_state_of(pid) in (b"R", b"D") for pid in _session_members(session))


def _state_of(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def children_of(pid: int) -> list:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def signal_session(session: int, number: int, brief: bool = False) -> None:
    """Signals every process of a session. `brief`: they stand still, and the end of killed ones is not awaited.

    The leader is a member even if it has only just been forked and has not made its session yet.
    """
    if number == signal.SIGKILL:
        _kill_session(session, _BRIEF_SECONDS if brief else _KILL_SECONDS)
    else:
        _signal_all(_session_members(session), number)


def _kill_session(session: int, seconds: float) -> None:
    """Kills all members. They are stopped first: a fork bomb outruns killing one by one.

    A process that was in the middle of a fork when it was stopped finishes it, and its child appears after the
    listing. So the listing is repeated until none is left; a process that cannot be ended in time is held by the
    kernel, and ends there.
    """
    stopped: set = set()
    while (members := _session_members(session)) - stopped:
        _signal_all(members - stopped, signal.SIGSTOP)
        stopped |= members
    until = time.monotonic() + seconds
    while members and time.monotonic() < until:
        _signal_all(members, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
        members = _session_members(session)


def _session_members(session: int) -> set:
    leader = {session} if session_of(session) is not None else set()
    return leader | {pid for pid in _list_pids() if session in session_lineage(pid)}


def _list_pids() -> list:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _signal_all(pids: set, number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
