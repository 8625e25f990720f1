"""The filters, installed for real in a child that then tries."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import cloche.isolation
from cloche.linux import seccomp
from cloche.linux.syscalls import PR_SET_NO_NEW_PRIVS, SYSCALL_NUMBERS, prctl, syscall

POLICIES = Path(cloche.isolation.__file__).parent / "policy"
ARCH = platform.machine()
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000


def compiled(name: str) -> bytes:
    return seccomp.compile_policy(seccomp.load_policy(POLICIES / f"{name}.toml"))


CELL = compiled("cell")
NURSERY = compiled("nursery")


def behind(program: bytes, function: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        seccomp.SeccompFilter(program).install()
        return function()

    return run


def call(name: str, *args: int) -> Callable[[], int]:
    """That system call, or its errno as a negative number."""

    def run() -> int:
        try:
            return syscall(SYSCALL_NUMBERS[ARCH][name], *args)
        except OSError as error:
            return -(error.errno or 0)

    return run


def words(text: str) -> list[str]:
    return text.split()


DENIED = words("""
    ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd add_key request_key keyctl bpf
    perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register name_to_handle_at open_by_handle_at
    kexec_load kexec_file_load init_module finit_module delete_module swapon swapoff acct quotactl quotactl_fd syslog
    settimeofday clock_settime clock_adjtime adjtimex vhangup fanotify_init move_pages memfd_secret lookup_dcookie
""")
WALLS = words("""
    unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
    open_tree_attr sethostname setdomainname
