"""Landlock: rules about paths that a process lays on itself, a second wall behind the mount namespace.

A ruleset names the rights it handles; a right that is handled and not allowed somewhere is denied. Paths are
resolved when a rule is added, so a ruleset has to be built in the mount namespace where it is to hold, after
the last mount (a process behind Landlock can mount nothing any more). `restrict_thread` applies it to the
calling thread, which needs no_new_privs or CAP_SYS_ADMIN, and to its later children. Open descriptors keep
the rights they had.

Scopes (ABI 6: signals and abstract sockets only within a domain) are left out. A sandbox's first kernel is in
another domain than its init and init's children, and these must reach each other; the pid and network
namespaces draw that line already.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import struct
from collections.abc import Iterable
from types import TracebackType

from cloche.linux.syscalls import syscall

# The numbers are the same on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13  # ABI 2: link or rename between directories
TRUNCATE = 1 << 14  # ABI 3
IOCTL_DEV = 1 << 15  # ABI 5

READ = EXECUTE | READ_FILE | READ_DIR
# Everything but making device nodes, which no sandbox is to do anywhere.
WRITE = (
    WRITE_FILE
    | REMOVE_DIR
    | REMOVE_FILE
    | MAKE_DIR
    | MAKE_REG
    | MAKE_SOCK
    | MAKE_FIFO
    | MAKE_SYM
    | REFER
    | TRUNCATE
    | IOCTL_DEV
)
_ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # the rest makes sense only for a directory

_NEWEST_BIT = {1: MAKE_SYM, 2: REFER, 3: TRUNCATE, 4: TRUNCATE}  # from 5 on: IOCTL_DEV


@functools.cache
def abi_version() -> int:
    """The version of Landlock that this kernel has; 0 if it has none or it is switched off."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION, name="landlock_create_ruleset")
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise


def handled_rights() -> int:
    """All the access rights to files that this kernel's Landlock can handle."""
    return (_NEWEST_BIT.get(abi_version(), IOCTL_DEV) << 1) - 1


def restrict_thread(ruleset_fd: int) -> None:
    """Puts the calling thread, and its later children, behind a ruleset, its own or another process's."""
    syscall(_RESTRICT_SELF, ruleset_fd, 0, name="landlock_restrict_self")


class Ruleset:
    """A ruleset being built: `allow` paths, then `restrict`."""

    def __init__(self) -> None:
        """Handles every right over files that the running kernel knows."""
        attributes = struct.pack("=Q", handled_rights())
        self.fd = syscall(_CREATE_RULESET, attributes, len(attributes), 0, name="landlock_create_ruleset")

    def allow(self, path: str, access: int) -> None:
        """Allows that access to a file, or to everything beneath a directory.

        Rights that the kernel does not know, or that make no sense for a file that is no directory, are left out.
        """
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            self._add_rule(fd, access)
        finally:
            os.close(fd)

    def _add_rule(self, fd: int, access: int) -> None:
        access &= handled_rights() if stat.S_ISDIR(os.fstat(fd).st_mode) else handled_rights() & _ON_FILES
        rule = struct.pack("=Qi", access, fd)
        syscall(_ADD_RULE, self.fd, _RULE_PATH_BENEATH, rule, 0, name="landlock_add_rule")

    def restrict(self) -> None:
        """Puts the calling thread, and its later children, behind it."""
        restrict_thread(self.fd)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Ruleset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LandlockWall:
    """The second wall, prepared: rights by path, to be raised in any mount namespace that has these paths."""

    def __init__(self, writable: Iterable[str], read_only: Iterable[str] = ("/",)):
        """Reading and executing beneath `read_only`; writing too beneath (or to the devices) `writable`.

        A program that sets its own oom_score_adj or names its threads writes below /proc: that belongs there too.
        """
        self._paths = [(path, READ) for path in read_only] + [(path, READ | WRITE) for path in writable]

    def build(self) -> Ruleset:
        """Returns the ruleset. The paths are resolved now; a holder of the descriptor can go behind them later."""
        ruleset = Ruleset()
        try:
            for path, access in self._paths:
                ruleset.allow(path, access)
        except OSError:
            ruleset.close()
            raise
        return ruleset

    def raise_wall(self) -> None:
        """Puts the calling thread, and its later children, behind it. The paths are resolved now."""
        with self.build() as ruleset:
            ruleset.restrict()
