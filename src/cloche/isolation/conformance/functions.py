"""Claims about the functions of every backend."""

from __future__ import annotations

import json

from cloche import errors
from cloche.isolation.conformance.claims import Claim, ClaimScene, Examine, expect_that, prints_claim, run_python
from cloche.model import MIB, Limits


async def _last_expression(scene: ClaimScene) -> None:
    ran = await scene.box.run("1 + 1")
    expect_that((ran.outcome, ran.text, ran.stdout) == ("ok", "2", ""), ran)


async def _check_state(scene: ClaimScene) -> None:
    await scene.box.run("kept = 41")
    ran = await scene.box.run("kept + 1")
    expect_that(ran.text == "42", ran)


async def _check_exceptions(scene: ClaimScene) -> None:
    await scene.box.run("before = 'here'")
    ran = await scene.box.run("1 / 0")
    expect_that((ran.outcome, ran.error) == ("raised", "ZeroDivisionError"), ran)
    ran = await scene.box.run("before")
    expect_that(ran.text == "'here'", ran)


async def _check_syntax(scene: ClaimScene) -> None:
    ran = await scene.box.run("def (:")
    expect_that((ran.outcome, ran.error) == ("raised", "SyntaxError"), ran)


async def _check_empty(scene: ClaimScene) -> None:
    ran = await scene.box.run("")
    expect_that((ran.outcome, ran.stdout, ran.stderr) == ("ok", "", ""), ran)


async def _check_streams(scene: ClaimScene) -> None:
    ran = await scene.box.run("import sys; print('out'); print('err', file=sys.stderr)")
    expect_that((ran.stdout, ran.stderr) == ("out\n", "err\n"), ran)


async def _large_output(scene: ClaimScene) -> None:
    ran = await scene.box.run("print('x' * 3_000_000, end='')")
    expect_that(ran.outcome == "ok" and ran.stdout == "x" * 3_000_000, (ran.outcome, len(ran.stdout)))


async def _interrupt_asleep(scene: ClaimScene) -> None:
    await scene.box.run("patience = 'kept'")
    ran = await scene.box.run("import time; print('here', flush=True); time.sleep(60)", interrupt_at="here")
    expect_that(ran.outcome == "interrupted", ran)
    ran = await scene.box.run("patience")
    expect_that(ran.text == "'kept'", ran)


async def _interrupt_busy(scene: ClaimScene) -> None:
    ran = await scene.box.run("print('here', flush=True)\nwhile True: pass", interrupt_at="here")
    expect_that(ran.outcome == "interrupted", ran)


async def _time_limit(scene: ClaimScene) -> None:
    await scene.box.run("hurry = 'kept'")
    ran = await scene.box.run("while True: pass", seconds=0.3)
    expect_that(ran.outcome == "timed_out", ran)
    ran = await scene.box.run("hurry")
    expect_that(ran.text == "'kept'", ran)


async def _separate_contexts(scene: ClaimScene) -> None:
    second = await scene.box.context()
    await scene.box.run("mine = 1")
    ran = await scene.box.run("'mine' in globals()", context=second)
    expect_that(ran.text == "False", ran)


async def _context_dies(scene: ClaimScene) -> None:
    second = await scene.box.context()
    await scene.box.run("other = 'alive'")
    ran = await scene.box.run("import os; os._exit(3)", context=second)
    expect_that(ran.outcome == "died", ran)
    ran = await scene.box.run("other")
    expect_that(ran.text == "'alive'", ran)
    ran = await scene.box.run("2 * 3", context=second)
    expect_that(ran.text == "6", ran)


_DRAW = """
import json, random, sys, uuid
numbers = [random.random(), uuid.uuid4().hex]
if "numpy" in sys.modules: numbers.append(float(sys.modules["numpy"].random.random()))
print(json.dumps(numbers))
"""


