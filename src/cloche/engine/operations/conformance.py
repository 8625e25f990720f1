"""Runs the claims of `cloche.isolation.conformance` on an engine's sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Output, ProcessResult, Run, RunFold
from cloche.isolation import conformance
from cloche.isolation.conformance.claims import Claim, CodeResult, CommandOutcome, OpenSandbox
from cloche.model import Limits, SandboxSpec, User

COMMAND_SECONDS = 60.0


class EngineSandboxBox:
    """A sandbox of an engine with the interface that claims use."""

    def __init__(self, sandbox: Sandbox):
        self.limits = sandbox.limits
        self._sandbox = sandbox

    async def run(
        self, code: str, *, context: str | None = None, seconds: float = 30.0, interrupt_at: str | None = None
    ) -> CodeResult:
        execution = self._sandbox.context(context).execute(code, timeout_seconds=seconds)
        folding = RunFold()
        async with execution:
            async for event in execution:
                folding.feed(event)
                if interrupt_at and isinstance(event, Output) and interrupt_at in event.text:
                    execution.interrupt()
        return _to_ran(folding.run())

    async def command(
        self, command: str, *, user: User = "user", stdin: str = "", env: dict[str, str] | None = None
    ) -> CommandOutcome:
        return _to_done(
            await self._sandbox.commands.run(command, user=user, stdin=stdin, env=env, timeout_seconds=COMMAND_SECONDS)
        )

    async def terminal(self, command: str) -> CommandOutcome:
        process = await self._sandbox.commands.start(command, pty=(30, 100), timeout_seconds=COMMAND_SECONDS)
        async with process:
            return _to_done(await process.result())

    async def context(self) -> str:
        return (await self._sandbox.create_context()).id

    async def read(self, path: str) -> bytes:
        return await self._sandbox.files.read(path)

    async def write(self, path: str, content: bytes) -> None:
        await self._sandbox.files.write(path, content)


def make_box_opener(engine: Engine, template: str = "python") -> OpenSandbox:
    """Opens sandboxes of that engine for `conformance.run`."""

    @asynccontextmanager
    async def open_box(limits: Limits) -> AsyncIterator[EngineSandboxBox]:
        sandbox = await engine.create(SandboxSpec(template=template, limits=limits))
        try:
            yield EngineSandboxBox(sandbox)
        finally:
            await asyncio.shield(sandbox.kill())

    return open_box


def claims_for_backend(backend: str) -> tuple[Claim, ...]:
    """The claims for that backend: without walls, only the functional ones."""
    walled = backend != "plain-unsafe"
    left_out = conformance.OWN_KERNEL_DIFFERENCES if backend == "gvisor" else {}
    return tuple(
        claim for claim in conformance.ALL_CLAIMS if claim.name not in left_out and (walled or claim.kind == "function")
    )


async def run_conformance(engine: Engine, template: str = "python") -> AsyncIterator[conformance.ClaimOutcome]:
    """All claims that the engine's backend must pass, one after another. Raises as `Engine.create` does."""
    async for outcome in conformance.run_claims(
        make_box_opener(engine, template), claims_for_backend(engine.config.backend)
    ):
        yield outcome


def _to_ran(run: Run) -> CodeResult:
    return CodeResult(
        outcome=run.outcome,
        stdout=run.stdout,
        stderr=run.stderr,
        text=run.text,
        error=run.error.name if run.error else None,
    )


def _to_done(result: ProcessResult) -> CommandOutcome:
    return CommandOutcome(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)
