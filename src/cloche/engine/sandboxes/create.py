"""Making sandboxes: a cell, what is asked for, and the files of an image where there is one."""

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
from cloche.engine.executions.history import Archive, Transcript
from cloche.engine.instance import Instance
from cloche.engine.operations.audit import Trail
from cloche.engine.operations.counters import Tally
from cloche.engine.pauses.images import Images
from cloche.engine.principal import acting
from cloche.engine.quotas.capacity import Place, Turns
from cloche.engine.quotas.quotas import Charge, Quotas
from cloche.engine.sandboxes.networks import Networks
from cloche.engine.sandboxes.pool import Housing, default_limits
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.engine.sandboxes.volumes import Volumes
from cloche.isolation.base import Mounts
from cloche.model import Launch, Limits, SandboxSpec, Snapshot, Template
from cloche.store.base import SandboxRecord
from cloche.telemetry import log

# A sandbox of a built template begins: its start command runs, and it is there when its ready command succeeds.

READY_SECONDS = 30.0  # clients wait a minute for a sandbox
POLL_SECONDS = 0.2
DEFAULT_USER = "default_user"  # a note: as whom clients run what they run as nobody in particular
SHELL = ("/bin/bash", "-l", "-c")


async def launch(sandbox: Sandbox, how: Launch) -> None:
    """Returns when it is ready, or after so many seconds all the same: then the log says so. Raises Gone."""
    if how.start_command is not None:
        await sandbox.commands.launch(
            (*SHELL, how.start_command), user=how.user, cwd=how.cwd, tag="start", counted=False
        )
    if how.ready_command is None:
        return
    try:
        async with asyncio.timeout(READY_SECONDS):
            await _wait_ready(sandbox, how, how.ready_command)
    except TimeoutError:
        log.warning("sandbox.not_ready", sandbox=sandbox.id, owner=sandbox.spec.owner, seconds=READY_SECONDS)


async def _wait_ready(sandbox: Sandbox, how: Launch, command: str) -> None:
    while True:
        began_at = time.monotonic()
        process = await sandbox.commands.start(
            (*SHELL, command), user=how.user, cwd=how.cwd, timeout_seconds=READY_SECONDS, counted=False
        )
        async with contextlib.aclosing(process):  # killed where the time is over
            async for _ in process:  # nobody wants what it says
                pass
        sandbox.check_running()
        if process.exited is not None and process.exited.exit_code == 0:
            log.info("sandbox.ready", sandbox=sandbox.id, seconds=round(time.monotonic() - began_at, 3))
            return
        await asyncio.sleep(POLL_SECONDS)


async def launched(sandbox: Sandbox, how: Launch | None) -> Sandbox:
    """The same, once it has begun, as far as it can. It ends where whoever asked for it has left. Raises Gone."""
    if how is None:
        return sandbox
    try:
        await launch(sandbox, how)
    except errors.Gone:
        raise
    except errors.ClocheError as error:  # a working directory that somebody removed, say: the sandbox is there
        log.warning("sandbox.not_started", sandbox=sandbox.id, owner=sandbox.spec.owner, reason=error.code)
    except BaseException:
        await sandbox.kill("whoever asked for it left before it was ready")
        raise
    return sandbox


class Keeper(Protocol):
    """Whose the sandboxes are that are made."""

    trail: Trail

    def add(self, sandbox: Sandbox) -> None: ...

    def on_change(self, sandbox: Sandbox) -> None: ...

    def on_due(self, sandbox: Sandbox) -> None: ...


