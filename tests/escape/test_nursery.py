"""A template whose package is hostile: importing it runs its code in the nursery, as root of its namespaces.

From there it can spoil its own sandboxes. It must not get at the host, at the template on disk or at anybody else's.
"""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.engine.engine import Engine
from cloche.engine.instance import Instance
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.isolation.channel import OutputPipe, PipeWriter
from cloche.isolation.conformance.claims import whole_program
from cloche.isolation.namespaces import NamespacesBackend
from cloche.linux import cgroups
from cloche.model import SandboxSpec, Template
from cloche.sdk.assembly import open_stores
from cloche.templates import Catalogue, build_template, uv
from cloche.templates.recipe import Recipe

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

without_cgroups = pytest.mark.skipif(
    bool({"memory", "pids"} & set(cgroups.probe_cgroups().missing)),
    reason="without rights over cgroups nothing but the host bounds what a nursery imports: `cloche doctor` says best effort",
)
PACKAGE = "cloche_escape_attack"  # a name that no registry has


def make_wheel(directory: Path, name: str, files: dict[str, str]) -> None:
    info = f"{name}-1.0.dist-info"
    entries = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in entries.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(content)}\n"
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """Written by the wheel's `.pth` file wherever it runs and can: on the host it could."""
    directory = tmp_path_factory.mktemp("trace")
    directory.chmod(0o777)
    return directory / "ran-on-the-host"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, trace) -> Template:
    """A template of one hostile package, with a `.pth` file that runs at each start of an interpreter."""
    wheels, data = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("hostile")
    for directory in (data, data.parent):
        directory.chmod(0o755)
    pth = (
        f"import os; exec(\"try: open({str(trace)!r}, 'a').write('ran')\\nexcept OSError: pass\"); "
        "os.environ.__setitem__('PTH_RAN', 'yes')\n"
    )
    make_wheel(wheels, PACKAGE, {f"{PACKAGE}.py": "", f"{PACKAGE}.pth": pth})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in uv.uv_environment(os.environ).items():
            patch.setenv(name, value)
        links = [value for value in (os.environ.get("UV_FIND_LINKS"), str(wheels)) if value]
        patch.setenv("UV_FIND_LINKS", ",".join(links))
        return build_template(
            Catalogue(data), Recipe(name="hostile", packages=(f"{PACKAGE}==1.0",), imports=(PACKAGE,))
        )


def arm(template: Template, attack: str) -> None:
    """Puts the attack where the package is, so that one build serves all tests."""
    (package,) = Path(template.root).glob(f"env/lib/python3*/site-packages/{PACKAGE}.py")
    package.write_text("import os\n" + attack)
    for compiled in package.parent.glob(f"__pycache__/{PACKAGE}.*.pyc"):
        compiled.unlink()


def arm_early(template: Template, attack: str) -> None:
    """Has it run at the start of the interpreter, before there is a cradle: what is imported there is init's, too."""
    (package,) = Path(template.root).glob(f"env/lib/python3*/site-packages/{PACKAGE}.py")
    (package.parent / "early_attack.pth").write_text("import early_attack\n")
    boot = "import sys\nsys.path.insert(0, '/opt/cloche/lib')\n"
    (package.parent / "early_attack.py").write_text(boot + attack)


class Fixed:
    """Knows one template."""

    def __init__(self, template: Template):
        self._template = template

    def resolve(self, ref: str) -> Template:
        return self._template

    def list(self) -> list[Template]:
        return [self._template]


def state_of(template: Template) -> dict[str, tuple[int, float, int]]:
    """Every file of the template as it lies on the host."""
    found = {}
    for directory, _, files in os.walk(template.root):
        for name in files:
            path = os.path.join(directory, name)
            about = os.lstat(path)
            found[path] = (about.st_size, about.st_mtime, about.st_mode)
    described = os.path.join(template.root, "template.json")  # the host itself touches it, to know when it was used
    found[described] = (hash(Path(described).read_bytes()), 0.0, os.lstat(described).st_mode)
    return found


