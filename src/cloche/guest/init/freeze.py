"""Where the host has no freezer, init stops all programs by SIGSTOP, and lets them go on by SIGCONT.

They can tell, if they look closely: SIGCONT may have a handler, and some system calls (`epoll_wait`, `semop`) end with
EINTR. Who stands still by his own will stays so. What init forks while they are held runs: only who is there at the
time is stopped, so that init can have the files copied meanwhile.
"""

from __future__ import annotations

import os
import signal
import time

_SECONDS = 2.0  # for all to stand still; less than the host waits
_LOOK_SECONDS = 0.0005
_STILLNESS = "all stand still"
_STILL = (b"T", b"t", b"Z", b"X")


class Stillness:
    """`receptions`: where programs ask init to start others, which must not be while all stand still."""

    def __init__(self, watchman, receptions: tuple = ()):
        self._watchman = watchman
        self._receptions = receptions
        self._stopped: list = []  # by us, in this order

    def verbs(self) -> dict:
        return {"hold": self._hold, "release": self._release}

    def _hold(self, header: dict, _: bytes) -> dict:
        """Starts nobody from now on. With `stop` it stops them, too: `still` tells if it could; else all run on."""
        self._watchman.resting = True
        for reception in self._receptions:
            reception.rest(_STILLNESS)
        still = not header.get("stop") or self._stop_all()
        if not still:
            self._release({}, b"")
        return {"still": still}

    def _release(self, header: dict, _: bytes) -> dict:
        """Who was stopped last goes on first: a shell that waits for its children would else find them stopped."""
        self._watchman.resting = False
        for reception in self._receptions:
            reception.go_on(_STILLNESS)
        while self._stopped:
            _signal(self._stopped.pop(), signal.SIGCONT)
        return {}

    def _stop_all(self) -> bool:
        """One generation after the other: who waits for a child, and does not stand still himself, sees it stop.

        Who was in the middle of a fork finishes it, and its child comes after we have looked; and who forks and ends at
        once is never where we look. But nobody is left to bury those that have ended: while some still do, their number
        grows. So all stand still when we have looked twice and found the same, and nobody who moved either time: who
        did the first time may have finished a fork the second time, after we had listed all and before we came to it.
        """
        until = time.monotonic() + _SECONDS
        before: set | None = None  # all of the last look, if none of them moved
        while time.monotonic() < until:
            there, moving = _look()
            if not moving and there == before:
                return True
            for pid in [pid for pid, watcher in moving.items() if watcher not in moving]:
                _signal(pid, signal.SIGSTOP)
                if pid not in self._stopped:
                    self._stopped.append(pid)
            before = None if moving else there
            time.sleep(_LOOK_SECONDS)
        return False


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _look() -> tuple:
    """All programs; and those that do not stand still, each with who would see it stop.

    That is its parent, unless that one is in the kernel, and waits for it there (vfork).
    """
    states = _states()
    there = _ours(states)
    deep = {pid for pid, (state, _) in states.items() if state == b"D"}
    moving = [pid for pid in there if not _stands_still(pid, states)]
    return set(there), {pid: None if states[pid][1] in deep else states[pid][1] for pid in moving}


def _states() -> dict:
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


def _ours(states: dict) -> list:
    """All below init. Behind walls that is everybody, also the first kernel, whose parent is outside."""
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
    """Its first thread has ended. It has ended itself if that was the last."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] not in _STILL:
                    return False
    except OSError:
        pass  # it has ended meanwhile
    return True
