"""Creation of sandboxes: a cell, the requested settings, and the files of an image where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from cloche import errors
from cloche.config import Config
from cloche.engine.executions.history import HistoryBudget, SandboxHistory
from cloche.engine.instance import Instance
from cloche.engine.operations.audit import AuditLog
from cloche.engine.operations.counters import EngineCounters
from cloche.engine.pauses.images import SandboxImages
from cloche.engine.principal import current_principal
from cloche.engine.quotas.capacity import ExecutionSlots, Slot
from cloche.engine.quotas.quotas import QuotaLease, Quotas
from cloche.engine.sandboxes.networks import Networks
from cloche.engine.sandboxes.pool import CellSupply, default_limits
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.engine.sandboxes.volumes import VolumeRegistry
from cloche.isolation.base import CellMounts
from cloche.model import Launch, Limits, SandboxSpec, Snapshot, Template
from cloche.store.base import SandboxRecord
from cloche.telemetry import log

# Launch of a built template's sandbox: runs its start command, and waits until its ready command succeeds.

LAUNCH_READY_SECONDS = 30.0  # clients wait a minute for a sandbox
READY_POLL_SECONDS = 0.2
DEFAULT_USER_NOTE = "default_user"  # a note: as whom clients run what they run as nobody in particular
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
            async for _ in process:  # nobody wants what it says
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
    except errors.ClocheError as error:  # a working directory that somebody removed, say: the sandbox is there
        log.warning("sandbox.not_started", sandbox=sandbox.id, owner=sandbox.spec.owner, reason=error.code)
    except BaseException:
        await sandbox.kill("whoever asked for it left before it was ready")
        raise
    return sandbox


class SandboxRegistry(Protocol):
    """The engine as the owner of the sandboxes that are made."""

    trail: AuditLog

    def add(self, sandbox: Sandbox) -> None: ...

    def on_change(self, sandbox: Sandbox) -> None: ...

    def on_due(self, sandbox: Sandbox) -> None: ...


class SandboxFactory:
    """Makes sandboxes until it is `closing`."""

    def __init__(
        self,
        config: Config,
        instance: Instance,
        housing: CellSupply,
        networks: Networks,
        images: SandboxImages,
        volumes: VolumeRegistry,
        quotas: Quotas,
        tally: EngineCounters,
        keeper: SandboxRegistry,
    ):
        self.closing = False
        self._config = config
        self._instance = instance
        self._housing = housing
        self._networks = networks
        self._images = images
        self._volumes = volumes
        self._quotas = quotas
        self._tally = tally
        self._keeper = keeper
        self._archive = HistoryBudget(config.history.bytes)

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
        self._check_spec(spec)
        check = self._make_creation_check(spec.owner or _current_owner())
        limits = spec.limits or default_limits(self._config, template)
        self._config.limits.check(limits)
        charge = QuotaLease(self._quotas, spec.owner, _creating_key_id(spec, before), limits.memory_bytes)
        spec = charge.limit_spec_lifetime(spec)
        place = await self._acquire_slot(spec, charge)
        began_at = time.monotonic()
        try:
            sandbox = await self._create_in_slot(spec, id, template, limits, charge, place, image, before, check)
        except (errors.Unavailable, OSError) as failure:
            error = failure if isinstance(failure, errors.Unavailable) else out_of_files_error(failure)
            self._tally.not_created[error.code] += 1
            log.warning("sandbox.not_created", template=spec.template, reason=error.code)
            raise error from None
        if spec.owner:
            self._tally.sandbox_created(time.monotonic() - began_at)
        return sandbox

    def _make_creation_check(self, owner: str) -> Callable[[], None]:
        """A check for the times in between: raises where the sandbox must not be made any more. Raises so itself."""
        shut_out = self._housing.admission.shut_out
        begun = shut_out.begun(owner)

        def check() -> None:
            if self.closing:
                raise shutting_down_error()
            shut_out.check(owner, begun)

        return check

    async def _acquire_slot(self, spec: SandboxSpec, charge: QuotaLease) -> Slot:
        """Raises Busy, ShuttingDown."""
        try:
            return await self._housing.admission.sandboxes.enter(spec.owner or _current_owner())
        except BaseException:
            charge.leave()
            raise

    def close(self) -> None:
        """Waiting creations fail with ShuttingDown."""
        self.closing = True
        self._housing.admission.close()

    async def _create_in_slot(
        self,
        spec: SandboxSpec,
        id: str,
        template: Template,
        limits: Limits,
        charge: QuotaLease,
        place: Slot,
        image: str | None,
        before: SandboxRecord | None,
        check: Callable[[], None],
    ) -> Sandbox:
        """Gives it a cell. Its life begins when it has one, and its slot is given back when that is gone."""
        try:
            sandbox, stale = await self._make_sandbox(spec, id, template, limits, charge, place, image, before, check)
        except BaseException:
            place.leave()
            charge.leave()
            raise
        self._keeper.add(sandbox)
        if self._networks.needs_door(sandbox.network.policy):
            await self._networks.open(sandbox)
        if stale:  # its first kernel was there before its packages were
            await sandbox.context().restart()
        return sandbox

    async def _make_sandbox(
        self,
        spec: SandboxSpec,
        id: str,
        template: Template,
        limits: Limits,
        charge: QuotaLease,
        place: Slot,
        image: str | None,
        before: SandboxRecord | None,
        check: Callable[[], None],
    ) -> tuple[Sandbox, bool]:
        """The sandbox, and whether its first kernel is older than its packages."""
        check()
        network = self._networks.policy_for(spec, template)
        mounts = await self._volumes.acquire_mounts(spec.volumes, spec.owner, template) if spec.volumes else None
        ready = await self._housing.take(template, spec.user, limits, mounts)
        try:
            check()
            stale = image is not None and await self._images.restore(ready.guest, image)
            check()  # whoever ends all sandboxes, or all of one owner, has not seen it
            ready.guest.noted = self._keeper.trail.of(id, spec.owner, charge.key_id)
            sandbox = Sandbox(
                ready,
                spec,
                self._new_record(id, spec, template, limits, charge.key_id, before),
                network=network,
                max_lifetime_seconds=charge.max_lifetime_seconds(self._config.lifetime.max_seconds),
                tally=self._tally if spec.owner else EngineCounters(),
                on_change=lambda changed: self._on_change(changed, place, mounts),
                on_due=self._keeper.on_due,
                transcript=SandboxHistory(self._config.history.sandbox_bytes, self._archive),
                charge=charge,
                turns=ExecutionSlots(self._housing.admission.executions, spec.owner),
            )
        except BaseException:  # a spec that fits into no frame, say, or files that do not fit in
            await ready.aclose()
            raise
        return sandbox, stale

    def _on_change(self, sandbox: Sandbox, place: Slot, mounts: CellMounts | None) -> None:
        self._keeper.on_change(sandbox)
        if sandbox.destroy_task is not None:
            sandbox.destroy_task.add_done_callback(place.leave)
            if mounts is not None:
                mounts.leave()

    def _check_spec(self, spec: SandboxSpec) -> None:
        if self.closing:
            raise shutting_down_error()
        most = self._config.lifetime.max_seconds
        if spec.lifetime_seconds is not None and spec.lifetime_seconds > most:
            raise errors.InvalidRequest(f"a lifetime can be {most:g} s on this host, not {spec.lifetime_seconds:g}")

    def _new_record(
        self,
        id: str,
        spec: SandboxSpec,
        template: Template,
        limits: Limits,
        key_id: str,
        before: SandboxRecord | None,
    ) -> SandboxRecord:
        now = time.time()
        return SandboxRecord(
            id=id,
            owner=spec.owner,
            template=template.ref,
            state="running",
            instance=self._instance.name,
            created_at=now if before is None else before.created_at,
            deadline_at=None if spec.lifetime_seconds is None else now + spec.lifetime_seconds,
            metadata=spec.metadata,
            limits=limits,
            on_deadline=spec.on_deadline,
            pause_memory=spec.pause_memory,
            auto_resume=spec.auto_resume,
            notes=spec.notes,
            volumes=spec.volumes,
            resumed_at=None if before is None else now,
            key_id=key_id,
        )


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
    whose = "this process has" if error.errno == errno.EMFILE else "this host has"
    return errors.Unavailable(
        f"{whose} too many files open for one more sandbox: close some, or raise the limit (ulimit -n)"
    )


def shutting_down_error() -> errors.ShuttingDown:
    return errors.ShuttingDown("the host is shutting down")


# All-or-nothing forks of a sandbox.


async def require_all_forks(made: Sequence[Sandbox | errors.ClocheError]) -> list[Sandbox]:
    """The sandboxes of `Engine.fork`, if none failed. Raises the first failure, after ending the other forks."""
    failures = [each for each in made if isinstance(each, errors.ClocheError)]
    forks = [each for each in made if isinstance(each, Sandbox)]
    if failures:
        await asyncio.gather(*(each.kill("not all of its siblings could be made") for each in forks))
        raise failures[0]
    return forks