@pytest.fixture
def nursery_of(hostile, tmp_path):
    """`async with nursery_of(attack) as engine`: an engine whose template does `attack` when it is imported.

    `early` is done before that, when its interpreter starts.
    """
    tmp_path.chmod(0o755)

    @contextlib.asynccontextmanager
    async def open_engine(attack: str, early: str = "") -> AsyncIterator[Engine]:
        arm(hostile, attack)
        arm_early(hostile, early)
        before = state_of(hostile)
        instance = Instance(tmp_path / "run")
        instance.open()
        backend = NamespacesBackend(instance.directory, instance.name, instance.is_live)
        config = Config(data_dir=str(tmp_path), pool=PoolConfig(ready=0))
        async with Engine(config, backend, Fixed(hostile), instance, open_stores(tmp_path, config)) as engine:
            yield engine
        assert state_of(hostile) == before

    return open_engine


async def works(engine: Engine) -> Sandbox:
    sandbox = await engine.create(SandboxSpec())
    run = await sandbox.context().execute("6 * 7", timeout_seconds=20).result()
    assert run.text == "42", run
    return sandbox


async def answer_of(engine: Engine, code: str):
    """What hostile code in the nursery found out: it is left where a sandbox can read it."""
    sandbox = await works(engine)
    run = (
        await sandbox.context().execute("import json, sys; print(json.dumps(sys.modules['findings'].answer))").result()
    )
    assert run.outcome == "ok", run
    return json.loads(run.stdout)


def finding(code: str) -> str:
    """An attack whose `answer` is kept in memory for `answer_of`."""
    whole = whole_program(code).rsplit("print(json.dumps(answer)", 1)[0]
    return (
        whole
        + "\nimport sys, types\nsys.modules['findings'] = types.ModuleType('findings'); sys.modules['findings'].answer = answer\n"
    )


async def ask(nursery_of, code: str):
    async with nursery_of(finding(code)) as engine:
        return await answer_of(engine, code)


async def test_a_pth_file_runs_in_the_nursery_and_nowhere_else(nursery_of, trace):
    async with nursery_of("") as engine:
        sandbox = await works(engine)
        run = await sandbox.commands.run(
            "/opt/cloche/env/bin/python3 -c \"import os; print(os.environ.get('PTH_RAN'))\""
        )
        assert run.stdout == "yes\n"  # the trap works
    assert not trace.exists()


async def test_the_template_cannot_be_rewritten_on_the_host(nursery_of):
    """The check that no file of the template changed is in `nursery_of`."""
    seen = await ask(
        nursery_of,
        """
answer = {}
for place in ("/opt/cloche/env", "/usr", "/opt/cloche/python", "/opt/cloche/lib/cloche/guest"):
    answer[f"write {place}"] = attempt(lambda: open(place + "/x", "w").write("x"))
    answer[f"remount {place}"] = attempt(lambda: call("mount", None, place.encode(), None, 32 | 4096, None))
    answer[f"setattr {place}"] = attempt(lambda: call("mount_setattr", -100, place.encode(), 0x8000, (0).to_bytes(8, "little") + (1).to_bytes(8, "little") + bytes(16), 32))
    def clone():
        tree = libc.syscall(428, -100, place.encode(), 1)
        if tree < 0: raise OSError(ctypes.get_errno(), "")
        call("mount_setattr", tree, b"", 0x1000, (0).to_bytes(8, "little") + (1).to_bytes(8, "little") + bytes(16), 32)
    answer[f"clone {place}"] = attempt(clone)
os.makedirs("/tmp/u", exist_ok=True); os.makedirs("/tmp/w", exist_ok=True)
answer["overlay"] = attempt(lambda: call("mount", b"o", b"/opt/cloche/env", b"overlay", 0, b"lowerdir=/opt/cloche/env,upperdir=/tmp/u,workdir=/tmp/w,userxattr"))
""",
    )
    seen.pop("overlay")  # a cover over its own view of it: its own affair
    assert not any(got.startswith("done") for got in seen.values()), seen


