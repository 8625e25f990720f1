"""Ways out of other container runtimes, each tried here. The name of a test says what was broken there, and stands here."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import pytest

from cloche import errors

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

both = pytest.mark.parametrize("user", ["user", "root"])
DENIED = {"EPERM", "EACCES", "ENOSYS", "EROFS", "ENOENT", "ETXTBSY"}


@pytest.fixture(autouse=True)
def undisturbed() -> None:
    """The neighbour is asked once, at the end: most of what is tried here is refused by the first call."""


@both
async def test_no_program_that_the_host_will_run_can_be_overwritten(box, attack, user):
    """runc, CVE-2019-5736: /proc/self/exe was the host's own program, and could be opened for writing from inside."""
    seen = await attack(
        box,
        """
answer, paths = {}, ["/proc/self/exe", "/proc/1/exe", "/proc/2/exe", "/opt/cloche/env/bin/python3", "/usr/bin/env", "/opt/cloche/lib/cloche/guest/init/init.py"]
for path in paths:
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC): answer[f"{path} {flags}"] = attempt(lambda: os.open(path, flags))
again = os.open("/proc/self/exe", os.O_PATH)
answer["by a descriptor"] = attempt(lambda: os.open(f"/proc/self/fd/{again}", os.O_WRONLY))
""",
        user,
    )
    assert set(seen.values()) <= DENIED, seen


@pytest.mark.parametrize(
    "cwd", ["/proc/self/fd/3", "/proc/self/fd/7", "/proc/self/fd/9", "/proc/1/cwd", "/proc/1/root"]
)
async def test_no_working_directory_lies_outside(box, host, cwd):
    """runc, CVE-2024-21626: a leaked descriptor of a directory of the host, named as the place to start a program in."""
    command = f"pwd -P; cat ../../../../../../../..{host.file} && echo READ; ls -id / /.."
    try:
        done = await box.commands.run(command, cwd=cwd, timeout_seconds=10)
    except errors.ClocheError:
        return  # there is no such place to start in
    assert "READ" not in done.stdout and "unreachable" not in done.stdout
    assert len({line.split()[0] for line in done.stdout.splitlines() if line.endswith((" /", " /.."))}) <= 1


@both
async def test_no_descriptor_of_a_directory_or_of_the_host_is_inherited(box, attack, user):
    seen = await attack(
        box,
        """
import stat
answer = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError: continue
    for number in numbers:
        try: about = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError: continue
        if stat.S_ISDIR(about.st_mode) and int(pid) != os.getpid(): answer[f"{pid} {number}"] = os.readlink(f"/proc/{pid}/fd/{number}")
""",
        user,
    )
    assert seen == {}


@both
async def test_the_masks_of_proc_cannot_be_replaced_moved_or_raced(box, attack, user):
    """runc, CVE-2025-31133, -52565, -52881: /dev/null or /dev/console were swapped for a link before they were mounted.

    Here all of /dev lies in a read-only root that was made before any program ran, and nothing is mounted later.
    """
    seen = await attack(
        box,
        """
answer = {}
for path in ("/dev/null", "/dev/zero", "/dev/console", "/dev/pts", "/dev/ptmx", "/dev/fd", "/proc/sys", "/proc/keys", "/proc/cmdline"):
    answer[f"unlink {path}"] = attempt(lambda: os.unlink(path))
    answer[f"rename {path}"] = attempt(lambda: os.rename(path, path + "x"))
    answer[f"link over {path}"] = attempt(lambda: os.rename("/tmp/link", path) if os.symlink("/proc/sys/kernel/core_pattern", "/tmp/link") else os.rename("/tmp/link", path))
    try: os.unlink("/tmp/link")
    except OSError: pass
answer = {name: got for name, got in answer.items() if got not in ("EPERM", "EACCES", "EROFS", "ENOENT", "EBUSY", "EISDIR", "ENOTDIR", "EXDEV")}
answer["console"] = os.path.exists("/dev/console")
answer["null"] = [os.major(os.stat("/dev/null").st_rdev), os.minor(os.stat("/dev/null").st_rdev)]
""",
        user,
    )
    assert seen == {"console": False, "null": [1, 3]}


