"""Limits, each in a sandbox of its own that has little: reached, they stop the program and nobody else."""

from __future__ import annotations

from cloche.isolation.conformance_claims import Claim, Examine, Scene, expect, python
from cloche.model import MIB, Limits


async def _memory(scene: Scene) -> None:
    second = await scene.box.context()
    await scene.box.run("kept = 'alive'", context=second)
    ran = await scene.box.run("blocks = [bytearray(8 << 20) for _ in range(100)]")
    # Where init has to watch memory itself, a limit per process makes an exception of it before that.
    expect(ran.outcome == "out_of_memory" or ran.error == "MemoryError", ran)
    ran = await scene.box.run("kept", context=second)
    expect(ran.text == "'alive'", ran)


async def _processes(scene: Scene) -> None:
    made = await python(scene.box, _FORKS, "user")
    expect(made["error"] == "EAGAIN" and made["count"] <= scene.box.limits.processes, made)
    expect((await scene.box.run("'still here'")).text == "'still here'", "it does not run any more")


async def _threads(scene: Scene) -> None:
    made = await python(scene.box, _THREADS, "user")
    expect(0 < made <= scene.box.limits.processes, made)


async def _space(scene: Scene) -> None:
    for directory in ("/mnt/data", "/tmp", "/dev/shm", "/home/user", "/var/tmp"):
        found = await python(scene.box, _FILL.replace("DIRECTORY", directory), "user")
        expect(found["error"] == "ENOSPC" and found["bytes"] <= scene.box.limits.space_bytes, (directory, found))


async def _inodes(scene: Scene) -> None:
    found = await python(scene.box, _INODES, "user")
    expect(found["error"] == "ENOSPC", found)


async def _open_files(scene: Scene) -> None:
    found = await python(scene.box, _OPEN, "user")
    expect(found["error"] == "EMFILE" and found["count"] <= scene.box.limits.open_files, found)


async def _output(scene: Scene) -> None:
    limit = scene.box.limits.output_bytes
    ran = await scene.box.run(f"print('x' * {3 * limit}); print('after')")
    expect(ran.outcome == "ok" and len(ran.stdout) <= limit and "limit" in ran.stderr, (ran.outcome, ran.stderr))


async def _inotify(scene: Scene) -> None:
    count = await python(scene.box, _INOTIFY, "user")
    expect(count <= 16, count)


async def _terminals(scene: Scene) -> None:
    count = await python(scene.box, _PTYS, "user")
    expect(count <= 64, count)


async def _raising_limits(scene: Scene) -> None:
    for user in ("user", "root"):
        raised = await python(scene.box, _RAISE, user)
        expect(raised == [], (user, raised))


_FORKS = """
children, error = [], None
while len(children) < 500:
    try: pid = os.fork()
    except OSError as failure:
        error = errno.errorcode[failure.errno]
        break
    if pid == 0:
        import signal
        signal.pause()
    children.append(pid)
for pid in children:
    os.kill(pid, 9); os.waitpid(pid, 0)
answer = {"count": len(children), "error": error}
"""
_THREADS = """
import threading
done = threading.Event()
threads = []
try:
    while len(threads) < 500:
        thread = threading.Thread(target=done.wait, daemon=True)
        thread.start()
        threads.append(thread)
except RuntimeError: pass
answer = len(threads)
done.set()
"""
_FILL = """
error, total = None, 0
try:
    with open("DIRECTORY/full", "wb", buffering=0) as file:
        while total < 256 << 20: total += file.write(bytes(1 << 20))
except OSError as failure: error = errno.errorcode[failure.errno]
os.unlink("DIRECTORY/full")
answer = {"bytes": total, "error": error}
"""
_INODES = """
os.mkdir("/tmp/many")
error = None
try:
    for number in range(100_000): os.close(os.open(f"/tmp/many/{number}", os.O_CREAT | os.O_WRONLY))
except OSError as failure: error = errno.errorcode[failure.errno]
answer = {"count": number, "error": error}
"""
_OPEN = """
files, error = [], None
try:
    while len(files) < 10_000: files.append(os.open("/dev/null", os.O_RDONLY))
except OSError as failure: error = errno.errorcode[failure.errno]
answer = {"count": len(files), "error": error}
os.closerange(3, 10_100)
"""
_INOTIFY = """
answer = 0
while answer < 200 and libc.inotify_init1(0) >= 0: answer += 1
"""
_PTYS = """
held = []
try:
    while len(held) < 200: held.append(os.openpty())
except OSError: pass
answer = len(held)
"""
_RAISE = """
import resource
answer = []
for name in ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE"):
    soft, hard = resource.getrlimit(getattr(resource, name))
    try: resource.setrlimit(getattr(resource, name), (soft, hard + 1))
    except (ValueError, OSError): continue
    answer.append(name)
"""
_SMALL = Limits(memory_bytes=128 * MIB, space_bytes=16 * MIB, processes=48, open_files=128, output_bytes=MIB)


def _limit(name: str, text: str, examine: Examine) -> Claim:
    return Claim(name, "wall", text, examine, _SMALL)


LIMITS: tuple[Claim, ...] = (
    _limit("memory limit", "Too much memory ends the program, and no other context", _memory),
    _limit("process limit", "Processes come to an end", _processes),
    _limit("thread limit", "Threads count as processes", _threads),
    _limit("space limit", "Writable space comes to an end inside, wherever it is", _space),
    _limit("file count limit", "The number of files comes to an end inside", _inodes),
    _limit("open files limit", "Open files come to an end", _open_files),
    _limit("output limit", "Output over the limit is dropped with a notice, and the program goes on", _output),
    _limit("inotify limit", "File watchers come to an end before the host's do", _inotify),
    _limit("terminal limit", "Terminals come to an end before the host's do", _terminals),
    _limit("raising limits", "No limit can be raised again", _raising_limits),
)
