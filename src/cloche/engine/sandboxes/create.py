"""Creation of sandboxes: a cell, the requested settings, and the files of an image where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cloche import errors
from cloche.engine.executions.history import HistoryBudget, SandboxHistory
from cloche.engine.operations.metrics import EngineCounters
from cloche.engine.pauses.images import SandboxImages
from cloche.engine.principal import current_principal
from cloche.engine.quotas.capacity import ExecutionSlots, Slot
from cloche.engine.quotas.quotas import QuotaLease
from cloche.engine.sandboxes.endings import CLIENT_DISCONNECTED_EARLY, SIBLING_FAILED
from cloche.engine.sandboxes.pool import ReadyCell, default_limits
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.isolation.base import CellMounts
from cloche.model import Launch, Limits, SandboxSpec, Snapshot, Template
from cloche.network_policy import NetworkPolicy
from cloche.store.base import SandboxRecord
from cloche.telemetry import log

if TYPE_CHECKING:
    from cloche.engine.engine import Engine

# Launch of a built template's sandbox: runs its start command, and waits until its ready command succeeds.

LAUNCH_READY_SECONDS = 30.0  # clients wait a minute for a sandbox
READY_POLL_SECONDS = 0.2
DEFAULT_USER_NOTE = "default_user"  # a note: the user of programs for which clients name none
LAUNCH_SHELL = ("/bin/bash", "-l", "-c")


async def run_launch_commands(sandbox: Sandbox, how: Launch) -> None:
    """Returns when it is ready, or after LAUNCH_READY_SECONDS all the same, with a log line. Raises Gone."""
    if how.start_command is not None:
        await sandbox.commands.launch(
            (*LAUNCH_SHELL, how.start_command), user=how.user, cwd=how.cwd, tag="start", counted=False
        )
    if how.ready_command is None:
        return
    try:
        async with asyncio.timeout(LAUNCH_READY_SECONDS):
            await _wait_ready(sandbox, how, how.ready_command)
    except TimeoutError:
        log.warning("sandbox.not_ready", sandbox=sandbox.id, owner=sandbox.spec.owner, seconds=LAUNCH_READY_SECONDS)


async def _wait_ready(sandbox: Sandbox, how: Launch, command: str) -> None:
    while True:
        began_at = time.monotonic()
        process = await sandbox.commands.start(
            (*LAUNCH_SHELL, command), user=how.user, cwd=how.cwd, timeout_seconds=LAUNCH_READY_SECONDS, counted=False
        )
        async with contextlib.aclosing(process):  # killed where the time is over
            async for _ in process:  # its output is not needed
                pass
        sandbox.check_running()
        if process.exited is not None and process.exited.exit_code == 0:
            log.info("sandbox.ready", sandbox=sandbox.id, seconds=round(time.monotonic() - began_at, 3))
            return
        await asyncio.sleep(READY_POLL_SECONDS)


async def launch_sandbox(sandbox: Sandbox, how: Launch | None) -> Sandbox:
    """The same sandbox, launched; a failed launch is logged. Kills it if the caller is cancelled. Raises Gone."""
    if how is None:
        return sandbox
    try:
        await run_launch_commands(sandbox, how)
    except errors.Gone:
        raise
    except errors.ClocheError as error:  # a working directory that was removed, say: the sandbox is there
        log.warning("sandbox.not_started", sandbox=sandbox.id, owner=sandbox.spec.owner, reason=error.code)
    except BaseException:
        await sandbox.kill(CLIENT_DISCONNECTED_EARLY)
        raise
    return sandbox


class Creation(NamedTuple):
    """One sandbox that is being made: the request, and the things that are already decided about it."""

    id: str
    spec: SandboxSpec
    template: Template
    limits: Limits
    quota_lease: QuotaLease
    check: Callable[[], None]  # raises where it must not be made any more
    image: str | None  # of its files
    before: SandboxRecord | None  # the paused sandbox that it is to be again

    def record(self, instance: str) -> SandboxRecord:
        """The record of the sandbox as it begins to run in that host process."""
        now, spec, before = time.time(), self.spec, self.before
        return SandboxRecord(
            id=self.id,
            spec=msgspec.structs.replace(spec, template=self.template.ref, limits=self.limits),
            state="running",
            instance=instance,
            created_at=now if before is None else before.created_at,
            deadline_at=None if spec.lifetime_seconds is None else now + spec.lifetime_seconds,
            resumed_at=None if before is None else now,
            key_id=self.quota_lease.key_id,
        )


class SandboxFactory:
    """Makes the engine's sandboxes until it is `closing`."""

    def __init__(self, engine: Engine, images: SandboxImages):
        self.closing = False
        self._engine = engine
        self._config = engine.config
        self._images = images
        self._archive = HistoryBudget(engine.config.history.bytes)

    async def create(
        self,
        spec: SandboxSpec,
        id: str,
        template: Template,
        *,
        image: str | None = None,
        before: SandboxRecord | None = None,
    ) -> Sandbox:
        """See `Engine.create` and `Engine.make`."""
        creation = self._begin_creation(spec, id, template, image, before)
        slot = await self._acquire_slot(creation)
        began_at = time.monotonic()
        try:
            sandbox = await self._create_in_slot(creation, slot)
        except (errors.Unavailable, OSError) as failure:
            error = failure if isinstance(failure, errors.Unavailable) else out_of_files_error(failure)
            self._engine.counters.not_created[error.code] += 1
            log.warning("sandbox.not_created", template=spec.template, reason=error.code)
            raise error from None
        if spec.owner:
            self._engine.counters.sandbox_created(time.monotonic() - began_at)
        return sandbox

    def close(self) -> None:
        """Waiting creations fail with ShuttingDown."""
        self.closing = True
        self._engine.cell_supply.admission.close()

    def _begin_creation(
        self, spec: SandboxSpec, id: str, template: Template, image: str | None, before: SandboxRecord | None
    ) -> Creation:
        """Raises InvalidRequest, QuotaExceeded, ShuttingDown."""
        self._check_spec(spec)
        check = self._make_creation_check(spec.owner or _current_owner())
        limits = spec.limits or default_limits(self._config, template)
        self._config.limits.check(limits)
        quota_lease = QuotaLease(self._engine.quotas, spec.owner, _creating_key_id(spec, before), limits.memory_bytes)
        return Creation(id, quota_lease.limit_spec_lifetime(spec), template, limits, quota_lease, check, image, before)

    def _check_spec(self, spec: SandboxSpec) -> None:
        if self.closing:
            raise shutting_down_error()
        most = self._config.lifetime.max_seconds
        if spec.lifetime_seconds is not None and spec.lifetime_seconds > most:
            raise errors.InvalidRequest(f"a lifetime can be {most:g} s on this host, not {spec.lifetime_seconds:g}")

    def _make_creation_check(self, owner: str) -> Callable[[], None]:
        """A check for the times in between: raises where the sandbox must not be made any more. Raises so itself."""
        lockout = self._engine.cell_supply.admission.lockout
        begun = lockout.begun(owner)

        def check() -> None:
            if self.closing:
                raise shutting_down_error()
            lockout.check(owner, begun)

        return check

    async def _acquire_slot(self, creation: Creation) -> Slot:
        """Raises Busy, ShuttingDown."""
        try:
            return await self._engine.cell_supply.admission.sandboxes.enter(creation.spec.owner or _current_owner())
        except BaseException:
            creation.quota_lease.leave()
            raise

    async def _create_in_slot(self, creation: Creation, slot: Slot) -> Sandbox:
        """Gives it a cell. Its life begins when it has one, and its slot is given back when that is gone."""
        try:
            sandbox, stale = await self._make_sandbox(creation, slot)
        except BaseException:
            slot.leave()
            creation.quota_lease.leave()
            raise
        self._engine.add(sandbox)
        if self._engine.networks.needs_door(sandbox.network.policy):
            await self._engine.networks.open(sandbox)
        if stale:  # its first kernel was there before its packages were
            await sandbox.context().restart()
        return sandbox

    async def _make_sandbox(self, creation: Creation, slot: Slot) -> tuple[Sandbox, bool]:
        """The sandbox, and whether its first kernel is older than its packages."""
        spec, template, check = creation.spec, creation.template, creation.check
        check()
        network = self._engine.networks.policy_for(spec, template)
        volumes = self._engine.volumes
        mounts = await volumes.acquire_mounts(spec.volumes, spec.owner, template) if spec.volumes else None
        ready = await self._engine.cell_supply.take(template, spec.user, creation.limits, mounts)
        try:
            check()
            stale = creation.image is not None and await self._images.restore(ready.guest, creation.image)
            check()  # an end of all sandboxes, or of all of one owner, has not seen it
            ready.guest.noted = self._engine.audit_log.of(creation.id, spec.owner, creation.quota_lease.key_id)
            sandbox = self._assemble_sandbox(creation, ready, network, partial(self._on_change, slot, mounts))
        except BaseException:  # a spec that fits into no frame, say, or files that do not fit in
            await ready.aclose()
            raise
        return sandbox, stale

    def _assemble_sandbox(
        self, creation: Creation, ready: ReadyCell, network: NetworkPolicy, on_change: Callable[[Sandbox], None]
    ) -> Sandbox:
        owner, quota_lease = creation.spec.owner, creation.quota_lease
        return Sandbox(
            ready,
            creation.record(self._engine.instance.name),
            network=network,
            max_lifetime_seconds=quota_lease.max_lifetime_seconds(self._config.lifetime.max_seconds),
            counters=self._engine.counters if owner else EngineCounters(),
            on_change=on_change,
            on_due=self._engine.on_due,
            history=SandboxHistory(self._config.history.sandbox_bytes, self._archive),
            quota_lease=quota_lease,
            execution_slots=ExecutionSlots(self._engine.cell_supply.admission.executions, owner),
        )

    def _on_change(self, slot: Slot, mounts: CellMounts | None, sandbox: Sandbox) -> None:
        self._engine.on_change(sandbox)
        if sandbox.destroy_task is not None:
            sandbox.destroy_task.add_done_callback(slot.leave)
            if mounts is not None:
                mounts.leave()


