"""`cloche doctor --deep`: tries every claim of conformance in real sandboxes of this host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from cloche import errors
from cloche.cli.progress import show_progress
from cloche.config import Config
from cloche.engine.operations.conformance import run_conformance
from cloche.isolation.base import HostCheck
from cloche.sdk.assembly import assemble_engine
from cloche.templates import Catalogue, ensure_template


async def examine_claims(config: Config, show: Callable[[HostCheck], None]) -> list[HostCheck]:
    """Tries all claims and shows each at once. A sandbox that cannot be made is a claim that does not hold."""
    checks = []
    try:
        async for check in _try_claims(config):
            show(check)
            checks.append(check)
    except errors.ClocheError as error:
        checks.append(HostCheck(name="a sandbox runs", state="missing", detail=str(error)))
        show(checks[-1])
    return checks


async def _try_claims(config: Config) -> AsyncIterator[HostCheck]:
    with show_progress("building python") as report:
        await asyncio.to_thread(ensure_template, Catalogue(config.data_dir, config.aliases), "python", report)
    async with assemble_engine(config) as engine:
        async for outcome in run_conformance(engine):
            state = "enforced" if outcome.passed else "missing"
            yield HostCheck(name=outcome.name, state=state, detail=outcome.text, advice=outcome.detail)