async def test_the_nursery_sees_no_file_and_no_process_of_the_host(nursery_of, host):
    seen = await ask(
        nursery_of,
        f"""
answer = {{"files": [], "pids": []}}
call("umount2", b"/proc", 2) if True else None
for _ in range(3):
    answer["pids"].append(sorted(int(n) for n in os.listdir("/proc") if n.isdigit()) if os.path.isdir("/proc") else [])
    for path in ({host.file!r}, "/etc/shadow", "/proc/1/root" + {host.file!r}, "/proc/1/cwd" + {host.file!r}, "/proc/2/root" + {host.file!r}):
        if attempt(lambda: open(path).read()).startswith("done"): answer["files"].append(path)
    for name in ("ns/mnt", "ns/user", "ns/pid"):
        fd = attempt(lambda: os.open("/proc/1/" + name, os.O_RDONLY))
        if fd.startswith("done") and attempt(lambda: call("setns", int(fd[6:]), 0)).startswith("done"): answer["files"].append(name)
    libc.umount2(b"/proc", 2)
libc.mount(b"proc", b"/proc", b"proc", 0, None)
""",
    )
    assert seen["files"] == []
    assert all(len(pids) <= 6 and os.getpid() not in pids for pids in seen["pids"])


async def test_the_nursery_cannot_trace_or_kill_its_parent(nursery_of):
    seen = await ask(
        nursery_of,
        """
answer = [attempt(lambda: os.kill(1, 9)), attempt(lambda: os.kill(1, 19))]
calls = [attempt(lambda: call("ptrace", 16, 1, 0, 0)), attempt(lambda: open("/proc/1/mem", "rb")), attempt(lambda: call("pidfd_getfd", os.pidfd_open(1), 0, 0))]
calls += [attempt(lambda: call("process_vm_readv", 1, 0, 0, 0, 0, 0)), attempt(lambda: call("bpf", 0, 0, 0)), attempt(lambda: call("keyctl", 0, -4, 0)), attempt(lambda: call("io_uring_setup", 1, 0))]
answer = calls
""",
    )
    assert set(seen) <= {"EPERM", "EACCES", "ENOSYS"}, seen


async def test_the_nursery_has_no_network_no_devices_and_no_kernel_settings(nursery_of, host):
    seen = await ask(
        nursery_of,
        f"""
answer = {{"host": attempt(lambda: socket.create_connection(("127.0.0.1", {host.port}), 1)), "out": attempt(lambda: socket.create_connection(("192.0.2.1", 80), 1))}}
answer["abstract"] = attempt(lambda: socket.socket(1).connect("\\0" + {host.abstract!r}))
answer["core"] = attempt(lambda: open("/proc/sys/kernel/core_pattern", "w").write("|/x"))
answer["mknod"] = attempt(lambda: os.mknod("/tmp/mem", 0o20666, os.makedev(1, 1)))
answer["sysfs"] = attempt(lambda: call("mount", b"s", b"/tmp", b"sysfs", 0, None))
answer["vsock"] = attempt(lambda: socket.socket(40, 1, 0))
answer["netfilter"] = attempt(lambda: socket.socket(16, 3, 12))
""",
    )
    assert not any(got.startswith("done") for got in seen.values()), seen


async def test_the_nursery_knows_nothing_of_the_hosts_environment_and_descriptors(nursery_of):
    seen = await ask(
        nursery_of,
        """
answer = {"env": sorted(os.environ), "fds": {}}
for fd in range(0, 1024):
    try: answer["fds"][fd] = os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
    except OSError: pass
""",
    )
    foreign = set(os.environ) - {"PATH", "LANG", "HOME", "SHELL", "TZ", "PYTHONMALLOC", "GLIBC_TUNABLES", "PTH_RAN"}
    assert not foreign & set(seen["env"])
    assert (
        set(seen["fds"].values()) <= {"/dev/null", "pipe", "socket", "anon_inode", "/proc/28/fd"}
        or len(seen["fds"]) < 8
    ), seen


@without_cgroups
@pytest.mark.long
async def test_a_memory_bomb_at_import_ends_the_nursery_with_a_clear_error(nursery_of):
    attack = "held = []\nfor _ in range(320): held.append(bytearray(b'x') * (16 << 20))"  # 5 GiB
    async with nursery_of(attack) as engine:
        with pytest.raises(errors.NurseryFailed):
            await asyncio.wait_for(engine.create(SandboxSpec()), 90)


