"""E2B's view of sandboxes: it follows pauses, and keeps no sandbox that has ended."""

from __future__ import annotations

import gc
import weakref

from cloche.api.e2b.registry import E2bSandboxes, E2bTokens
from cloche.config import Config, PoolConfig
from cloche.engine.engine import Engine
from cloche.model import SandboxSpec
from cloche.sdk.assembly import assemble_engine


async def test_an_ended_sandbox_leaves_the_memory(bare_dir):
    async with assemble_engine(Config(data_dir=bare_dir, pool=PoolConfig(ready=0))) as engine:
        known = E2bSandboxes(engine, E2bTokens(b"secret"))
        ended = [await _used_and_killed(engine, known) for _ in range(3)]
        known.of(await engine.create(SandboxSpec()))
        gc.collect()
        assert [each() for each in ended] == [None] * 3


async def _used_and_killed(engine: Engine, known: E2bSandboxes) -> weakref.ref:
    sandbox = await engine.create(SandboxSpec())
    assert known.of(sandbox) is known.of(sandbox) is known.running(sandbox.id)
    await sandbox.kill()
    assert known.running(sandbox.id) is None
    return weakref.ref(sandbox)
