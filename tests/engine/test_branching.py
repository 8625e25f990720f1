"""Contexts that are taken back to a mark, and copied: by forks of their kernels."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from cloche import errors
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.executions.checkpoints import MAX_CHECKPOINTS
from cloche.engine.executions.context import Context
from cloche.engine.sandboxes.sandbox import MAX_CONTEXTS, Sandbox
from cloche.events import Output
from cloche.model import MIB, Limits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def value(context: Context, code: str) -> str:
    run = await context.execute(code).result()
    assert run.error is None, run.error
    return (run.text or run.stdout).strip()


@contextlib.asynccontextmanager
async def limited(engine: Engine, limits: Limits) -> AsyncIterator[Sandbox]:
    box = await engine.create(SandboxSpec(limits=limits))
    try:
        yield box
    finally:
        await box.kill()


@pytest.fixture
def walls(config: Config) -> None:
    if config.backend == "plain-unsafe":
        pytest.skip("without walls there are no limits, and all of the host's processes are to be seen")


async def processes(context: Context) -> int:
    """How many there are in its sandbox, zombies too."""
    return int(await value(context, "import os; len([n for n in os.listdir('/proc') if n.isdigit()])"))


async def until(question, answer) -> None:
    """Waits as long as it takes, up to what no host needs."""
    async with asyncio.timeout(20):
        while await question() != answer:
            await asyncio.sleep(0.01)


# --- what a copy is


async def test_a_context_goes_back_to_its_mark_as_often_as_it_likes(box: Sandbox):
    context = box.context()
    await value(context, "x = [1]")
    mark = await context.checkpoint()
    for _ in range(3):
        assert await value(context, "x.append(2); x") == "[1, 2]"
        await context.rollback(mark.id)
        assert await value(context, "x") == "[1]"
    assert context.marks() == [mark]


async def test_forks_have_the_state_and_go_their_own_ways(box: Sandbox):
    context = box.context()
    await value(context, "x = {'a': 1}")
    forks = await context.fork(3)
    for number, fork in enumerate(forks):
        assert await value(fork, f"x['b'] = {number}; x") == f"{{'a': 1, 'b': {number}}}"
    assert await value(context, "x") == "{'a': 1}"
    assert [box.context(fork.id) for fork in forks] == forks
    (grandchild,) = await forks[2].fork()
    assert await value(grandchild, "x") == "{'a': 1, 'b': 2}"


async def test_a_copy_is_exact(box: Sandbox):
    """Cells, counts, the place, the environment, random numbers, an open file with what was written to it."""
    context = box.context()
    await value(context, "import os, random, numpy as np, tempfile\n'first'")
    await value(context, "here = tempfile.mkdtemp(); os.chdir(here); os.environ['MARK'] = 'set'; random.seed(5)")
    await value(context, "log = open('log', 'a'); log.write('before,'); count = open('n', 'w+'); count.write('1234')")
    (fork,) = await context.fork()
    seen = "(Out, In[1], os.getcwd() == here, os.environ['MARK'], random.random(), np.random.rand(), random.getstate())"
    assert await value(fork, seen) == await value(context, seen)
    run = await fork.execute("1").result()
    assert run.count == (await context.execute("1").result()).count
    await value(fork, "log.write('fork,'); log.flush(); count.write('56'); count.flush()")
    await value(context, "log.write('origin'); log.flush(); count.seek(0); count.read(2)")
    assert (
        await value(fork, "open('log').read(), open('n').read(), count.tell()") == "('before,fork,origin', '123456', 6)"
    )


async def test_numbers_of_one_open_file_stay_together_and_others_apart(box: Sandbox):
    context = box.context()
    await value(context, "import os, tempfile\npath = tempfile.mkdtemp() + '/f'\nfile = open(path, 'wb', buffering=0)")
    await value(
        context, "twin = os.dup(file.fileno()); file.write(b'0123'); apart = open(path, 'rb'); other = open(path, 'rb')"
    )
    await value(context, "temporary = tempfile.TemporaryFile(); temporary.write(b'kept')")
    (fork,) = await context.fork()
    await value(fork, "os.write(twin, b'45'); file.write(b'67'); apart.read(3)")
    assert await value(fork, "open(path).read(), apart.tell(), other.tell()") == "('01234567', 3, 0)"
    assert await value(context, "file.tell(), os.lseek(twin, 0, 1), apart.tell()") == "(4, 4, 0)"
    assert await value(fork, "temporary.seek(0); temporary.read()") == "b'kept'"


async def test_private_shared_memory_is_copied(box: Sandbox):
    """Locks of `multiprocessing`, which many libraries make; one that is held in a copy is free in the others."""
    context = box.context()
    await value(context, "import mmap, multiprocessing as mp, os\nlock = mp.RLock(); memory = mmap.mmap(-1, 8192)")
    await value(context, "memory[:6] = b'before'")
    (fork,) = await context.fork()
    await value(fork, "lock.acquire(); memory[:6] = b'forked'")
    assert await value(context, "lock.acquire(timeout=5), memory[:6]") == "(True, b'before')"
    await value(fork, "pid = os.fork()\nif pid == 0:\n    memory[:6] = b'child!'; os._exit(0)\nos.waitpid(pid, 0)")
    assert await value(fork, "memory[:6]") == "b'child!'"


async def test_contexts_of_root_are_copied(engine: Engine):
    box = await engine.create(SandboxSpec(user="root", sudo=True))
    try:
        context = box.context()
        await value(context, "import os; x = 1")
        mark = await context.checkpoint()
        await value(context, "x = 2")
        await context.rollback(mark.id)
        (fork,) = await context.fork()
        assert [await value(each, "x, os.getuid()") for each in (context, fork)] == [
            await value(context, "1, os.getuid()")
        ] * 2
    finally:
        await box.kill()


async def test_output_of_a_copy_is_its_own(box: Sandbox):
    context = box.context()
    await value(context, "import os, sys\nalias = os.dup(1)")
    (fork,) = await context.fork()
    run = await fork.execute(
        "print('a'); os.write(alias, b'b\\n'); os.system('echo c'); print('d', file=sys.stderr)"
    ).result()
    assert (run.stdout, run.stderr) == ("a\nb\nc\n", "d\n")
    assert await value(context, "print('mine')") == "mine"


async def test_a_fork_is_a_context_like_any_other(box: Sandbox):
    """It is interrupted alone, asks, prefers to be killed while it executes, restarts, and is removed."""
    (fork,) = await box.context().fork()
    async with fork.execute("print('go', flush=True)\nwhile True: pass") as execution:
        async for event in execution:
            if isinstance(event, Output):
                assert fork.interrupt() and not box.context().interrupt()
    assert execution.ended is not None and execution.ended.outcome == "interrupted"
    assert (await fork.execute("input('?') + '!'", input=["yes"]).result()).text == "'yes!'"
    score = "open('/proc/self/oom_score_adj').read().strip()"
    assert await value(fork, score) == await value(box.context(), score)
    await fork.restart()
    assert await value(fork, "1 + 1") == "2"
    box.remove_context(fork.id)
    with pytest.raises(errors.ContextNotFound):
        fork.execute("1")


async def test_figures_and_fonts_come_along(box: Sandbox):
    context = box.context()
    draw = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.title('x')"
    await context.execute(draw).result()
    mark = await context.checkpoint()
    await context.rollback(mark.id)
    assert any(result.png for result in (await context.execute(draw).result()).results)


async def test_the_event_loop_works_on_both_sides_of_a_fork(box: Sandbox):
    context = box.context()
    await value(
        context, "import asyncio\nawait asyncio.sleep(0)\nlock = asyncio.Lock(); loop = asyncio.get_running_loop()"
    )
    (fork,) = await context.fork()
    both = "async with lock:\n    await asyncio.sleep(0.001)\nasyncio.get_running_loop() is loop"
    for side in (fork, context, fork):
        assert await value(side, both) == "True"


_NUMERICAL = """
import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
a = np.arange(250000.0).reshape(500, 500)
x = np.random.default_rng(0).random((400, 4))
fit = HistGradientBoostingRegressor(max_iter=3).fit(x, x[:, 0])
float((a @ a)[0, 0]), round(float(fit.score(x, x[:, 0])), 6)
"""


@pytest.mark.long
async def test_pools_of_numerical_threads_are_made_again_on_both_sides(box: Sandbox, walls: None):
    """OpenBLAS's and OpenMP's: the kernel has them when it is copied, and the copy makes its own."""
    context = box.context()
    await value(
        context, "import cloche.guest.kernel.threads as t, sklearn.ensemble; t.find_libraries(); t.restore_threads()"
    )
    result = await value(context, _NUMERICAL)
    assert int(await value(context, "import os; len(os.listdir('/proc/self/task'))")) > 1
    mark = await context.checkpoint()
    (fork,) = await context.fork()
    assert [await value(each, _NUMERICAL) for each in (fork, context)] == [result] * 2
    await context.rollback(mark.id)
    assert await value(context, _NUMERICAL) == result


async def test_a_library_with_threads_of_its_own_is_refused(box: Sandbox):
    """They are C's, and Python knows nothing of them."""
    context = box.context()
    start = "import ctypes\nthread = ctypes.c_ulong(); c = ctypes.CDLL(None)\n"
    start += "c.pthread_create(ctypes.byref(thread), None, ctypes.cast(c.pause, ctypes.c_void_p), None)"
    await value(context, start)
    with pytest.raises(errors.NotCopyable, match="threads of its own"):
        await context.fork()
    assert await value(context, "1 + 1") == "2"


