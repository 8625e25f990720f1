"""The system calls that Python lacks, each a function that raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_machine = platform.machine()

# Looked up here and once: a first look in a sandbox would write to pages that it shares with the zygote.
_capset = _libc.capset
_chmod = _libc.chmod
_fstatfs = _libc.fstatfs
_mkdir = _libc.mkdir
_mount = _libc.mount
_prctl = _libc.prctl
_setfsgid = _libc.setfsgid
_setfsuid = _libc.setfsuid
_sethostname = _libc.sethostname
_setns = _libc.setns
_syscall = _libc.syscall
_umount2 = _libc.umount2
_unshare = _libc.unshare

# Numbers from 424 on are the same on every architecture.
OPEN_TREE, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT, MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(_machine, -1)
CLOSE_RANGE = 436

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

PROC_SUPER_MAGIC = 0x9FA0
TMPFS_MAGIC = 0x01021994


def checked(result: int, what: str) -> int:
    """`result`, or OSError from errno if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *args: int | bytes | None, name: str = "") -> int:
    """A raw system call. Integers are passed as 64-bit values."""
    raw = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return checked(_syscall(ctypes.c_long(number), *raw), name or f"syscall {number}")


_mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    return checked(_prctl(option, arg2, arg3, arg4, arg5), "prctl")


_bare_fork = ctypes.PyDLL(None, use_errno=True).fork


def fork_bare() -> int:
    """fork() without Python's own hooks before and after it, which touch some 250 pages: a third of a fork's cost.

    Only for a process with one thread that holds no lock. What hooks would do for the child's sake (reseeding `random`)
    is the child's to do.
    """
    return checked(_bare_fork(), "fork")


def unshare(flags: int) -> None:
    checked(_unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    checked(_setns(fd, kind), f"setns {kind:#x}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = _mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    checked(result, f"mount {kind or source} on {target}")


def umount(target: str, flags: int = 0) -> None:
    checked(_umount2(target.encode(), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    syscall(PIVOT_ROOT, new.encode(), old.encode(), name="pivot_root")


def set_hostname(name: str) -> None:
    raw = name.encode()
    checked(_sethostname(raw, len(raw)), "sethostname")


def close_range(lowest: int, highest: int) -> None:
    syscall(CLOSE_RANGE, lowest, highest, 0, name="close_range")


def close_from(lowest: int) -> None:
    """Closes every descriptor from `lowest` up."""
    close_range(lowest, 0xFFFFFFFF)


def set_fs_identity(uid: int, gid: int) -> None:
    """File-system uid and gid of the calling thread. The kernel reports no failure, so we ask afterwards."""
    _setfsgid(gid)
    _setfsuid(uid)
    if _setfsuid(-1) != uid:
        raise PermissionError(f"could not act as uid {uid}")


_CAPABILITY_VERSION_3 = 0x20080522


def set_capabilities(keep: int) -> None:
    """Makes the bit set `keep` the effective and permitted capabilities, with nothing inheritable or ambient."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    checked(_capset(*_capability_sets(keep)), "capset")


def _capability_sets(keep: int) -> tuple:
    """The two arguments of capset(2)."""
    low, high = keep & 0xFFFFFFFF, keep >> 32
    return struct.pack("Ii", _CAPABILITY_VERSION_3, 0), struct.pack("6I", low, low, 0, high, high, 0)


class Prepared:
    """System calls whose arguments are encoded once and that are made many times, in order, as cheaply as can be."""

    def __init__(self) -> None:
        self._calls: list = []

    def mount(self, source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        args = (source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
        self._calls.append((_mount, args, f"mount {kind or source} on {target}"))

    def make_directory(self, path: str, mode: int) -> None:
        """With exactly that mode, whatever the umask."""
        self._calls.append((_mkdir, (path.encode(), mode), f"mkdir {path}"))
        self._calls.append((_chmod, (path.encode(), mode), f"chmod {path}"))

    def prctl(self, option: int, arg2: int = 0) -> None:
        self._calls.append((_prctl, (option, arg2, 0, 0, 0), f"prctl {option}"))

    def drop_bounding(self, numbers: list) -> None:
        for number in numbers:
            self.prctl(PR_CAPBSET_DROP, number)

    def set_capabilities(self, keep: int) -> None:
        self._calls.append((_prctl, (PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl ambient"))
        self._calls.append((_capset, _capability_sets(keep), "capset"))

    def make(self) -> None:
        """Makes them all. Raises OSError at the first that fails."""
        for function, args, what in self._calls:
            if function(*args) < 0:
                checked(-1, what)


def drop_bounding(keep: int, last: int) -> None:
    """Takes every capability up to number `last` that is not in `keep` out of the bounding set."""
    for number in range(last + 1):
        if not keep >> number & 1:
            prctl(PR_CAPBSET_DROP, number)


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


class _StatFs(ctypes.Structure):
    _fields_ = [("type", ctypes.c_long), ("rest", ctypes.c_byte * 256)]


def filesystem_type(fd: int) -> int:
    """The magic number of the file system that an open file lies on."""
    buffer = _StatFs()
    checked(_fstatfs(fd, ctypes.byref(buffer)), "fstatfs")
    return int(buffer.type)
