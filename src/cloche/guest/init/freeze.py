"""The freezer for hosts without one: init stops all programs by SIGSTOP, and continues them by SIGCONT.

Programs can notice it: SIGCONT may have a handler, and some system calls (`epoll_wait`, `semop`) end with
EINTR. A program that was stopped before stays stopped. Processes that init forks meanwhile run: only the
programs of that moment are stopped, so that init can have the files copied.
"""

from __future__ import annotations

import os
import signal
import time

_SECONDS = 2.0  # for all to stand still; less than the host waits
_LOOK_SECONDS = 0.0005
_STILLNESS = "all stand still"
_STILL = (b"T", b"t", b"Z", b"X")


class SignalFreezer:
    """`receptions`: the sockets on which programs ask init to start others, which must rest meanwhile."""

    def __init__(self, watchman, receptions: tuple = ()):
        self._watchman = watchman
        self._receptions = receptions
        self._stopped: list = []  # by us, in this order

    def verb_handlers(self) -> dict:
        return {"hold": self._hold_programs, "release": self._release_programs}

    def _hold_programs(self, header: dict, _: bytes) -> dict:
        """Starts no programs from now on. With `stop` it stops all, too: `still` says if it could; else all run on."""
        self._watchman.resting = True
        for reception in self._receptions:
            reception.rest(_STILLNESS)
        still = not header.get("stop") or self._stop_all()
        if not still:
            self._release_programs({}, b"")
        return {"still": still}

    def _release_programs(self, header: dict, _: bytes) -> dict:
        """Continues the last stopped first: a shell that waits for its children would else find them stopped."""
        self._watchman.resting = False
        for reception in self._receptions:
            reception.go_on(_STILLNESS)
        while self._stopped:
            _send_signal(self._stopped.pop(), signal.SIGCONT)
        return {}

    def _stop_all(self) -> bool:
        """Stops one generation after the other: a running parent that waits for a child would see it stop.

        A process in the middle of a fork finishes it, and its child appears after the listing; and a process that
        forks and ends at once is never in a listing. But ended processes are not reaped: while some still end, their
        number grows. So all stand still when two listings are equal and no process moved in either: one that moved
        the first time may have finished a fork the second time, after the listing and before its state was read.
        """
        until = time.monotonic() + _SECONDS
        before: set | None = None  # all of the last look, if none of them moved
        while time.monotonic() < until:
            there, moving = _list_moving()
            if not moving and there == before:
                return True
            for pid in [pid for pid, watcher in moving.items() if watcher not in moving]:
                _send_signal(pid, signal.SIGSTOP)
                if pid not in self._stopped:
                    self._stopped.append(pid)
            before = None if moving else there
            time.sleep(_LOOK_SECONDS)
        return False


def _send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _list_moving() -> tuple:
    """All programs; and the moving ones, each with the process that would see it stop.

    That is its parent, unless the parent is in the kernel, and waits for it there (vfork).
    """
    states = _process_states()
    there = _own_programs(states)
    deep = {pid for pid, (state, _) in states.items() if state == b"D"}
    moving = [pid for pid in there if not _stands_still(pid, states)]
    return set(there), {pid: None if states[pid][1] in deep else states[pid][1] for pid in moving}


def _process_states() -> dict:
    """(state, parent) of every process that we can see."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()  # its name, in brackets, may hold anything
            except OSError:
                continue  # it has ended
            found[int(name)] = (fields[0], int(fields[1]))
    return found


def _own_programs(states: dict) -> list:
    """All processes below init; behind walls all there are.

    The first kernel is included, which has its parent outside.
    """
    own = os.getpid()
    children: dict = {}
    for pid, (_, parent) in states.items():
        if pid != own:
            children.setdefault(parent, []).append(pid)
    line = [*children.get(own, ()), *(children.get(0, ()) if own == 1 else ())]
    for pid in line:
        line += children.get(pid, ())
    return line


def _stands_still(pid: int, states: dict) -> bool:
    state, _ = states[pid]
    if state == b"Z":
        return _threads_stand_still(pid)
    if state == b"D":
        # Its child shares its memory until it runs a program, and is stopped: it cannot stop itself before (vfork).
        return any(parent == pid and other in _STILL for other, parent in states.values())
    return state in _STILL


def _threads_stand_still(pid: int) -> bool:
    """For a process with its first thread ended. It has ended itself if that was the last."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] not in _STILL:
                    return False
    except OSError:
        pass  # it has ended meanwhile
    return True
