"""The guard of locks: its program step by step, and in the kernel where the host's takes it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche.linux import lock_guard
from cloche.linux.lock_guard import GuardedIds, KernelTypes, LockGuard

IDS = GuardedIds(0x70000000, 0x10000000, 0x70000000 + 4095)
CELL, NEIGHBOUR, NURSERY = IDS.first + 8192, IDS.first + 12288, IDS.first
F_INODE, I_UID, I_MODE = 32, 4, 0
FILE, DIRECTORY, PIPE, DEVICE = stat.S_IFREG | 0o600, stat.S_IFDIR | 0o755, stat.S_IFIFO | 0o600, stat.S_IFCHR | 0o666
_64_BITS = (1 << 64) - 1


def run_steps(code: bytes, uid: int, owner: int, mode: int) -> int:
    """The verdict on a lock by `uid` of a file with that owner and mode: eBPF's rules for the steps that are used."""
    memory = {("arguments", 0): "file", ("file", F_INODE): "inode", ("inode", I_UID): owner, ("inode", I_MODE): mode}
    registers: dict[int, int | str] = {1: "arguments"}
    place = 0
    while True:
        operation, pair, offset, number = struct.unpack_from("=BBhi", code, 8 * place)
        to, source = pair & 15, pair >> 4
        place += 1
        if operation == 0x95:
            return int(registers[0])
        if operation == 0x85:
            assert number == 14 + 1  # the caller's uid, and its gid in the upper half
            registers[0] = 1000 << 32 | uid
        elif operation in (0xBF, 0xBC):
            value = registers[source]
            registers[to] = value if operation == 0xBF or isinstance(value, str) else value & 0xFFFFFFFF
        elif operation in (0x61, 0x69, 0x79):
            registers[to] = memory[str(registers[source]), offset]
        elif operation == 0xB7:
            registers[to] = number
        elif operation == 0x17:
            registers[to] = int(registers[to]) - number & _64_BITS
        elif operation == 0x57:
            registers[to] = int(registers[to]) & number
        else:
            assert operation in (0x35, 0x15)
            value = int(registers[to])
            place += offset if (value >= number if operation == 0x35 else value == number) else 0


@pytest.mark.parametrize(
    ("uid", "owner", "mode", "allowed"),
    [
        (CELL, CELL, FILE, True),
        (CELL, CELL + 1000, DIRECTORY, True),
        (CELL, NURSERY + 1000, FILE, True),  # a volume's
        (NURSERY, NURSERY, FILE, True),
        (CELL, IDS.shared, FILE, False),
        (CELL, 0, FILE, False),
        (CELL, 0, 0o600, False),  # an eventfd
        (CELL, 0, DEVICE, False),
        (CELL, 1000, FILE, False),
        (CELL, IDS.first - 1, FILE, False),
        (CELL, IDS.first + IDS.size, FILE, False),
        (CELL, CELL, PIPE, False),
        (NURSERY, 0, FILE, False),
        (0, 0, FILE, True),
        (1000, 0, DEVICE, True),
        (IDS.first - 1, 0, FILE, True),
        (IDS.first + IDS.size, 0, FILE, True),
    ],
)
def test_sandboxes_lock_files_of_sandboxes_and_all_others_whatever_they_like(
    uid: int, owner: int, mode: int, allowed: bool
) -> None:
    code = lock_guard.guard_code(IDS, F_INODE, I_UID, I_MODE)
    assert run_steps(code, uid, owner, mode) == (0 if allowed else -errno.ENOLCK)


@pytest.mark.skipif(not Path("/sys/kernel/btf/vmlinux").exists(), reason="this kernel does not describe its types")
def test_the_types_of_this_kernel_are_found() -> None:
    types = KernelTypes(Path("/sys/kernel/btf/vmlinux").read_bytes(), ("file", "inode", "vfs_read"))
    inode = types.offsets("inode")
    assert (inode["i_mode"], inode["i_uid"], inode["i_gid"]) == (0, 4, 8)
    assert types.offsets("file")["f_inode"] % 8 == 0
    assert types.number("vfs_read") > 0
    with pytest.raises(OSError, match="no_such_function"):
        KernelTypes(Path("/sys/kernel/btf/vmlinux").read_bytes(), ("file", "no_such_function"))


@pytest.fixture(name="guard")
def _guard() -> Iterator[LockGuard]:
    try:
        guard = LockGuard(IDS)
    except OSError as error:
        pytest.skip(f"this host takes no guard of locks: {error}")
    yield guard
    guard.close()


def try_locks(fd: int) -> list[str]:
    """flock, a POSIX lock and an OFD lock, each for reading: the errors' names."""
    region = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 1, 0)
    tries: list[Callable[[], object]] = [lambda: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)]
    tries += [lambda command=command: fcntl.fcntl(fd, command, region) for command in (fcntl.F_SETLK, 37)]
    answers = []
    for attempt in tries:
        try:
            attempt()
        except OSError as error:
            answers.append(errno.errorcode[error.errno])
        else:
            answers.append("locked")
    return answers


@pytest.mark.usefixtures("guard")
def test_a_sandbox_id_locks_no_file_of_the_host(tmp_path: Path, in_child) -> None:
    own = os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    os.fchown(own, CELL, CELL)

    def attempt() -> dict[str, list[str]]:
        os.setgroups([])
        os.setresgid(CELL, CELL, CELL)
        os.setresuid(CELL, CELL, CELL)
        shared = {
            path: os.open(path, os.O_RDONLY) for path in ("/usr/bin/env", "/usr", "/dev/null", "/proc/self/ns/uts")
        }
        return {name: try_locks(fd) for name, fd in {**shared, "pipe": os.pipe()[0], "own": own}.items()}

    seen = in_child(attempt)
    assert seen.pop("own") == ["locked"] * 3
    assert set(map(tuple, seen.values())) == {("ENOLCK",) * 3}
    with open("/usr/bin/env", "rb") as file:
        assert try_locks(file.fileno()) == ["locked"] * 3
