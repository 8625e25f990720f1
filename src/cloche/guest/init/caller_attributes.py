"""Copies the attributes of the calling process to a fork of the fork server, or refuses to."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import os
import resource
import time

from cloche.guest.init.service_sockets import RequestRefused

# Variables that an interpreter or a library reads once, when it starts: in a fork that was before.
_READ_EARLY = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "GLIBC_TUNABLES",
    "MALLOC_",
    "OMP_",
    "KMP_",
    "GOTO_",
    "OPENBLAS_",
    "MKL_",
    "BLIS_",
    "NUMEXPR_",
    "NPY_",
    "NUMPY_",
    "PANDAS_",
    "MATPLOTLIBRC",
    "MPLCONFIGDIR",
)
_READ_LATE = frozenset(("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"))  # the client has seen to them
_RIGHTS = b"Uid Gid Groups CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Seccomp_filters".split()
_KINDS = range(16)  # of limits
# Every interpreter ignores the first two. The others are the C library's own, and `make`, say, hands one on ignored.
_OWN = (_signal.SIGPIPE, _signal.SIGXFSZ, 32, 33)
_ROOM_BYTES = 256 << 20


def copy_caller_attributes(pid: int, env: dict, inherited: dict) -> None:
    """Copies the attributes of process `pid`; `env` is its environment, `inherited` that of the imports.

    Raises RequestRefused, or OSError, where it has attributes that cannot be copied.
    """
    theirs, own = _read_status(pid), _read_status(os.getpid())
    if any(theirs.get(name) != own.get(name) for name in _RIGHTS) or int(theirs[b"SigBlk"], 16):
        raise RequestRefused("the caller has given up rights, or blocks signals")
    if any(env.get(name) != inherited.get(name) for name in (*env, *inherited) if _is_read_early(name)):
        raise RequestRefused("a variable is set that is read when an interpreter starts")
    _copy_limits(pid)
    _copy_scheduling(pid)
    _ignore_signals(int(theirs[b"SigIgn"], 16))
    os.umask(int(theirs[b"Umask"], 8))
    before = os.environ.get("TZ")
    os.environ.clear()
    os.environ.update(env)
    if os.environ.get("TZ") != before:
        time.tzset()


def _read_status(pid: int) -> dict:
    with open(f"/proc/{pid}/status", "rb") as file:
        rows = [line.partition(b":\t") for line in file.read().splitlines()]
    return {name: value for name, _, value in rows}


def _is_read_early(name: str) -> bool:
    return name.startswith(_READ_EARLY) and name not in _READ_LATE


def _copy_limits(pid: int) -> None:
    for kind in _KINDS:
        theirs, own = resource.prlimit(pid, kind), resource.getrlimit(kind)
        if theirs == own:
            continue
        if kind == resource.RLIMIT_AS or (kind == resource.RLIMIT_DATA and not _is_close_limit(theirs[0], own[0])):
            raise RequestRefused("the caller's memory is limited: what was imported before counts in a fork")
        if kind != resource.RLIMIT_DATA:
            resource.setrlimit(kind, theirs)


def _is_close_limit(theirs: int, own: int) -> bool:
    """Such a limit includes the memory imported before, which is a little more each time: see `limits`."""
    return -1 not in (theirs, own) and abs(theirs - own) < _ROOM_BYTES


def _copy_scheduling(pid: int) -> None:
    niceness = os.getpriority(os.PRIO_PROCESS, pid)
    if niceness != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    processors = os.sched_getaffinity(pid)
    if processors != os.sched_getaffinity(0):
        os.sched_setaffinity(0, processors)
    with open(f"/proc/{pid}/oom_score_adj", "rb") as file:
        score = file.read()
    if score != b"0\n":
        with open("/proc/self/oom_score_adj", "wb") as file:
            file.write(score)


def _ignore_signals(mask: int) -> None:
    for number in range(1, 65):
        if mask >> (number - 1) & 1 and number not in _OWN:
            _signal.signal(number, _signal.SIG_IGN)