""")


# Bad pointers and descriptors throughout: a call that slipped through fails with another errno and does no harm.
@pytest.mark.parametrize("name", [*DENIED, *WALLS, *(["iopl", "ioperm", "modify_ldt"] if ARCH == "x86_64" else [])])
def test_a_cell_is_refused(name: str, in_child) -> None:
    assert in_child(behind(CELL, call(name, -1, -1, -1, -1, -1, -1))) == -errno.EPERM


@pytest.mark.parametrize("name", DENIED)
def test_the_nursery_is_refused(name: str, in_child) -> None:
    assert in_child(behind(NURSERY, call(name, -1, -1, -1, -1, -1, -1))) == -errno.EPERM


def test_reboot_is_refused_in_both(in_child) -> None:
    # Wrong magic numbers: EINVAL from the kernel itself.
    assert in_child(behind(CELL, call("reboot", 1, 1, 0, 0))) == -errno.EPERM
    assert in_child(behind(NURSERY, call("reboot", 1, 1, 0, 0))) == -errno.EPERM


def test_the_nursery_can_make_namespaces_and_a_cell_below_it_cannot(in_child) -> None:
    def both() -> tuple[int, int]:
        first = call("unshare", 0)()
        seccomp.SeccompFilter(CELL).install()
        return first, call("unshare", 0)()

    assert in_child(behind(NURSERY, both)) == (0, -errno.EPERM)


def test_clone_makes_no_namespace_in_a_cell(in_child) -> None:
    assert in_child(behind(CELL, call("clone", CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0))) == -errno.EPERM
    high = 0x1_0000_0000 | CLONE_NEWNS | signal.SIGCHLD
    assert in_child(behind(CELL, call("clone", high, 0, 0, 0, 0))) == -errno.EPERM


def test_calls_with_a_fallback_look_absent(in_child) -> None:
    for name in ("clone3", "statmount", "listmount", "io_setup", "file_getattr"):
        assert in_child(behind(CELL, call(name, 0, 0, 0, 0, 0))) == -errno.ENOSYS


def test_unknown_numbers_look_absent(in_child) -> None:
    def number(n: int) -> Callable[[], int]:
        return lambda: syscall(n)

    for n in (400, 480, 1000, 0x7FFF_FFFF):
        with pytest.raises(OSError, match="not implemented"):
            in_child(behind(CELL, number(n)))


def test_sync_succeeds_and_does_nothing(in_child) -> None:
    assert in_child(behind(CELL, call("syncfs", 9999))) == 0


ALLOWED_SOCKETS = [
    (socket.AF_UNIX, socket.SOCK_STREAM, 0),
    (socket.AF_INET, socket.SOCK_STREAM, 0),
    (socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP),
    (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP),
    (socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE),
]
REFUSED_SOCKETS = [
    (socket.AF_NETLINK, socket.SOCK_RAW, 12),  # NETLINK_NETFILTER
    (socket.AF_VSOCK, socket.SOCK_STREAM, 0),
    (socket.AF_ALG, socket.SOCK_SEQPACKET, 0),
    (socket.AF_PACKET, socket.SOCK_RAW, 0),
    (socket.AF_INET, socket.SOCK_STREAM, 132),  # SCTP
    (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
    (0x1_0000_0000 | socket.AF_VSOCK, socket.SOCK_STREAM, 0),
]


@pytest.mark.parametrize("program", [CELL, NURSERY], ids=["cell", "nursery"])
def test_sockets_by_family(program: bytes, in_child) -> None:
    for arguments in ALLOWED_SOCKETS:
        assert in_child(behind(program, call("socket", *arguments))) not in (-errno.EAFNOSUPPORT, -errno.EPERM), (
            arguments
        )
    for arguments in REFUSED_SOCKETS:
        assert in_child(behind(program, call("socket", *arguments))) == -errno.EAFNOSUPPORT, arguments


# Typing into terminals and consoles, line disciplines, a file's blocks and flags, freezing, namespaces, a pidfd.
REFUSED_REQUESTS = [0x5412, 0x541C, 0x5423, 0xC020660B, 0x40086602, 0xC0045877, 0xB702, 0xB701, 0xFF01, 0x7FFF_FFFF]


@pytest.mark.parametrize("request_code", [*REFUSED_REQUESTS, 0xFFFF_FFFF_0000_5412])
def test_requests_that_are_not_listed_are_refused_also_with_high_bits_set(request_code: int, in_child) -> None:
    with open("/usr/bin/env", "rb") as file:
        assert in_child(behind(CELL, call("ioctl", file.fileno(), request_code, 0))) == -errno.ENOTTY


# Leases, dnotify, delegations, signals of choice, hints, and commands of later kernels.
@pytest.mark.parametrize("command", [10, 15, 17, 1024, 1025, 1026, 1027, 1029, 1036, 1039, 1040, 0xFFFF_FFFF_0000_0400])
def test_fcntl_commands_that_are_not_listed_are_refused(command: int, in_child) -> None:
    with open("/usr/bin/env", "rb") as file:
        assert in_child(behind(CELL, call("fcntl", file.fileno(), command, 0))) == -errno.EINVAL


def test_descriptors_are_copied_flagged_sized_and_locked(tmp_path: Path, in_child) -> None:
    def use() -> list[object]:
        with open(tmp_path / "own", "wb") as file:
            copy = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 10)
            fcntl.lockf(file, fcntl.LOCK_EX)
            fcntl.flock(file, fcntl.LOCK_EX)
            flags = fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        return [copy >= 10, flags, fcntl.fcntl(os.pipe()[0], 1031, 1 << 16)]  # F_SETPIPE_SZ

    assert in_child(behind(CELL, use)) == [True, 0, 1 << 16]


def test_other_ioctls_work(in_child) -> None:
    def readable() -> bytes:
        reading, writing = os.pipe()
        os.write(writing, b"four")
        return fcntl.ioctl(reading, 0x541B, b"\0\0\0\0")  # FIONREAD

    assert in_child(behind(CELL, readable)) == (4).to_bytes(4, "little")


both = pytest.mark.parametrize("program", [CELL, NURSERY], ids=["cell", "nursery"])


@both
def test_the_limit_of_core_dumps_stays(program: bytes, in_child) -> None:
    """At 1, and only there, the kernel starts no core handler: 0 would start one that is a pipe."""
    limits = ctypes.create_string_buffer(bytes(16))
    new = ctypes.addressof(limits)

    def lower() -> list[object]:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        seccomp.SeccompFilter(program).install()
        answers: list[object] = [call("setrlimit", 4, new)(), call("setrlimit", 0x1_0000_0004, new)()]
        answers += [call("prlimit64", pid, 4, new, 0)() for pid in (0, os.getpid(), os.getppid())]
        answers += [call("prlimit64", 0, 4, 1 << 32, 0)(), call("prlimit64", 0, 4, 1, 0)()]  # one half of a pointer
        answers += [call("prlimit64", 0, 4, new, new)(), call("prlimit64", 0, 4, 1 << 32, 1 << 32)()]
        return [*answers, resource.getrlimit(resource.RLIMIT_CORE), call("prlimit64", 0, 4, 0, new)()]

    succeeds, refused = [0] * 7, [-errno.EPERM] * 2
    assert in_child(lower) == [*succeeds, *refused, (1, 1), 0]


@both
def test_other_limits_can_be_lowered(program: bytes, in_child) -> None:
    def lower() -> object:
        resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    assert in_child(behind(program, lower)) == (99, 99)


@both
@pytest.mark.parametrize("option", [26, 50, 51, 52])
def test_sockets_take_no_program(program: bytes, option: int, in_child) -> None:
    """Compiled ones come out of one pool of the whole host, and are charged to no cgroup."""
    assert in_child(behind(program, call("setsockopt", -1, 1, option, 0, 0))) == -errno.ENOPROTOOPT


SOCKET_HOARDS = [(41, 6), (41, 32), (41, 54), (41, 55), (41, 57), (41, 59), (6, 14), (6, 31), (6, 32), (6, 38)]


@both
@pytest.mark.parametrize(("level", "option"), SOCKET_HOARDS)
def test_sockets_take_no_keys_and_no_headers(program: bytes, level: int, option: int, in_child) -> None:
    """Memory that is charged to no cgroup, and a table of the whole host."""
    assert in_child(behind(program, call("setsockopt", -1, level, option, 0, 0))) == -errno.ENOPROTOOPT


@both
@pytest.mark.parametrize(("level", "option"), [(41, 26), (6, 1), (6, 4), (1, 2), (1, 15), (0, 2)])
def test_sockets_take_ordinary_options(program: bytes, level: int, option: int, in_child) -> None:
    assert in_child(behind(program, call("setsockopt", -1, level, option, 0, 0))) == -errno.EBADF


@both
def test_access_lists_and_policies_of_memory_are_not_kept(program: bytes, tmp_path: Path, in_child) -> None:
    """No cgroup is charged for them. A size of 64 bits is as large as its upper half says, to the kernel too."""
    path, name, value = (ctypes.create_string_buffer(each) for each in (bytes(tmp_path), b"user.a", bytes(300)))
    where = ctypes.addressof(path), ctypes.addressof(name), ctypes.addressof(value)
    for size in (256, 300, 65536, 1 << 32):
        for change in ("setxattr", "lsetxattr"):
            assert in_child(behind(program, call(change, *where, size, 0))) == -errno.E2BIG
        assert in_child(behind(program, call("fsetxattr", -1, *where[1:], size, 0))) == -errno.E2BIG
    assert in_child(behind(program, call("fsetxattr", -1, *where[1:], 255, 0))) == -errno.EBADF
    assert in_child(behind(program, call("mbind", 1, 2, 3, 4, 5, 6))) == 0


def test_a_cell_installs_no_filter_of_its_own(in_child) -> None:
    """As programs of sockets; and each child that installs one adds to those of its parent."""
    assert in_child(behind(CELL, call("seccomp", 1, 0, 0))) == -errno.EINVAL
    assert in_child(behind(CELL, call("prctl", 22, 2, 0))) == -errno.EINVAL
    assert in_child(behind(CELL, call("prctl", 21))) == 2  # PR_GET_SECCOMP


def test_mknod_makes_pipes_but_no_devices(tmp_path: Path, in_child) -> None:
    def make(kind: int) -> Callable[[], None]:
        return lambda: os.mknod(tmp_path / f"n{kind}", kind | 0o600, os.makedev(1, 3))

    for kind in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
        in_child(behind(CELL, make(kind)))
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        with pytest.raises(PermissionError):
            in_child(behind(CELL, make(kind)))
    assert not (tmp_path / f"n{stat.S_IFCHR}").exists()


def test_prctl_and_personality(in_child) -> None:
    assert in_child(behind(CELL, call("prctl", 35, 0, 0, 0, 0))) == -errno.EPERM
    assert in_child(behind(CELL, call("prctl", 4, 1, 0, 0, 0))) == 0  # PR_SET_DUMPABLE
    assert in_child(behind(CELL, call("personality", 0xFFFFFFFF))) >= 0
    assert in_child(behind(CELL, call("personality", 0x0400000))) == -errno.EPERM  # READ_IMPLIES_EXEC


def machine_code(code: bytes) -> int:
    """Runs those instructions and returns what they leave in eax."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)()


