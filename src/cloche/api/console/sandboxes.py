"""The pages of sandboxes: the list, each one's own, and their actions."""

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
from cloche.api.console.context import (
    ConsoleContext,
    ConsolePage,
    ConsoleVisitor,
    compress_partial,
    decode_body,
    is_partial,
)
from cloche.api.console.sandbox_list import (
    LIVE_STATES,
    LONG_HEIGHT,
    LONG_WIDTH,
    PAGE_POINTS,
    EndingExplanation,
    UsageSparklines,
    decode_sandbox_query,
    explain_ending,
    find_sandboxes,
    usage_sparklines,
)
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.sandboxes.endings import KILLED_BY_OWNER, not_running_error, sandbox_not_found_error
from cloche.engine.sandboxes.network import listening_ports
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import ProcessInfo, SnapshotInfo, Struct
from cloche.protocol import requests
from cloche.protocol.responses import NetworkInfo
from cloche.store.audit_reader import AuditQuery, read_last
from cloche.store.base import SandboxRecord
from cloche.telemetry import LogEntry, log

# All facts about one sandbox, for its own page.

T = TypeVar("T")

ASK_SECONDS = 2.0  # for a sandbox to say what runs in it
LOG_LINES = 100
SHOWN_RULES = 50
OWNER_EVENTS = ("sandbox.", "network.")  # events of one's own sandbox that are no business of the server alone


class SandboxActivity(NamedTuple):
    """Contexts, processes and ports of a running sandbox. None where it does not answer in time."""

    contexts: Sequence[Context] = ()
    processes: Sequence[ProcessInfo] | None = ()
    ports: Sequence[int] | None = ()


class SandboxFacts(NamedTuple):
    record: SandboxRecord
    sandbox: Sandbox | None
    ending: EndingExplanation | None
    usage: UsageSparklines | None
    inside: SandboxActivity
    network: NetworkInfo | None
    snapshots: Sequence[SnapshotInfo]
    lines: Sequence[LogEntry]

    @property
    def state(self) -> str:
        return self.record.state if self.record.state in LIVE_STATES else "ended"

    @property
    def lived_seconds(self) -> float:
        return (self.record.ended_at or time.time()) - self.record.created_at

    @property
    def processes(self) -> int | None:
        return None if self.sandbox is None else self.sandbox.meter.processes


async def find_record(engine: Engine, id: str, owner: str | None) -> tuple[SandboxRecord, Sandbox | None]:
    """A sandbox of that owner (None: of any) and its cell. It wakes no sandbox. Raises SandboxNotFound."""
    sandbox = next((each for each in engine.live_sandboxes() if each.id == id and each.spec.owner), None)
    if sandbox is not None and owner in (None, sandbox.spec.owner):
        return sandbox.record, sandbox
    record = await engine.records.get(id, owner)
    if record is None:
        raise sandbox_not_found_error(id)
    return record, None


async def load_facts(engine: Engine, id: str, owner: str | None) -> SandboxFacts:
    """Raises SandboxNotFound."""
    record, sandbox = await find_record(engine, id, owner)
    snapshots = await engine.snapshots.list(record.owner, id)
    return SandboxFacts(
        record=record,
        sandbox=sandbox,
        ending=None if record.state in LIVE_STATES else explain_ending(record),
        usage=None if sandbox is None else usage_sparklines(sandbox.meter, PAGE_POINTS, LONG_WIDTH, LONG_HEIGHT),
        inside=await _query_activity(sandbox, sealed=engine.networks.sealed),
        network=None if sandbox is None else requests.policy_to_info(sandbox.network.policy),
        snapshots=[each.info for each in snapshots],
        lines=_log_lines(id, all=owner is None),
    )


