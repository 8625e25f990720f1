"""From one sandbox to another: names and limits that the kernel keeps for everybody, and what a cell leaves behind."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import asyncio
import os

import pytest

from cloche.model import SandboxSpec

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

both = pytest.mark.parametrize("user", ["user", "root"])

# Everything that has a name which is not a path. A marker is put into each; whoever shares it finds it.
LEAVE = """
key = 0x51de
libc.shmat.restype = ctypes.c_void_p
memory = libc.shmget(key, 4096, 0o1666); ctypes.memmove(libc.shmat(memory, None, 0), b"marker", 6)
semaphore = libc.semget(key, 1, 0o1666)
queue = libc.msgget(key, 0o1666); libc.msgsnd(queue, ctypes.create_string_buffer(bytes(8) + b"marker"), 6, 0)
libc.mq_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
posix = libc.mq_open(b"/side-door", os.O_CREAT | os.O_RDWR, 0o666, None)
libc.mq_send(posix, b"marker", 6, 0) if posix >= 0 else None  # not every kernel lets a namespace's user have one
for place in ("/dev/shm", "/tmp", "/var/tmp", "/run", "/home/user", "/mnt/data", "/app", "/workspace", "/root"):
    try: open(place + "/side-door", "w").write("marker"); os.chmod(place + "/side-door", 0o666)
    except OSError: pass
doors = []
for name in ("\\0side-door", "/tmp/side-door.sock"):
    doors.append(socket.socket(socket.AF_UNIX)); doors[-1].bind(name); doors[-1].listen()
doors.append(socket.create_server(("", 5555), family=socket.AF_INET6, dualstack_ipv6=True))
answer = [memory >= 0, semaphore >= 0, queue >= 0]
print(json.dumps(answer), flush=True)
import time
end = time.monotonic() + 30
while not os.path.exists("/tmp/down") and time.monotonic() < end: time.sleep(0.02)
"""
FIND = """
answer = {"memory": libc.shmget(0x51de, 4096, 0), "semaphore": libc.semget(0x51de, 1, 0), "queue": libc.msgget(0x51de, 0)}
libc.mq_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
answer["posix"] = libc.mq_open(b"/side-door", os.O_RDWR, 0, None)
answer["files"] = [place for place in ("/dev/shm", "/tmp", "/var/tmp", "/run", "/home/user", "/mnt/data", "/app", "/workspace", "/root") if os.path.exists(place + "/side-door")]
answer["sockets"] = [name for name in ("\\0side-door", "/tmp/side-door.sock") if attempt(lambda: socket.socket(socket.AF_UNIX).connect(name)).startswith("done")]
answer["ports"] = [host for host in ("127.0.0.1", "127.9.9.9", "::1") if attempt(lambda: socket.create_connection((host, 5555), 1)).startswith("done")]
answer["lists"] = [path for path in ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg") if len(open(path).readlines()) > 1]
answer["unix"] = [line for line in open("/proc/net/unix") if "side-door" in line]
answer["tcp"] = [line for path in ("/proc/net/tcp", "/proc/net/tcp6") for line in open(path) if ":15B3 " in line]
"""
NOTHING = {
    "memory": -1,
    "semaphore": -1,
    "queue": -1,
    "posix": -1,
    "files": [],
    "sockets": [],
    "ports": [],
    "lists": [],
    "unix": [],
    "tcp": [],
}


async def until(box, path: str) -> None:
    async with asyncio.timeout(20):
        while not await box.files.exists(path):
            await asyncio.sleep(0.02)


@both
async def test_nothing_that_has_a_name_in_the_kernel_is_shared(box, attack, neighbour, user):
    leaving = asyncio.create_task(attack(box, LEAVE, user))
    await until(box, "/tmp/side-door.sock")
    try:
        for other in ("user", "root"):
            assert await attack(neighbour.sandbox, FIND, other) == NOTHING
    finally:
        await box.files.write("/tmp/down", b"")
    assert await leaving == [True] * 3


# What is counted per user of the host, or for the whole of it. Each holds all it can get until it is told to go.
HOARDS = {
    "queued signals": """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [34])