@both
async def test_no_file_that_starts_a_program_on_the_host_can_be_written(box, attack, user):
    """release_agent (CVE-2022-0492), core_pattern, modprobe, uevent_helper, binfmt_misc, sysrq: how to run as the host's root."""
    seen = await attack(
        box,
        """
answer = {}
files = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug", "/proc/sys/kernel/poweroff_cmd", "/sys/kernel/uevent_helper"]
files += ["/proc/sys/fs/binfmt_misc/register", "/proc/sysrq-trigger", "/proc/sys/kernel/usermodehelper/bset", "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/yama/ptrace_scope"]
files += ["/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/cgroup.procs", "/proc/self/uid_map", "/proc/self/setgroups", "/proc/1/uid_map", "/proc/self/attr/current", "/proc/1/oom_score_adj"]
for path in files: answer[path] = attempt(lambda: os.write(os.open(path, os.O_WRONLY), b"|/tmp/x"))
for kind in (b"cgroup", b"cgroup2", b"binfmt_misc", b"debugfs", b"tracefs", b"securityfs", b"bpf", b"fuse", b"overlay"):
    answer[f"mount {kind}"] = attempt(lambda: call("mount", b"x", b"/tmp", kind, 0, None))
    answer[f"fsopen {kind}"] = attempt(lambda: call("fsopen", kind, 0))
answer["fsconfig"] = attempt(lambda: call("fsconfig", 0, 1, b"source", b"x" * 5000, 0))
answer = {name: got for name, got in answer.items() if got not in ("EPERM", "EACCES", "ENOSYS", "EROFS", "ENOENT", "EINVAL")}
""",
        user,
    )
    assert seen == {}


@both
async def test_only_sockets_of_four_kinds_can_be_made(box, attack, user):
    """Every family times every type: AF_ALG, AF_PACKET, AF_VSOCK, AF_RDS, AF_KEY and the rest have all had a way out."""
    seen = await attack(
        box,
        """
answer = {"made": [], "netlink": []}
for family in range(64):
    for kind in (1, 2, 3, 4, 5, 6, 10):
        if attempt(lambda: socket.socket(family, kind, 0)).startswith("done"): answer["made"].append([family, kind])
        if family != 1 and attempt(lambda: socket.socketpair(family, kind, 0)).startswith("done"): answer["made"].append([family, kind, "pair"])
for protocol in range(64):
    if attempt(lambda: socket.socket(16, 3, protocol)).startswith("done"): answer["netlink"].append(protocol)
""",
        user,
    )
    allowed = {(1, kind) for kind in (1, 2, 3, 5)} | {(family, kind) for family in (2, 10) for kind in (1, 2)}
    assert {tuple(each) for each in seen["made"]} <= allowed | {(16, 2), (16, 3)}, seen
    assert seen["netlink"] == [0]


@both
async def test_netlink_changes_nothing(box, attack, user):
    """Without rights over its network a sandbox can ask, not order: no link, address, route, queueing discipline, filter."""
    seen = await attack(
        box,
        """
import struct
def order(kind, body):
    with socket.socket(16, 3, 0) as sock:
        sock.settimeout(2)
        sock.send(struct.pack("=IHHII", 16 + len(body), kind, 0x605, 1, 0) + body)
        answered = sock.recv(4096)
        return struct.unpack_from("=i", answered, 16)[0] if struct.unpack_from("=H", answered, 4)[0] == 2 else "an answer"
link = struct.pack("=BBHiII", 0, 0, 0, 1, 0, 0xffffffff)
tc = struct.pack("=BxHiIII", 0, 0, 1, 0x10000, 0xffffffff, 0)
answer = {name: order(kind, body) for name, kind, body in (("new link", 16, link), ("new address", 20, struct.pack("=BBBBi", 2, 8, 0, 0, 1)),
    ("new route", 24, struct.pack("=BBBBBBBBI", 2, 8, 0, 0, 254, 3, 0, 1, 0)), ("queue", 36, tc), ("filter", 44, tc), ("chain", 100, tc), ("rule", 32, struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 0, 0, 1, 0)))}
""",
        user,
    )
    assert set(seen.values()) <= {-1, -95, -13}, seen  # EPERM, EOPNOTSUPP, EACCES


@both
async def test_the_hosts_file_systems_cannot_be_ordered_about(box, attack, user):
    """Through a descriptor of a read-only file: freeze, trim, shut down, make immutable, relabel, find blocks."""
    seen = await attack(
        box,
        """
import fcntl, struct
orders = {"flags": (0x40086602, bytes(8)), "attributes": (0x401c5820, bytes(28)), "freeze": (0xc0045877, bytes(4)), "thaw": (0xc0045878, bytes(4)), "trim": (0xc0185879, bytes(24)),
    "shut down": (0x8004587d, struct.pack("I", 2)), "blocks": (1, bytes(4)), "label": (0x41009432, b"x" * 256), "encrypt": (0x800c6613, bytes(12)), "clone": (0x40049409, 0), "swap": (0x40406601, bytes(64))}
answer = {}
for path in ("/usr", "/usr/bin/env", "/opt/cloche/env", "/opt/cloche/lib/cloche/guest/init/init.py", "/etc/ssl/certs"):
    if not os.path.exists(path): continue
    fd = os.open(path, os.O_RDONLY)
    for name, (number, argument) in orders.items(): answer[f"{name} {path}"] = attempt(lambda: fcntl.ioctl(fd, number, argument))
""",
        user,
    )
    assert not {name: got for name, got in seen.items() if got.startswith("done")}


