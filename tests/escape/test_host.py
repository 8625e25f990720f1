"""Nothing of the host can be seen, reached or changed."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

both = pytest.mark.parametrize("user", ["user", "root"])
REFUSALS = {"EPERM", "EACCES", "ENOENT", "ENOSYS", "EROFS", "ENOTDIR", "ELOOP", "ENXIO", "ENODEV", "EINVAL"}


@both
async def test_no_path_leads_to_a_file_of_the_host(box, attack, host, user):
    seen = await attack(
        box,
        f"""
paths = ["{{}}", "/proc/self/root{{}}", "/proc/1/root{{}}", "/proc/self/cwd/../../../../..{{}}", "/dev/fd/../../../..{{}}"]
paths += ["/proc/thread-self/root{{}}", "/../../..{{}}", "/proc/1/cwd{{}}", "/proc/2/root{{}}", "/sys/..{{}}", "/opt/cloche/cell/..{{}}"]
answer = [path for path in paths for name in ({host.file!r}, "/etc/shadow", "/etc/hostname-of-the-host")
          if attempt(lambda: open(path.format(name)).read()).startswith("done")]
""",
        user,
    )
    assert seen == []


@both
async def test_a_search_of_everything_finds_no_file_that_the_host_can_write(box, attack, user):
    """Whatever can be opened for writing lies in memory of the sandbox's own, or is a harmless device."""
    found = await attack(
        box,
        """
import stat
answer = []
for top in ("/usr/local", "/etc", "/opt", "/dev", "/sys", "/run", "/var", "/root", "/home", "/mnt", "/proc/sys/kernel"):
    for directory, names, files in os.walk(top):
        for name in files[:500]:
            path = os.path.join(directory, name)
            try:
                if stat.S_ISREG(os.lstat(path).st_mode): os.close(os.open(path, os.O_WRONLY)); answer.append(path)
            except OSError: pass
""",
        user,
    )
    assert found == []


@both
async def test_walking_up_with_a_chroot_leads_nowhere(box, attack, host, user):
    seen = await attack(
        box,
        f"""
os.makedirs("/tmp/jail", exist_ok=True)
here = os.open("/", os.O_RDONLY)
answer = [attempt(lambda: os.chroot("/tmp/jail"))]
os.fchdir(here)
for _ in range(50): os.chdir("..")
answer.append(attempt(lambda: open("." + {host.file!r}).read()))
""",
        user,
    )
    assert seen == ["EPERM", "ENOENT"]


@both
async def test_overlong_and_strange_paths_are_refused_and_harmless(box, attack, user):
    seen = await attack(
        box,
        """
deep = "/tmp"
answer = []
for path in ("/" + "a" * 5000, "/tmp/" + "x" * 256, "/".join([""] + ["d"] * 3000), "/tmp/\\n\\x1b[2J", "/proc/self/" + "../" * 1300):
    answer.append(attempt(lambda: os.mkdir(path)))
os.chdir("/tmp")
for _ in range(1500):
    try: os.mkdir("deep"); os.chdir("deep")
    except OSError as error: answer.append(errno.errorcode[error.errno]); break
""",
        user,
    )
    assert seen[0] == seen[1] == "ENAMETOOLONG"
    names = [each.name for each in await box.files.list("/tmp", user="root")]
    assert "\n\x1b[2J" in names
    await box.files.remove("/tmp/deep", user="root")
    assert not await box.files.exists("/tmp/deep")


@both
async def test_no_process_of_the_host_can_be_seen_signalled_or_looked_into(box, attack, user):
    seen = await attack(
        box,
        f"""
answer = {{"pids": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()), "host": [], "parents": []}}
for pid in ({os.getpid()}, {os.getppid()}, -{os.getpid()}):
    answer["host"].append(attempt(lambda: os.kill(pid, 0)))
    answer["host"].append(attempt(lambda: os.pidfd_open(abs(pid))))
for name in ("ns/pid", "ns/mnt", "ns/user", "exe", "cwd", "root"):
    answer["parents"].append(attempt(lambda: os.readlink(f"/proc/1/{{name}}")))
""",
        user,
    )
    assert len(seen["pids"]) < 10
    assert set(seen["host"]) == {"ESRCH"}
    assert set(seen["parents"]) <= {"EACCES", "EPERM"}


@both
async def test_a_signal_to_all_processes_reaches_only_the_sandboxs_own(box, attack, user):
    answer = await attack(box, "answer = attempt(lambda: os.kill(-1, 0))", user)
    assert answer == "done: None" or answer == "EPERM"
    await box.commands.run("kill -9 -1", user=user)
    assert os.getpid() == os.getpid()  # we are here to say so


