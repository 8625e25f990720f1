"""Claims about walls: things that no program in a sandbox can see, reach or change, be it `user` or `root`
there.
"""

from __future__ import annotations

import socket

from cloche import errors
from cloche.isolation import rootfs
from cloche.isolation.conformance.claims import (
    CLAIM_USERS,
    Claim,
    ClaimScene,
    Examine,
    answers_claim,
    call_expressions,
    expect_that,
    refused_claim,
    run_attempts,
    run_python,
)
from cloche.linux import capabilities

_DENIED = ("EPERM", "EACCES", "ENOSYS")
_UNWRITABLE = (*_DENIED, "EROFS", "ENOENT")
_NO_FAMILY = ("EAFNOSUPPORT", "EPERM", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT")
_NEW_NAMESPACES = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000}
_NEW_NAMESPACES |= {"pid": 0x20000000, "net": 0x40000000, "time": 0x80}

# Cloche sets the whole environment of a program; without settings it has only these variables.
_VARIABLE_NAMES = {
    "PATH",
    "LANG",
    "SHELL",
    "MPLBACKEND",
    "TZ",
    "HOME",
    "USER",
    "LOGNAME",
    "PWD",
    "SHLVL",
    "_",
    "OLDPWD",
    "TERM",
}
_VARIABLE_NAMES |= set(rootfs.INSTALLER_ENVIRONMENT)
_DEVICES = {"null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "shm", "fd", "stdin", "stdout", "stderr"}
_WRITABLE_TYPES = {"tmpfs", "proc", "devpts", "devtmpfs"}


async def _host_file(scene: ClaimScene) -> None:
    for user in CLAIM_USERS:
        found = await run_attempts(scene.box, {"file": f"open({scene.host.file!r}).read()"}, user)
        expect_that(found["file"] == "ENOENT", found)


async def _host_port(scene: ClaimScene) -> None:
    found = await run_attempts(
        scene.box, {"port": f"socket.create_connection(('127.0.0.1', {scene.host.port}), 2)"}, "user"
    )
    expect_that(found["port"] == "ECONNREFUSED", found)


async def _host_abstract(scene: ClaimScene) -> None:
    expression = f"socket.socket(socket.AF_UNIX).connect({chr(0) + scene.host.abstract!r})"
    found = await run_attempts(scene.box, {"socket": expression}, "user")
    expect_that(found["socket"] == "ECONNREFUSED", found)


async def _host_name(scene: ClaimScene) -> None:
    name = await run_python(scene.box, "answer = os.uname().nodename", "user")
    expect_that(name == "cloche" or name != socket.gethostname(), name)


async def _neighbour_files(scene: ClaimScene) -> None:
    for path in ("/mnt/data/secret", "/tmp/secret", "/dev/shm/secret"):
        await scene.neighbour.write(path, b"of the neighbour")
    tries = {path: f"open({path!r}).read()" for path in ("/mnt/data/secret", "/tmp/secret", "/dev/shm/secret")}
    for user in CLAIM_USERS:
        found = await run_attempts(scene.box, tries, user)
        expect_that(set(found.values()) == {"ENOENT"}, found)


async def _neighbour_processes(scene: ClaimScene) -> None:
    await scene.neighbour.command("(exec -a neighbour-process sleep 30) > /dev/null 2>&1 &")
    for user in CLAIM_USERS:
        names = await run_python(scene.box, _ALL_COMMANDS, user)
        expect_that(not any("neighbour-process" in name for name in names), names)


async def _neighbour_ipc(scene: ClaimScene) -> None:
    made = await run_python(scene.neighbour, "answer = libc.shmget(0x2a2a2a2a, 4096, 0o1666)", "user")
    expect_that(made >= 0, made)
    found = await run_python(scene.box, "answer = libc.shmget(0x2a2a2a2a, 4096, 0o666)", "root")
    expect_that(found == -1, found)


async def _check_links(scene: ClaimScene) -> None:
    """A link that a program puts where the host will read must not make the host read anything else."""
    await scene.box.command(
        "cd /mnt/data; ln -s /etc/shadow shadow; ln -s /proc/1/environ environ; ln -s / root; mkfifo fifo;"
        f"ln -s /dev/zero zero; ln -s {scene.host.file} host"
    )
    for name in ("shadow", "environ", "root/etc/shadow", "fifo", "zero", "host", f"root{scene.host.file}"):
        try:
            content = await scene.box.read(f"/mnt/data/{name}")
        except (errors.FileError, errors.FileNotFound, errors.InvalidPath):
            continue
        expect_that(False, (name, content[:100]))


async def _pid_1(scene: ClaimScene) -> None:
    for user in CLAIM_USERS:
        await scene.box.command("for s in INT TERM HUP KILL STOP SEGV USR1; do kill -$s 1; done; true", user=user)
    done = await scene.box.command("echo alive")
    expect_that(done.stdout == "alive\n", done)


async def _check_descriptors(scene: ClaimScene) -> None:
    for user in CLAIM_USERS:
        done = await scene.box.command("ls /proc/$$/fd; true", user=user)
        expect_that(done.stdout.split() == ["0", "1", "2"], done)
    ran = await scene.box.run("import subprocess; subprocess.run('ls /proc/$$/fd; true', shell=True)")
    expect_that(ran.stdout.split() == ["0", "1", "2"], ran)


async def _check_environment(scene: ClaimScene) -> None:
    for user in CLAIM_USERS:
        found = await run_python(scene.box, "answer = dict(os.environ)", user)
        # The first directory of the library search path belongs to Cloche, and is read-only.
        ours = found.pop("LD_LIBRARY_PATH", "/opt/cloche/").startswith("/opt/cloche/")
        expect_that(ours and set(found) <= _VARIABLE_NAMES, set(found) - _VARIABLE_NAMES)
    ran = await scene.box.run(
        "import os; print(*[n for n in os.environ if n.startswith(('GLIBC', 'PYTHON', 'CLOCHE'))])"
    )
    expect_that(ran.outcome == "ok" and ran.stdout.split() in ([], ["PYTHONUSERBASE"]), ran)


def _wall_claim(name: str, text: str, examine: Examine) -> Claim:
    return Claim(name, "wall", text, examine)


_ALL_COMMANDS = """
answer = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: answer.append(open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\\0", b" ").decode(errors="replace"))
    except OSError: pass
"""
_STATUS = "answer = [line.split()[1] for line in open('/proc/self/status') if line.startswith(%r)]"
_MOUNTS = """
rows = [line.split() for line in open("/proc/self/mountinfo")]
answer = [[row[4], row[row.index("-") + 1]] for row in rows if "rw" in row[5].split(",")]
"""
_SUID = """
places = ("/", "/usr", "/tmp", "/mnt/data", "/home/user")
answer = [path for path in places if not os.statvfs(path).f_flag & os.ST_NOSUID]
"""
_HOST_PLACES = ("/boot", "/srv", "/lost+found", "/var/lib", "/var/log", "/sys/class", "/sys/fs")
_CGROUP = "answer = [line.split(':', 2)[2].strip() for line in open('/proc/self/cgroup')]"
_MASKED = """
answer = {}
for name in ("kcore", "keys", "key-users", "latency_stats", "timer_list", "sched_debug", "sysrq-trigger", "interrupts",
             "softirqs", "diskstats", "partitions", "crypto", "consoles", "config.gz", "cmdline"):
    try: answer[name] = open(f"/proc/{name}", "rb").read(10).decode(errors="replace")
    except OSError: pass
for name in ("acpi", "scsi", "bus", "fs", "irq"):
    try: answer[name] = os.listdir(f"/proc/{name}")
    except OSError: pass
"""
_SOCKETS = {
    "packet": "socket.socket(17, 3, 0)",
    "raw": "socket.socket(2, 3, 255)",
    "raw icmp": "socket.socket(2, 3, 1)",
    "vsock": "socket.socket(40, 1, 0)",
    "alg": "socket.socket(38, 5, 0)",
    "bluetooth": "socket.socket(31, 3, 1)",
    "can": "socket.socket(29, 3, 1)",
    "tipc": "socket.socket(30, 1, 0)",
    "sctp": "socket.socket(2, 1, 132)",
    "dccp": "socket.socket(2, 6, 0)",
    "xdp": "socket.socket(44, 3, 0)",
    "netfilter": "socket.socket(16, 3, 12)",
    "audit": "socket.socket(16, 3, 9)",
    "uevents": "socket.socket(16, 3, 15)",
}
_PROC = (
    "sys/kernel/core_pattern",
    "sys/kernel/hostname",
    "sys/vm/drop_caches",
    "sys/net/ipv4/ip_forward",
    "sysrq-trigger",
)
_PROC_MORE = (
    "sys/kernel/ns_last_pid",
    "sys/user/max_user_namespaces",
    "sys/fs/pipe-max-size",
    "irq/default_smp_affinity",
)
_SYSTEM = (
    "/usr/x",
    "/usr/bin/x",
    "/etc/x",
    "/etc/passwd",
    "/opt/cloche/x",
    "/opt/cloche/env/x",
    "/x",
    "/bin/sh",
    "/sys/x",
)
_OUTER = ("/proc/1/mem", "/proc/1/environ", "/proc/1/maps", "/proc/1/root/etc/passwd", "/proc/1/cwd/x", "/proc/1/fd/3")

WALL_CLAIMS: tuple[Claim, ...] = (
    _wall_claim("host files", "A file of the host is not visible", _host_file),
    answers_claim(
        "host users",
        "No home, password or account of the host is there",
        "answer = [os.listdir('/home'), os.path.exists('/etc/shadow'), sum(1 for _ in open('/etc/passwd'))]",
        lambda seen: seen == [["user"], False, 3],
    ),
    answers_claim(
        "system places",
        "Nothing of the host's /var, /boot, /srv, /sys or /lost+found is there",
        f"answer = [path for path in {_HOST_PLACES} if os.path.exists(path)]",
        lambda seen: seen == [],
    ),
    answers_claim(
        "host processes",
        "Only the sandbox's own processes can be seen",
        "answer = [int(name) for name in os.listdir('/proc') if name.isdigit()]",
        lambda seen: 1 in seen and len(seen) < 32,
    ),
    _wall_claim("host name", "The host's name is not known inside", _host_name),
    _wall_claim("host ports", "A server on the host's loopback cannot be reached", _host_port),
    _wall_claim("host sockets", "Abstract sockets of the host cannot be reached", _host_abstract),
    answers_claim(
        "interfaces",
        "There is no network interface but loopback",
        "answer = [name for _, name in socket.if_nameindex()]",
        lambda seen: seen == ["lo"],
    ),
    refused_claim(
        "network",
        "No address beyond loopback can be reached",
        {
            "ipv4": "socket.create_connection(('192.0.2.1', 80), 2)",
            "metadata": "socket.create_connection(('169.254.169.254', 80), 2)",
            "ipv6": "socket.create_connection(('2001:db8::1', 80), 2)",
            "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
        },
        ("ENETUNREACH", "EADDRNOTAVAIL", "EHOSTUNREACH"),
    ),
    refused_claim(
        "socket families", "No raw, packet, vsock, crypto or other exotic socket can be made", _SOCKETS, _NO_FAMILY
    ),
    _wall_claim("neighbour's files", "Files of a neighbour are not there", _neighbour_files),
    _wall_claim("neighbour's processes", "Processes of a neighbour cannot be seen", _neighbour_processes),
    _wall_claim("neighbour's memory", "Shared memory of a neighbour is not there", _neighbour_ipc),
    refused_claim(
        "system files",
        "The system is read-only",
        {path: f"open({path!r}, 'a').close()" for path in _SYSTEM},
        (*_UNWRITABLE, "ETXTBSY"),
    ),
    answers_claim(
        "writable mounts",
        "Nothing that can be written to is a disk of the host",
        _MOUNTS,
        lambda rows: all(kind in _WRITABLE_TYPES for _, kind in rows),
    ),
    refused_claim(
        "kernel settings",
        "No file in /proc that controls the kernel is writable",
        {name: f"open('/proc/{name}', 'w').write('1')" for name in (*_PROC, *_PROC_MORE)},
        _UNWRITABLE,
    ),
    answers_claim(
        "masked files",
        "Files of /proc with information about the host are empty",
        _MASKED,
        lambda seen: not any(seen.values()),
    ),
    answers_claim(
        "devices",
        "There are only harmless devices",
        "answer = os.listdir('/dev')",
        lambda seen: set(seen) <= _DEVICES,
    ),
    refused_claim(
        "new devices",
        "No device can be made",
        {
            "memory": "os.mknod('/tmp/mem', 0o20666, os.makedev(1, 1))",
            "disk": "os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0))",
        },
        _DENIED,
    ),
    refused_claim(
        "mounts",
        "Nothing can be mounted, unmounted or moved",
        {
            "mount": "call('mount', b'x', b'/tmp', b'tmpfs', 0, None)",
            "bind": "call('mount', b'/', b'/tmp', None, 4096, None)",
            "remount": "call('mount', None, b'/usr', None, 32 | 4096, None)",
            "umount": "call('umount2', b'/proc', 2)",
            "pivot_root": "call('pivot_root', b'/tmp', b'/tmp')",
            "chroot": "os.chroot('/tmp')",
        },
        _DENIED,
    ),
    refused_claim(
        "new mount calls",
        "The newer mount calls are refused too",
        call_expressions("open_tree", "move_mount", "fsopen", "fsmount", "fspick", "mount_setattr"),
        _DENIED,
    ),
    refused_claim(
        "new namespaces",
        "No namespace can be made or entered",
        {name: f"call('unshare', {flag})" for name, flag in _NEW_NAMESPACES.items()}
        | {
            f"clone {name}": f"call('clone', {flag} | 17, 0, 0, 0, 0)"
            for name, flag in _NEW_NAMESPACES.items()
            if flag > 0xFF
        }
        | call_expressions("setns", "clone3"),
        _DENIED,
    ),
    refused_claim(
        "other processes",
        "No process can be traced, read or robbed of descriptors",
        call_expressions("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise"),
        _DENIED,
    ),
    refused_claim(
        "init",
        "Pid 1 cannot be inspected",
        {path: f"open({path!r}, 'rb').read(1)" for path in _OUTER},
        (*_DENIED, "ENOENT"),
    ),
    _wall_claim("signals to init", "Pid 1 cannot be killed from inside", _pid_1),
    refused_claim("keyrings", "Keyrings cannot be used", call_expressions("add_key", "request_key", "keyctl"), _DENIED),
    refused_claim(
        "large kernel interfaces",
        "Tracing, BPF, io_uring and user page faults are closed",
        call_expressions(
            "bpf", "perf_event_open", "io_uring_setup", "userfaultfd", "fanotify_init", "memfd_secret", "io_setup"
        ),
        _DENIED,
    ),
    refused_claim(
        "the machine",
        "The machine cannot be controlled: modules, clock, swap, reboot, accounting",
        call_expressions(
            "init_module", "finit_module", "delete_module", "kexec_load", "reboot", "swapon", "swapoff", "acct"
        )
        | call_expressions(
            "clock_settime", "settimeofday", "adjtimex", "syslog", "iopl", "ioperm", "quotactl", "sethostname"
        ),
        _DENIED,
    ),
    refused_claim(
        "files by handle",
        "No file can be opened by its number, past all paths",
        call_expressions("open_by_handle_at", "name_to_handle_at"),
        _DENIED,
    ),
    answers_claim(
        "capabilities of user",
        "The user has no capability",
        _STATUS % "CapEff",
        lambda sets: int(sets[0], 16) == 0,
        ("user",),
    ),
    answers_claim(
        "capabilities of root",
        "Root has only the capabilities for its own users and files",
        _STATUS % "CapEff:",
        lambda sets: int(sets[0], 16) & ~capabilities.CELL == 0,
        ("root",),
    ),
    answers_claim(
        "bounding set",
        "No program can gain more capabilities than that",
        _STATUS % "CapBnd",
        lambda sets: int(sets[0], 16) & ~capabilities.CELL == 0,
    ),
    answers_claim(
        "no new privileges",
        "No program gains rights by being started",
        _STATUS % "NoNewPrivs",
        lambda seen: seen == ["1"],
    ),
    answers_claim(
        "system call filter", "A filter of system calls is on", _STATUS % "Seccomp:", lambda seen: seen == ["2"]
    ),
    answers_claim("set-uid files", "Set-uid bits have no effect on any file system", _SUID, lambda seen: seen == []),
    refused_claim(
        "becoming root", "The user cannot become root", {"setuid": "os.setuid(0)"}, ("EPERM", "EINVAL"), ("user",)
    ),
    _wall_claim("descriptors", "A command inherits its three streams and nothing else", _check_descriptors),
    _wall_claim(
        "environment", "Nothing of the host's environment, and nothing of our own devices, is in it", _check_environment
    ),
    answers_claim(
        "control groups",
        "The sandbox's path in the host's cgroups is hidden",
        _CGROUP,
        lambda seen: set(seen) <= {"/"},
    ),
    refused_claim(
        "terminal input",
        "No program can type into a terminal by a call",
        {"TIOCSTI": "call('ioctl', os.openpty()[1], 0x5412, b'x')"},
        (*_DENIED, "EIO", "ENOTTY"),
    ),
    _wall_claim("links", "Links, pipes and devices where the host reads a file lead to nothing", _check_links),
)
