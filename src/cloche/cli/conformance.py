"""`cloche doctor --deep`: every claim of conformance, tried in real sandboxes of this host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from cloche import errors
from cloche.cli.progress import showing
from cloche.config import Config
from cloche.engine.operations.conformance import examine
from cloche.isolation.base import Check
from cloche.sdk.assembly import assemble
from cloche.templates import Catalogue, ensure


async def examine_claims(config: Config, show: Callable[[Check], None]) -> list[Check]:
    """All of them, each shown as soon as it was tried. That no sandbox can be made is a claim that does not hold."""
    checks = []
    try:
        async for check in _tried(config):
            show(check)
            checks.append(check)
    except errors.ClocheError as error:
        checks.append(Check(name="a sandbox runs", state="missing", detail=str(error)))
        show(checks[-1])
    return checks


async def _tried(config: Config) -> AsyncIterator[Check]:
    with showing("building python") as report:
        await asyncio.to_thread(ensure, Catalogue(config.data_dir, config.aliases), "python", report)
    async with assemble(config) as engine:
        async for outcome in examine(engine):
            state = "enforced" if outcome.passed else "missing"
            yield Check(name=outcome.name, state=state, detail=outcome.text, advice=outcome.detail)