@both
async def test_nothing_beyond_loopback_answers(box, attack, host, user):
    seen = await attack(
        box,
        f"""
def tcp(address): socket.create_connection(address, 1)
answer = {{}}
for address in (("127.0.0.1", {host.port}), ("::1", {host.port}), ("0.0.0.0", {host.port})): answer[str(address)] = attempt(lambda: tcp(address))
for address in (("192.0.2.1", 80), ("169.254.169.254", 80), ("10.0.0.1", 22), ("172.17.0.1", 80), ("fe80::1", 80)):
    answer[str(address)] = attempt(lambda: tcp(address))
answer["broadcast"] = attempt(lambda: socket.socket(2, 2).sendto(b"x", ("255.255.255.255", 67)))
answer["multicast"] = attempt(lambda: socket.socket(2, 2).sendto(b"x", ("224.0.0.251", 5353)))
answer["abstract"] = attempt(lambda: socket.socket(1).connect("\\0" + {host.abstract!r}))
""",
        user,
    )
    reachable = {"ENETUNREACH", "ECONNREFUSED", "EINVAL", "EACCES", "EADDRNOTAVAIL", "EPERM", "EHOSTUNREACH"}
    assert set(seen.values()) <= reachable, seen


@both
async def test_the_network_cannot_be_changed(box, attack, user):
    """Routes, addresses and interfaces are ruled over netlink, which is open for reading only."""
    seen = await attack(
        box,
        """
import fcntl, struct
def link(kind, flags, body):
    with socket.socket(16, 3, 0) as sock:
        message = struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body
        sock.send(message)
        reply = sock.recv(4096)
        number = struct.unpack_from("=i", reply, 16)[0] if struct.unpack_from("=H", reply, 4)[0] == 2 else 0
        if number: raise OSError(-number, "")
lo = struct.pack("=BBHiII", 0, 0, 0, 1, 0, 0xffffffff)
dummy = struct.pack("=BBHiII", 0, 0, 0, 0, 0, 0) + struct.pack("=HH", 16, 18) + struct.pack("=HH6sxx", 10, 1, b"dummy\\0")
address = struct.pack("=BBBBI", 2, 8, 0, 0, 1) + struct.pack("=HH4B", 8, 2, 10, 0, 0, 1)
answer = [attempt(lambda: link(16, 5, lo)), attempt(lambda: link(16, 0x605, dummy)), attempt(lambda: link(20, 0x605, address))]
answer.append(attempt(lambda: fcntl.ioctl(socket.socket(2, 2), 0x8914, struct.pack("16sH14x", b"lo", 0))))
""",
        user,
    )
    assert set(seen) == {"EPERM"}


@both
async def test_sockets_that_pass_network_namespaces_or_load_modules_cannot_be_made(box, attack, user):
    seen = await attack(
        box,
        """
answer = {}
for family in range(3, 46):
    for kind, protocol in ((1, 0), (2, 0), (3, 0), (5, 0)):
        if family in (10, 16): continue
        answer[f"{family} {kind}"] = attempt(lambda: socket.socket(family, kind, protocol).close())
for protocol in range(1, 23): answer[f"netlink {protocol}"] = attempt(lambda: socket.socket(16, 3, protocol).close())
for family in (2, 10):
    for kind in (3, 4, 5, 6, 10): answer[f"inet {family} {kind}"] = attempt(lambda: socket.socket(family, kind, 0).close())
    for protocol in (132, 136, 33, 115, 255, 262, 4, 41, 47): answer[f"inet {family} {protocol}"] = attempt(lambda: socket.socket(family, 1, protocol).close())
answer["pair"] = attempt(lambda: socket.socketpair(30, 5, 0))
""",
        user,
    )
    assert {name: got for name, got in seen.items() if got not in ("EAFNOSUPPORT", "EPERM")} == {}


@both
async def test_no_device_can_be_made_or_opened(box, attack, user):
    seen = await attack(
        box,
        """
answer = {}
for name, mode, device in (("mem", 0o20666, (1, 1)), ("kmsg", 0o20666, (1, 11)), ("disk", 0o60666, (254, 0)), ("fuse", 0o20666, (10, 229)), ("kvm", 0o20666, (10, 232))):
    answer[name] = attempt(lambda: os.mknod(f"/tmp/{name}", mode, os.makedev(*device)))
for path in ("/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/kvm", "/dev/vda", "/dev/sda", "/dev/console", "/dev/tty0", "/dev/loop-control", "/dev/net/tun", "/dev/vsock", "/dev/uinput"):
    answer[path] = attempt(lambda: os.open(path, os.O_RDWR))
""",
        user,
    )
    assert {name: got for name, got in seen.items() if got not in REFUSALS} == {}