def _creating_key_id(spec: SandboxSpec, before: SandboxRecord | None) -> str:
    """The id of the key that a sandbox is made with; of one that is made again, the original one."""
    if before is not None:
        return before.key_id
    principal = current_principal()
    return principal.key_id if principal is not None and principal.owner == spec.owner else ""


def spec_from_snapshot(spec: SandboxSpec, snapshot: Snapshot) -> SandboxSpec:
    """Requested settings come before the snapshot's; the working directory is the template's."""
    begin = {} if snapshot.launch is None else {"cwd": snapshot.launch.cwd}
    notes = {} if snapshot.launch is None else {DEFAULT_USER_NOTE: snapshot.launch.user}
    return msgspec.structs.replace(
        spec,
        **begin,
        notes={**spec.notes, **notes},
        template=snapshot.template,
        env={**snapshot.env, **spec.env},
        limits=spec.limits or snapshot.limits,
        network=spec.network or snapshot.network,
        volumes={**snapshot.volumes, **spec.volumes},
    )


def _current_owner() -> str:
    """The owner that the engine makes a sandbox of its own for (a template's build); empty for a canary."""
    principal = current_principal()
    return "" if principal is None else principal.owner


def out_of_files_error(error: OSError) -> errors.Unavailable:
    """The error for too many open files. Raises the error itself if it is another one."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        raise error
    holder = "this process has" if error.errno == errno.EMFILE else "this host has"
    return errors.Unavailable(
        f"{holder} too many files open for one more sandbox: close some, or raise the limit (ulimit -n)"
    )


def shutting_down_error() -> errors.ShuttingDown:
    return errors.ShuttingDown("the host is shutting down")


# All-or-nothing forks of a sandbox.


async def require_all_forks(made: Sequence[Sandbox | errors.ClocheError]) -> list[Sandbox]:
    """The sandboxes of `Engine.fork`, if none failed. Raises the first failure, after ending the other forks."""
    failures = [each for each in made if isinstance(each, errors.ClocheError)]
    forks = [each for each in made if isinstance(each, Sandbox)]
    if failures:
        await asyncio.gather(*(each.kill(SIBLING_FAILED) for each in forks))
        raise failures[0]
    return forks
