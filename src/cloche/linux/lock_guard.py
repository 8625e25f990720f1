"""Locks on files that are not a sandbox's own, refused by a program in the kernel.

A lock belongs to a file's inode, which is the same one in every namespace. 20,000 locks on /dev/null, on a program in
/usr, or on an eventfd (of these the whole host has one inode) make each close() of one take milliseconds, for everyone;
and two sandboxes can talk by them. A filter of system calls cannot see which file a descriptor is of. A program of the
BPF LSM can: Linux calls it before a flock, a POSIX lock, an OFD lock or a lease is set. It looks at the file's owner.

It needs Linux 5.7 with `bpf` among its LSMs (as Debian and Fedora build it), no lockdown, and the rights of root in the
first user namespace. The program that `guard_code` returns may be used under the MIT licence or version 2 of the GPL:
the kernel takes no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from cloche.linux.syscalls import SYSCALL_NUMBERS, syscall

_PROG_LOAD, _RAW_TRACEPOINT_OPEN = 5, 17
_PROG_TYPE_LSM, _ATTACH_LSM_MAC = 29, 27
_PROG_ATTRIBUTES = struct.Struct("=IIQQIIQII16sIIIIQIIQIIIIQ")  # of `union bpf_attr`, down to `fd_array`
_HOOK = "bpf_lsm_file_lock"
_TYPES = Path("/sys/kernel/btf/vmlinux")
_LSMS = Path("/sys/kernel/security/lsm")


class GuardedIds(NamedTuple):
    """User ids of the host: `size` of them from `first` on, which sandboxes and nurseries have.

    `shared` is one of them; files that several sandboxes see belong to it.
    """

    first: int
    size: int
    shared: int


class LockGuard:
    """The program in the kernel, called for each lock of this host until `close`, or until this process has ended."""

    def __init__(self, ids: GuardedIds):
        """Processes with these ids can lock files of these ids only. Takes 30 ms.

        Raises OSError where this kernel, its lockdown or the rights of this process do not allow such a program.
        """
        _refuse_early()
        types = KernelTypes(_TYPES.read_bytes(), ("file", "inode", _HOOK))
        inode = types.offsets("inode")
        code = guard_code(ids, types.offsets("file")["f_inode"], inode["i_uid"], inode["i_mode"])
        program = _load_program(code, types.number(_HOOK))
        try:
            self._link = _call_bpf(_RAW_TRACEPOINT_OPEN, struct.pack("=QIIQ", 0, program, 0, 0))
        finally:
            os.close(program)

    def close(self) -> None:
        os.close(self._link)


# An assembler for eBPF, as far as one program needs it. Registers are r0 to r9; `to` is a label further on.

_UID_HELPER = 15  # bpf_get_current_uid_gid
_LOADS = {2: 0x69, 4: 0x61, 8: 0x79}  # by size: u16, u32, u64


class _Step(NamedTuple):
    code: int
    destination: int = 0
    source: int = 0
    offset: int = 0
    immediate: int = 0
    to: str = ""


def _load(destination: int, source: int, offset: int, size: int) -> _Step:
    return _Step(_LOADS[size], destination, source, offset)


def _subtract(register: int, number: int) -> _Step:
    return _Step(0x17, register, immediate=number)


def _go_if_at_least(register: int, number: int, to: str) -> _Step:
    return _Step(0x35, register, immediate=number, to=to)


def _go_if_equal(register: int, number: int, to: str) -> _Step:
    return _Step(0x15, register, immediate=number, to=to)


def _return(number: int) -> list[_Step]:
    return [_Step(0xB7, 0, immediate=number), _Step(0x95)]


def guard_code(ids: GuardedIds, f_inode: int, i_uid: int, i_mode: int) -> bytes:
    """The program: 0 or -ENOLCK for the file that the hook is called with. The other arguments are offsets.

    Files of volumes have ids of the nursery, in whose user namespace they lie. So its ids are no less a sandbox's own.
    """
    steps: list[_Step | str] = [
        _Step(0xBF, 6, 1),  # r6: the hook's arguments
        _Step(0x85, immediate=_UID_HELPER),
        _Step(0xBC, 8, 0),  # r8: the caller's user id, without the group id above it
        _subtract(8, ids.first),
        _go_if_at_least(8, ids.size, "allow"),  # not of ours (an id below is a large number now)
        _load(6, 6, 0, 8),
        _load(6, 6, f_inode, 8),
        _load(7, 6, i_uid, 4),
        _subtract(7, ids.first),
        _go_if_at_least(7, ids.size, "refuse"),  # the host's
        _go_if_equal(7, ids.shared - ids.first, "refuse"),
        _load(7, 6, i_mode, 2),
        _Step(0x57, 7, immediate=stat.S_IFMT(0xFFFF)),
        _go_if_equal(7, stat.S_IFREG, "allow"),
        _go_if_equal(7, stat.S_IFDIR, "allow"),  # a pipe's other end may be the host's
        "refuse",
        *_return(-errno.ENOLCK),
        "allow",
        *_return(0),
    ]
    return _assemble(steps)


def _assemble(steps: list[_Step | str]) -> bytes:
    places: dict[str, int] = {}
    code: list[_Step] = []
    for step in steps:
        if isinstance(step, str):
            places[step] = len(code)
        else:
            code.append(step)
    offsets = [places[step.to] - place - 1 if step.to else step.offset for place, step in enumerate(code)]
    return b"".join(
        struct.pack("=BBhi", step.code, step.destination | step.source << 4, offset, step.immediate)
        for step, offset in zip(code, offsets, strict=True)
    )


# Words that follow the three of each type in BTF, by its kind: fixed ones, and those for each member.
_STRUCT = 4
_FIXED_WORDS = {1: 1, 3: 3, 14: 1, 17: 1}
_MEMBER_WORDS = {4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}


class KernelTypes:
    """Types of the running kernel by name: structures and functions, found in its BTF."""

    def __init__(self, btf: bytes, names: tuple[str, ...]):
        """Raises OSError (ENOENT) if one is missing."""
        magic, _, _, header, types, length, strings, strings_length = struct.unpack_from("=HBBIIIII", btf)
        if magic != 0xEB9F:
            raise OSError(errno.EINVAL, "not the types of a kernel")
        self._strings = btf[header + strings : header + strings + strings_length]
        self._words = memoryview(btf)[header + types : header + types + length].cast("I")
        wanted = {self._strings.find(b"\0%s\0" % name.encode()) + 1: name for name in names}
        wanted.pop(0, None)  # not found
        self._found: dict[str, tuple[int, int]] = {}  # name -> number, and place among the words
        self._find(wanted)
        if missing := set(names) - self._found.keys():
            raise OSError(errno.ENOENT, f"this kernel has no {', '.join(sorted(missing))}")

    def _find(self, wanted: dict[int, str]) -> None:
        words, place, number = self._words, 0, 0
        sizes = [(3 + _FIXED_WORDS.get(kind, 0), _MEMBER_WORDS.get(kind, 0)) for kind in range(32)]
        while place < len(words) and len(self._found) < len(wanted):
            number += 1
            info = words[place + 1]
            kind = info >> 24 & 31
            if words[place] in wanted and kind in (_STRUCT, 12):  # 12: a function
                self._found[wanted[words[place]]] = number, place
            fixed, member = sizes[kind]
            place += fixed + member * (info & 0xFFFF)

    def number(self, name: str) -> int:
        return self._found[name][0]

    def offsets(self, name: str) -> dict[str, int]:
        """Where the members of a structure are, in bytes; without those of nested ones that have no name."""
        place = self._found[name][1]
        info = self._words[place + 1]
        members = range(place + 3, place + 3 + 3 * (info & 0xFFFF), 3)
        mask = 0xFFFFFF if info >> 31 else 0xFFFFFFFF  # with bit fields, their width is above the offset
        return {self._name(self._words[at]): (self._words[at + 2] & mask) // 8 for at in members}

    def _name(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()


def _refuse_early() -> None:
    """Raises OSError where no program of this kind is accepted, before anything slow is done."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if "bpf" not in _LSMS.read_text().split(","):
            raise OSError(errno.EOPNOTSUPP, "bpf is not among this kernel's LSMs")
    try:
        os.close(_load_program(_assemble([*_return(0)]), 0))
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            raise


def _load_program(code: bytes, hook: int) -> int:
    licence, steps = ctypes.create_string_buffer(b"Dual MIT/GPL"), ctypes.create_string_buffer(code, len(code))
    addresses = ctypes.addressof(steps), ctypes.addressof(licence)
    kind = _PROG_TYPE_LSM, len(code) // 8, *addresses
    rest = 0, 0, 0, 0, 0, b"cloche_locks", 0, _ATTACH_LSM_MAC, 0, 0, 0, 0, 0, 0, 0, hook, 0, 0, 0
    return _call_bpf(_PROG_LOAD, _PROG_ATTRIBUTES.pack(*kind, *rest))


def _call_bpf(command: int, attributes: bytes) -> int:
    """The new descriptor, which programs that are executed do not inherit. Raises OSError."""
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    number = SYSCALL_NUMBERS[platform.machine()]["bpf"]
    return int(syscall(number, command, ctypes.addressof(buffer), len(attributes), name="bpf"))
