"""The pages of sandboxes: the list, each one's own, and what can be done to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cloche import errors
from cloche.api.console import format
from cloche.api.console.context import House, Page, Visitor, body_of, is_partial, packed
from cloche.api.console.sandbox_list import (
    LIVE,
    LONG_HEIGHT,
    LONG_POINTS,
    LONG_WIDTH,
    Ending,
    Usage,
    asked_of,
    found,
    usage_of,
    why,
)
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.sandboxes.endings import KILLED_BY_OWNER, absent, never
from cloche.engine.sandboxes.network import listening
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import ProcessInfo, SnapshotInfo, Struct
from cloche.protocol import requests
from cloche.protocol.responses import NetworkInfo
from cloche.store.audit_reader import Wanted, last
from cloche.store.base import SandboxRecord
from cloche.telemetry import Entry, log

# All that is known of one sandbox, as its own page shows it.

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


MAX_AT_ONCE = 1000  # that are killed by one request
KILLS_AT_ONCE = 16
MAX_MINUTES = 7 * 24 * 60
AUDIT_LINES = 50
COLUMNS = (
    ("id", "Sandbox"),
    ("state", "State"),
    ("owner", "Owner"),
    ("template", "Template"),
    ("age", "Age"),
    ("deadline", "Ends in"),
    ("cpu", "CPU"),
    ("memory", "Memory"),
    ("processes", "Procs"),
)
NUMBERS = ("age", "deadline", "processes")  # of the columns


class Renewal(Struct, forbid_unknown_fields=True):
    minutes: float


class Several(Struct, forbid_unknown_fields=True):
    ids: list[str]


class Sandboxes:
    def __init__(self, house: House):
        self._house = house
        self._engine = house.engine

    # -- what is shown

    async def list(self, request: Request, visitor: Visitor) -> Response:
        asked = asked_of(request.query_params)
        values = {
            "asked": asked,
            "found": await found(self._engine, visitor.sees, asked),
            "columns": [each for each in COLUMNS if each[0] != "owner" or visitor.is_admin],
            "numbers": NUMBERS,
        }
        name = "sandbox_rows.html" if is_partial(request) else "sandboxes.html"
        return packed(request, self._render(request, visitor, name, values))

    async def show(self, request: Request, visitor: Visitor) -> Response:
        facts = await facts_of(self._engine, request.path_params["id"], visitor.sees)
        values = {"facts": facts, "shown_rules": SHOWN_RULES}
        return self._render(request, visitor, "sandbox_facts.html" if is_partial(request) else "sandbox.html", values)

    async def audit(self, request: Request, visitor: Visitor) -> Response:
        """Who did what to it, and in it. Asked for by hand, as it takes a while where there is much."""
        record, _ = await recorded(self._engine, request.path_params["id"], visitor.sees)
        await self._engine.trail.flushed()
        wanted = Wanted(sandbox=record.id, since=record.created_at)
        directory = Path(self._house.config.data_dir, "audit")
        try:
            lines = await asyncio.to_thread(last, directory, wanted, AUDIT_LINES)
        except OSError as error:
            raise errors.Unavailable(f"the audit log cannot be read: {error.strerror}") from None
        return self._render(request, visitor, "sandbox_audit.html", {"lines": lines[::-1]})

    def _render(self, request: Request, visitor: Visitor, name: str, values: dict[str, Any]) -> Response:
        return self._house.render(request, visitor, name, words=format, now=time.time(), **values)

    # -- what is done

    async def pause(self, request: Request, visitor: Visitor) -> Response:
        record, _ = await self._meant(request, visitor)
        await self._engine.pause(record.id, record.owner)
        return _said(f"{record.id} is paused")

    async def resume(self, request: Request, visitor: Visitor) -> Response:
        record, _ = await self._meant(request, visitor)
        await self._engine.resume(record.id, record.owner)
        return _said(f"{record.id} runs again")

    async def renew(self, request: Request, visitor: Visitor) -> Response:
        record, sandbox = await self._meant(request, visitor)
        minutes = (await body_of(request, Renewal)).minutes
        if not 0 < minutes <= MAX_MINUTES:
            raise errors.InvalidRequest(f"a sandbox is renewed for more than 0 and at most {MAX_MINUTES} minutes")
        if sandbox is None:
            raise absent(record)
        deadline = sandbox.renew(minutes * 60).deadline_at or 0.0
        return _said(f"{record.id} has {format.duration(deadline - time.time())} from now")

    async def kill(self, request: Request, visitor: Visitor) -> Response:
        record, _ = await self._meant(request, visitor)
        await self._kill(record, visitor)
        return _said(f"{record.id} was killed")

    async def kill_several(self, request: Request, visitor: Visitor) -> Response:
        ids = dict.fromkeys((await body_of(request, Several)).ids)
        if len(ids) > MAX_AT_ONCE:
            raise errors.InvalidRequest(f"{MAX_AT_ONCE} sandboxes can be killed at once, not {len(ids)}")
        room = asyncio.Semaphore(KILLS_AT_ONCE)
        told = await asyncio.gather(*(self._try_to_kill(id, visitor, room) for id in ids))
        failed = [each for each in told if each]
        more = f"; {len(failed)} not: {failed[0]}" if failed else ""
        return _said(f"{len(ids) - len(failed)} killed{more}")

    async def kill_process(self, request: Request, visitor: Visitor) -> Response:
        record, sandbox = await self._meant(request, visitor)
        if sandbox is None:
            raise absent(record)
        sandbox.check_running()
        sandbox.commands.kill(request.path_params["process"])
        return _said("The process was killed")

    async def _meant(self, request: Request, visitor: Visitor) -> tuple[SandboxRecord, Sandbox | None]:
        return await recorded(self._engine, request.path_params["id"], visitor.sees)

    async def _try_to_kill(self, id: str, visitor: Visitor, room: asyncio.Semaphore) -> str | None:
        async with room:
            try:
                record, _ = await recorded(self._engine, id, visitor.sees)
                await self._kill(record, visitor)
            except errors.ClocheError as error:
                return str(error)
        return None

    async def _kill(self, record: SandboxRecord, visitor: Visitor) -> None:
        own = record.owner == visitor.owner
        by = KILLED_BY_OWNER if own else f"killed by an admin ({visitor.owner})"
        await self._engine.kill(record.id, record.owner, f"{by}, in the console")


def _said(text: str) -> Response:
    return JSONResponse({"said": text})


def pages(house: House) -> list[Page]:
    sandboxes = Sandboxes(house)
    post = ("POST",)
    return [
        Page("/sandboxes", sandboxes.list),
        Page("/sandboxes/kill", sandboxes.kill_several, post),
        Page("/sandboxes/{id}", sandboxes.show),
        Page("/sandboxes/{id}/audit", sandboxes.audit, admin=True),
        Page("/sandboxes/{id}/pause", sandboxes.pause, post),
        Page("/sandboxes/{id}/resume", sandboxes.resume, post),
        Page("/sandboxes/{id}/renew", sandboxes.renew, post),
        Page("/sandboxes/{id}/kill", sandboxes.kill, post),
        Page("/sandboxes/{id}/processes/{process}/kill", sandboxes.kill_process, post),
    ]
