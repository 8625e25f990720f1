"""Trying the claims of `cloche.isolation.conformance` on an engine's sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cloche.engine.commands.process import ProcessResult
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Folding, Output, Run
from cloche.isolation import conformance
from cloche.isolation.conformance.claims import Boxes, Claim, Done, Ran
from cloche.model import Limits, SandboxSpec, User

COMMAND_SECONDS = 60.0


class SandboxBox:
    """A sandbox of an engine as claims want it."""

    def __init__(self, sandbox: Sandbox):
        self.limits = sandbox.limits
        self._sandbox = sandbox

    async def run(
        self, code: str, *, context: str | None = None, seconds: float = 30.0, interrupt_at: str | None = None
    ) -> Ran:
        execution = self._sandbox.context(context).execute(code, timeout_seconds=seconds)
        folding = Folding()
        async with execution:
            async for event in execution:
                folding.feed(event)
                if interrupt_at and isinstance(event, Output) and interrupt_at in event.text:
                    execution.interrupt()
        return _ran(folding.run())

    async def command(
        self, command: str, *, user: User = "user", stdin: str = "", env: dict[str, str] | None = None
    ) -> Done:
        return _done(
            await self._sandbox.commands.run(command, user=user, stdin=stdin, env=env, timeout_seconds=COMMAND_SECONDS)
        )

    async def terminal(self, command: str) -> Done:
        process = await self._sandbox.commands.start(command, pty=(30, 100), timeout_seconds=COMMAND_SECONDS)
        async with process:
            return _done(await process.result())

    async def context(self) -> str:
        return (await self._sandbox.create_context()).id

    async def read(self, path: str) -> bytes:
        return await self._sandbox.files.read(path)

    async def write(self, path: str, content: bytes) -> None:
        await self._sandbox.files.write(path, content)


def boxes_of(engine: Engine, template: str = "python") -> Boxes:
    """Opens sandboxes of that engine for `conformance.run`."""

    @asynccontextmanager
    async def open_box(limits: Limits) -> AsyncIterator[SandboxBox]:
        sandbox = await engine.create(SandboxSpec(template=template, limits=limits))
        try:
            yield SandboxBox(sandbox)
        finally:
            await asyncio.shield(sandbox.kill())

    return open_box


def claims_for(backend: str) -> tuple[Claim, ...]:
    """What a backend of that name is asked for: one without walls, only what it can do."""
    walled = backend != "plain-unsafe"
    return tuple(claim for claim in conformance.CLAIMS if walled or claim.kind == "function")


async def examine(engine: Engine, template: str = "python") -> AsyncIterator[conformance.Outcome]:
    """All claims that the engine's backend must pass, one after another. Raises as `Engine.create` does."""
    async for outcome in conformance.run(boxes_of(engine, template), claims_for(engine.config.backend)):
        yield outcome


def _ran(run: Run) -> Ran:
    return Ran(
        outcome=run.outcome,
        stdout=run.stdout,
        stderr=run.stderr,
        text=run.text,
        error=run.error.name if run.error else None,
    )


def _done(result: ProcessResult) -> Done:
    return Done(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)
