"""A sandbox: a cell with an id, an owner, a deadline, files, contexts and processes."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import msgspec

from cloche import errors
from cloche.engine.commands import Commands
from cloche.engine.context import Context
from cloche.engine.endings import gone
from cloche.engine.files import Files
from cloche.engine.kernel import Kernel, start_kernel
from cloche.engine.metrics import Meter, measured_inside
from cloche.engine.network import SandboxNetwork, environment_of
from cloche.engine.paths import sandbox_path
from cloche.engine.pool import ReadyCell
from cloche.engine.ports import connect_port
from cloche.engine.queue import Bell
from cloche.engine.tally import Tally
from cloche.engine.tool_calls import Tools
from cloche.model import Limits, SandboxInfo, SandboxSpec, check_metadata, check_seconds, new_id
from cloche.network_policy import NetworkPolicy
from cloche.store.base import SandboxRecord, State

DEFAULT_CONTEXT = "default"
MAX_CONTEXTS = 64


class Sandbox:
    """Made by `Engine.create`. `on_change(record)` hears of every change of what is recorded."""

    def __init__(
        self,
        ready: ReadyCell,
        spec: SandboxSpec,
        record: SandboxRecord,
        *,
        network: NetworkPolicy,
        max_lifetime_seconds: float,
        tally: Tally,
        on_change: Callable[[Sandbox], None],
    ):
        self.id = record.id
        self.spec = spec
        self.limits: Limits = record.limits
        self.record = record
        self.ending: str | None = None  # why executions end, once the sandbox does
        self._cell = ready.cell
        self._guest = ready.guest
        self._max_lifetime_seconds = max_lifetime_seconds
        self._on_change = on_change
        self.execution_ended = tally.execution_ended
        self._deadline: asyncio.TimerHandle | None = None
        self._destroying: asyncio.Task[None] | None = None
        self._ended = Bell()
        self._kernels_started = 0
        self._contexts: dict[str, Context] = {}
        self.files = Files(ready.guest, user=spec.user, cwd=spec.cwd, limits=self.limits)
        self.commands = Commands(
            ready.guest, user=spec.user, cwd=spec.cwd, limits=self.limits, oom_kills=self.oom_kills
        )
        self.network = SandboxNetwork(ready.guest, network, ready.listener)
        self.tools = Tools(ready.guest)
        self.meter = Meter(self._cell.stats, lambda: measured_inside(ready.guest), self.limits)
        self._configure(ready)
        self._arm_deadline()

    # -- what it is

    @property
    def info(self) -> SandboxInfo:
        return info_of(self.record)

    def check_running(self) -> None:
        """Raises SandboxExpired, SandboxKilled or SandboxLost if it has ended."""
        if self.record.state != "running":
            raise gone(self.record)

    def label(self, name: str, value: str) -> None:
        """Changes one pair of its metadata. Raises InvalidRequest for what is too much."""
        metadata = {**self.record.metadata, name: value}
        check_metadata(metadata)
        self._change(metadata=metadata)

    # -- how long it lives

    def renew(self, seconds: float) -> SandboxInfo:
        """Moves the deadline to `seconds` from now, at most to the longest lifetime that the host allows."""
        self.check_running()
        check_seconds("lifetime", seconds)
        if seconds is None:
            raise errors.InvalidRequest("renew needs a number of seconds")
        latest = self.record.created_at + self._max_lifetime_seconds
        self._change(deadline_at=min(time.time() + seconds, latest))
        self._arm_deadline()
        return self.info

    def extend(self, seconds: float) -> SandboxInfo:
        """As `renew`, but never to an earlier moment than the deadline that it has; without one, it keeps none."""
        deadline_at = self.record.deadline_at
        if deadline_at is None or time.time() + seconds <= deadline_at:
            self.check_running()
            check_seconds("lifetime", seconds)
            return self.info
        return self.renew(seconds)

    def expire(self) -> None:
        """As if its deadline passed now. Harmless when it has ended."""
        self._on_deadline()

    async def kill(self, reason: str = "killed by its owner") -> None:
        """Ends it. Afterwards nothing of it remains on the host. Harmless when it has ended."""
        await self.end("killed", "sandbox killed", reason)

    async def end(self, state: State, ending: str, reason: str) -> None:
        """Ends it for that reason; `ending` is what running executions say."""
        self._end(state, ending, reason)
        if self._destroying is not None:
            await asyncio.shield(self._destroying)

    @property
    def destroying(self) -> asyncio.Task[None] | None:
        """Its destruction, once it has ended."""
        return self._destroying

    async def wait_ended(self) -> None:
        """Returns when it has ended, for whatever reason."""
        while self.ending is None:
            await self._ended.heard()

    def abandon(self, why: str) -> None:
        """The cell is broken: it is destroyed and the sandbox is lost."""
        self._end("lost", f"sandbox lost: {why}", why)

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
        return [self.context(), *(each for id, each in self._contexts.items() if id != DEFAULT_CONTEXT)]

    def context(self, id: str | None = None) -> Context:
        """The context of that id; the default one without. Raises ContextNotFound."""
        self.check_running()
        try:
            return self._contexts[id or DEFAULT_CONTEXT]
        except KeyError:
            raise errors.ContextNotFound(f"sandbox {self.id} has no context {id!r}") from None

    def default_context(self, language: str = "python") -> Context:
        """The context of that language that nobody needs to make. Its kernel starts when it is first used.

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
        if len(self._contexts) >= MAX_CONTEXTS:
            raise errors.InvalidRequest(f"a sandbox can have {MAX_CONTEXTS} contexts: remove one first")
        cwd = self.spec.cwd if cwd is None else sandbox_path(cwd, self.spec.cwd)
        context = Context(self, new_id("c"), language=language, cwd=cwd)
        await context.kernel()
        self.check_running()
        self._contexts[context.id] = context
        return context

    def remove_context(self, id: str) -> None:
        """Ends a context. The default one comes back, empty, when it is used again. Raises ContextNotFound."""
        self.context(id).remove()
        del self._contexts[id]
        if id == DEFAULT_CONTEXT:
            self._contexts[id] = Context(self, id, cwd=self.spec.cwd)

    # -- Home: what a context needs of its sandbox

    async def start_kernel(self, context: Context) -> Kernel:
        self.check_running()
        self._kernels_started += 1
        id, language = str(self._kernels_started), context.language
        return await start_kernel(self._guest, id, language=language, user=self.spec.user, cwd=context.cwd, env={})

    def oom_kills(self) -> int:
        return self._cell.oom_kills()

    def memory_peak_bytes(self) -> int | None:
        """The most that it ever used, with its files; None where this host does not know."""
        return self._cell.memory_peak_bytes()

    @property
    def has_deadline(self) -> bool:
        return self.record.deadline_at is not None

    # -- inside

    def _configure(self, ready: ReadyCell) -> None:
        """Says what a cell that was made in advance could not know: mostly nothing. Nobody waits for an answer."""
        ready.set_limits(self.limits)
        own_limits = self._cell.limits_for_init(self.limits)
        cwd = self.spec.cwd if self.spec.cwd != SandboxSpec().cwd else None  # it started there
        env = {**environment_of(self.network.policy), **self.spec.env}
        if env or cwd or own_limits or self.spec.sudo:
            self._guest.tell("configure", env=env, cwd=cwd, sudo=self.spec.sudo, **own_limits)
            ready.kernel.configure(env, cwd, own_limits)
        self._guest.on_lost = self._on_lost
        first = Context(self, DEFAULT_CONTEXT, cwd=self.spec.cwd, kernel=ready.kernel)
        self._contexts[DEFAULT_CONTEXT] = first

    def _arm_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if self.record.deadline_at is not None:
            left = max(self.record.deadline_at - time.time(), 0.0)
            self._deadline = asyncio.get_running_loop().call_later(left, self._on_deadline)

    def _on_deadline(self) -> None:
        self._end("expired", "deadline", "its deadline passed")

    def _on_lost(self, why: str) -> None:
        self._end("lost", "sandbox lost: its init died", f"its init died ({why})")

    def _end(self, state: State, ending: str, reason: str) -> None:
        if self.ending is not None:
            return
        self.ending = ending
        self._ended.ring()
        if self._deadline is not None:
            self._deadline.cancel()
        self.meter.close()
        self.network.close()
        self.tools.close()
        for context in self._contexts.values():
            context.stop(ending)
        self.commands.end_all(ending)
        self._destroying = asyncio.create_task(self._cell.aclose())
        self._change(state=state, ended_at=time.time(), end_reason=reason)
        self._guest.close(lambda: gone(self.record))

    def _change(self, **fields: object) -> None:
        self.record = msgspec.structs.replace(self.record, **fields)
        self._on_change(self)


def info_of(record: SandboxRecord) -> SandboxInfo:
    """What is told of a sandbox."""
    return SandboxInfo(
        id=record.id,
        template=record.template,
        owner=record.owner,
        state="running" if record.state == "running" else "ended",
        created_at=record.created_at,
        deadline_at=record.deadline_at,
        metadata=record.metadata,
        limits=record.limits,
        ended_at=record.ended_at,
        end_reason=record.end_reason,
    )