async def _check_randomness(scene: ClaimScene) -> None:
    second = await scene.box.context()
    runs = [await scene.box.run(_DRAW), await scene.box.run(_DRAW, context=second), await scene.neighbour.run(_DRAW)]
    expect_that(all(ran.outcome == "ok" for ran in runs), runs)
    drawn = [json.loads(ran.stdout) for ran in runs]
    expect_that(all(len(set(column)) == len(drawn) for column in zip(*drawn, strict=True)), drawn)


async def _check_files(scene: ClaimScene) -> None:
    await scene.box.write("/mnt/data/given.txt", "ü\n".encode())
    ran = await scene.box.run("open('given.txt', encoding='utf-8').read()")
    expect_that(ran.text == "'ü\\n'", ran)
    await scene.box.run("open('made.bin', 'wb').write(bytes(range(256)))")
    expect_that(await scene.box.read("/mnt/data/made.bin") == bytes(range(256)), "other bytes")


async def _large_files(scene: ClaimScene) -> None:
    content = bytes(range(256)) * 12_000
    await scene.box.write("/mnt/data/large.bin", content)
    expect_that(await scene.box.read("/mnt/data/large.bin") == content, "other bytes")


async def _missing_file(scene: ClaimScene) -> None:
    try:
        await scene.box.read("/mnt/data/no such file")
    except errors.FileNotFound:
        return
    expect_that(False, "no error")


async def _check_command(scene: ClaimScene) -> None:
    done = await scene.box.command("echo out; echo err >&2; exit 7")
    expect_that((done.exit_code, done.stdout, done.stderr) == (7, "out\n", "err\n"), done)


async def _command_killed(scene: ClaimScene) -> None:
    done = await scene.box.command("kill -9 $$")
    expect_that(done.exit_code == 137, done)


async def _command_missing(scene: ClaimScene) -> None:
    done = await scene.box.command("no-such-command-here")
    expect_that(done.exit_code == 127, done)


async def _command_input(scene: ClaimScene) -> None:
    done = await scene.box.command("tr a-z A-Z; echo $GREETING", stdin="text\n", env={"GREETING": "hello you"})
    expect_that(done.stdout == "TEXT\nhello you\n", done)


async def _check_terminal(scene: ClaimScene) -> None:
    done = await scene.box.terminal("test -t 0 && test -t 1 && stty size && tty")
    lines = done.stdout.split()
    expect_that(done.exit_code == 0 and lines[:2] == ["30", "100"] and lines[2].startswith("/dev/pts/"), done)


async def _output_by_name(scene: ClaimScene) -> None:
    done = await scene.box.command("echo out > /dev/stdout; echo err > /dev/stderr")
    expect_that((done.stdout, done.stderr) == ("out\n", "err\n"), done)


def _function_claim(name: str, text: str, examine: Examine) -> Claim:
    return Claim(name, "function", text, examine)


_ORDER = "import subprocess; print('a', flush=True); subprocess.run(['echo', 'b']); print('c')"
_LOOPBACK = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    connection, _ = server.accept()
    with connection: connection.sendall(b"over loopback")
    print(client.recv(100).decode())
