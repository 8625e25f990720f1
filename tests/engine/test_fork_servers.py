"""What starts with everything imported: it comes from a seed, which comes when it is needed, and can be lost."""

from __future__ import annotations

import asyncio
import secrets
import time

import pytest
import pytest_asyncio

from cloche.config import Config
from cloche.engine.commands.program import PythonScript
from cloche.engine.engine import Engine
from cloche.engine.sandboxes import init_client
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.isolation import namespaces
from cloche.linux import cgroups
from cloche.model import MIB, Limits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT_SECONDS = 4.0  # init waits for a seed that does not answer for five
# Of the processes that are not ours, the seed is the one of root's.
SEED = "pgrep -u root -x python3 | grep -vx 1 | head -n 1"


@pytest.fixture
def walls(config: Config) -> None:
    if config.backend == "plain-unsafe":
        pytest.skip("without walls init has everything imported itself")


async def stdout_of(box: Sandbox, source: str) -> str:
    """Of a program that the host starts with everything imported."""
    process = await box.commands.start(PythonScript(source=source))
    return (await process.result()).stdout


async def check_users(box: Sandbox) -> None:
    await box.commands.run("touch /tmp/whose", user="root")
    if (await box.commands.run("stat -c %u /tmp/whose")).stdout != "0\n":
        pytest.skip("with one uid, root is a name, and the seed cannot be told from others by its user")


async def signal_seed(box: Sandbox, name: str) -> None:
    await check_users(box)
    done = await box.commands.run(f"kill -{name} $({SEED})", user="root")
    assert done.exit_code == 0, done


@pytest_asyncio.fixture(loop_scope="session")
async def sown(box: Sandbox, walls: None) -> Sandbox:
    """One that has a seed."""
    assert (await box.commands.run("python3 -c 'print(6 * 7)'")).stdout == "42\n"
    return box


async def test_one_kernel_and_commands_need_none(box: Sandbox, walls: None):
    await check_users(box)
    await box.context().execute("1").result()
    await box.commands.run("true")
    assert (await box.commands.run(SEED)).stdout == ""


async def test_concurrent_requests_share_a_fork_server_without_waiting(engine: Engine, walls: None):
    for _ in range(6):
        box = await engine.create(SandboxSpec())
        began_at = time.monotonic()
        ran, context, script = await asyncio.gather(
            box.commands.run("python3 -c 'import pandas; print(pandas.__name__)'"),
            box.create_context(),
            stdout_of(box, "print(3)"),
        )
        assert (ran.stdout, script) == ("pandas\n", "3\n")
        assert (await context.execute("6 * 7").result()).text == "42"
        assert time.monotonic() - began_at < PROMPT_SECONDS
        await box.kill()


async def test_many_programs_that_end_at_once_are_all_told(sown: Sandbox):
    began_at = time.monotonic()
    scripts = [stdout_of(sown, f"print({n})") for n in range(60)]
    assert await asyncio.gather(*scripts) == [f"{n}\n" for n in range(60)]
    assert time.monotonic() - began_at < 10 * PROMPT_SECONDS


FIND = """
import re
found = set()
for line in open("/proc/self/maps"):
    place, rights, *_, name = line.rstrip().split(" ")
    if rights.startswith("rw") and "[v" not in name:
        start, end = (int(each, 16) for each in place.split("-"))
        with open("/proc/self/mem", "rb", 0) as memory:
            memory.seek(start)
            found |= set(re.findall(rb"[k]ept-[0-9a-f]{16}", memory.read(end - start)))
print(sorted(found))
"""


async def test_no_program_reads_the_request_of_another(sown: Sandbox):
    secret = "kept-" + secrets.token_hex(8)
    script = PythonScript(source=f"print({secret!r})", argv=(secret,))
    asked = await sown.commands.start(script, user="root", env={"SECRET": secret})
    assert (await asked.result()).stdout == f"{secret}\n"
    await sown.commands.run("true", env={"SECRET": secret}, user="root")
    assert await stdout_of(sown, FIND) == "[]\n"
    assert (await sown.commands.run(["python3", "-c", FIND])).stdout == "[]\n"


async def test_one_that_is_killed_is_replaced_and_its_programs_live_on(sown: Sandbox):
    context = await sown.create_context()
    await context.execute("kept = 1").result()
    code = "import os, time; open('up', 'w').close()\nwhile os.path.exists('up'): time.sleep(0.01)\nprint(1)"
    waiting = asyncio.create_task(sown.commands.run(f'python3 -c "{code}"; echo $?'))
    while not await sown.files.exists("up"):
        await asyncio.sleep(0.01)
    await signal_seed(sown, "KILL")
    assert (await sown.commands.run("python3 -c 'print(2)'; rm up")).stdout == "2\n"
    assert (await waiting).stdout == "1\n0\n"
    assert (await context.execute("kept").result()).text == "1"
    ended = await context.execute("import os; os._exit(4)").result()
    assert "exited with code 4" in (ended.reason or "")


@pytest.mark.long
async def test_one_that_is_stopped_holds_up_init_once_and_nothing_runs_twice(sown: Sandbox):
    await signal_seed(sown, "STOP")
    source = "open('/mnt/data/ran', 'a').write('ran\\n')"
    await stdout_of(sown, source)
    assert await sown.files.read("ran") == b"ran\n"
    began_at = time.monotonic()
    await sown.files.list("/mnt/data")
    assert (await sown.commands.run("python3 -c 'print(2)'")).stdout == "2\n"  # by an interpreter of its own
    assert time.monotonic() - began_at < PROMPT_SECONDS
    assert (await sown.commands.run(SEED)).stdout == ""
    assert await sown.files.read("ran") == b"ran\n"


async def test_killing_fork_servers_makes_programs_start_cold_until_the_next(
    sown: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    for _ in range(init_client.MAX_FORK_SERVERS + 1):
        await signal_seed(sown, "KILL")
        assert (await (await sown.create_context()).execute("6 * 7").result()).text == "42"
        if (await sown.commands.run(SEED)).stdout == "":
            break
    else:
        pytest.fail("there was always another")
    monkeypatch.setattr(init_client, "FORK_SERVER_SECONDS", 0.01)
    await asyncio.sleep(0.1)
    await sown.create_context()
    assert (await sown.commands.run(SEED)).stdout != ""


@pytest.mark.long
async def test_contexts_that_do_nothing_take_none_of_a_small_memory_where_init_counts(own_config, opening, walls: None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(namespaces.cgroups, "probe_cgroups", lambda: cgroups.plan_cgroups([]))
        async with opening(own_config) as engine:
            box = await engine.create(SandboxSpec(limits=Limits(memory_bytes=160 * MIB, space_bytes=16 * MIB)))
            await box.context().execute("kept = 1").result()
            contexts = [await box.create_context() for _ in range(3)]
            await asyncio.sleep(1)  # it looks four times a second
            assert (await box.context().execute("kept").result()).text == "1"
            hog = "hog = b'x' * (110 << 20); import time; time.sleep(3)"
            runs = await asyncio.gather(*(context.execute(hog).result() for context in contexts[:2]))
            assert "out_of_memory" in {run.outcome for run in runs}
            assert (await box.context().execute("kept").result()).text == "1"