async def _query_activity(sandbox: Sandbox | None, *, sealed: bool) -> SandboxActivity:
    """Queries a running sandbox. Without isolation the ports are the host's, and are not shown."""
    if sandbox is None or sandbox.record.state != "running":
        return SandboxActivity()
    ask_ports = listening_ports(sandbox.guest, sandbox.health_port.port) if sealed else _no_ports()
    processes, ports = await asyncio.gather(_in_time(sandbox.commands.list()), _in_time(ask_ports))
    contexts = sandbox.contexts if sandbox.record.state == "running" else ()
    return SandboxActivity(contexts, processes, ports)


async def _no_ports() -> Sequence[int]:
    return ()


async def _in_time(asking: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return await asking
    except (TimeoutError, errors.ClocheError):  # a page about a sandbox that is stuck must come all the same
        return None


def _log_lines(id: str, *, all: bool) -> list[LogEntry]:
    """The server's log lines about it, the newest first."""
    found = [each for each in log.kept if each.fields.get("sandbox") == id]
    return [each for each in reversed(found) if all or each.event.startswith(OWNER_EVENTS)][:LOG_LINES]


MAX_KILLED_AT_ONCE = 1000  # that are killed by one request
KILLS_AT_ONCE = 16
MAX_MINUTES = 7 * 24 * 60
AUDIT_LINES = 50
SANDBOX_COLUMNS = (
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
NUMBER_COLUMNS = ("age", "deadline", "processes")  # of the columns


class RenewalRequest(Struct, forbid_unknown_fields=True):
    minutes: float


class KillSeveralRequest(Struct, forbid_unknown_fields=True):
    ids: list[str]


class SandboxPages:
    def __init__(self, context: ConsoleContext):
        self._context = context
        self._engine = context.engine

    # -- what is shown

    async def list(self, request: Request, visitor: ConsoleVisitor) -> Response:
        query = decode_sandbox_query(request.query_params)
        values = {
            "asked": query,
            "found": await find_sandboxes(self._engine, visitor.visible_owner, query),
            "columns": [each for each in SANDBOX_COLUMNS if each[0] != "owner" or visitor.is_admin],
            "numbers": NUMBER_COLUMNS,
        }
        name = "sandbox_rows.html" if is_partial(request) else "sandboxes.html"
        return compress_partial(request, self._render_page(request, visitor, name, values))

    async def show(self, request: Request, visitor: ConsoleVisitor) -> Response:
        facts = await load_facts(self._engine, request.path_params["id"], visitor.visible_owner)
        values = {"facts": facts, "shown_rules": SHOWN_RULES}
        return self._render_page(
            request, visitor, "sandbox_facts.html" if is_partial(request) else "sandbox.html", values
        )

    async def audit(self, request: Request, visitor: ConsoleVisitor) -> Response:
        """The audit lines of a sandbox. Loaded on request only, as a long log takes a while."""
        record, _ = await find_record(self._engine, request.path_params["id"], visitor.visible_owner)
        await self._engine.audit_log.wait_flushed()
        query = AuditQuery(sandbox=record.id, since=record.created_at)
        directory = Path(self._context.config.data_dir, "audit")
        try:
            lines = await asyncio.to_thread(read_last, directory, query, AUDIT_LINES)
        except OSError as error:
            raise errors.Unavailable(f"the audit log cannot be read: {error.strerror}") from None
        return self._render_page(request, visitor, "sandbox_audit.html", {"lines": lines[::-1]})

    def _render_page(self, request: Request, visitor: ConsoleVisitor, name: str, values: dict[str, Any]) -> Response:
        return self._context.render(request, visitor, name, words=format, now=time.time(), **values)

    # -- what is done

    async def pause(self, request: Request, visitor: ConsoleVisitor) -> Response:
        record, _ = await self._find_sandbox(request, visitor)
        await self._engine.pause(record.id, record.owner)
        return _message_reply(f"{record.id} is paused")

    async def resume(self, request: Request, visitor: ConsoleVisitor) -> Response:
        record, _ = await self._find_sandbox(request, visitor)
        await self._engine.resume(record.id, record.owner)
        return _message_reply(f"{record.id} runs again")

    async def renew(self, request: Request, visitor: ConsoleVisitor) -> Response:
        record, sandbox = await self._find_sandbox(request, visitor)
        minutes = (await decode_body(request, RenewalRequest)).minutes
        if not 0 < minutes <= MAX_MINUTES:
            raise errors.InvalidRequest(f"a sandbox is renewed for more than 0 and at most {MAX_MINUTES} minutes")
        if sandbox is None:
            raise not_running_error(record)
        deadline = sandbox.renew(minutes * 60).deadline_at or 0.0
        return _message_reply(f"{record.id} has {format.duration(deadline - time.time())} from now")

    async def kill(self, request: Request, visitor: ConsoleVisitor) -> Response:
        record, _ = await self._find_sandbox(request, visitor)
        await self._kill_sandbox(record, visitor)
        return _message_reply(f"{record.id} was killed")

    async def kill_several(self, request: Request, visitor: ConsoleVisitor) -> Response:
        ids = dict.fromkeys((await decode_body(request, KillSeveralRequest)).ids)
        if len(ids) > MAX_KILLED_AT_ONCE:
            raise errors.InvalidRequest(f"{MAX_KILLED_AT_ONCE} sandboxes can be killed at once, not {len(ids)}")
        room = asyncio.Semaphore(KILLS_AT_ONCE)
        told = await asyncio.gather(*(self._try_to_kill(id, visitor, room) for id in ids))
        failed = [each for each in told if each]
        more = f"; {len(failed)} not: {failed[0]}" if failed else ""
        return _message_reply(f"{len(ids) - len(failed)} killed{more}")

    async def kill_process(self, request: Request, visitor: ConsoleVisitor) -> Response:
        record, sandbox = await self._find_sandbox(request, visitor)
        if sandbox is None:
            raise not_running_error(record)
        sandbox.check_running()
        sandbox.commands.kill(request.path_params["process"])
        return _message_reply("The process was killed")

    async def _find_sandbox(self, request: Request, visitor: ConsoleVisitor) -> tuple[SandboxRecord, Sandbox | None]:
        return await find_record(self._engine, request.path_params["id"], visitor.visible_owner)

    async def _try_to_kill(self, id: str, visitor: ConsoleVisitor, room: asyncio.Semaphore) -> str | None:
        async with room:
            try:
                record, _ = await find_record(self._engine, id, visitor.visible_owner)
                await self._kill_sandbox(record, visitor)
            except errors.ClocheError as error:
                return str(error)
        return None

    async def _kill_sandbox(self, record: SandboxRecord, visitor: ConsoleVisitor) -> None:
        own = record.owner == visitor.owner
        by = KILLED_BY_OWNER if own else f"killed by an admin ({visitor.owner})"
        await self._engine.kill(record.id, record.owner, f"{by}, in the console")


def _message_reply(text: str) -> Response:
    return JSONResponse({"said": text})


def pages(context: ConsoleContext) -> list[ConsolePage]:
    sandboxes = SandboxPages(context)
    post = ("POST",)
    return [
        ConsolePage("/sandboxes", sandboxes.list),
        ConsolePage("/sandboxes/kill", sandboxes.kill_several, post),
        ConsolePage("/sandboxes/{id}", sandboxes.show),
        ConsolePage("/sandboxes/{id}/audit", sandboxes.audit, admin=True),
        ConsolePage("/sandboxes/{id}/pause", sandboxes.pause, post),
        ConsolePage("/sandboxes/{id}/resume", sandboxes.resume, post),
        ConsolePage("/sandboxes/{id}/renew", sandboxes.renew, post),
        ConsolePage("/sandboxes/{id}/kill", sandboxes.kill, post),
        ConsolePage("/sandboxes/{id}/processes/{process}/kill", sandboxes.kill_process, post),
    ]