class Making:
    """Once it is `closing`, it makes no more."""

    def __init__(
        self,
        config: Config,
        instance: Instance,
        housing: Housing,
        networks: Networks,
        images: Images,
        volumes: Volumes,
        quotas: Quotas,
        tally: Tally,
        keeper: Keeper,
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
        self._archive = Archive(config.history.bytes)

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
        self._check(spec)
        check = self._may_go_on(spec.owner or _on_behalf())
        limits = spec.limits or default_limits(self._config, template)
        self._config.limits.check(limits)
        charge = Charge(self._quotas, spec.owner, _key_of(spec, before), limits.memory_bytes)
        spec = charge.within_lifetime(spec)
        place = await self._enter(spec, charge)
        began_at = time.monotonic()
        try:
            sandbox = await self._house(spec, id, template, limits, charge, place, image, before, check)
        except (errors.Unavailable, OSError) as failure:
            error = failure if isinstance(failure, errors.Unavailable) else out_of_files(failure)
            self._tally.not_created[error.code] += 1
            log.warning("sandbox.not_created", template=spec.template, reason=error.code)
            raise error from None
        if spec.owner:
            self._tally.sandbox_created(time.monotonic() - began_at)
        return sandbox

    def _may_go_on(self, owner: str) -> Callable[[], None]:
        """For the times in between: raises where one must not be made any more. Raises so itself."""
        shut_out = self._housing.admission.shut_out
        begun = shut_out.begun(owner)

        def check() -> None:
            if self.closing:
                raise shutting_down()
            shut_out.check(owner, begun)

        return check

    async def _enter(self, spec: SandboxSpec, charge: Charge) -> Place:
        """Raises Busy, ShuttingDown."""
        try:
            return await self._housing.admission.sandboxes.enter(spec.owner or _on_behalf())
        except BaseException:
            charge.leave()
            raise

    def close(self) -> None:
        """Whoever waits to have one made is told."""
        self.closing = True
        self._housing.admission.close()

    async def _house(
        self,
        spec: SandboxSpec,
        id: str,
        template: Template,
        limits: Limits,
        charge: Charge,
        place: Place,
        image: str | None,
        before: SandboxRecord | None,
        check: Callable[[], None],
    ) -> Sandbox:
        """Gives it a cell. Its life begins when it has one, and its place is given back when that is gone."""
        try:
            sandbox, stale = await self._make(spec, id, template, limits, charge, place, image, before, check)
        except BaseException:
            place.leave()
            charge.leave()
            raise
        self._keeper.add(sandbox)
        if self._networks.wants_door(sandbox.network.policy):
            await self._networks.open(sandbox)
        if stale:  # its first kernel was there before its packages were
            await sandbox.context().restart()
        return sandbox

    async def _make(
        self,
        spec: SandboxSpec,
        id: str,
        template: Template,
        limits: Limits,
        charge: Charge,
        place: Place,
        image: str | None,
        before: SandboxRecord | None,
        check: Callable[[], None],
    ) -> tuple[Sandbox, bool]:
        """The sandbox, and whether its first kernel is older than its packages."""
        check()
        network = self._networks.policy_for(spec, template)
        mounts = await self._volumes.mounts(spec.volumes, spec.owner, template) if spec.volumes else None
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
                tally=self._tally if spec.owner else Tally(),
                on_change=lambda changed: self._on_change(changed, place, mounts),
                on_due=self._keeper.on_due,
                transcript=Transcript(self._config.history.sandbox_bytes, self._archive),
                charge=charge,
                turns=Turns(self._housing.admission.executions, spec.owner),
            )
        except BaseException:  # a spec that fits into no frame, say, or files that do not fit in
            await ready.aclose()
            raise
        return sandbox, stale

    def _on_change(self, sandbox: Sandbox, place: Place, mounts: Mounts | None) -> None:
        self._keeper.on_change(sandbox)
        if sandbox.destroying is not None:
            sandbox.destroying.add_done_callback(place.leave)
            if mounts is not None:
                mounts.leave()

    def _check(self, spec: SandboxSpec) -> None:
        if self.closing:
            raise shutting_down()
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


def _key_of(spec: SandboxSpec, before: SandboxRecord | None) -> str:
    """The key that a sandbox is made with, or was, where it is made again."""
    if before is not None:
        return before.key_id
    principal = acting()
    return principal.key_id if principal is not None and principal.owner == spec.owner else ""


def from_snapshot(spec: SandboxSpec, snapshot: Snapshot) -> SandboxSpec:
    """What is asked for comes before what the snapshot has; where one begins is what its template says."""
    begin = {} if snapshot.launch is None else {"cwd": snapshot.launch.cwd}
    notes = {} if snapshot.launch is None else {DEFAULT_USER: snapshot.launch.user}
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


def _on_behalf() -> str:
    """Who has the engine make one of its own (a template's build); nobody, where it is for itself (a canary)."""
    principal = acting()
    return "" if principal is None else principal.owner


def out_of_files(error: OSError) -> errors.Unavailable:
    """What it means that no file can be opened. Raises the error itself where it means something else."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        raise error
    whose = "this process has" if error.errno == errno.EMFILE else "this host has"
    return errors.Unavailable(
        f"{whose} too many files open for one more sandbox: close some, or raise the limit (ulimit -n)"
    )


def shutting_down() -> errors.ShuttingDown:
    return errors.ShuttingDown("the host is shutting down")


# Forks for callers who want all of them, or none.


async def all_made(made: Sequence[Sandbox | errors.ClocheError]) -> list[Sandbox]:
    """What `Engine.fork` gave, if none failed. Raises why the first failed; the others have ended then."""
    failures = [each for each in made if isinstance(each, errors.ClocheError)]
    forks = [each for each in made if isinstance(each, Sandbox)]
    if failures:
        await asyncio.gather(*(each.kill("not all of its siblings could be made") for each in forks))
        raise failures[0]
    return forks
