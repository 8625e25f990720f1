"""Sandboxes as a whole: lifetimes, endings that are told apart, the pool, nurseries that die, restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from cloche import errors
from cloche.config import Config, LifetimeConfig, PoolConfig
from cloche.engine.engine import Engine
from cloche.engine.instance import Instance
from cloche.engine.sandboxes.pool import CellPool, ReadyCell
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.linux import cgroups
from cloche.model import Limits, SandboxSpec
from cloche.network_policy import NetworkPolicy
from cloche.store.base import SandboxRecord
from cloche.store.sandboxes import SqliteSandboxRecords

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def until(true) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.01)


async def answer(box: Sandbox) -> str | None:
    return (await box.context().execute("6*7").result()).text


async def test_an_id_is_valid_in_every_dialect(box: Sandbox):
    assert len(box.id) == 21 and box.id[0] == "i" and box.id.isalnum() and box.id.islower()


async def test_unknown_killed_expired_are_three_errors(engine: Engine):
    killed = await engine.create(SandboxSpec())
    expired = await engine.create(SandboxSpec(lifetime_seconds=0.05))
    await killed.kill()
    await until(lambda: expired.ending is not None)
    with pytest.raises(errors.SandboxNotFound, match="no sandbox"):
        await engine.get("i" + "0" * 20, "local")
    with pytest.raises(errors.SandboxKilled, match=r"was killed at \d{4}-.* UTC: killed by its owner"):
        await engine.get(killed.id, "local")
    with pytest.raises(errors.SandboxExpired, match=r"timed out at \d{4}-.* UTC"):
        await engine.get(expired.id, "local")
    with pytest.raises(errors.SandboxExpired):
        await expired.files.read("a") if not expired.check_running() else None


async def test_a_foreign_sandbox_looks_like_one_that_never_existed(engine: Engine, box: Sandbox):
    with pytest.raises(errors.SandboxNotFound) as foreign:
        await engine.get(box.id, "somebody")
    with pytest.raises(errors.SandboxNotFound) as unknown:
        await engine.get("i" + "0" * 20, "somebody")
    assert str(foreign.value).replace(box.id, "") == str(unknown.value).replace("i" + "0" * 20, "")
    assert box.id not in [info.id for info in engine.list("somebody")]
    assert box.id in [info.id for info in engine.list("local")]
    assert await engine.get(box.id, "local") is box


async def test_a_renewed_deadline_is_kept(engine: Engine):
    box = await engine.create(SandboxSpec(lifetime_seconds=0.5))
    renewed = box.renew(1000)
    assert renewed.deadline_at is not None and renewed.deadline_at > time.time() + 900
    await asyncio.sleep(0.7)  # past its first deadline
    assert await answer(box) == "42"
    most = box.renew(10**9).deadline_at
    assert most is not None and most <= box.record.created_at + engine.config.lifetime.max_seconds + 1  # two clocks
    for seconds in (0, -1, float("nan"), None):
        with pytest.raises(errors.InvalidRequest):
            box.renew(seconds)
    await box.kill()
    with pytest.raises(errors.SandboxKilled):
        box.renew(1)


async def test_killing_twice_and_at_once_is_harmless(engine: Engine):
    box = await engine.create(SandboxSpec())
    await asyncio.gather(box.kill(), box.kill())
    await box.kill()
    assert box.info.state == "ended"


async def test_limits_beyond_the_hosts_are_refused(engine: Engine):
    for spec in (
        SandboxSpec(limits=Limits(memory_bytes=1 << 50)),
        SandboxSpec(lifetime_seconds=10**9),
        SandboxSpec(network=NetworkPolicy(allow=("example.org",))),
    ):
        with pytest.raises(errors.InvalidRequest):
            await engine.create(spec)
    with pytest.raises(errors.TemplateNotFound, match="python"):
        await engine.create(SandboxSpec(template="no-such-template"))


async def test_a_spec_that_fits_into_no_frame_is_refused_and_leaves_no_cell(engine: Engine, monkeypatch):
    taken: list[ReadyCell] = []
    take = CellPool.take

    async def taking(pool: CellPool) -> ReadyCell:
        taken.append(await take(pool))
        return taken[-1]

    monkeypatch.setattr(CellPool, "take", taking)
    with pytest.raises(errors.InvalidRequest):
        await engine.create(SandboxSpec(env={f"A{number}": "\x01" * 100_000 for number in range(8)}))
    assert [ready.alive for ready in taken] == [False]


async def test_env_and_metadata_of_a_sandbox(engine: Engine):
    box = await engine.create(SandboxSpec(env={"A": "é"}, metadata={"m": "1"}))
    other = await box.create_context()
    for context in (box.context(), other):
        assert (await context.execute("import os; os.environ['A']").result()).text == "'é'"
    assert (await box.commands.run("echo $A")).stdout == "é\n"
    assert box.info.metadata == {"m": "1"}
    await box.kill()


async def test_a_sandbox_whose_init_dies_is_lost_and_says_so(engine: Engine):
    box = await engine.create(SandboxSpec())
    running = asyncio.create_task(box.context().execute("import time; time.sleep(60)").result())
    await until(lambda: box.context()._running is not None and box.context()._running.started)
    os.kill(_init_pid(box), signal.SIGKILL)
    run = await asyncio.wait_for(running, 10)
    assert run.outcome == "died" and run.reason is not None and "lost" in run.reason
    with pytest.raises(errors.SandboxLost):
        await engine.get(box.id, "local")


def _init_pid(box: Sandbox) -> int:
    cell = getattr(box._cell, "_cell", box._cell)
    for line in Path(f"/proc/self/fdinfo/{cell._pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise AssertionError("no pid")


async def test_many_creates_at_once_are_all_different(engine: Engine):
    boxes = await asyncio.gather(*(engine.create(SandboxSpec()) for _ in range(8)))
    try:
        assert await asyncio.gather(*(answer(box) for box in boxes)) == ["42"] * 8
        assert len({box.id for box in boxes}) == 8
        await asyncio.gather(*(box.context().execute("mine = 1").result() for box in boxes[:4]))
        assert (await boxes[5].context().execute("'mine' in globals()").result()).text == "False"
    finally:
        await asyncio.gather(*(box.kill() for box in boxes))


async def test_the_pool_refills_for_a_cell_taken_as_a_refill_ends(own_config: Config, opening):
    async with opening(own_config) as engine:
        await engine.cell_supply.warm()
        (pool,) = engine.cell_supply._pools.values()
        refilling = pool._refilling
        while not refilling.done():
            await asyncio.sleep(0)
        await engine.create(SandboxSpec())
        await until(lambda: pool.ready == 2)


async def test_the_pool_refills_and_replaces_dead_cells(own_config: Config, opening):
    async with opening(own_config) as engine:
        await engine.cell_supply.warm()
        (pool,) = engine.cell_supply._pools.values()
        await until(lambda: pool.ready == 2)
        waiting = pool._ready[0]
        os.kill(_init_pid_of(waiting.cell), signal.SIGKILL)
        await until(lambda: waiting not in pool._ready and pool.ready == 2)
        box = await engine.create(SandboxSpec())
        assert await answer(box) == "42"
        await until(lambda: pool.ready == 2)


async def test_a_dead_pooled_cell_is_not_handed_out_before_it_is_noticed(own_config: Config, opening):
    async with opening(own_config) as engine:
        await engine.cell_supply.warm()
        (pool,) = engine.cell_supply._pools.values()
        await until(lambda: pool.ready == 2)
        dead = list(pool._ready)
        for each in dead:
            os.kill(_init_pid_of(each.cell), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while any(each.cell.alive for each in dead) and time.monotonic() < deadline:
            time.sleep(0.001)  # the event loop stands still, as on a host that has no time for it
        assert pool.ready == 2
        taken = await pool.take()
        assert taken not in dead and taken.alive
        await taken.aclose()


def _init_pid_of(cell) -> int:
    return _init_pid(type("Box", (), {"_cell": cell})())


async def test_a_nursery_that_dies_loses_no_sandbox_and_is_replaced(own_config: Config, opening):
    async with opening(msgspec.structs.replace(own_config, pool=PoolConfig(ready=0))) as engine:
        box = await engine.create(SandboxSpec())
        (nursery,) = engine.cell_supply._nurseries.values()
        first = await nursery.get()
        await box.context().execute("kept = 1").result()
        _kill_zygote(box)
        await until(lambda: not first.alive)
        other = await engine.create(SandboxSpec())
        assert await answer(other) == "42"
        assert (await box.context().execute("kept").result()).text == "1"
        assert (await (await box.create_context()).execute("1").result()).text == "1"


def _kill_zygote(box: Sandbox) -> None:
    """By way of its cradle, which is the parent of every init: the zygote ends when it is gone."""
    status = Path(f"/proc/{_init_pid(box)}/status").read_text()
    os.kill(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")), signal.SIGKILL)


async def test_closing_ends_executions_with_shutdown_and_leaves_nothing(own_config: Config, opening, monkeypatch):
    monkeypatch.setattr(cgroups, "_DEATH_SECONDS", 60.0)  # on a busy machine the dead take longer to be gone
    async with opening(own_config) as engine:
        box = await engine.create(SandboxSpec())
        running = asyncio.create_task(box.context().execute("import time; time.sleep(60)").result())
        await until(lambda: box.context()._running is not None and box.context()._running.started)
        pid = _init_pid(box)
    run = await running
    assert (run.outcome, run.reason) == ("died", "shutdown")
    assert _gone(pid)
    assert not engine._instance.directory.exists()
    with pytest.raises(errors.ShuttingDown):
        await engine.create(SandboxSpec())


def _gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return "State:\tZ" in status  # dead; without a pid namespace whoever adopted it has yet to reap it


async def test_how_a_sandbox_ended_is_known_after_a_restart(own_config: Config, opening):
    async with opening(own_config) as engine:
        killed, running = await engine.create(SandboxSpec()), await engine.create(SandboxSpec())
        await killed.kill("by the test")
    async with opening(own_config) as engine:
        with pytest.raises(errors.SandboxKilled, match="by the test"):
            await engine.get(killed.id, "local")
        with pytest.raises(errors.SandboxKilled, match="its host shut down"):
            await engine.get(running.id, "local")


HOST = """
import asyncio, sys
from cloche.config import Config
from cloche.model import SandboxSpec
from cloche.sdk.assembly import assemble_engine as assemble
async def main():
    async with assemble(Config(data_dir=sys.argv[1], backend=sys.argv[2])) as engine:
        box = await engine.create(SandboxSpec())
        await engine.records.notes(box.id)  # it is written now
        print(box.id, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_sandboxes_of_a_host_process_that_was_killed_are_lost(own_config: Config, opening):
    command = [sys.executable, "-c", HOST, own_config.data_dir, own_config.backend]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        try:
            id = (await asyncio.to_thread(host.stdout.readline)).strip()
            if not id:
                pytest.skip("this host cannot start that backend")
            async with opening(own_config) as engine:
                with pytest.raises(errors.SandboxNotFound, match="another process"):
                    await engine.get(id, "local")
        finally:
            host.kill()
    async with opening(own_config) as engine:
        with pytest.raises(errors.SandboxLost, match="its host process died"):
            await engine.get(id, "local")
        assert [each.name for each in (Path(own_config.data_dir) / "run").iterdir()] == [engine._instance.name]


async def test_without_walls_a_home_that_was_removed_does_not_come_back(own_config: Config, opening):
    """A kernel that was just being made when its host was killed may come to its directory after it was removed."""
    if own_config.backend != "plain-unsafe":
        pytest.skip("behind walls it is no directory of the host's")
    async with opening(own_config) as engine:
        box = await engine.create(SandboxSpec())
        home = Path((await box.commands.run("echo $HOME")).stdout.strip())
        assert (await box.commands.run("pwd", cwd="/mnt/data/new/one")).stdout == f"{home}/data/new/one\n"
        assert home.is_relative_to(Path(own_config.data_dir) / "run")
        shutil.rmtree(home)
        assert (await box.commands.run("true")).exit_code == 127
        assert not home.exists()


async def test_a_lifetime_has_a_maximum(own_config: Config, opening):
    config = msgspec.structs.replace(own_config, lifetime=LifetimeConfig(max_seconds=100.0))
    async with opening(config) as engine:
        with pytest.raises(errors.InvalidRequest, match="100 s"):
            await engine.create(SandboxSpec(lifetime_seconds=101))


def record(id: str, **fields) -> SandboxRecord:
    spec = SandboxSpec(owner="o", template="t@1", **fields)
    return SandboxRecord(id=id, spec=spec, state="running", instance="here", created_at=time.time())


async def test_records_are_seen_at_once_and_by_others(tmp_path: Path):
    path = tmp_path / "store.sqlite3"
    first, second = SqliteSandboxRecords(path), SqliteSandboxRecords(path)
    await asyncio.gather(first.open(), second.open())
    for number in range(500):
        first.put(record(f"i{number}", metadata={"a": "é"}))
    assert await first.get("i499") == (await first.list("o"))[0] or await first.get("i499") is not None
    assert await second.get("i0") == await first.get("i0")
    first.put(msgspec.structs.replace(record("i0"), state="killed", ended_at=time.time(), end_reason="x"))
    changed = await first.get("i0")
    assert changed is not None and changed.state == "killed"
    assert len(await first.list("o")) == 500
    lost = await first.mark_lost(lambda instance: instance != "here", time.time())
    assert {each.id for each in lost} == {f"i{number}" for number in range(1, 500)}
    assert {each.owner for each in lost} == {"o"}
    await asyncio.gather(first.aclose(), second.aclose())


async def test_records_of_sandboxes_ended_long_ago_are_dropped(tmp_path: Path):
    first = SqliteSandboxRecords(tmp_path / "s")
    await first.open()
    first.put(msgspec.structs.replace(record("old"), state="killed", ended_at=time.time() - 31 * 86400))
    first.put(msgspec.structs.replace(record("new"), state="killed", ended_at=time.time() - 29 * 86400))
    await first.aclose()
    second = SqliteSandboxRecords(tmp_path / "s")
    await second.open()
    assert await second.get("old") is None
    assert await second.get("new") is not None
    await second.aclose()


async def test_a_store_that_cannot_be_opened_is_said(tmp_path: Path):
    (tmp_path / "s").write_text("this is no database" * 100)
    with pytest.raises(errors.Unavailable, match="records"):
        await SqliteSandboxRecords(tmp_path / "s").open()


async def test_only_the_dead_are_cleaned(tmp_path: Path):
    live, looking = Instance(tmp_path), Instance(tmp_path)
    live.open()
    looking.open()
    dead = tmp_path / "hdead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "left").touch()
    assert looking.is_live(live.name) and looking.is_live(looking.name)
    assert not looking.is_live("hdead") and not looking.is_live("hnever")
    assert looking.clean() == ["hdead"]
    assert not dead.exists() and live.directory.exists() and looking.directory.exists()
    live.close()
    assert not looking.is_live(live.name) and not live.directory.exists()
    looking.close()


async def test_nothing_shows_that_a_cell_of_the_pool_has_rehearsed(engine):
    await engine.cell_supply.warm()
    while not engine.waiting:
        await asyncio.sleep(0.01)
    sandbox = await engine.create(SandboxSpec())
    seen = "print(In[:-1], Out, [_], [_i], [name for name in dir() if name[:2] == '_i' and name[2:].isdigit()])"
    run = await sandbox.context().execute(seen).result()
    assert run.stdout == "[''] {} [''] [''] ['_i1']\n"
    assert (run.count, run.text, run.stderr) == (1, None, "")
    await sandbox.kill()
