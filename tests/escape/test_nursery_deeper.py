"""A hostile package at import, second round: with all rights that a namespace of its own can give, and as a liar in between."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from tests.escape.test_nursery import ask, hostile, nursery_of, trace, works  # noqa: F401 - fixtures are found by name

from cloche import errors
from cloche.model import SandboxSpec

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120), pytest.mark.long]

# In a child, so that the zygote stays what it is: a user namespace whose root has every capability, and then all others.
DEEPER = """
read, write = os.pipe()
child = os.fork()
if child == 0:
    answer = {}
    try:
        made = [attempt(lambda: call("unshare", 0x10000000))]
        with open("/proc/self/setgroups", "w") as file: file.write("deny")
        with open("/proc/self/uid_map", "w") as file: file.write("0 0 1")
        with open("/proc/self/gid_map", "w") as file: file.write("0 0 1")
        made.append(attempt(lambda: call("unshare", 0x20000 | 0x40000000 | 0x8000000 | 0x4000000 | 0x2000000)))
        answer["made"] = made
%s
    except OSError as error: answer["stopped"] = str(error)
    os.write(write, json.dumps(answer).encode()); os._exit(0)
os.close(write)
told = b""
while block := os.read(read, 65536): told += block
os.waitpid(child, 0)
answer = json.loads(told)
"""


def deeper(code: str) -> str:
    return DEEPER % "\n".join("        " + line for line in code.strip().splitlines())


async def test_all_capabilities_of_a_namespace_reach_nothing_of_the_host(nursery_of, host):  # noqa: F811
    seen = await ask(
        nursery_of,
        deeper(f"""
answer["capabilities"] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")][0]
tries = {{}}
for kind in (b"ext4", b"xfs", b"vfat", b"sysfs", b"debugfs", b"tracefs", b"securityfs", b"bpf", b"nfs", b"9p", b"iso9660", b"squashfs", b"devtmpfs", b"pstore", b"efivarfs"):
    tries["mount " + kind.decode()] = attempt(lambda: call("mount", b"/dev/null", b"/tmp", kind, 0, None))
for place in (b"/usr", b"/opt/cloche/env", b"/opt/cloche/lib/cloche/guest"):
    tries["remount " + place.decode()] = attempt(lambda: call("mount", None, place, None, 32 | 4096, None))
    tries["unmount " + place.decode()] = attempt(lambda: call("umount2", place, 2))
for family, kind, protocol in ((16, 3, 12), (16, 3, 9), (16, 3, 15), (16, 3, 16), (17, 3, 0), (2, 3, 255), (40, 1, 0), (38, 5, 0), (44, 3, 0), (15, 3, 2)):
    tries[f"socket {{family}} {{kind}} {{protocol}}"] = attempt(lambda: socket.socket(family, kind, protocol))
for name in ("bpf", "perf_event_open", "io_uring_setup", "userfaultfd", "keyctl", "add_key", "init_module", "kexec_load", "ptrace", "process_vm_readv", "open_by_handle_at", "name_to_handle_at", "fanotify_init", "quotactl", "swapon", "syslog", "reboot", "settimeofday", "iopl", "modify_ldt"):
    tries[name] = attempt(lambda: call(name, 0, 0, 0, 0, 0))
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches", "/proc/sys/kernel/panic", "/proc/sys/fs/file-max", "/proc/sys/kernel/pid_max"):
    tries[path] = attempt(lambda: os.write(os.open(path, os.O_WRONLY), b"1"))
tries["device"] = attempt(lambda: os.mknod("/tmp/mem", 0o20666, os.makedev(1, 1)))
tries["memory"] = attempt(lambda: open("/proc/kcore", "rb").read(1))
tries["host file"] = attempt(lambda: open({host.file!r}).read())
tries["host port"] = attempt(lambda: socket.create_connection(("127.0.0.1", {host.port}), 1))
answer["done"] = [name for name, got in tries.items() if got.startswith("done")]
"""),
    )
    assert "stopped" not in seen, seen
    assert seen["made"] == ["done: None"] * 2, seen  # else the attack was none
    assert seen["done"] == [], seen


async def test_the_cgroups_that_hold_a_nursery_cannot_be_changed_by_it(nursery_of):  # noqa: F811
    """A cgroup file system can be mounted in a namespace of one's own; its files stay the host's (CVE-2022-0492)."""
    seen = await ask(
        nursery_of,
        deeper("""
