"""Rights that a program does not have and cannot get."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path

import pytest

from cloche import errors
from cloche.linux import capabilities
from cloche.model import SandboxSpec

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

both = pytest.mark.parametrize("user", ["user", "root"])
DENIED = {"EPERM", "EACCES", "ENOSYS"}


@both
async def test_no_process_is_traced_read_or_robbed(box, attack, user):
    seen = await attack(
        box,
        """
child = os.fork()
if child == 0:
    import time; time.sleep(20); os._exit(0)
answer = {}
for pid in (1, 2, child):
    for request in (16, 0x4206): answer[f"ptrace {pid} {request}"] = attempt(lambda: call("ptrace", request, pid, 0, 0))
    buffer = ctypes.create_string_buffer(64)
    class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    vector = Vector(ctypes.addressof(buffer), 64)
    answer[f"read {pid}"] = attempt(lambda: call("process_vm_readv", pid, ctypes.addressof(vector), 1, ctypes.addressof(vector), 1, 0))
    answer[f"write {pid}"] = attempt(lambda: call("process_vm_writev", pid, ctypes.addressof(vector), 1, ctypes.addressof(vector), 1, 0))
    answer[f"rob {pid}"] = attempt(lambda: call("pidfd_getfd", os.pidfd_open(pid), 0, 0))
    answer[f"compare {pid}"] = attempt(lambda: call("kcmp", pid, os.getpid(), 0, 0, 0))
answer["me"] = attempt(lambda: call("ptrace", 0, 0, 0, 0))
answer["init's memory"] = attempt(lambda: open("/proc/1/mem", "rb"))
os.kill(child, 9)
""",
        user,
    )
    assert {name: got for name, got in seen.items() if got not in DENIED} == {}


async def test_the_user_cannot_look_into_processes_of_root(box, single, attack):
    if single:
        pytest.skip("with a single uid, user and root are one identity: nothing is promised between them")
    process = await box.commands.start("sleep 20", user="root", env={"SECRET": "of root"})
    async with process:
        seen = await attack(
            box,
            f"""
answer = [attempt(lambda: open("/proc/{process.pid}/" + name, "rb").read(10)) for name in ("environ", "mem", "maps")]
answer.append(attempt(lambda: os.kill({process.pid}, 9)))
answer.append(attempt(lambda: os.listdir("/root")))
""",
        )
    assert set(seen) <= DENIED


@both
async def test_no_mount_can_be_made_changed_or_taken_away(box, attack, user):
    seen = await attack(
        box,
        """
answer = {}
for name, flags in (("tmpfs", 0), ("proc", 0), ("sysfs", 0), ("cgroup2", 0), ("overlay", 0), ("devpts", 0), ("ramfs", 0)):
    answer[name] = attempt(lambda: call("mount", name.encode(), b"/tmp", name.encode(), flags, None))
answer["bind"] = attempt(lambda: call("mount", b"/usr", b"/tmp", None, 4096, None))
answer["remount"] = attempt(lambda: call("mount", None, b"/usr", None, 4096 | 32, None))
answer["shared"] = attempt(lambda: call("mount", None, b"/", None, (1 << 20) | 16384, None))
answer["move"] = attempt(lambda: call("mount", b"/proc", b"/tmp", None, 8192, None))
for path in (b"/proc", b"/tmp", b"/usr", b"/dev/pts", b"/proc/sys", b"/mnt/data"): answer[f"umount {path}"] = attempt(lambda: call("umount2", path, 2))
answer["open_tree"] = attempt(lambda: call("open_tree", -100, b"/usr", 1))
answer["fsopen"] = attempt(lambda: call("fsopen", b"tmpfs", 0))
answer["setattr"] = attempt(lambda: call("mount_setattr", -100, b"/usr", 0, bytes(32), 32))
answer["pivot"] = attempt(lambda: call("pivot_root", b"/tmp", b"/tmp"))
""",
        user,
    )
    assert {name: got for name, got in seen.items() if got not in DENIED} == {}


@both
async def test_no_namespace_can_be_made_or_entered(box, attack, user):
    seen = await attack(
        box,
        """
answer = {}
for bit in (7, 17, 25, 26, 27, 28, 29, 30):
    answer[f"unshare {bit}"] = attempt(lambda: call("unshare", 1 << bit))
    if bit > 7: answer[f"clone {bit}"] = attempt(lambda: call("clone", (1 << bit) | 17, 0, 0, 0, 0))
answer["clone3"] = attempt(lambda: call("clone3", bytes(88), 88))
for name in os.listdir("/proc/self/ns"):
    fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    answer[f"setns {name}"] = attempt(lambda: call("setns", fd, 0))
