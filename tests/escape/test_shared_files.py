"""Files that all sandboxes and the host share, the system and the template: they tell nobody what others do with them.

A file has one object in the kernel, whatever namespace it is seen from. Watches, leases and the page cache belong to it.
"""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import asyncio
import errno
import os
import subprocess

import pytest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

both = pytest.mark.parametrize("user", ["user", "root"])
PROGRAM = "factor"  # what the neighbour runs, and the watcher would like to know of

# Every watch that can be had on where programs and modules lie. It tells of names, each of which somebody else opened.
SPY = """
import select, struct, time
watch = libc.inotify_init1(0)
answer = {"watches": {}, "seen": []}
for path in (b"/usr/bin", b"/usr/bin/factor", b"/opt/cloche/env/lib", b"/dev/null", b"/etc/hosts"):
    for mask in (0x1, 0x10, 0x20, 0x31, 0xfff, 0x20000020, 0x80000020):
        if libc.inotify_add_watch(watch, path, mask) >= 0: answer["watches"][f"{path} {mask:#x}"] = "made"
    libc.inotify_add_watch(watch, path, 0xfce if path != b"/dev/null" else 0)  # all that is not reading
open("/tmp/up", "w").close()
end = time.monotonic() + 20
while not os.path.exists("/tmp/down") and time.monotonic() < end:
    if select.select([watch], [], [], 0.05)[0]:
        data = os.read(watch, 1 << 16)
        while data:
            number, mask, _, length = struct.unpack_from("iIII", data)
            answer["seen"].append([mask, data[16:16 + length].rstrip(b"\\0").decode()])
            data = data[16 + length:]
"""


async def until(box, path: str) -> None:
    async with asyncio.timeout(20):
        while not await box.files.exists(path):
            await asyncio.sleep(0.02)


@both
async def test_a_sandbox_cannot_see_programs_that_neighbours_and_the_host_open(box, attack, neighbour, user):
    spying = asyncio.create_task(attack(box, SPY, user))
    await until(box, "/tmp/up")
    await neighbour.sandbox.commands.run(f"{PROGRAM} 12; cat /etc/hosts > /dev/null", timeout_seconds=10)
    await asyncio.to_thread(subprocess.run, [PROGRAM, "12"], capture_output=True)
    await box.files.write("/tmp/down", b"")
    assert await spying == {"watches": {}, "seen": []}


async def test_changes_to_ones_own_files_can_be_watched(box, attack):
    """What the wall above leaves: a watcher that reloads a program when its source changes."""
    seen = await attack(
        box,
        """
import struct
watch = libc.inotify_init1(0)
assert libc.inotify_add_watch(watch, b"/mnt/data", 0x2 | 0x8 | 0x100 | 0x200 | 0xc0) > 0
open("/mnt/data/source.py", "w").write("x")
data = os.read(watch, 4096)
answer = data[16:16 + struct.unpack_from("iIII", data)[3]].rstrip(b"\\0").decode()
""",
    )
    assert seen == "source.py"


@both
async def test_neither_notices_nor_leases_of_files_are_to_be_had(box, attack, user):
    """dnotify, the older way to watch a directory; and a lease, which also holds up whoever opens the file: init, say."""
    seen = await attack(
        box,
        """
import fcntl
open("/mnt/data/own", "w").write("x")
own, answer = open("/mnt/data/own", "r+"), {}
for path in ("/usr/bin", "/mnt/data", "/opt/cloche/env"):
    fd = os.open(path, os.O_RDONLY)
    for bits in (0x1, 0x2, 0x8000003f): answer[f"notice {path} {bits:#x}"] = attempt(lambda: fcntl.fcntl(fd, 1026, bits))
for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):
    answer[f"lease {kind}"] = attempt(lambda: fcntl.fcntl(own, 1024, kind))
    answer[f"shared lease {kind}"] = attempt(lambda: fcntl.fcntl(os.open("/usr/bin/env", os.O_RDONLY), 1024, kind))
""",
        user,
    )
    assert set(seen.values()) == {"EINVAL"}, seen
    async with asyncio.timeout(10):
        assert await box.files.read("/mnt/data/own") == b"x"