# --- what cannot be copied

_REFUSED = {
    "busy": (
        "import threading; stop = threading.Event()\n"
        "thread = threading.Thread(target=stop.wait, name='busy'); thread.start()",
        "stop.set(); thread.join()",
    ),
    r"socket:\[": ("import socket; sock = socket.socket()", "sock.close()"),
    r"pipe:\[": ("import os; ends = os.pipe()", "[os.close(end) for end in ends]"),
    "eventpoll": ("import select; poll = select.epoll()", "poll.close()"),
    "sleep": ("import subprocess; child = subprocess.Popen(['sleep', '100'])", "child.kill(); child.wait()"),
    "shared memory": (
        "import mmap, os; fd = os.memfd_create('m'); os.ftruncate(fd, 4096); memory = mmap.mmap(fd, 4096)",
        "memory.close(); os.close(fd)",
    ),
    "ITIMER_REAL": ("import signal; signal.alarm(100)", "signal.alarm(0)"),
    "waiting": ("import asyncio; task = asyncio.create_task(asyncio.sleep(100), name='waiting')", "task.cancel()"),
    "locked files": (
        "import fcntl, tempfile; file = tempfile.TemporaryFile(); fcntl.flock(file, fcntl.LOCK_EX)",
        "file.close()",
    ),
}