@pytest.mark.skipif(ARCH != "x86_64", reason="32-bit x86 calls exist only on x86-64")
def test_a_32_bit_call_kills_the_process(in_child, ChildDied) -> None:
    getpid_32 = bytes.fromhex("b814000000 cd80 c3".replace(" ", ""))  # mov eax, 20; int 0x80; ret
    if in_child(lambda: machine_code(getpid_32)) < 0:
        pytest.skip("this kernel has no 32-bit calls")
    with pytest.raises(ChildDied) as caught:
        in_child(behind(CELL, lambda: machine_code(getpid_32)))
    assert caught.value.signal == signal.SIGSYS


@pytest.mark.skipif(ARCH != "x86_64", reason="x32 exists only on x86-64")
def test_x32_calls_look_absent(in_child) -> None:
    def x32_getpid() -> int:
        return machine_code(bytes.fromhex("b827000040 0f05 c3".replace(" ", "")))  # mov eax, 39 | 1 << 30; syscall; ret

    assert in_child(behind(CELL, x32_getpid)) == -errno.ENOSYS


def test_without_no_new_privs_an_ordinary_user_cannot_install(in_child) -> None:
    def install() -> None:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        seccomp.SeccompFilter(CELL).install()

    with pytest.raises(PermissionError):
        in_child(install)


