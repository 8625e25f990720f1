"""Hostile programs, and a neighbour that must notice nothing of any of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Run
from cloche.isolation.conformance import HostTraces, leave_traces
from cloche.isolation.conformance.claims import whole_program
from cloche.isolation.probe import host_checks
from cloche.model import MIB, Limits, SandboxSpec, Template
from cloche.sdk.assembly import assemble_engine

TIGHT = Limits(memory_bytes=192 * MIB, space_bytes=32 * MIB, processes=64, open_files=256, output_bytes=4 * MIB)
ATTACK_SECONDS = 30.0
NEIGHBOUR = """
import os
state = {'beats': 0}
open('mine.txt', 'w').write('mine')
home = os.getpid()
known = set(map(int, filter(str.isdigit, os.listdir("/proc"))))
"""
HEARTBEAT = """
import os
state["beats"] += 1
others = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in known]
print(state["beats"], os.getpid() == home, others, sorted(os.listdir("/mnt/data")))
"""


@pytest.fixture(scope="session")
def config(data_dir: str, template: Template) -> Config:
    return Config(data_dir=data_dir, pool=PoolConfig(ready=1))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(config: Config) -> AsyncIterator[Engine]:
    try:
        engine = assemble_engine(config)
    except errors.IsolationUnavailable as error:
        pytest.skip(str(error))
    async with engine:
        yield engine


@pytest.fixture(scope="session")
def locks_are_guarded() -> None:
    [check] = [check for check in host_checks() if check.name == "locks"]
    if check.state != "enforced":
        pytest.skip(check.detail)


@pytest_asyncio.fixture(loop_scope="session")
async def box(engine: Engine) -> AsyncIterator[Sandbox]:
    sandbox = await engine.create(SandboxSpec())
    yield sandbox
    await sandbox.kill()


@pytest_asyncio.fixture(loop_scope="session")
async def tight(engine: Engine) -> AsyncIterator[Sandbox]:
    """A sandbox that has little of everything."""
    sandbox = await engine.create(SandboxSpec(limits=TIGHT))
    yield sandbox
    await sandbox.kill()


class Neighbour:
    """A sandbox beside the attacker's, with a kernel, files and a process of its own."""

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox
        self._beats = 0

    async def settle(self) -> None:
        await self.sandbox.commands.run("python3 -c ''")  # for the first of these a seed comes, and stays
        await self.sandbox.context().execute(NEIGHBOUR).result()

    async def notices_nothing(self) -> None:
        """Its kernel, state, files and processes are as they were, and new ones can be made."""
        self._beats += 1
        run = await self.sandbox.context().execute(HEARTBEAT, timeout_seconds=ATTACK_SECONDS).result()
        assert (run.outcome, run.stdout) == ("ok", f"{self._beats} True [] ['mine.txt']\n")
        result = await self.sandbox.commands.run("echo hello", timeout_seconds=ATTACK_SECONDS)
        assert (result.exit_code, result.stdout) == (0, "hello\n")
        assert await self.sandbox.files.read("mine.txt") == b"mine"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def neighbour(engine: Engine) -> AsyncIterator[Neighbour]:
    sandbox = await engine.create(SandboxSpec())
    neighbour = Neighbour(sandbox)
    await neighbour.settle()
    yield neighbour
    await sandbox.kill()


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def undisturbed(neighbour: Neighbour) -> AsyncIterator[None]:
    """Whatever the test did, the neighbour noticed nothing, and no exception was lost in the host's event loop."""
    lost: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, what: lost.append(what))
    yield
    await neighbour.notices_nothing()
    loop.set_exception_handler(None)
    assert lost == []


@pytest.fixture(scope="session")
def host() -> Iterator[HostTraces]:
    """Things on the host that anybody on it may reach."""
    with leave_traces() as found:
        yield found


Attack = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="session")
def attack() -> Attack:
    """`await attack(box, code, user)`: what a hostile program sets `answer` to. See `conformance_claims.program`."""

    async def run(box: Sandbox, code: str, user: str = "user") -> Any:
        result = await box.commands.run(
            "exec python3 -I -S -", user=user, stdin=whole_program(code), timeout_seconds=ATTACK_SECONDS
        )
        assert result.exit_code == 0, result
        return json.loads(result.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def execute() -> Callable[..., Awaitable[Run]]:
    """`await execute(box, code, seconds)`: runs a hostile program in the sandbox's first kernel."""

    async def run(box: Sandbox, code: str, seconds: float = ATTACK_SECONDS) -> Run:
        return await box.context().execute(code, timeout_seconds=seconds).result()

    return run