"""
_TEMPORARY = """
import os, tempfile
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("temporary"); file.seek(0); print(file.read())
"""
_POOL = """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool: print(sum(pool.map(abs, [-1, -2, -3])))
"""
_THREADS = """
import concurrent.futures
with concurrent.futures.ThreadPoolExecutor(8) as pool: print(sum(pool.map(len, ["ab"] * 20)))
"""
_SHARED = """
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
block.buf[:3] = b"shm"; print(bytes(block.buf[:3]).decode()); block.close(); block.unlink()
"""
_ALARM = """
import signal
old = signal.signal(signal.SIGALRM, lambda *_: print("rang"))
signal.setitimer(signal.ITIMER_REAL, 0.02); signal.pause(); signal.signal(signal.SIGALRM, old)
"""
_RECURSION = """
def deeper(): return deeper()
try: deeper()
except RecursionError: print("too deep")
"""
_ZONE = "import datetime, zoneinfo; print(datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin')))"
_PTY = """
import os, pty
parent, child = pty.openpty()
os.write(child, b"through a terminal"); print(os.read(parent, 100).decode()); os.close(parent); os.close(child)
"""

FUNCTION_CLAIMS: tuple[Claim, ...] = (
    prints_claim("code", "Code runs", "print(6 * 7)", "42"),
    _function_claim("last expression", "The last expression's value is the result", _last_expression),
    _function_claim("state", "State persists between executions", _check_state),
    _function_claim("exceptions", "An exception is data, and the state survives it", _check_exceptions),
    _function_claim("syntax errors", "Bad syntax is a failure of the program, not of Cloche", _check_syntax),
    _function_claim("empty code", "Empty code runs and is ok", _check_empty),
    _function_claim("streams", "Standard output and error are kept apart", _check_streams),
    prints_claim("output order", "Output of the program and its children comes in order", _ORDER, "a\nb\nc"),
    _function_claim("large output", "Three megabytes of output arrive whole", _large_output),
    _function_claim("interrupt asleep", "An interrupt ends a sleep and keeps the state", _interrupt_asleep),
    _function_claim("interrupt busy", "An interrupt ends a busy loop", _interrupt_busy),
    _function_claim("time limit", "An execution over its time ends and keeps the state", _time_limit),
    _function_claim("contexts", "A second context has its own variables", _separate_contexts),
    _function_claim("context dies", "A context that dies leaves others alone and can be used again", _context_dies),
    _function_claim("randomness", "No two contexts or sandboxes draw the same random numbers", _check_randomness),
    prints_claim("await", "Top-level await works", "import asyncio; print(await asyncio.sleep(0, 'waited'))", "waited"),
    prints_claim(
        "locale", "Text is UTF-8 everywhere", "import sys; print('é漢', sys.getfilesystemencoding())", "é漢 utf-8"
    ),
    prints_claim("time zones", "Time zone data is there", _ZONE, "2024-07-01 00:00:00+02:00"),
    prints_claim("loopback", "Programs can talk over loopback", _LOOPBACK, "over loopback"),
    prints_claim("temporary files", "Temporary files can be written", _TEMPORARY, "temporary"),
    prints_claim("threads", "Threads work", _THREADS, "40"),
    prints_claim("process pools", "Process pools work", _POOL, "6"),
    prints_claim("shared memory", "Named shared memory works", _SHARED, "shm"),
    prints_claim("signals", "Timers and signal handlers work", _ALARM, "rang"),
    prints_claim("recursion", "Endless recursion is an exception, not a crash", _RECURSION, "too deep"),
    prints_claim("terminals", "A program can open terminals of its own", _PTY, "through a terminal"),
    _function_claim("files", "Files are written and read unchanged", _check_files),
    _function_claim("large files", "Three megabytes are written and read unchanged", _large_files),
    _function_claim("missing files", "Reading a missing file is an error with that reason", _missing_file),
    _function_claim("commands", "A command has its exit code and both streams", _check_command),
    _function_claim("killed commands", "A command that a signal ended has exit code 128 + signal", _command_killed),
    _function_claim("unknown commands", "A command that does not exist has exit code 127", _command_missing),
    _function_claim("command input", "A command gets its input and environment", _command_input),
    _function_claim("command terminal", "A command can have a terminal with a size", _check_terminal),
    _function_claim("streams by name", "A command can open its streams by name", _output_by_name),
)


# Claims about limits, each in a sandbox of its own with low ones: a limit stops the program and nothing
# else.


async def _limit_memory(scene: ClaimScene) -> None:
    second = await scene.box.context()
    await scene.box.run("kept = 'alive'", context=second)
    ran = await scene.box.run("blocks = [bytearray(8 << 20) for _ in range(100)]")
    # Where init has to watch memory itself, a limit per process makes an exception of it before that.
    expect_that(ran.outcome == "out_of_memory" or ran.error == "MemoryError", ran)
    ran = await scene.box.run("kept", context=second)
    expect_that(ran.text == "'alive'", ran)


async def _limit_processes(scene: ClaimScene) -> None:
    made = await run_python(scene.box, _FORKS, "user")
    expect_that(made["error"] == "EAGAIN" and made["count"] <= scene.box.limits.processes, made)
    expect_that((await scene.box.run("'still here'")).text == "'still here'", "it does not run any more")


async def _limit_threads(scene: ClaimScene) -> None:
    made = await run_python(scene.box, _COUNT_THREADS, "user")
    expect_that(0 < made <= scene.box.limits.processes, made)


async def _limit_space(scene: ClaimScene) -> None:
    for directory in ("/mnt/data", "/tmp", "/dev/shm", "/home/user", "/workspace", "/var/tmp"):
        found = await run_python(scene.box, _FILL.replace("DIRECTORY", directory), "user")
        expect_that(found["error"] == "ENOSPC" and found["bytes"] <= scene.box.limits.space_bytes, (directory, found))


async def _limit_inodes(scene: ClaimScene) -> None:
    found = await run_python(scene.box, _INODES, "user")
    expect_that(found["error"] == "ENOSPC", found)


async def _open_files(scene: ClaimScene) -> None:
    found = await run_python(scene.box, _OPEN, "user")
    expect_that(found["error"] == "EMFILE" and found["count"] <= scene.box.limits.open_files, found)


async def _limit_output(scene: ClaimScene) -> None:
    limit = scene.box.limits.output_bytes
    ran = await scene.box.run(f"print('x' * {3 * limit}); print('after')")
    expect_that(ran.outcome == "ok" and len(ran.stdout) <= limit and "limit" in ran.stderr, (ran.outcome, ran.stderr))


async def _limit_inotify(scene: ClaimScene) -> None:
    count = await run_python(scene.box, _INOTIFY, "user")
    expect_that(count <= 16, count)


async def _limit_terminals(scene: ClaimScene) -> None:
    count = await run_python(scene.box, _PTYS, "user")
    expect_that(count <= 64, count)


async def _raising_limits(scene: ClaimScene) -> None:
    for user in ("user", "root"):
        raised = await run_python(scene.box, _RAISE, user)
        expect_that(raised == [], (user, raised))


_FORKS = """
children, error = [], None
while len(children) < 500:
    try: children.append(os.posix_spawn("/bin/sleep", ["sleep", "600"], {}))
    except OSError as failure:
        error = errno.errorcode[failure.errno]
        break