def run_behind_cell(argv: list[str], cwd: Path) -> str:
    """The output of a command whose every process is behind the cell's filter."""

    def confine() -> None:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        seccomp.SeccompFilter(CELL).install()

    # Only what the command itself needs: no agents, no configuration of whoever runs the tests.
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(argv, cwd=cwd, env=env, preexec_fn=confine, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


PYTHON = """
import asyncio, concurrent.futures, multiprocessing, os, select, socket, sqlite3, subprocess, tempfile, threading
from multiprocessing import shared_memory

def double(n): return n * 2

async def main():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b""
    writer.close(); server.close()
    child = await asyncio.create_subprocess_exec("true")
    return await child.wait()

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool: assert pool.map(double, [1, 2]) == [2, 4]
    with concurrent.futures.ThreadPoolExecutor(4) as pool: assert list(pool.map(double, [1, 2])) == [2, 4]
    block = shared_memory.SharedMemory(create=True, size=4096); block.close(); block.unlink()
    assert asyncio.run(main()) == 0
    assert subprocess.check_output("echo $((1+1)) | cat", shell=True) == b"2\\n"
    assert sqlite3.connect(os.path.join(tempfile.mkdtemp(), "x.db")).execute("select 1").fetchone() == (1,)
    assert socket.getaddrinfo("127.0.0.1", 80)
    print("fine")
"""


def test_python_works_in_a_cell(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PYTHON)
    assert run_behind_cell([sys.executable, "program.py"], tmp_path) == "fine\n"


@pytest.mark.long
def test_numpy_and_pandas_work_in_a_cell(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    code = "import numpy, pandas; a = numpy.ones((300, 300)); print(int((a @ a)[0, 0]), pandas.DataFrame(a).shape)"
    assert run_behind_cell([sys.executable, "-c", code], tmp_path) == "300 (300, 300)\n"


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program} here")


@needs("bash")
def test_shell_work_goes_on_in_a_cell(tmp_path: Path) -> None:
    script = """
        set -euo pipefail
        seq 1000 | sort -rn | head -3 | tr '\\n' ' '
        mkfifo pipe; (echo through > pipe &) ; cat pipe
        mkdir a; echo x > a/f; cp -a a b; tar cf t.tar a pipe; rm -r a; tar xf t.tar; cat a/f
        sleep 0.01 & wait; diff <(echo 1) <(echo 1); df . > /dev/null; sync; touch -d yesterday a/f; ls -l > /dev/null
    """
    assert run_behind_cell(["bash", "-c", script], tmp_path) == "1000 999 998 through\nx\n"


@needs("git")
def test_git_commits_in_a_cell(tmp_path: Path) -> None:
    script = """
        set -e
        git init -q . && echo x > f && git add f
        git -c user.name=n -c user.email=e@example.org commit -qm first
        git clone -q . copy && git -C copy log --format=%s
    """
    assert run_behind_cell(["sh", "-c", script], tmp_path) == "first\n"


@needs("node")
def test_node_works_in_a_cell(tmp_path: Path) -> None:
    code = """
        const {Worker} = require('worker_threads'); const os = require('os'); os.networkInterfaces();
        require('fs').promises.writeFile('f', 'x').then(() => {
          new Worker("require('worker_threads').parentPort.postMessage(1+1)", {eval: true}).on('message', console.log)
          require('child_process').execSync('true')
        })
    """
    assert run_behind_cell(["node", "-e", code], tmp_path) == "2\n"


@needs("gcc")
def test_gcc_compiles_and_runs_in_a_cell(tmp_path: Path) -> None:
    (tmp_path / "hello.c").write_text('#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n')
    assert run_behind_cell(["sh", "-c", "gcc -o hello hello.c && ./hello"], tmp_path) == "hello\n"


@needs("java")
def test_java_starts_in_a_cell(tmp_path: Path) -> None:
    run_behind_cell(["java", "-version"], tmp_path)


# Policies


def test_every_call_is_mentioned_with_a_reason() -> None:
    for reason in ('""', "1"):
        with pytest.raises(seccomp.PolicyError, match="no reason"):
            seccomp.compile_policy(f"[allow]\nread = {reason}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[allow]\nreed = "typo"', "'reed' is no system call"),
        ('[allow]\nread = "a"\n[answer.ENOSYS]\nread = "b"', "twice"),
        ('[answer.EWRONG]\nread = "a"', "'EWRONG' is no errno"),
        ('[rule.read]\nallow = [["arg0 = 1"]]\nreason = "a"', "is no test"),
        ('[rule.read]\nallow = [["arg0 in NAME"]]\nreason = "a"', "'NAME' is neither"),
        ('[rule.read]\nallow = [["arg0 in 0x100000000"]]\nreason = "a"', "32 bits"),
        ('[rule.read]\nreason = "a"', "either allow or deny"),
        ('[alow]\nread = "a"', "unknown sections: alow"),
        ('extends = "x.toml"', "load_policy"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(seccomp.PolicyError, match=textwrap.dedent(message)):
        seccomp.compile_policy(text)
    assert issubclass(seccomp.PolicyError, ValueError)


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(seccomp.PolicyError, match="'riscv64'"):
        seccomp.compile_policy("", "riscv64")