async def test_state_that_cannot_be_copied_is_refused_by_name_and_runs_on(box: Sandbox):
    context = box.context()
    for name, (begin, end) in _REFUSED.items():
        await value(context, begin)
        with pytest.raises(errors.NotCopyable, match=name):
            await context.checkpoint()
        with pytest.raises(errors.NotCopyable, match=name):
            await context.fork()
        await value(context, end)
        context.forget((await context.checkpoint()).id)


async def test_other_languages_are_refused(box: Sandbox):
    context = box.default_context("bash")
    with pytest.raises(errors.NotCopyable, match="bash"):
        await context.checkpoint()
    with pytest.raises(errors.NotCopyable, match="bash"):
        await context.fork()


async def test_a_program_that_breaks_inspection_is_refused(box: Sandbox):
    context = box.context()
    await value(context, "import random; kept = random.getstate; random.getstate = lambda: 1 / 0")
    with pytest.raises(errors.NotCopyable, match="ZeroDivisionError"):
        await context.checkpoint()
    await value(context, "random.getstate = kept")
    await context.checkpoint()


# --- lives of marks and forks


async def test_a_copy_waits_its_turn(box: Sandbox):
    context = box.context()
    async with context.execute("import time; time.sleep(0.2); x = 'done'") as execution:
        copying = asyncio.create_task(context.fork())
        await execution.result()
        (fork,) = await copying
    assert await value(fork, "x") == "'done'"


async def test_a_context_goes_back_after_its_kernel_died(box: Sandbox):
    context = box.context()
    await value(context, "x = 1")
    mark = await context.checkpoint()
    assert (await context.execute("import os; os._exit(3)").result()).outcome == "died"
    await context.rollback(mark.id)
    assert await value(context, "x") == "1"