answer["by pidfd"] = attempt(lambda: call("setns", os.pidfd_open(1), 0x20000))
""",
        user,
    )
    assert {name: got for name, got in seen.items() if got not in DENIED} == {}


@both
async def test_keyrings_are_closed(box, attack, user):
    seen = await attack(
        box,
        """
answer = [attempt(lambda: call("add_key", b"user", b"cloche", b"secret", 6, -4)), attempt(lambda: call("keyctl", 0, -4, 1))]
answer += [attempt(lambda: call("keyctl", 6, -4)), attempt(lambda: call("request_key", b"user", b"x", None, -4))]
""",
        user,
    )
    assert set(seen) <= DENIED


@both
async def test_no_capability_can_be_gained(box, attack, user):
    seen = await attack(
        box,
        """
import struct
def capset(value):
    low, high = value & 0xffffffff, value >> 32
    call("capset", struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", low, low, low, high, high, high))
answer = {"all": attempt(lambda: capset((1 << 41) - 1)), "admin": attempt(lambda: capset(1 << 21))}
answer["ambient"] = attempt(lambda: call("prctl", 47, 2, 21, 0, 0))
answer["securebits"] = attempt(lambda: call("prctl", 28, 0x2f, 0, 0, 0))
answer["privileges"] = attempt(lambda: call("prctl", 38, 0, 0, 0, 0))
answer["status"] = {line.split()[0]: line.split()[1] for line in open("/proc/self/status") if line.startswith(("Cap", "NoNewPrivs", "Seccomp:"))}
""",
        user,
    )
    status = seen.pop("status")
    assert not any(got.startswith("done") for got in seen.values()), seen
    for name in ("CapEff:", "CapPrm:", "CapBnd:", "CapInh:", "CapAmb:"):
        assert int(status[name], 16) & ~capabilities.CELL == 0
    assert status["NoNewPrivs:"] == "1" and status["Seccomp:"] == "2"


@both
async def test_a_set_uid_program_gives_no_rights(box, attack, single, user):
    seen = await attack(
        box,
        """
import shutil, subprocess
shutil.copy("/usr/bin/id", "/tmp/id")
answer = {"chmod": attempt(lambda: os.chmod("/tmp/id", 0o6755)), "cap": attempt(lambda: os.setxattr("/tmp/id", "security.capability", bytes.fromhex("0100000200002000000000000000000000000000")))}
answer["as"] = subprocess.run(["setpriv", "--reuid", "1000", "/tmp/id", "-u"] if os.getuid() == 0 else ["/tmp/id", "-u"], capture_output=True, text=True).stdout.strip()
answer["su"] = subprocess.run(["su", "-c", "id -u", "root"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout.strip() if os.getuid() else ""
""",
        user,
    )
    assert seen["as"] in ("1000", "0" if single and user == "root" else "1000", "")
    assert seen["su"] in ("", "1000")
    assert not seen["cap"].startswith("done")


async def test_a_set_uid_program_of_the_host_gives_no_rights(box, tmp_path):
    """/usr holds real set-uid programs of the host's root."""
    found = [path for name in ("su", "passwd", "mount", "newuidmap", "sudo", "chsh") if (path := shutil.which(name))]
    found = [path for path in found if os.stat(path).st_mode & stat.S_ISUID and path.startswith(("/usr", "/bin"))]
    if not found:
        pytest.skip("this host has no set-uid program below /usr")
    code = "import os, sys; print(os.statvfs(sys.argv[1]).f_flag & os.ST_NOSUID)"
    for path in found:
        assert (await box.commands.run(["python3", "-c", code, path])).stdout.strip() == "2"


@both
async def test_the_kernel_is_not_configured_from_inside(box, attack, user):
    seen = await attack(
        box,
        """
answer = {}
for name in ("bpf", "perf_event_open", "io_uring_setup", "userfaultfd", "fanotify_init", "init_module", "finit_module", "delete_module", "kexec_load", "reboot",
             "swapon", "swapoff", "acct", "clock_settime", "settimeofday", "adjtimex", "sethostname", "setdomainname", "syslog", "open_by_handle_at", "name_to_handle_at",
             "quotactl", "move_pages", "migrate_pages", "iopl", "ioperm", "modify_ldt", "vhangup", "lookup_dcookie", "memfd_secret", "process_mrelease"):
    if name in NUMBERS: answer[name] = attempt(lambda: call(name, 0, 0, 0, 0, 0, 0))
""",
        user,
    )
    assert {name: got for name, got in seen.items() if got not in DENIED} == {}


async def test_calls_for_another_machine_end_the_program_or_fail(box):
    """int 0x80 reaches the 32-bit table and x32 the other one, past a filter that looks at 64-bit numbers only."""
    if os.uname().machine != "x86_64":
        pytest.skip("only x86-64 has other tables")
    code = """
import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b8140000 00cd80c3".replace(" ", "")))  # mov eax, 20 (getpid); int 0x80; ret
work = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("pid" if work() == os.getpid() else "refused", flush=True)
"""
    result = await box.commands.run(["python3", "-c", code])
    assert result.stdout != "pid\n"
    code = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.syscall(0x40000000 + 39), ctypes.get_errno())"
    assert (await box.commands.run(["python3", "-c", code])).stdout == "-1 38\n"


@both
async def test_no_program_types_into_a_terminal_by_a_call(box, user):
    process = await box.commands.start(
        ["python3", "-c", "import fcntl; fcntl.ioctl(0, 0x5412, b'x')"], user=user, pty=(24, 80), timeout_seconds=10
    )
    result = await process.result()
    assert "PermissionError" in result.stdout or "OSError" in result.stdout


@both
async def test_init_survives_every_signal_from_inside(box, user):
    code = """
import os, signal
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
"""
    await box.commands.run(["python3", "-c", code], user=user, timeout_seconds=20)
    assert (await box.context().execute("1 + 1").result()).text == "2"


async def test_a_sandbox_whose_init_is_starved_is_cleanly_dead_or_works(engine):
    """Root of a sandbox may lower limits of its own pid 1: it harms itself."""
    box = await engine.create(SandboxSpec(user="root"))
    code = """
import resource
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK):
    try: resource.prlimit(1, kind, (0, 0))
    except (OSError, ValueError): pass
"""
    try:
        await asyncio.wait_for(box.context().execute(code, timeout_seconds=5).result(), 20)
        await asyncio.wait_for(box.commands.run("true", timeout_seconds=5), 25)
    except errors.ClocheError:
        pass
    await asyncio.wait_for(box.kill(), 10)
    with pytest.raises(errors.ClocheError):
        box.check_running()


KILL_ALL = """
import os
for pid in (-1, 1, os.getpid()):
    try: os.kill(pid, 9)
    except OSError: pass
"""


async def test_a_kernel_that_kills_everything_leaves_a_sandbox_that_works(engine):
    box = await engine.create(SandboxSpec(user="root"))
    run = await box.context().execute(KILL_ALL).result()
    assert run.outcome == "died"
    assert (await box.context().execute("1 + 1").result()).text == "2"
    await box.kill()


async def test_abstract_sockets_of_one_sandbox_are_not_in_another(box, attack, neighbour):
    code = "s = socket.socket(socket.AF_UNIX); s.bind('\\0shared'); s.listen(); open('/tmp/up', 'w').close(); import time; time.sleep(3); answer = 1"
    listening = asyncio.create_task(attack(box, code))
    for _ in range(200):
        if await box.files.exists("/tmp/up"):
            break
        await asyncio.sleep(0.02)
    assert (
        await attack(box, "answer = attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0shared'))")
        == "done: None"
    )
    assert (
        await attack(neighbour.sandbox, "answer = attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0shared'))")
        == "ECONNREFUSED"
    )
    assert not any("shared" in line for line in Path("/proc/net/unix").read_text().splitlines())
    await listening


async def test_locks_on_shared_files_do_not_stop_the_neighbour(box, neighbour):
    """Both see the same read-only files of the system: a lock on one must not keep anybody from using it."""
    code = """
import fcntl, glob, os, time
held = []
for path in ["/usr/bin/env", "/bin/bash", *glob.glob("/opt/cloche/env/pyvenv.cfg")]:
    try: held.append(open(path)); fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: pass
open("/tmp/held", "w").close()
while not os.path.exists("/tmp/enough"): time.sleep(0.01)
"""
    holding = asyncio.create_task(box.commands.run(["python3", "-c", code], timeout_seconds=10))
    while not await box.files.exists("/tmp/held"):
        await asyncio.sleep(0.01)
    assert (
        await neighbour.sandbox.commands.run("env true && python3 -c 'print(1)'", timeout_seconds=10)
    ).stdout == "1\n"
    await box.files.write("/tmp/enough", b"")
    assert (await holding).exit_code == 0


@both
async def test_the_other_end_of_its_channel_is_of_no_use(box, execute, user):
    """A socket tells who is at its other end: the host. That must not be a handle on it."""
    code = """
import ctypes, os, signal, socket
results = []
for fd in range(3, 64):
    try: sock = socket.socket(fileno=os.dup(fd))
    except OSError: continue
    results.append(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4] == bytes(4))
    try: pidfd = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, 77, 4), "little")
    except OSError: continue
    for number in (0, signal.SIGTERM):
        try: signal.pidfd_send_signal(pidfd, number); results.append("signalled")
        except OSError: pass
print(results)
"""
    run = await execute(box, code)
    assert "signalled" not in run.stdout
