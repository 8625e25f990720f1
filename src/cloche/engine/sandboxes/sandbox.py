"""A sandbox: a cell with an id, an owner, a deadline, files, contexts and processes."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import msgspec

from cloche import errors
from cloche.engine.commands.commands import Commands
from cloche.engine.executions.checkpoints import branch
from cloche.engine.executions.context import Context
from cloche.engine.executions.history import Transcript
from cloche.engine.executions.kernel import Kernel, start_kernel
from cloche.engine.executions.streams import Bell
from cloche.engine.executions.tools import Tools
from cloche.engine.operations.counters import Tally
from cloche.engine.operations.metrics import Meter, measured_inside
from cloche.engine.pauses.freeze import Stillness
from cloche.engine.quotas.capacity import Turns
from cloche.engine.quotas.quotas import Charge
from cloche.engine.sandboxes.endings import KILLED_BY_OWNER, absent
from cloche.engine.sandboxes.files import Files, sandbox_path
from cloche.engine.sandboxes.init_client import Guest
from cloche.engine.sandboxes.network import SandboxNetwork, connect_port, environment_of
from cloche.engine.sandboxes.pool import ReadyCell
from cloche.model import Limits, SandboxInfo, SandboxSpec, check_metadata, check_seconds, new_id
from cloche.network_policy import NetworkPolicy, without_secrets
from cloche.store.base import Revival, SandboxRecord, State
from cloche.telemetry import log

# How long a sandbox may run, by a clock that nobody sets. The wall clock only says when its end will be.


class Lifetime:
    """Calls `on_end` when it is over. It can last for `most_seconds` in all, since it was made or began again."""

    def __init__(self, most_seconds: float, on_end: Callable[[], None]):
        self._most_seconds = most_seconds
        self._on_end = on_end
        self._began_at = time.monotonic()
        self._ends_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left_seconds(self) -> float | None:
        """None where it has no end."""
        return None if self._ends_at is None else max(self._ends_at - time.monotonic(), 0.0)

    @property
    def over_seconds(self) -> float:
        """For how long it has lasted beyond the most; negative before that."""
        return time.monotonic() - self._began_at - self._most_seconds

    def begin(self, seconds: float | None) -> float | None:
        """As if it was made now. When its end is, by the wall clock."""
        self._began_at = time.monotonic()
        return self.set(seconds)

    def set(self, seconds: float | None) -> float | None:
        """Ends so many seconds from now, at most after all that it can have. When that is, by the wall clock."""
        self.stop()
        if seconds is None:
            return None
        left = max(min(seconds, -self.over_seconds), 0.0)
        self._ends_at = time.monotonic() + left
        self.defer(left)
        return time.time() + left

    def defer(self, seconds: float) -> None:
        """`on_end` is called so much later; what is said of its end stays."""
        self._cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_end)

    def stop(self) -> None:
        """It has no end until it is set again."""
        self._cancel()
        self._ends_at = None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


DEFAULT_CONTEXT = "default"
MAX_CONTEXTS = 64


class Sandbox:
    """Made by `Engine.create`. `on_change(record)` hears of every change of what is recorded.

    `on_due(sandbox)` hears that the deadline has passed of one that is to be paused then.
    """

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
        on_due: Callable[[Sandbox], None],
        transcript: Transcript,
        charge: Charge,
        turns: Turns,
    ):
        self.id = record.id
        self.spec = spec
        self.limits: Limits = record.limits
        self.record = record
        self.ending: str | None = None  # why executions end, once the sandbox does
        self.unneeded: str | None = None  # the image of one that ended while it was paused
        self._cell = ready.cell
        self._guest = ready.guest
        self._on_change = on_change
        self._on_due = on_due
        self.changing = asyncio.Lock()  # held by whoever pauses it, resumes it, or makes an image of it
        self.stillness = Stillness(ready.cell, ready.guest)
        self.charge = charge.begin(ready.cell, record.limits)
        self.count_execution = charge.count_execution
        self._lifetime = Lifetime(max_lifetime_seconds, self._on_deadline)
        self._destroying: asyncio.Task[None] | None = None
        self._ended = Bell()
        self._kernels_started = 0
        self._contexts: dict[str, Context] = {}
        self.files = Files(ready.guest, user=spec.user, cwd=spec.cwd, limits=self.limits)
        self.commands = Commands(
            ready.guest,
            user=spec.user,
            cwd=spec.cwd,
            limits=self.limits,
            oom_kills=self.oom_kills,
            count=charge.count_execution,
        )
        self.network = SandboxNetwork(ready.guest, network, ready.listener)
        self.tools = Tools(ready.guest)
        self.transcript = transcript
        self.turns = turns
        self.meter = Meter(
            self._cell.stats, lambda: measured_inside(ready.guest), self.limits, self._cell.cpu_seconds, charge.spend
        )
        self.execution_ended = self.meter.heeding(tally.execution_ended)
        self._configure(ready)
        if record.deadline_at is not None:
            self._lifetime.set(record.deadline_at - time.time())

    # -- what it is

    @property
    def info(self) -> SandboxInfo:
        return info_of(self.record)

    def check_running(self) -> None:
        """Raises SandboxExpired, SandboxKilled or SandboxLost if it has ended, SandboxPaused if it is paused."""
        if self.record.state != "running":
            raise absent(self.record)

    @property
    def guest(self) -> Guest:
        return self._guest

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
        self._change(deadline_at=self._lifetime.set(seconds))
        return self.info

    @property
    def over_seconds(self) -> float:
        """For how long it has run beyond what one may on this host; negative before that."""
        return self._lifetime.over_seconds

    def reckon(self) -> None:
        """The wall clock was set: its deadline is as far away as before, so it is called by another time."""
        if (left := self._lifetime.left_seconds) is not None:
            self._change(deadline_at=time.time() + left)

    def extend(self, seconds: float) -> SandboxInfo:
        """As `renew`, but never to an earlier moment than the deadline that it has; without one, it keeps none."""
        left = self._lifetime.left_seconds
        if left is None or seconds <= left:
            self.check_running()
            check_seconds("lifetime", seconds)
            return self.info
        return self.renew(seconds)

    def expire(self) -> None:
        """As if its deadline passed now. Harmless when it has ended."""
        self._on_deadline()

    # -- rest

    def rest(self, revival: Revival, *, memory: bool) -> SandboxRecord:
        """What is recorded of it if it is paused now. Nothing is changed yet."""
        return msgspec.structs.replace(
            self.record, state="paused", paused_at=time.time(), pause_memory=memory, revival=revival
        )

    def lie_down(self, record: SandboxRecord) -> None:
        """It is paused as that record says, its programs stand still. So does its deadline."""
        self._lifetime.stop()
        self.turns.rest()
        self._change(
            state="paused", paused_at=record.paused_at, pause_memory=record.pause_memory, revival=record.revival
        )

    def leave_cell(self, reason: str) -> None:
        """Paused without its memory: its cell is destroyed. This object is of no more use."""
        self._leave(reason)
        self._on_change(self)
        self._guest.close(lambda: absent(self.record))

    def get_up(self, seconds: float | None) -> None:
        """It runs again, its programs go on, and has so many seconds, or as many as it was first given."""
        now = time.time()
        lifetime = seconds or self.spec.lifetime_seconds
        self._change(
            state="running",
            paused_at=None,
            resumed_at=now,
            revival=None,
            pause_memory=self.spec.pause_memory,
            deadline_at=self._lifetime.begin(lifetime),
        )

    def revival(self, image: str, size_bytes: int) -> Revival:
        """What it takes to make it again, with the files of that image."""
        spec, policy = self.spec, self.network.policy
        return Revival(
            image=image,
            bytes=size_bytes,
            env=spec.env,
            user=spec.user,
            cwd=spec.cwd,
            sudo=spec.sudo,
            network=without_secrets(policy),
            lifetime_seconds=spec.lifetime_seconds,
            pause_memory=spec.pause_memory,
        )

    def defer(self, seconds: float) -> None:
        """Its deadline has passed, and what should be done then could not: so much later it passes again."""
        self._lifetime.defer(seconds)

    async def kill(self, reason: str = KILLED_BY_OWNER) -> None:
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
        self.check_room(1)
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

    async def branch_kernel(self, origin: Kernel) -> Kernel:
        self.check_running()
        self._kernels_started += 1
        return await branch(self._guest, origin, str(self._kernels_started), user=self.spec.user)

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

    def _on_deadline(self) -> None:
        if self.record.on_deadline == "pause" and self.ending is None:
            self._on_due(self)
        else:
            self._end("expired", "deadline", "its deadline passed")

    def _on_lost(self, why: str) -> None:
        self._end("lost", "sandbox lost: its init died", f"its init died ({why})")

    def _end(self, state: State, ending: str, reason: str) -> None:
        if self.ending is not None:
            return
        self._leave(ending)
        if self.record.revival is not None:
            self.unneeded = self.record.revival.image
        self._change(state=state, ended_at=time.time(), end_reason=reason, revival=None)
        self._guest.close(lambda: absent(self.record))

    def _leave(self, ending: str) -> None:
        """All that runs ends, and the cell is destroyed."""
        self.ending = ending
        self._ended.ring()
        self._lifetime.stop()
        self.meter.close()
        self.charge.leave()
        self.network.close()
        self.tools.close()
        for context in self._contexts.values():
            context.stop(ending)
        self.commands.end_all(ending)
        self._destroying = asyncio.create_task(self._cell.aclose())

    def _change(self, **fields: object) -> None:
        self.record = msgspec.structs.replace(self.record, **fields)
        self._on_change(self)


def info_of(record: SandboxRecord) -> SandboxInfo:
    """What is told of a sandbox."""
    return SandboxInfo(
        id=record.id,
        template=record.template,
        owner=record.owner,
        state=record.state if record.state in ("running", "paused") else "ended",
        created_at=record.created_at,
        deadline_at=record.deadline_at,
        metadata=record.metadata,
        limits=record.limits,
        ended_at=record.ended_at,
        end_reason=record.end_reason,
        paused_at=record.paused_at if record.state == "paused" else None,
        pause_memory=record.pause_memory if record.state == "paused" else None,
        on_deadline=record.on_deadline,
        auto_resume=record.auto_resume,
        notes=record.notes,
        volumes=record.volumes,
        key_id=record.key_id,
    )


# Notices that somebody has set the wall clock: what was said of moments to come is then said anew.

TICK_SECONDS = 1.0
JUMP_SECONDS = 2.0  # less is drift, which nobody minds


class Jumps:
    """Calls `on_jump` after each, from `open` until `close`."""

    def __init__(self, on_jump: Callable[[], None]):
        self._on_jump = on_jump
        self._difference = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._difference = time.time() - time.monotonic()
        self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._look)

    def _look(self) -> None:
        self._wait()
        jumped = time.time() - time.monotonic() - self._difference
        if abs(jumped) > JUMP_SECONDS:
            self._difference += jumped
            log.warning("clock.jumped", seconds=round(jumped))
            self._on_jump()