@both
async def test_core_dumps_start_nothing_on_the_host(box, attack, user):
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    seen = await attack(
        box,
        """
import resource, signal
answer = [attempt(lambda: open("/proc/sys/kernel/core_pattern", "w").write("|/tmp/x")), resource.getrlimit(resource.RLIMIT_CORE)]
answer.append(attempt(lambda: os.open("/proc/self/../sys/kernel/core_pattern", os.O_RDWR)))
if os.fork() == 0:
    os.chdir("/tmp"); os.kill(os.getpid(), signal.SIGSEGV)
answer.append(os.wait()[1] & 0x80)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); attempt(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)))
answer += [resource.getrlimit(resource.RLIMIT_CORE), open("/proc/self/limits").read().split("Max core file size")[1].split()[:2]]
""",
        user,
    )
    assert seen[0] in REFUSALS and seen[2] in REFUSALS
    assert seen[1] == [1, 1] and seen[3] == 0
    assert seen[4:] == [[1, 1], ["1", "1"]], "at 0, a core handler that is a pipe would be started"
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


@both
async def test_nothing_in_proc_or_sys_can_be_written_that_others_would_feel(box, attack, user):
    seen = await attack(
        box,
        """
answer = []
for top in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/driver", "/proc/tty", "/proc/acpi", "/proc/scsi", "/sys"):
    for directory, _, files in os.walk(top):
        for name in files:
            path = os.path.join(directory, name)
            if attempt(lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))).startswith("done"): answer.append(path)
for name in os.listdir("/proc"):
    path = "/proc/" + name
    if os.path.isfile(path) and not os.path.islink(path) and attempt(lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))).startswith("done"): answer.append(path)
""",
        user,
    )
    assert seen == []


@both
async def test_files_about_the_host_are_masked(box, attack, user):
    seen = await attack(
        box,
        """
answer = {}
for name in ("kcore", "keys", "key-users", "timer_list", "sched_debug", "latency_stats", "kmsg", "interrupts", "slabinfo", "pagetypeinfo", "vmallocinfo", "kpageflags", "softirqs", "diskstats", "partitions", "crypto", "consoles", "config.gz"):
    got = attempt(lambda: open("/proc/" + name, "rb").read(100))
    if got.startswith("done: b'") and got != "done: b''": answer[name] = got
addresses = {line.split()[0] for line in open("/proc/kallsyms")} if os.path.exists("/proc/kallsyms") else set()
if addresses - {"0" * 16}: answer["kallsyms"] = "addresses of the kernel"
for name in ("bus", "irq", "fs"):
    if os.path.exists("/proc/" + name) and os.listdir("/proc/" + name): answer[name] = os.listdir("/proc/" + name)
""",
        user,
    )
    assert seen == {}


async def test_nothing_of_the_hosts_environment_comes_in(box, attack, execute):
    marks = [f"{name}={value}" for name, value in os.environ.items() if len(value) > 12]
    program = "print(open('/proc/self/environ').read().replace('\\0', '\\n')); import os; [print(f'{n}={v}') for n, v in os.environ.items()]"
    kernel = (await execute(box, program)).stdout
    command = (await box.commands.run("env; cat /proc/self/environ | tr '\\0' '\\n'", user="root")).stdout
    ours = {f"PATH={os.environ.get('PATH')}", f"LANG={os.environ.get('LANG')}"}
    for text in (kernel, command):
        assert [mark for mark in marks if mark in text.splitlines() and mark not in ours] == []
    child = (
        await execute(box, "import subprocess; print(subprocess.run('env', capture_output=True, text=True).stdout)")
    ).stdout
    for name in ("GLIBC_TUNABLES", "PYTHONMALLOC", "LD_PRELOAD", "CLOCHE_"):
        assert name not in command and name not in child


async def test_a_kernel_and_its_children_hold_no_foreign_descriptor(box, execute):
    program = """
import os, stat
seen = {}
for fd in range(3, 4096):
    try: seen[fd] = os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
    except OSError: pass
print(sorted(set(seen.values())))
"""
    run = await execute(box, program)
    kinds = set(eval(run.stdout, {"__builtins__": {}}))
    assert kinds <= {"socket", "pipe", "anon_inode", "/proc/self/oom_score_adj", "/proc/2/oom_score_adj"}, kinds
    child = await execute(
        box,
        "import subprocess; print(subprocess.run('ls /proc/$$/fd; true', shell=True, capture_output=True, text=True, close_fds=False).stdout.split())",
    )
    assert child.stdout == "['0', '1', '2']\n"
