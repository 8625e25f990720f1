"""Programs that are held stand still, whichever way the host has for it, and go on as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from tests.engine.conftest import open_engine

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Output
from cloche.isolation import namespaces
from cloche.linux import cgroups
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

FREEZER, SIGNALS, PLAIN = "freezer", "signals", "plain-unsafe"
LOOK_SECONDS = 0.05  # between two looks at one who should not have moved: too short a one could only hide a mistake


@pytest.fixture(scope="module", params=[FREEZER, SIGNALS, pytest.param(PLAIN, marks=pytest.mark.long)])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(way: str, bare_dir: str) -> AsyncIterator[Engine]:
    """By the host's freezer; behind the same walls on a host that gives us no cgroups; and without walls."""
    if way == FREEZER and "freezer" in cgroups.probe_cgroups().missing:
        pytest.skip("this host gives us no freezer")
    backend = PLAIN if way == PLAIN else "namespaces"
    with pytest.MonkeyPatch.context() as patch:
        if way == SIGNALS:
            patch.setattr(namespaces.cgroups, "probe_cgroups", lambda: cgroups.plan_cgroups([]))
        async with open_engine(Config(data_dir=bare_dir, backend=backend, pool=PoolConfig(ready=1))) as engine:
            yield engine


class Program:
    """A command in a sandbox, as the host sees it: by a mark in its arguments that nobody else's have."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()

    def pids(self) -> list[int]:
        """The youngest are looked at first: of those who live for a moment, they are the ones still to be seen."""
        running = sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)
        return [pid for pid in running if self._mark in _read(Path(f"/proc/{pid}/cmdline"))]

    def cpu_nanoseconds(self) -> int:
        return sum(int((_read(Path(f"/proc/{pid}/schedstat")).split() or [b"0"])[0]) for pid in self.pids())

    async def stands_still(self) -> bool:
        """One who counts as stopped may have some steps left to go in the kernel, and no more."""
        before = self.cpu_nanoseconds()
        await asyncio.sleep(LOOK_SECONDS)
        return self.cpu_nanoseconds() - before < 1_000_000

    def states(self) -> set[str]:
        return {_read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()[0].decode() for pid in self.pids()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.005)


async def goes_on(program: Program) -> None:
    enough = program.cpu_nanoseconds() + 2_000_000
    await until(lambda: program.cpu_nanoseconds() > enough)


async def started(box: Sandbox, script: str) -> Program:
    mark = secrets.token_hex(8)
    await box.commands.start(["bash", "-c", script, mark], background=True)
    program = Program(mark)
    await until(lambda: bool(program.pids()))
    return program


BUSY = "while :; do :; done"


async def test_they_use_no_cpu_and_go_on(box: Sandbox) -> None:
    busy = await started(box, f"({BUSY}) & {BUSY}")
    await until(lambda: len(busy.pids()) == 2)
    for _ in range(3):
        await box.freezer.hold()
        assert await busy.stands_still()
        await box.freezer.release()
        await goes_on(busy)


async def test_holds_are_counted(box: Sandbox) -> None:
    busy = await started(box, BUSY)
    await box.freezer.hold()
    await box.freezer.hold()
    await box.freezer.release()
    assert box.freezer.held and await busy.stands_still()
    await box.freezer.release()
    assert not box.freezer.held
    await goes_on(busy)
    with pytest.raises(RuntimeError):
        await box.freezer.release()


async def test_requests_to_a_frozen_kernel_are_served_afterwards(box: Sandbox) -> None:
    await box.context().execute("x = 20").result()
    await box.freezer.hold()
    asked = asyncio.create_task(box.context().execute("x + 1").result())
    await asyncio.sleep(LOOK_SECONDS)
    assert not asked.done()
    await box.freezer.release()
    assert (await asked).text == "21"


async def test_an_interrupt_meanwhile_comes_afterwards(box: Sandbox) -> None:
    code = "import time\ntry: print('begun'); time.sleep(1000)\nexcept KeyboardInterrupt: print('heard')"
    async with box.context().execute(code) as execution:
        async for event in execution:
            if isinstance(event, Output) and event.text == "begun\n":
                await box.freezer.hold()
                box.context().interrupt()
                ended = asyncio.create_task(execution.result())
                await asyncio.sleep(LOOK_SECONDS)
                assert not ended.done()
                await box.freezer.release()
                assert (await ended).stdout == "heard\n"
                return


async def test_a_stopped_process_stays_stopped(box: Sandbox) -> None:
    stopped = await started(box, f"kill -STOP $$; {BUSY}")
    await until(lambda: stopped.states() == {"T"})
    await box.freezer.hold()
    await box.freezer.release()
    await asyncio.sleep(LOOK_SECONDS)
    assert stopped.states() == {"T"}


async def test_a_shell_does_not_find_its_child_stopped(box: Sandbox) -> None:
    shell = await box.commands.start(["bash", "--norc", "-i"], pty=(80, 24), background=True)
    mark = secrets.token_hex(8)
    await shell.send_stdin(f"bash -c 'while [ ! -e go ]; do sleep 0.01; done' {mark}; echo en''ded; exit\n".encode())
    child = Program(mark)
    await until(lambda: len(child.pids()) == 1)
    for _ in range(5):
        await box.freezer.hold()
        await box.freezer.release()
    await box.files.write("go", b"")
    said = (await shell.result()).stdout
    assert "ended" in said and "Stopped" not in said


async def test_a_process_that_keeps_starting_programs_is_frozen(box: Sandbox) -> None:
    loop = await started(box, "while :; do /bin/true; (exec /bin/true) & wait; done")
    for _ in range(10):
        await box.freezer.hold()
        assert await loop.stands_still()
        await box.freezer.release()
    await goes_on(loop)


# What a shell holds makes each fork of it take long, and most of the time one is under way.
FORKING = "printf -v much %100000000s; while :; do (for ((i = 0; i < 1000; i++)); do :; done); done"


@pytest.mark.long
async def test_a_process_in_the_middle_of_a_fork_is_frozen_with_its_child(box: Sandbox) -> None:
    """It stops when it has a child, who may be younger than the list of those who were looked at."""
    forking = await started(box, FORKING)
    await until(lambda: len(forking.pids()) > 1)
    for number in range(30):
        await asyncio.sleep(number / 1000)  # to meet it at another point each time
        await box.freezer.hold()
        held = set(forking.pids())
        assert await forking.stands_still() and set(forking.pids()) == held
        await box.freezer.release()


SPAWNING = """
import os
os.mkfifo("fifo")
print("begun", flush=True)
opens = (os.POSIX_SPAWN_OPEN, 0, "fifo", os.O_RDONLY, 0)
os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=[opens]), 0)[1]
"""


async def test_a_process_waiting_for_a_vfork_child_is_frozen(box: Sandbox) -> None:
    """Inside the kernel, for as long as the child, which is stopped, has not become a program of its own."""
    spawning = box.context().execute(SPAWNING)
    async for event in spawning:
        if isinstance(event, Output):
            break
    for _ in range(3):
        await box.freezer.hold()
        await box.freezer.release()
    await (await box.commands.start(": > fifo")).result()
    assert (await spawning.result()).text == "0"


RELAY = "relay() { relay & }; relay"  # each starts the next and ends


@pytest.mark.long
async def test_a_forking_chain_is_frozen_or_all_run_on(box: Sandbox, way: str) -> None:
    relay = await started(box, RELAY)
    try:
        await box.freezer.hold()
    except errors.Unavailable:
        assert way != FREEZER, "nobody outruns the freezer"
        assert not box.freezer.held
    else:
        pids = set(relay.pids())
        await asyncio.sleep(LOOK_SECONDS)
        assert set(relay.pids()) == pids
        await box.freezer.release()
    was = set(relay.pids())
    await until(lambda: bool(set(relay.pids()) - was))


async def test_a_sandbox_is_killed_while_it_is_held(engine: Engine) -> None:
    box = await engine.create(SandboxSpec())
    busy = await started(box, f"({BUSY}) & {BUSY}")
    await box.freezer.hold()
    await box.kill()
    await box.wait_ended()
    assert busy.pids() == []
    with pytest.raises(errors.Gone):
        await box.context().execute("1").result()


async def test_a_sandbox_is_killed_while_it_comes_to_a_stand(engine: Engine) -> None:
    for pause_seconds in (0, 0.001, 0.005):
        box = await engine.create(SandboxSpec())
        busy = await started(box, BUSY)
        holding = asyncio.create_task(box.freezer.hold())
        await asyncio.sleep(pause_seconds)
        await box.kill()
        with contextlib.suppress(errors.Gone, errors.Unavailable):
            await holding
        await box.wait_ended()
        assert busy.pids() == []


async def test_a_cancelled_freeze_leaves_all_running(box: Sandbox) -> None:
    busy = await started(box, BUSY)
    for pause_seconds in (0, 0.001, 0.004, 0.01):
        holding = asyncio.create_task(box.freezer.hold())
        await asyncio.sleep(pause_seconds)
        holding.cancel()
        await asyncio.wait([holding])
        if not holding.cancelled():
            await box.freezer.release()
        await goes_on(busy)
    await box.freezer.hold()
    await box.freezer.release()
    assert (await box.context().execute("6 * 7").result()).text == "42"


async def test_a_command_killed_meanwhile_is_gone_afterwards(box: Sandbox) -> None:
    process = await box.commands.start(BUSY, background=True)
    await box.freezer.hold()
    process.kill()
    await box.freezer.release()
    assert (await process.result()).exit_code == 128 + signal.SIGKILL