while held < 50_000 and libc.sigqueue(os.getpid(), 34, ctypes.c_long(0)) == 0: held += 1
""",
    "message queues": """
while held < 40_000 and libc.msgget(0, 0o1600) >= 0: held += 1
""",
    "timers": """
class Event(ctypes.Structure): _fields_ = [("value", ctypes.c_long), ("number", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_char * 48)]
event, timer = Event(0, 0, 1), ctypes.c_int()
while held < 50_000 and libc.syscall(ctypes.c_long(NUMBERS["timer_create"]), 1, ctypes.byref(event), ctypes.byref(timer)) == 0: held += 1
""",
    "epoll watches": """
import select
polls = []
pipes = [os.pipe() for _ in range(100)]
try:
    while held < 100_000:
        polls.append(select.epoll())
        for read, write in pipes: polls[-1].register(read); polls[-1].register(write); held += 2
except OSError: pass
""",
    "semaphores": """
while held < 40_000 and libc.semget(0, 250, 0o1600) >= 0: held += 1
""",
    "locked memory": """
libc.mmap.restype = ctypes.c_void_p
while held < 1000 and libc.mlock(ctypes.c_void_p(libc.mmap(None, 65536, 3, 0x22, -1, 0)), 65536) == 0: held += 1
""",
}
HOLD = """
open("/tmp/held", "w").close()
import time
end = time.monotonic() + 30
while not os.path.exists("/tmp/down") and time.monotonic() < end: time.sleep(0.02)
answer = held
"""
# A little of everything, as any program might want it.
NEED = """
import select, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [34])
answer = {"signals": all(libc.sigqueue(os.getpid(), 34, ctypes.c_long(0)) == 0 for _ in range(100))}
queues = [libc.msgget(0, 0o1600) for _ in range(4)]
answer["queues"] = min(queues) >= 0
for queue in queues: libc.msgctl(queue, 0, None)
class Event(ctypes.Structure): _fields_ = [("value", ctypes.c_long), ("number", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_char * 48)]
event, timer = Event(0, 0, 1), ctypes.c_int()
answer["timers"] = all(libc.syscall(ctypes.c_long(NUMBERS["timer_create"]), 1, ctypes.byref(event), ctypes.byref(timer)) == 0 for _ in range(50))
poll = select.epoll()
for _ in range(50): poll.register(os.pipe()[0])
semaphores = libc.semget(0, 10, 0o1600)
answer["semaphores"] = semaphores >= 0
libc.semctl(semaphores, 0, 0)
libc.mmap.restype = ctypes.c_void_p
answer["locked"] = libc.mlock(ctypes.c_void_p(libc.mmap(None, 4096, 3, 0x22, -1, 0)), 4096) == 0
children = []
for _ in range(20):
    child = os.fork()
    if child == 0: signal.pause()
    children.append(child)
