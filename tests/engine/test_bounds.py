"""What a tenant can make the host keep has an end: metadata, changes that nobody reads, names, pools."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
import weakref
from contextlib import AsyncExitStack, contextmanager

import pytest

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.sandboxes import pool as housing_module
from cloche.engine.sandboxes.files import MAX_WAITING_BYTES, MAX_WATCHES, TooManyWatches
from cloche.engine.sandboxes.pool import MAX_ODD_POOLS, MAX_TEMPLATES_KNOWN
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB, Limits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def until(true) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.01)


async def run(box: Sandbox, code: str) -> None:
    assert (await box.context().execute(code).result()).ok


# -- metadata


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({str(number): "" for number in range(65)}, "64 pairs of metadata, not 65"),
        ({"name": "x" * (16 * 1024 - 3)}, r"16385 bytes.*16384 bytes \(16 KiB\)"),
        ({"x" * 16 * 1024: "y"}, "16385 bytes"),
        ({"é": "é" * 8192}, "16386 bytes"),
        ({"a": 1}, "strings"),
        ({1: "a"}, "strings"),
        ({"a": "\ud800"}, "Unicode"),
    ],
)
async def test_metadata_over_its_limits_is_refused_with_the_limit(metadata, said):
    with pytest.raises(errors.InvalidRequest, match=said):
        SandboxSpec(metadata=metadata)


async def test_metadata_up_to_its_limits_is_kept(engine: Engine):
    metadata = {f"{number:02}": "x" * 254 for number in range(64)}
    box = await engine.create(SandboxSpec(metadata=metadata))
    assert box.info.metadata == metadata
    await box.kill()


# -- watches


async def test_unread_changes_are_bounded_by_the_bytes_of_their_paths(box: Sandbox):
    await run(box, "import os\nfor _ in range(14): os.mkdir('d' * 250); os.chdir('d' * 250)\ndeep = os.getcwd()")
    deep = (await box.context().execute("print(deep)").result()).stdout.strip()
    async with box.files.watch(deep) as watch:
        await run(box, "for number in range(1000): open(str(number), 'x').close()")
        await watch.catch_up()
        assert watch.missed > 0
        kept = watch.take()
        assert len(kept) > 100 and len(kept) + watch.missed >= 1000
        assert sum(sys.getsizeof(change.path) for change in kept) <= MAX_WAITING_BYTES
        await run(box, "for number in range(10): os.remove(str(number))")
        assert len(await watch.collect()) == 10


async def test_a_sandbox_has_so_many_watches_and_no_more(box: Sandbox):
    async with AsyncExitStack() as stack:
        watches = [await stack.enter_async_context(box.files.watch(".")) for _ in range(MAX_WATCHES)]
        with pytest.raises(TooManyWatches, match="64 watches: stop one"):
            await box.files.watch(".").__aenter__()
        watches[0].close()
        await stack.enter_async_context(box.files.watch("."))


async def test_a_watch_that_could_not_start_does_not_count(box: Sandbox):
    for _ in range(MAX_WATCHES + 1):
        with pytest.raises(errors.FileNotFound):
            await box.files.watch("nowhere").__aenter__()


async def test_events_dropped_by_the_kernel_are_announced_to_every_watch(box: Sandbox):
    await box.files.make_dir("busy")
    await box.files.make_dir("calm")
    async with box.files.watch("busy") as busy, box.files.watch("calm") as calm:
        with stopped_init(box):
            most = "int(open('/proc/sys/fs/inotify/max_queued_events').read())"
            await run(box, f"for number in range({most} + 10): open(f'busy/{{number}}', 'x').close()")
        await calm.catch_up()
        assert busy.missed > 0 and calm.missed == 1
        assert calm.take() == []
        assert await calm.news()


@contextmanager
def stopped_init(box: Sandbox):
    """Its init reads nothing meanwhile; programs run on."""
    pidfd = getattr(box._cell, "_cell", box._cell)._pidfd  # the plain backend has one inside another
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    try:
        yield
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)


async def test_an_ended_sandbox_lets_go_of_its_watches_at_once(engine: Engine):
    box = await engine.create(SandboxSpec())
    watch = box.files.watch(".")
    await watch.__aenter__()
    left = weakref.ref(watch)
    del watch
    gc.disable()
    try:
        await box.kill()
        assert left() is None
    finally:
        gc.enable()


# -- names and pools


async def test_names_of_templates_are_not_remembered_without_end(engine: Engine):
    for number in range(MAX_TEMPLATES_KNOWN + 20):
        assert (await engine.template(f"python:3.{number}")).name == "python"
    assert len(engine.cell_supply._templates) <= MAX_TEMPLATES_KNOWN
    await engine.template("python")
    assert "python" in engine.cell_supply._templates


async def test_few_unusual_kinds_of_cells_wait_at_once(engine: Engine):
    boxes = [await engine.create(SandboxSpec(limits=odd(number))) for number in range(MAX_ODD_POOLS + 3)]
    await until(lambda: all(pool._refilling is None for pool in engine.cell_supply._pools.values()))
    assert len(engine.cell_supply._odd_pools) == MAX_ODD_POOLS
    assert sum(engine.cell_supply._pools[key].ready for key in engine.cell_supply._odd_pools) == MAX_ODD_POOLS
    assert all([(await box.context().execute("6*7").result()).text == "42" for box in boxes])
    for box in boxes:
        await box.kill()
    await asyncio.gather(*(engine.cell_supply._pools.pop(key).aclose() for key in engine.cell_supply._odd_pools))


async def test_an_unused_pool_is_removed(engine: Engine, monkeypatch):
    monkeypatch.setattr(housing_module, "KEEP_OTHER_SECONDS", 0.3)
    engine.cell_supply._drop_idle_pools()
    await (await engine.create(SandboxSpec(limits=odd(100)))).kill()
    [key] = [key for key in engine.cell_supply._pools if key[1].space_bytes == odd(100).space_bytes]
    await until(lambda: engine.cell_supply._pools[key].idle)
    await (await engine.create(SandboxSpec(limits=odd(101)))).kill()
    assert key not in engine.cell_supply._pools and key not in engine.cell_supply._odd_pools


def odd(number: int) -> Limits:
    return Limits(space_bytes=(16 + number) * MIB)