answer["written"], answer["mounted"] = [], []
for kind, options in ((b"cgroup2", None), (b"cgroup", b"memory"), (b"cgroup", b"pids"), (b"cgroup", b"cpu"), (b"cgroup", b"devices"), (b"cgroup", b"freezer"), (b"cgroup", b"none,name=x")):
    if not attempt(lambda: call("mount", b"c", b"/tmp", kind, 0, options)).startswith("done"): continue
    answer["mounted"].append(kind.decode())
    for directory, _, names in os.walk("/tmp"):
        for name in names:
            if name in ("release_agent", "notify_on_release", "cgroup.procs", "tasks", "cgroup.subtree_control", "cgroup.freeze", "cgroup.kill") or name.endswith((".max", "limit_in_bytes", ".allow", ".weight", "cfs_quota_us")):
                for value in (b"max", b"-1", b"1", b"/tmp/x"):
                    if attempt(lambda: os.write(os.open(directory + "/" + name, os.O_WRONLY), value)).startswith("done"): answer["written"].append([kind.decode(), name])
        if attempt(lambda: os.mkdir(directory + "/escape")).startswith("done"): answer["written"].append([kind.decode(), "mkdir"])
        break
    libc.umount2(b"/tmp", 2)
"""),
    )
    assert "stopped" not in seen and seen["written"] == [], seen


KEEPER = """
import cloche.guest.zygote.zygote as z, os, socket, threading, time
kept, original = [], z.Zygote._spawn_cell
def spawn(self, header, fds):
    kept.extend(os.dup(fd) for fd in fds)
    original(self, header, fds)
    if len(kept) > 4:
        for fd in kept:
            for junk in (b"\\xff" * 64, b"\\0\\0\\0\\2\\0\\0\\0\\0{}", b"\\0\\0\\0\\x10\\0\\0\\0\\0" + b'{"ev": "ready" } '):
                try: os.write(fd, junk)
                except OSError: pass
z.Zygote._spawn_cell = spawn
"""
FLOOD = """
import cloche.guest.zygote.zygote as z, threading
original = z.Zygote._announce
def announce(self, cell, pid, outputs):
    original(self, cell, pid, outputs)
    frame = z.wire.encode_frame({"ev": "kernel_exited", "cell": cell, "status": 0, "x": "y" * 100}) * 50
    if isinstance(frame, list): frame = b"".join(frame)
    def flood():
        try:
            while True: self._channel.sendall(frame)
        except OSError: pass
    threading.Thread(target=flood, daemon=True).start()
z.Zygote._announce = announce
"""


@pytest.mark.parametrize("lie", [KEEPER, FLOOD], ids=["keeps the channels of others", "floods the host"])
async def test_a_nursery_in_between_spoils_its_own_sandboxes_only(nursery_of, neighbour, lie):  # noqa: F811
    """It hands over every descriptor of its sandboxes and could speak for each. The host and other templates go on."""
    async with nursery_of(lie) as engine:
        for _ in range(3):
            with contextlib.suppress(errors.ClocheError, TimeoutError):
                async with asyncio.timeout(15):
                    box = await engine.create(SandboxSpec())
                    await box.context().execute("1", timeout_seconds=3).result()
            began = time.monotonic()
            await neighbour.notices_nothing()
            assert time.monotonic() - began < 10


POISON = """
import builtins, os, sys, threading, time
builtins.poison = []
def note(): builtins.poison.append((os.getpid(), [name for name in os.listdir("/proc") if name.isdigit()]))
os.register_at_fork(after_in_child=note)
class Spy(dict):
    pass
lurking = threading.Thread(target=lambda: time.sleep(600), daemon=True); lurking.start()
tape = os.open("/tmp/tape", os.O_CREAT | os.O_RDWR)
os.set_inheritable(tape, True)
sys.modules["tape"] = type(sys)("tape"); sys.modules["tape"].fd = tape
"""


async def test_sandboxes_of_one_hostile_template_share_no_file_and_no_memory_to_talk_by(nursery_of):  # noqa: F811
    """What it left open before the fork is closed in the sandboxes, and what it has in memory is each one's own copy."""
    async with nursery_of(POISON) as engine:
        try:
            first, second = [await works(engine) for _ in range(2)]
        except errors.ClocheError:
            return  # a nursery with threads may be refused
        write = "import builtins, os, sys; builtins.poison.append('from the first')\ntry: print(os.pwrite(sys.modules['tape'].fd, b'from the first', 0))\nexcept OSError as error: print('closed')"
        look = "import builtins, os, sys; print('from the first' in builtins.poison)\ntry: print(os.pread(sys.modules['tape'].fd, 100, 0))\nexcept OSError as error: print('closed')"
        wrote = (await first.context().execute(write).result()).stdout
        read = (await second.context().execute(look).result()).stdout
        assert read.splitlines()[0] == "False"
        assert wrote == "closed\n" or b"from the first".decode() not in read, (wrote, read)