@both
async def test_handles_on_namespaces_and_on_the_host_lead_nowhere(box, attack, execute, user):
    """nsfs and pidfds have calls of their own for going from one namespace to the next, its parent or its owner."""
    seen = await attack(
        box,
        """
import fcntl
answer = []
for name in os.listdir("/proc/self/ns"):
    fd = os.open("/proc/self/ns/" + name, os.O_RDONLY)
    for number in (1, 2):
        if attempt(lambda: fcntl.ioctl(fd, 0xb700 | number)).startswith("done"): answer.append([name, number])
    for number in (11, 12):
        if attempt(lambda: fcntl.ioctl(fd, (2 << 30) | (16 << 16) | 0xb700 | number, bytes(16))).startswith("done"): answer.append([name, number])
for pid in (1, 2):
    fd = os.pidfd_open(pid)
    for number in range(1, 11):
        if pid == 1 and attempt(lambda: fcntl.ioctl(fd, 0xff00 | number, 0)).startswith("done"): answer.append([pid, number])
""",
        user,
    )
    assert seen == []
    peer = await execute(
        box,
        """
import fcntl, os, socket
reached = []
for fd in range(3, 64):
    try: sock = socket.socket(fileno=fd)
    except OSError: continue
    try: pidfd = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, 77, 4), "little")
    except OSError: continue
    finally: sock.detach()
    for number in range(1, 11):
        try: fcntl.ioctl(pidfd, 0xff00 | number, 0); reached.append(number)
        except OSError: pass
    if "Pid:\\t0\\n" not in open(f"/proc/self/fdinfo/{pidfd}").read() : reached.append("pid")
print(reached)
""",
    )
    assert peer.stdout == "[]\n"


@both
async def test_a_program_without_a_file_has_no_more_rights(box, attack, user):
    """memfd_create and execveat: no path for anybody to look at, and no more than its parent had."""
    seen = await attack(
        box,
        """
fd = os.memfd_create("x", 0)
with open("/usr/bin/cat", "rb") as source: os.write(fd, source.read())
os.fchmod(fd, 0o6755)
child = os.fork()
if child == 0:
    out = os.open("/tmp/status", os.O_CREAT | os.O_WRONLY, 0o600); os.dup2(out, 1)
    words = (ctypes.c_char_p * 3)(b"cat", b"/proc/self/status", None)
    libc.syscall(ctypes.c_long(NUMBERS["execveat"]), fd, b"", words, None, 0x1000)
    os._exit(9)
os.waitpid(child, 0)
answer = {line.split()[0]: line.split()[1:] for line in open("/tmp/status") if line.startswith(("Uid", "CapEff", "NoNewPrivs", "Seccomp:"))}
answer["me"] = [str(os.getuid())] * 4
""",
        user,
    )
    assert seen["Uid:"] == seen["me"] and seen["NoNewPrivs:"] == ["1"] and seen["Seccomp:"] == ["2"]
    assert user == "root" or int(seen["CapEff:"][0], 16) == 0


@both
async def test_no_program_gets_ahead_of_all_others(box, attack, user):
    """A program of realtime, or with a deadline, would stop the whole host on as many CPUs as it has threads."""
    seen = await attack(
        box,
        """
import resource, struct
def raised(name):
    soft, hard = resource.getrlimit(name)
    try: resource.setrlimit(name, (20, 20))
    except (OSError, ValueError): return [soft, hard]
    return "raised"
answer = {f"policy {number}": attempt(lambda: os.sched_setscheduler(0, number, os.sched_param(1))) for number in (1, 2)}
answer["deadline"] = attempt(lambda: call("sched_setattr", 0, struct.pack("=IIQiIQQQ", 48, 6, 0, 0, 0, 10**7, 3 * 10**7, 3 * 10**7), 0))
answer["nicer"] = attempt(lambda: os.setpriority(os.PRIO_PROCESS, 0, -1))
answer["everybody"] = attempt(lambda: os.setpriority(os.PRIO_USER, 65534, 19))
answer["disk"] = attempt(lambda: call("ioprio_set", 1, 0, (1 << 13) | 4))
answer["limits"] = [raised(resource.RLIMIT_RTPRIO), raised(resource.RLIMIT_NICE)]
""",
        user,
    )
    assert seen.pop("limits") == [[0, 0], [0, 0]]
    assert set(seen.values()) <= {"EPERM", "EACCES", "ESRCH", "EINVAL"}, seen


async def test_the_neighbour_has_noticed_nothing_of_all_that(neighbour):
    await neighbour.notices_nothing()
