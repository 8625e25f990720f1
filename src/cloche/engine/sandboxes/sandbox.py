"""A sandbox: a cell with an id, an owner, a deadline, files, contexts and processes."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from cloche import errors
from cloche.engine.commands.commands import SandboxCommands
from cloche.engine.executions.checkpoints import copy_kernel
from cloche.engine.executions.context import Context
from cloche.engine.executions.history import SandboxHistory
from cloche.engine.executions.kernel import KernelClient, start_kernel
from cloche.engine.executions.tools import SandboxTools
from cloche.engine.operations.metrics import EngineCounters, SandboxMeter, measure_inside
from cloche.engine.pauses.freeze import ProgramFreezer
from cloche.engine.quotas.capacity import ExecutionSlots
from cloche.engine.quotas.quotas import QuotaLease
from cloche.engine.sandboxes.deadline import LifetimeTimer
from cloche.engine.sandboxes.endings import DEADLINE_PASSED, KILLED_BY_OWNER, not_running_error
from cloche.engine.sandboxes.files import SandboxFiles
from cloche.engine.sandboxes.health_port import HealthPort
from cloche.engine.sandboxes.init_client import InitClient
from cloche.engine.sandboxes.network import SandboxNetwork, connect_port, network_environment
from cloche.engine.sandboxes.pool import ReadyCell
from cloche.events import Ended, Signal
from cloche.model import Limits, SandboxInfo, SandboxSpec, check_metadata, check_seconds, new_id, sandbox_path
from cloche.network_policy import NetworkPolicy, without_secrets
from cloche.store.base import PausedFiles, RecordState, SandboxRecord

if TYPE_CHECKING:
    from cloche.engine.sandboxes.handle import SandboxHandle

DEFAULT_CONTEXT = "default"
MAX_CONTEXTS = 64


class Sandbox:
    """Made by `Engine.create`. `on_change(sandbox)` is called for every change of its record.

    `on_due(sandbox)` is called when the deadline of one has passed that is to be paused then.
    """

    def __init__(
        self,
        ready: ReadyCell,
        record: SandboxRecord,
        *,
        network: NetworkPolicy,
        max_lifetime_seconds: float,
        counters: EngineCounters,
        on_change: Callable[[Sandbox], None],
        on_due: Callable[[Sandbox], None],
        history: SandboxHistory,
        quota_lease: QuotaLease,
        execution_slots: ExecutionSlots,
    ):
        spec = record.spec
        self.id = record.id
        self.limits: Limits = record.limits
        self.record = record
        self.handle: SandboxHandle  # set by the engine, once it knows this sandbox
        self.ending: str | None = None  # why executions end, once the sandbox does
        self.unneeded: str | None = None  # the image of one that ended while it was paused
        self._cell = ready.cell
        self._guest = ready.guest
        self._on_change = on_change
        self._on_due = on_due
        self.changing = asyncio.Lock()  # held while it is paused, resumed or imaged
        self.freezer = ProgramFreezer(ready.cell, ready.guest)
        self.quota_lease = quota_lease.bind_cell(ready.cell, record.limits)
        self.count_execution = quota_lease.count_execution
        self._lifetime = LifetimeTimer(max_lifetime_seconds, self._on_deadline)
        self._destroying: asyncio.Task[None] | None = None
        self._ended = Signal()
        self._kernels_started = 0
        self._contexts: dict[str, Context] = {}
        self.files = SandboxFiles(ready.guest, user=spec.user, cwd=spec.cwd, limits=self.limits)
        self.commands = SandboxCommands(
            ready.guest,
            user=spec.user,
            cwd=spec.cwd,
            limits=self.limits,
            oom_kills=self.oom_kills,
            count=quota_lease.count_execution,
        )
        self.network = SandboxNetwork(ready.guest, network, ready.listener)
        self.health_port = HealthPort(ready.guest)
        self.tools = SandboxTools(ready.guest)
        self.history = history
        self.execution_slots = execution_slots
        self.meter = SandboxMeter(
            self._cell.stats,
            lambda: measure_inside(ready.guest),
            self.limits,
            self._cell.cpu_seconds,
            quota_lease.spend_cpu,
        )
        self._counters = counters
        self._configure_cell(ready)
        if record.deadline_at is not None:
            self._lifetime.set(record.deadline_at - time.time())

    # -- identity and state

    @property
    def spec(self) -> SandboxSpec:
        return self.record.spec

    @property
    def info(self) -> SandboxInfo:
        return sandbox_info(self.record)

    def check_running(self) -> None:
        """Raises SandboxExpired, SandboxKilled or SandboxLost if it has ended, SandboxPaused if it is paused."""
        if self.record.state != "running":
            raise not_running_error(self.record)

    @property
    def guest(self) -> InitClient:
        return self._guest

    def change_metadata(self, changes: Mapping[str, str | None]) -> None:
        """Adds, replaces or (None) removes pairs of its metadata. Raises InvalidRequest if it is too much."""
        changed = {**self.spec.metadata, **changes}
        metadata = {name: value for name, value in changed.items() if value is not None}
        check_metadata(metadata)
        self._change_record(spec=msgspec.structs.replace(self.spec, metadata=metadata))

    # -- how long it lives

    def renew(self, seconds: float) -> SandboxInfo:
        """Moves the deadline to `seconds` from now, at most to the longest lifetime that the host allows."""
        self.check_running()
        check_seconds("lifetime", seconds)
        if seconds is None:
            raise errors.InvalidRequest("renew needs a number of seconds")
        self._change_record(deadline_at=self._lifetime.set(seconds))
        return self.info

    @property
    def over_seconds(self) -> float:
        """The seconds that it has run beyond the longest lifetime of this host; negative before that."""
        return self._lifetime.over_seconds

    def adjust_deadline(self) -> None:
        """Corrects the recorded deadline after a change of the wall clock: it is as far away as before."""
        if (left := self._lifetime.left_seconds) is not None:
            self._change_record(deadline_at=time.time() + left)

    def extend(self, seconds: float) -> SandboxInfo:
        """As `renew`, but never to an earlier moment than the deadline that it has; without one, it keeps none."""
        left = self._lifetime.left_seconds
        if left is None or seconds <= left:
            self.check_running()
            check_seconds("lifetime", seconds)
            return self.info
        return self.renew(seconds)

    def expire_now(self) -> None:
        """As if its deadline passed now. Harmless when it has ended."""
        self._on_deadline()

    # -- rest

    def rest(self, files: PausedFiles, *, memory: bool) -> SandboxRecord:
        """The record of it if it is paused now, with these files. Nothing is changed yet."""
        return msgspec.structs.replace(
            self.without_secrets(), state="paused", paused_at=time.time(), memory_kept=memory, files=files
        )

    def without_secrets(self) -> SandboxRecord:
        """Its record with its present network policy, less the secrets of that."""
        spec = msgspec.structs.replace(self.spec, network=without_secrets(self.network.policy))
        return msgspec.structs.replace(self.record, spec=spec)

    def mark_paused(self, record: SandboxRecord) -> None:
        """Marks it as paused, as that record says: its programs are frozen. Its deadline stops."""
        self._lifetime.stop()
        self.execution_slots.rest()
        self._change_record(
            state="paused",
            paused_at=record.paused_at,
            memory_kept=record.memory_kept,
            files=record.files,
            spec=msgspec.structs.replace(self.spec, network=record.spec.network),
        )

    def release_cell(self, reason: str) -> None:
        """Destroys the cell of one paused without its memory. This object is of no more use."""
        self._end_everything(reason)
        self._on_change(self)
        self._guest.close(lambda: not_running_error(self.record))

    def mark_running(self, seconds: float | None) -> None:
        """Marks it as running again, for so many seconds, or as many as it was first given."""
        now = time.time()
        lifetime = seconds or self.spec.lifetime_seconds
        self._change_record(
            state="running",
            paused_at=None,
            resumed_at=now,
            files=None,
            deadline_at=self._lifetime.begin(lifetime),
        )

    def defer_deadline(self, seconds: float) -> None:
        """Moves the deadline's action so much later: it failed when the deadline passed."""
        self._lifetime.defer_deadline(seconds)

    async def kill(self, reason: str = KILLED_BY_OWNER) -> None:
        """Ends it. Afterwards nothing of it remains on the host. Harmless when it has ended."""
        await self.end("killed", "sandbox killed", reason)

    async def end(self, state: RecordState, ending: str, reason: str) -> None:
        """Ends it for that reason; `ending` is the reason of its running executions."""
        self._end_sandbox(state, ending, reason)
        if self._destroying is not None:
            await asyncio.shield(self._destroying)

    @property
    def destroy_task(self) -> asyncio.Task[None] | None:
        """The task that destroys its cell, once it has ended."""
        return self._destroying

    async def wait_ended(self) -> None:
        """Returns when it has ended, for any reason."""
        while self.ending is None:
            await self._ended.wait()

    def abandon(self, why: str) -> None:
        """The cell is broken: it is destroyed and the sandbox is lost."""
        self._end_sandbox("lost", f"sandbox lost: {why}", why)

    async def connect_port(self, port: int) -> socket.socket:
        """A connection to a program that listens inside. Raises PortNotOpen, InvalidRequest, Gone."""
        self.check_running()
        return await connect_port(self._guest, port)

    def add_env(self, env: dict[str, str]) -> None:
        """For all that starts from now on, and for kernels that run, from their next execution on."""
        env = {**env, **self.spec.env}
        self._guest.tell("configure", env=env)
        for context in self._contexts.values():
            context.configure(env)

    # -- contexts

    @property
    def contexts(self) -> list[Context]:
        self.check_running()
        return [self.context(), *(each for id, each in self._contexts.items() if id != DEFAULT_CONTEXT)]

    def context(self, id: str | None = None) -> Context:
        """The context of that id; the default one without. Raises ContextNotFound.

        One of a sandbox that has ended or is paused raises Gone or SandboxPaused when it is used.
        """
        try:
            return self._contexts[id or DEFAULT_CONTEXT]
        except KeyError:
            self.check_running()
            raise errors.ContextNotFound(f"sandbox {self.id} has no context {id!r}") from None

    def default_context(self, language: str = "python") -> Context:
        """The context of that language that exists without `create_context`. Its first use starts its kernel.

        Raises InvalidRequest for a language that does not exist.
        """
        self.check_running()
        if language == "python":
            return self.context()
        id = f"{DEFAULT_CONTEXT}-{language}"
        if id not in self._contexts:
            self._contexts[id] = Context(self, id, language=language, cwd=self.spec.cwd)
        return self._contexts[id]

    async def create_context(self, *, language: str = "python", cwd: str | None = None) -> Context:
        """A new context, its kernel ready. Raises InvalidRequest for a language that does not exist."""
        self.check_running()
        self.check_room(1)
        cwd = self.spec.cwd if cwd is None else sandbox_path(cwd, self.spec.cwd)
        context = Context(self, new_id("c"), language=language, cwd=cwd)
        await context.kernel()
        self.check_running()
        self._contexts[context.id] = context
        return context

    def remove_context(self, id: str) -> None:
        """Ends a context. The default one comes back, empty, when it is used again. Raises ContextNotFound."""
        self.check_running()
        self.context(id).remove()
        del self._contexts[id]
        if id == DEFAULT_CONTEXT:
            self._contexts[id] = Context(self, id, cwd=self.spec.cwd)

    # -- for its contexts

    async def start_kernel(self, context: Context) -> KernelClient:
        self.check_running()
        self._kernels_started += 1
        id, language = str(self._kernels_started), context.language
        user, memory_bytes = self.spec.user, self.limits.memory_bytes
        return await start_kernel(
            self._guest, id, language=language, user=user, cwd=context.cwd, env={}, memory_bytes=memory_bytes
        )

    async def branch_kernel(self, origin: KernelClient) -> KernelClient:
        self.check_running()
        self._kernels_started += 1
        return await copy_kernel(self._guest, origin, str(self._kernels_started))

    def check_room(self, count: int) -> None:
        left = MAX_CONTEXTS - len(self._contexts)
        if count > left:
            raise errors.InvalidRequest(
                f"a sandbox can have {MAX_CONTEXTS} contexts, and this one has room for {left} more: remove one first"
            )

    def add_contexts(self, contexts: list[Context]) -> None:
        self.check_running()
        self.check_room(len(contexts))
        self._contexts.update({context.id: context for context in contexts})

    def execution_ended(self, ended: Ended) -> None:
        self.meter.add_execution(ended)
        self._counters.execution_ended(ended)

    def oom_kills(self) -> int:
        return self._cell.oom_kills()

    def memory_peak_bytes(self) -> int | None:
        """The most that it ever used, with its files; None where this host does not know."""
        return self._cell.memory_peak_bytes()

    @property
    def has_deadline(self) -> bool:
        return self.record.deadline_at is not None

    # -- inside

    def _configure_cell(self, ready: ReadyCell) -> None:
        """Sends the settings that a ready cell could not know: mostly none. Does not wait for an answer."""
        ready.set_limits(self.limits)
        own_limits = self._cell.limits_for_init(self.limits)
        cwd = self.spec.cwd if self.spec.cwd != SandboxSpec().cwd else None  # it started there
        env = {**network_environment(self.network.policy), **self.spec.env}
        if env or cwd or own_limits or self.spec.sudo:
            self._guest.tell("configure", env=env, cwd=cwd, sudo=self.spec.sudo, **own_limits)
            ready.kernel.configure(env, cwd, own_limits)
        self._guest.on_lost = self._on_lost
        first = Context(self, DEFAULT_CONTEXT, cwd=self.spec.cwd, kernel=ready.kernel)
        self._contexts[DEFAULT_CONTEXT] = first

    def _on_deadline(self) -> None:
        if self.spec.on_deadline == "pause" and self.ending is None:
            self._on_due(self)
        else:
            self._end_sandbox("expired", "deadline", DEADLINE_PASSED)

    def _on_lost(self, why: str) -> None:
        self._end_sandbox("lost", "sandbox lost: its init died", f"its init died ({why})")

    def _end_sandbox(self, state: RecordState, ending: str, reason: str) -> None:
        if self.ending is not None:
            return
        self._end_everything(ending)
        if self.record.files is not None:
            self.unneeded = self.record.files.image
        self._change_record(state=state, ended_at=time.time(), end_reason=reason, files=None)
        self._guest.close(lambda: not_running_error(self.record))

    def _end_everything(self, ending: str) -> None:
        """Ends all executions, contexts and commands, and destroys the cell."""
        self.ending = ending
        self._ended.wake_all()
        self._lifetime.stop()
        self.meter.close()
        self.quota_lease.leave()
        self.network.close()
        self.health_port.close()
        self.tools.close()
        for context in self._contexts.values():
            context.stop(ending)
        self.commands.end_all(ending)
        self._destroying = asyncio.create_task(self._cell.aclose())

    def _change_record(self, **fields: object) -> None:
        self.record = msgspec.structs.replace(self.record, **fields)
        self._on_change(self)


def sandbox_info(record: SandboxRecord) -> SandboxInfo:
    """The public info of a sandbox."""
    spec, paused = record.spec, record.state == "paused"
    return SandboxInfo(
        id=record.id,
        template=spec.template,
        owner=spec.owner,
        state=record.state if record.state in ("running", "paused") else "ended",
        created_at=record.created_at,
        deadline_at=record.deadline_at,
        metadata=spec.metadata,
        limits=record.limits,
        memory_and_space_bytes=record.limits.memory_and_space_bytes,
        ended_at=record.ended_at,
        end_reason=record.end_reason,
        paused_at=record.paused_at if paused else None,
        pause_memory=record.memory_kept if paused else None,
        on_deadline=spec.on_deadline,
        auto_resume=spec.auto_resume,
        notes=spec.notes,
        volumes=spec.volumes,
        key_id=record.key_id,
    )