@both
async def test_the_page_cache_is_neither_asked_nor_emptied(box, attack, user):
    """Which pages of a library are in memory tells what others ran; to throw them out makes it a clean measurement."""
    seen = await attack(
        box,
        """
import mmap
fd = os.open("/usr/bin/env", os.O_RDONLY)
answer = {"nowait": attempt(lambda: os.preadv(fd, [bytearray(16)], 0, os.RWF_NOWAIT))}
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(16)
vector = Vector(ctypes.addressof(buffer), 16)
for flags in (0x80, 0x88): answer[f"flags {flags:#x}"] = attempt(lambda: call("preadv2", fd, ctypes.addressof(vector), 1, 0, 0, flags))
answer["plain"] = attempt(lambda: os.preadv(fd, [bytearray(4)], 0))
answer["cachestat"] = attempt(lambda: call("cachestat", fd, 0, 0, 0))
area = mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
libc.mmap.restype = ctypes.c_void_p
address = libc.mmap(None, 4096, 1, 1, fd, 0)
present = ctypes.create_string_buffer(1)
answer["mincore"] = [attempt(lambda: call("mincore", address, 4096, ctypes.addressof(present))), present.raw[0] & 1]
answer["merge"] = attempt(lambda: call("madvise", address, 4096, 12))
answer["merge all"] = attempt(lambda: call("prctl", 67, 1, 0, 0, 0))
""",
        user,
    )
    assert {seen["nowait"], seen["flags 0x80"], seen["flags 0x88"]} <= {"EOPNOTSUPP", "ENOTSUP"}
    assert seen["plain"] == "done: 4" and seen["merge"] == "EINVAL" and seen["merge all"] == "EPERM"
    assert seen["cachestat"] in ("EPERM", "ENOSYS")
    assert seen["mincore"] in (["done: None", 1], ["EPERM", 0])  # "there", whatever is true


async def test_pages_advised_as_unneeded_stay_in_the_hosts_memory(box, attack):
    """Files of the system are on the host's disk: pages of one are asked to go, and stay."""
    seen = await attack(
        box,
        """
path = "/usr/bin/env"
fd = os.open(path, os.O_RDONLY)
while os.read(fd, 1 << 16): pass
answer = attempt(lambda: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
""",
    )
    assert seen == "done: None"
    fd = os.open("/usr/bin/env", os.O_RDONLY)
    try:
        assert os.preadv(fd, [bytearray(64)], 0, os.RWF_NOWAIT) == 64
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("this host's file system does not say what is in memory")
    finally:
        os.close(fd)


DISK = """
import mmap
answer, own, shared = {}, os.open("/mnt/data/own", os.O_RDWR | os.O_CREAT), os.open("/usr/bin/env", os.O_RDONLY)
for name, fd in (("own", own), ("shared", shared), ("none", -1)):
    for each in ("fsync", "fdatasync", "sync_file_range"): answer[f"{each} {name}"] = attempt(lambda: call(each, fd, 0, 0, 7))
for each in ("fsync", "fdatasync", "sync_file_range"):
    for _ in range(1000): call(each, shared, 0, 0, 7)
direct = {name: attempt(lambda: os.open(path, os.O_RDONLY | os.O_DIRECT)) for name, path in (("shared", "/usr/bin/env"), ("link", "/proc/self/exe"))}
if os.uname().machine == "x86_64": direct["open"] = attempt(lambda: call("open", b"/usr/bin/env", os.O_DIRECT))
import fcntl
direct["later"] = attempt(lambda: fcntl.fcntl(shared, fcntl.F_SETFL, os.O_DIRECT))
how = ctypes.create_string_buffer(int.to_bytes(os.O_DIRECT, 8, "little") + bytes(16), 24)
direct["openat2"] = attempt(lambda: call("openat2", -100, b"/usr/bin/env", ctypes.addressof(how), 24))
answer["direct"] = direct
"""


def disk_counters(path: str) -> list[int]:
    """The figures of the disk with that file; Documentation/block/stat.rst. Skips the test if it is on none."""
    device = os.stat(path).st_dev
    try:
        with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        pytest.skip("the system's files are on no disk of this host's")


@both
async def test_no_file_makes_the_hosts_disk_write_back_or_be_read_past_the_cache(box, attack, user):
    """Each fsync of a file, although it is read-only, flushes the host's disk, for which all other writers wait."""
    seen = await attack(box, DISK, user)
    direct = seen.pop("direct")
    assert set(direct.values()) == {"EINVAL", "ENOSYS"} and direct["openat2"] == "ENOSYS", direct
    assert set(seen.values()) == {"done: None"}, seen  # also without a file: the kernel is not asked