for child in children: os.kill(child, 9); os.waitpid(child, 0)
answer["processes"] = len(children) == 20
"""


QUICK = ("queued signals", "locked memory")


@pytest.mark.parametrize(
    "hoard", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.long) for each in HOARDS]
)
async def test_a_hoard_leaves_the_neighbour_enough(box, attack, neighbour, hoard):
    """With ids of its own for each sandbox, what is counted per user is counted per sandbox; else by its namespace."""
    holding = asyncio.create_task(attack(box, "held = 0\n" + HOARDS[hoard] + HOLD))
    await until(box, "/tmp/held")
    try:
        needed = await attack(neighbour.sandbox, NEED)
        assert all(needed.values()), needed
        # The host can still make sandboxes, and its own processes have what they had.
        os.close(os.open("/dev/null", os.O_RDONLY))
    finally:
        await box.files.write("/tmp/down", b"")
    assert await holding > 0


# Which kernel objects a sandbox is made of.
IDENTITY = """
answer = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup")}
answer["space"] = os.stat("/mnt/data").st_dev
answer["terminals"] = os.stat("/dev/pts").st_dev
answer["proc"] = os.stat("/proc").st_dev
answer["ids"] = open("/proc/self/uid_map").read().split()[1::3]
answer["boot"] = open("/proc/sys/kernel/random/boot_id").read()
answer["found"] = sorted(path for place in ("/tmp", "/var/tmp", "/mnt/data", "/home/user", "/dev/shm", "/run", "/root", "/app", "/workspace") for path in os.listdir(place))
answer["pids"] = sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())
"""


async def test_no_two_sandboxes_are_made_of_the_same_objects(engine, attack, single):
    boxes = [await engine.create(SandboxSpec()) for _ in range(6)]  # from the pool, and made while one waits
    try:
        seen = [await attack(box, IDENTITY, "root") for box in boxes]
    finally:
        for box in boxes:
            await box.kill()
    # With a single id each command of root's has a user namespace that ends with it, and its number is given out again.
    own = ("mnt", "pid", "net", "ipc", "uts", "cgroup", "space", "terminals", "proc", "boot")
    for name in own if single else (*own, "user"):
        assert len({str(each[name]) for each in seen}) == len(seen), name
    assert single or len({str(each["ids"]) for each in seen}) == len(seen)


async def test_a_cell_is_never_used_by_a_second_sandbox(engine, attack):
    """Whatever the first leaves, in files, in the kernel, in memory, as a process or in a planted start-up file, is gone."""
    plant = """
import builtins, os, subprocess, sys
builtins.leftover = sys.leftover = os.leftover = "marker"
os.environ["LEFTOVER"] = "marker"
os.makedirs("/home/user/.ipython/profile_default/startup", exist_ok=True)
for path in ("/home/user/.ipython/profile_default/startup/00.py", "/home/user/.pythonrc.py", "/mnt/data/sitecustomize.py", "/mnt/data/usercustomize.py", "/tmp/leftover"):
    open(path, "w").write("leftover = 'marker'")
subprocess.Popen(["sleep", "300"], start_new_session=True)
"""
    objects = set()
    for _ in range(4):
        box = await engine.create(SandboxSpec())
        try:
            seen = await attack(box, IDENTITY, "root")
            assert seen["found"] == [] and len(seen["pids"]) <= 3
            objects.add((seen["mnt"], seen["space"], seen["boot"]))
            look = "import builtins, os, sys; print([hasattr(each, 'leftover') for each in (builtins, os, sys)], 'leftover' in globals(), os.environ.get('LEFTOVER'))"
            run = await box.context().execute(look).result()
            assert run.stdout == "[False, False, False] False None\n"
            await attack(box, LEAVE.partition("print(json")[0], "root")
            assert (await box.context().execute(plant).result()).outcome == "ok"
        finally:
            await box.kill()
    assert len(objects) == 4


async def test_no_clock_or_random_number_is_shared_by_forks_of_one_zygote(engine):
    """Children of one process would all draw the same: seeds, names of temporary files, ids."""
    code = """
import os, random, secrets, tempfile, uuid
values = [random.random(), secrets.token_hex(8), str(uuid.uuid4()), os.urandom(8).hex(), tempfile.mktemp()]
try:
    import numpy
    values += [float(numpy.random.rand()), float(numpy.random.default_rng().random())]
except ImportError: pass
print(values)
"""
    seen = []
    for _ in range(3):
        box = await engine.create(SandboxSpec())
        try:
            seen.append((await box.context().execute(code).result()).stdout)
            other = await box.create_context()
            seen.append((await other.execute(code).result()).stdout)
        finally:
            await box.kill()
    rows = [eval(each, {"__builtins__": {}}) for each in seen]
    for column in zip(*rows, strict=True):
        assert len(set(column)) == len(rows), column