@without_cgroups
@pytest.mark.long
async def test_a_fork_bomb_at_import_stops_at_a_limit(nursery_of):
    attack = """
import time
made = 0
try:
    while made < 5000:
        if os.fork() == 0: time.sleep(60); os._exit(0)
        made += 1
except OSError: pass
answer = made
"""
    async with nursery_of(finding(attack)) as engine:
        try:
            assert await asyncio.wait_for(answer_of(engine, attack), 60) < 2000
        except errors.Unavailable:  # the zygote cannot fork at all
            pass


async def test_a_package_that_exits_crashes_or_raises_at_import_is_a_clear_error(nursery_of):
    for attack in (
        "raise SystemExit(3)",
        "os._exit(7)",
        "os.kill(os.getpid(), 11)",
        "raise ValueError('I refuse')",
        "1/0",
    ):
        async with nursery_of("import os\n" + attack) as engine:
            with pytest.raises(errors.NurseryFailed, match="hostile"):
                await asyncio.wait_for(engine.create(SandboxSpec()), 60)


async def test_threads_and_processes_left_behind_end_with_the_nursery(nursery_of):
    attack = """
import subprocess, threading, time
threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
left = subprocess.Popen(["sleep", "617.25"], start_new_session=True)
"""
    async with nursery_of(attack) as engine:
        try:
            await works(engine)
        except errors.ClocheError:
            pass
    for _ in range(100):
        left = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if b"617.25" in _cmdline(pid)]
        if not left:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"processes {left} of the nursery are still there")


def _cmdline(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


ANNOUNCE = """
import cloche.guest.zygote.zygote as z, os, socket
def announce(self, cell, pid, out, err):
    z.wire.send_frame(self._channel, {"ev": "spawned", "cell": cell}, fds=(%s, out, err))
z.Zygote._announce = announce
"""
LIES = {
    "the host's own pidfd": ANNOUNCE % "int.from_bytes(self._channel.getsockopt(socket.SOL_SOCKET, 77, 4), 'little')",
    "its own pidfd": ANNOUNCE % "os.pidfd_open(os.getpid())",
    "the reaper's pidfd": ANNOUNCE % "os.pidfd_open(1)",
    "no pidfd": ANNOUNCE % "os.open('/dev/null', os.O_RDONLY)",
    "a directory of /proc": ANNOUNCE % "os.open('/proc/self', os.O_RDONLY)",
    "pipes that are none": ANNOUNCE.replace("out, err))", "0, self._channel.fileno()))") % "os.pidfd_open(pid)",
    "garbage": "import cloche.guest.wire as w\nw.encode_frame = lambda header, body=b'': b'\\xff' * 100",
    "strange frames": """
import cloche.guest.zygote.zygote as z
def announce(self, cell, pid, out, err):
    for header in ({"ev": ["x"]}, {"ev": "raw", "seconds": {"a": 1}}, {"ev": "spawned", "cell": ["x"]}, {"ev": "spawn_failed", "cell": {}}):
        z.wire.send_frame(self._channel, header)
    z.wire.send_frame(self._channel, {"ev": "spawned", "cell": cell})
z.Zygote._announce = announce
""",
    "its own death": "import cloche.guest.zygote.zygote as z, os\nz.Zygote._spawn_cell = lambda *_: os._exit(0)",
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_nursery_that_answers_with_a_false_sandbox_is_refused(nursery_of, lie):
    """Above all: the host must never signal a process because a nursery handed it a descriptor."""
    async with nursery_of(LIES[lie]) as engine:
        try:
            sandbox = await asyncio.wait_for(engine.create(SandboxSpec()), 45)
        except errors.ClocheError:
            return
        await asyncio.wait_for(sandbox.kill(), 10)


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 4), reason="pipes know RWF_NOWAIT since Linux 6.4"
)
async def test_a_guest_that_makes_the_hosts_pipes_blocking_does_not_stop_the_host():
    """Whether reading waits is a property of the open file, which a hostile init shares with the host."""
    read, write = os.pipe()
    pipe = OutputPipe(os.dup(read), lambda data: None)
    os.set_blocking(read, True)
    assert pipe.read_now() == 0
    pipe.close()
    writer = PipeWriter(os.dup(write))
    os.set_blocking(write, True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.write(bytes(8 << 20)), 0.5)
    writer.close()
    os.close(read)
    os.close(write)