async def test_marks_and_forks_outlast_a_pause(engine: Engine):
    box = await engine.create(SandboxSpec())
    try:
        context = box.context()
        await value(context, "x = 1")
        mark = await context.checkpoint()
        (fork,) = await context.fork()
        await value(context, "x = 2")
        await engine.pause(box.id, box.spec.owner)
        with pytest.raises(errors.SandboxPaused):
            await context.rollback(mark.id)
        await engine.resume(box.id, box.spec.owner)
        await context.rollback(mark.id)
        assert [await value(each, "x") for each in (context, fork)] == ["1", "1"]
    finally:
        await box.kill()


async def test_how_a_copy_ended_is_told(box: Sandbox):
    context = box.context()
    (fork,) = await context.fork()
    ended = await fork.execute("import os; os._exit(3)").result()
    assert ended.outcome == "died" and ended.reason is not None and "exited with code 3" in ended.reason
    (fork,) = await context.fork()
    await context.restart()  # the copy's parent is gone, and init is what it has
    ended = await fork.execute("import os; os._exit(4)").result()
    assert ended.reason is not None and "exited with code 4" in ended.reason


async def test_rolling_back_ends_processes_started_since(box: Sandbox, walls: None):
    context = box.context()
    mark = await context.checkpoint()
    before = await processes(context)
    await value(context, "import subprocess; children = [subprocess.Popen(['sleep', '1000']) for _ in range(3)]")
    await context.rollback(mark.id)
    await until(lambda: processes(context), before)


async def test_nothing_stays_of_forgotten_marks_and_removed_forks(box: Sandbox, walls: None):
    context = box.context()
    await context.restart()  # for the first kernel that is started a seed comes, and stays
    before = await processes(context)
    marks = [await context.checkpoint() for _ in range(3)]
    forks = await context.fork(2)
    for mark in marks[:2]:
        context.forget(mark.id)
    for fork in forks:
        box.remove_context(fork.id)
    with pytest.raises(errors.CheckpointNotFound):
        await context.rollback(marks[0].id)
    with pytest.raises(errors.CheckpointNotFound):
        context.forget("m0")
    assert context.marks() == marks[2:]
    await context.restart()
    assert context.marks() == []
    await until(lambda: processes(context), before)


async def test_there_is_an_end_to_marks_and_forks(box: Sandbox):
    context = box.context()
    for _ in range(MAX_CHECKPOINTS):
        await context.checkpoint()
    with pytest.raises(errors.InvalidRequest, match="32 checkpoints"):
        await context.checkpoint()
    with pytest.raises(errors.InvalidRequest, match="64 contexts"):
        await context.fork(MAX_CONTEXTS)
    for nonsense in (0, -1, True, "2"):
        with pytest.raises(errors.InvalidRequest):
            await context.fork(nonsense)  # type: ignore[arg-type]


async def test_processes_of_all_branches_count_together(engine: Engine, walls: None):
    async with limited(engine, Limits(processes=12)) as box:
        context = box.context()
        with pytest.raises(errors.NotCopyable, match="as many processes"):
            for _ in range(20):
                await context.fork()
        assert await value(context, "1 + 1") == "2"
        box.remove_context(box.contexts[-1].id)
        await until(lambda: fits(context), True)


async def fits(context: Context) -> bool:
    try:
        await context.fork()
    except errors.NotCopyable:
        return False
    return True


async def test_memory_of_all_branches_counts_together(engine: Engine, walls: None, memory_is_enforced: bool):
    if not memory_is_enforced:
        pytest.skip("this host has no cgroup for memory")
    async with limited(engine, Limits(memory_bytes=256 * MIB, space_bytes=16 * MIB)) as box:
        context = box.context()
        await value(context, "block = bytearray(60 << 20)")
        forks = await context.fork(6)  # shared, all of them fit
        assert await value(context, "len(block) >> 20") == "60"
        runs = [await fork.execute("block[::4096] = b'x' * len(block[::4096])").result() for fork in forks]
        assert "out_of_memory" in {run.outcome for run in runs}
        assert (await context.execute("len(block) >> 20").result()).outcome == "ok"
