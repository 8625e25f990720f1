"""Where a sandbox of this process's engine is now."""

from __future__ import annotations

import contextlib

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import RunInfo

_LIVE = ("running", "paused")


class Home:
    """A sandbox that was paused may come back in another cell: whoever uses it asks here, each time."""

    def __init__(self, engine: Engine, core: Sandbox):
        self._engine = engine
        self.id = core.id
        self.owner = core.spec.owner
        self.core = core  # as it was when it was last used

    @property
    def ended(self) -> bool:
        """Whether it is known here that it has ended."""
        return self.core.record.state not in _LIVE

    async def awake(self) -> Sandbox:
        """The sandbox, running. Raises Gone, or SandboxPaused where it is paused and may not be woken."""
        self.core = await self._engine.get(self.id, self.owner)
        return self.core

    async def resume(self, timeout_seconds: float | None) -> Sandbox:
        """Raises Gone, Unavailable."""
        self.core = await resumed(self._engine, self.id, self.owner, timeout_seconds)
        return self.core

    async def detach(self, execution: Execution, context: str) -> RunInfo:
        """Raises as `Runs.start` does."""
        return await self._engine.runs.start(self.core, context, execution)

    async def kill(self) -> None:
        """Harmless when it has ended."""
        if self.core.record.state == "running":
            await self.core.kill()
            return
        with contextlib.suppress(errors.Gone):
            await self._engine.kill(self.id, self.owner)


async def resumed(engine: Engine, id: str, owner: str, timeout_seconds: float | None) -> Sandbox:
    """The sandbox of that id, running. Raises SandboxNotFound, Gone, Unavailable."""
    sandbox = await engine.resume(id, owner, seconds=timeout_seconds)
    if timeout_seconds is not None:
        sandbox.renew(timeout_seconds)  # it may have been running
    return sandbox