for pid in children:
    os.kill(pid, 9); os.waitpid(pid, 0)
answer = {"count": len(children), "error": error}
"""
_COUNT_THREADS = """
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
    if resource.getrlimit(getattr(resource, name)) != (soft, hard): answer.append(name)
"""
_SMALL_LIMITS = Limits(memory_bytes=128 * MIB, space_bytes=16 * MIB, processes=48, open_files=128, output_bytes=MIB)


def _limit_claim(name: str, text: str, examine: Examine) -> Claim:
    return Claim(name, "wall", text, examine, _SMALL_LIMITS)


LIMIT_CLAIMS: tuple[Claim, ...] = (
    _limit_claim("memory limit", "Too much memory ends the program, and no other context", _limit_memory),
    _limit_claim("process limit", "The number of processes is limited", _limit_processes),
    _limit_claim("thread limit", "Threads count as processes", _limit_threads),
    _limit_claim("space limit", "Writable space is limited, in every directory", _limit_space),
    _limit_claim("file count limit", "The number of files is limited", _limit_inodes),
    _limit_claim("open files limit", "The number of open files is limited", _open_files),
    _limit_claim(
        "output limit", "Output over the limit is dropped with a notice, and the program continues", _limit_output
    ),
    _limit_claim("inotify limit", "File watchers are limited below the host's limit", _limit_inotify),
    _limit_claim("terminal limit", "Terminals are limited below the host's limit", _limit_terminals),
    _limit_claim("raising limits", "No limit can be raised again", _raising_limits),
)