async def test_three_thousand_fsyncs_of_a_shared_file_flush_no_disk(box, attack):
    before = disk_counters("/usr/bin/env")
    await attack(box, DISK)
    after = disk_counters("/usr/bin/env")
    flushes = [new - old for old, new in zip(before, after, strict=True)][15:16]
    assert not flushes or flushes[0] < 1500, flushes  # others flush it too, but not so often in the meantime


LOCKER = """
import errno, fcntl, select, struct
answer = {}
region = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 1, 0)
kinds = {"flock": lambda fd: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB), "POSIX": lambda fd: fcntl.fcntl(fd, fcntl.F_SETLK, region),
    "OFD": lambda fd: fcntl.fcntl(fd, 37, region), "lease": lambda fd: fcntl.fcntl(fd, 1024, fcntl.F_RDLCK)}
waiting = select.epoll()
shared = {path: os.open(path, os.O_RDONLY) for path in ("/usr/bin/env", "/usr", "/etc/hosts", "/dev/null", "/dev/tty0", "/proc/self/ns/time", "/proc/self/exe", "/opt/cloche/warm") if os.path.exists(path)}
shared |= {"eventfd": libc.eventfd(0, 0), "epoll": waiting.fileno()}
for name, fd in shared.items():
    for kind, lock in kinds.items():
        if attempt(lambda: lock(fd)).startswith("done"): answer[f"{kind} of {name}"] = "locked"
held = 0
try:
    for byte in range(20000): fcntl.fcntl(shared["/usr/bin/env"], fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 2 * byte, 1, 0)); held += 1
except OSError: pass
answer |= {"held": held} if held else {}
"""


@both
async def test_nothing_that_others_see_can_be_locked(box, attack, user, locks_are_guarded):
    assert await attack(box, LOCKER, user) == {}


async def test_locks_on_ones_own_files_work(box):
    """What programs lock, and that a second process is kept out."""
    code = """
import fcntl, os, sqlite3, subprocess, sys
os.chdir("/mnt/data")
for mode in ("delete", "wal"):
    with sqlite3.connect(mode) as base:
        base.execute(f"pragma journal_mode = {mode}")
        base.execute("create table t (a)")
        base.execute("insert into t values (1)")
        base.commit()
        base.execute("begin immediate")
        other = "import sqlite3; sqlite3.connect(%r, timeout=0).execute('begin immediate')" % mode
        print("database is locked" in subprocess.run([sys.executable, "-c", other], capture_output=True, text=True).stderr)
file = open("lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(subprocess.run(["flock", "-n", "lock", "true"]).returncode)
fcntl.fcntl(open("ofd", "w"), 38, bytes([1]) + bytes(31))
"""
    result = await box.commands.run(["python3", "-c", code], timeout_seconds=20)
    assert (result.stdout, result.stderr) == ("True\nTrue\n1\n", "")
    git = "cd /tmp && git init -q r && cd r && git -c user.name=a -c user.email=a commit -q --allow-empty -m m && git gc -q"
    assert (await box.commands.run(git, timeout_seconds=20)).exit_code == 0


async def test_locks_of_others_are_not_listed(box, attack, neighbour):
    code = """
import fcntl, time
held = [open("/usr/bin/env"), open("/mnt/data/locked", "w")]
fcntl.flock(held[0], fcntl.LOCK_SH); fcntl.lockf(held[1], fcntl.LOCK_EX)
open("/tmp/up", "w").close()
end = time.monotonic() + 20
while not os.path.exists("/tmp/down") and time.monotonic() < end: time.sleep(0.02)
answer = len(open("/proc/locks").readlines())
"""
    holding = asyncio.create_task(attack(box, code))
    await until(box, "/tmp/up")
    for user in ("user", "root"):
        assert await attack(neighbour.sandbox, "answer = open('/proc/locks').read()", user) == ""
    await box.files.write("/tmp/down", b"")
    assert await holding == 2


async def test_an_old_pipe_trick_writes_to_no_file_that_was_opened_for_reading(box, attack):
    """Dirty Pipe (CVE-2022-0847): a page of a file, spliced into a pipe whose slots were marked as mergeable."""
    seen = await attack(
        box,
        """
read, write = os.pipe()
import fcntl
room = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)  # less than usual where a host's user has many pipes
os.write(write, bytes(room)); os.read(read, room)
fd = os.open("/etc/hosts", os.O_RDONLY)
before = os.pread(fd, 4096, 0)
os.splice(fd, write, 1, 0)
os.write(write, b"OVERWRITTEN")
answer = os.pread(fd, 4096, 0) == before
""",
    )
    assert seen is True
