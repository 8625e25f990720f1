"""The backend gvisor, where runsc can be had: on the PATH, or built by `make runsc`."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.engine.engine import Engine
from cloche.engine.operations.conformance import EngineSandboxBox, run_conformance
from cloche.engine.sandboxes.network import listening_ports
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.isolation.conformance import ALL_CLAIMS, OWN_KERNEL_DIFFERENCES
from cloche.isolation.runsc import Runsc, check_runsc
from cloche.model import MIB, Limits, SandboxSpec
from cloche.sdk.assembly import assemble_engine

BUILT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cloche-tests", "gvisor")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]  # with its own nurseries of everything


@pytest.fixture(scope="module", autouse=True)
def runsc() -> str:
    if os.geteuid() != 0:
        pytest.skip("runsc restores sandboxes for root only")
    path = shutil.which("runsc", path=f"{os.environ['PATH']}:{BUILT}")
    if path is None:
        pytest.skip("there is no runsc: `make runsc` builds it")
    os.environ["PATH"] += f":{Path(path).parent}"
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(data_dir: str) -> AsyncIterator[Engine]:
    async with assemble_engine(Config(data_dir=data_dir, backend="gvisor", pool=PoolConfig(ready=0))) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(engine: Engine) -> AsyncIterator[Sandbox]:
    sandbox = await engine.create(SandboxSpec())
    yield sandbox
    await sandbox.kill()


async def run_text(sandbox: Sandbox, code: str) -> str | None:
    return (await EngineSandboxBox(sandbox).run(code)).text


async def test_code_runs_on_a_kernel_of_its_own(sandbox: Sandbox):
    assert await run_text(sandbox, "1+1") == "2"
    assert "gvisor" in str(await run_text(sandbox, "import os; os.uname().release"))


async def test_imports_were_made_before(sandbox: Sandbox):
    assert await run_text(sandbox, "import sys; 'pandas' in sys.modules") == "True"


async def test_two_restored_sandboxes_share_no_random_numbers(engine: Engine, sandbox: Sandbox):
    code = "import os, random, uuid, numpy; (random.random(), os.urandom(8), uuid.uuid4(), numpy.random.rand())"
    other = await engine.create(SandboxSpec())
    try:
        first, second = await run_text(sandbox, code), await run_text(other, code)
    finally:
        await other.kill()
    assert not set(str(first).strip("()").split(", ")) & set(str(second).strip("()").split(", "))


async def test_a_killed_sandbox_leaves_no_process(engine: Engine):
    before = _runsc_pids(engine)
    sandbox = await engine.create(SandboxSpec())
    assert _runsc_pids(engine) - before
    await sandbox.kill()
    assert _runsc_pids(engine) <= before


def _runsc_pids(engine: Engine) -> set[int]:
    """Of this engine: pytest runs other files beside this one."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"/{engine.instance.name}/gvisor/".encode() in (process / "cmdline").read_bytes():
                found.add(int(process.name))
    return found


async def test_out_of_memory_ends_the_program_and_not_its_sandbox(engine: Engine):
    sandbox = await engine.create(SandboxSpec(limits=Limits(memory_bytes=128 * MIB, space_bytes=64 * MIB)))
    box = EngineSandboxBox(sandbox)
    try:
        other = await box.context()
        await box.run("kept = 1", context=other)
        assert (await box.run("held = [bytearray(8 << 20) for _ in range(100)]")).outcome == "out_of_memory"
        hog = await box.command("python3 -ISc \"held = b'x' * (400 << 20)\"; echo $?")
        assert hog.stdout == "137\n"
        assert (await box.run("kept", context=other)).text == "1"
    finally:
        await sandbox.kill()


async def test_a_port_inside_is_reached_through_a_relay(sandbox: Sandbox):
    serve = "python3 -m http.server --bind 127.0.0.1 8123 > /dev/null 2>&1 &"
    await EngineSandboxBox(sandbox).command(f"cd /mnt/data; head -c 3000000 /dev/zero > large; {serve}")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30):
        while 8123 not in await listening_ports(sandbox._guest, None):
            await asyncio.sleep(0.05)
        connection = await sandbox.connect_port(8123)
        with connection:
            await loop.sock_sendall(connection, b"GET /large HTTP/1.0\r\n\r\n")
            received = 0
            while piece := await loop.sock_recv(connection, 1 << 20):
                received += len(piece)
    assert received > 3_000_000
    with pytest.raises(errors.PortNotOpen):
        await sandbox.connect_port(8124)


async def test_devices_cannot_be_replaced_by_root(sandbox: Sandbox):
    done = await EngineSandboxBox(sandbox).command("rm /dev/null || ln -s x /dev/console || echo kept", user="root")
    assert done.stdout == "kept\n"


async def test_directories_are_opened_without_following_a_symlink(sandbox: Sandbox):
    """gVisor follows one where O_DIRECTORY comes with O_NOFOLLOW."""
    code = """if True:
        import os, sys
        sys.path.insert(0, "/opt/cloche/lib")
        from cloche.guest.files.deep_walk import open_directory
        os.symlink("/home/user", "/tmp/link")
        os.close(open_directory("/home/user"))
        open_directory("/tmp/link")
    """
    assert (await EngineSandboxBox(sandbox).run(code)).error == "NotADirectoryError"


async def test_sandboxes_of_a_pool_stand_still_until_they_are_taken(data_dir: str):
    async with assemble_engine(Config(data_dir=data_dir, backend="gvisor", pool=PoolConfig(ready=1))) as engine:
        await engine.cell_supply.warm()
        (pool,) = engine.cell_supply._pools.values()
        async with asyncio.timeout(30):
            while not pool.ready:
                await asyncio.sleep(0.05)
            cell = pool._ready[0].cell
            if cell._group is None:
                pytest.skip("this host has no cgroups for us, and so no freezer")
            while not cell._group.frozen():
                await asyncio.sleep(0.05)
        sandbox = await engine.create(SandboxSpec())
        assert sandbox._cell is cell and not cell._group.frozen()
        assert await run_text(sandbox, "1+1") == "2"


async def test_every_claim_made_for_it_holds(engine: Engine):
    found = [outcome async for outcome in run_conformance(engine)]
    assert {outcome.name for outcome in found} == {claim.name for claim in ALL_CLAIMS} - set(OWN_KERNEL_DIFFERENCES)
    assert {outcome.name: outcome.detail for outcome in found if not outcome.passed} == {}


async def test_the_doctor_says_how_old_runsc_is(runsc: str):
    today = datetime.date(2026, 9, 25)
    assert Runsc(runsc, "release-20260905.0").built_on == datetime.date(2026, 9, 5)
    assert Runsc(runsc, "VERSION_MISSING").built_on is None
    check = check_runsc(today)
    assert check.state in ("enforced", "best effort") and runsc in check.detail
