"""All that is known of one sandbox, as its own page shows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import NamedTuple, TypeVar

from cloche import errors
from cloche.api.ui.sandbox_endings import Ending, why
from cloche.api.ui.sandbox_list import LIVE
from cloche.api.ui.sparklines import LONG_HEIGHT, LONG_POINTS, LONG_WIDTH, Usage, usage_of
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.sandboxes.endings import never
from cloche.engine.sandboxes.network import listening
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import ProcessInfo, SnapshotInfo
from cloche.protocol import requests
from cloche.protocol.responses import NetworkInfo
from cloche.store.base import SandboxRecord
from cloche.telemetry import Entry, log

T = TypeVar("T")

ASK_SECONDS = 2.0  # for a sandbox to say what runs in it
LOG_LINES = 100
SHOWN_RULES = 50
OF_OWNERS = ("sandbox.", "network.")  # events of one's own sandbox that are no business of the server alone


class Inside(NamedTuple):
    """What one that runs says of itself. None where it does not answer in time."""

    contexts: Sequence[Context] = ()
    processes: Sequence[ProcessInfo] | None = ()
    ports: Sequence[int] | None = ()


class Facts(NamedTuple):
    record: SandboxRecord
    sandbox: Sandbox | None
    ending: Ending | None
    usage: Usage | None
    inside: Inside
    network: NetworkInfo | None
    snapshots: Sequence[SnapshotInfo]
    lines: Sequence[Entry]

    @property
    def state(self) -> str:
        return self.record.state if self.record.state in LIVE else "ended"

    @property
    def lived_seconds(self) -> float:
        return (self.record.ended_at or time.time()) - self.record.created_at

    @property
    def processes(self) -> int | None:
        return None if self.sandbox is None else self.sandbox.meter.processes


async def recorded(engine: Engine, id: str, owner: str | None) -> tuple[SandboxRecord, Sandbox | None]:
    """One of that owner, or with None of anybody, and its cell. Nothing is woken by it. Raises SandboxNotFound."""
    sandbox = next((each for each in engine.living() if each.id == id and each.spec.owner), None)
    if sandbox is not None and owner in (None, sandbox.spec.owner):
        return sandbox.record, sandbox
    record = await engine.records.get(id, owner)
    if record is None:
        raise never(id)
    return record, None


async def facts_of(engine: Engine, id: str, owner: str | None) -> Facts:
    """Raises SandboxNotFound."""
    record, sandbox = await recorded(engine, id, owner)
    snapshots = await engine.snapshots.list(record.owner, id)
    return Facts(
        record=record,
        sandbox=sandbox,
        ending=None if record.state in LIVE else why(record),
        usage=None if sandbox is None else usage_of(sandbox.meter, LONG_POINTS, LONG_WIDTH, LONG_HEIGHT),
        inside=await _inside(sandbox, sealed=engine.networks.sealed),
        network=None if sandbox is None else requests.info_of(sandbox.network.policy),
        snapshots=[each.info for each in snapshots],
        lines=_lines(id, all=owner is None),
    )


async def _inside(sandbox: Sandbox | None, *, sealed: bool) -> Inside:
    """Without walls the ports are those of the host, and nobody's business."""
    if sandbox is None or sandbox.record.state != "running":
        return Inside()
    ask_ports = listening(sandbox.guest) if sealed else _none()
    processes, ports = await asyncio.gather(_in_time(sandbox.commands.list()), _in_time(ask_ports))
    contexts = sandbox.contexts if sandbox.record.state == "running" else ()
    return Inside(contexts, processes, ports)


async def _none() -> Sequence[int]:
    return ()


async def _in_time(asking: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return await asking
    except (TimeoutError, errors.ClocheError):  # a page about a sandbox that is stuck must come all the same
        return None


def _lines(id: str, *, all: bool) -> list[Entry]:
    """What the server said of it, the newest first."""
    found = [each for each in log.kept if each.fields.get("sandbox") == id]
    return [each for each in reversed(found) if all or each.event.startswith(OF_OWNERS)][:LOG_LINES]
