"""Making sandboxes: a cell, what is asked for, and the files of an image where there is one."""

from __future__ import annotations

import errno
import time
from typing import Protocol

import msgspec

from cloche import errors
from cloche.config import Config
from cloche.engine.history import Transcript
from cloche.engine.housing import Housing, default_limits
from cloche.engine.images import Images
from cloche.engine.instance import Instance
from cloche.engine.launching import DEFAULT_USER
from cloche.engine.networks import Networks
from cloche.engine.sandbox import Sandbox
from cloche.engine.tally import Tally
from cloche.engine.volumes import Volumes
from cloche.model import Limits, SandboxSpec, Snapshot, Template
from cloche.store.base import SandboxRecord
from cloche.telemetry import log


class Keeper(Protocol):
    """Whose the sandboxes are that are made."""

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
        self._tally = tally
        self._keeper = keeper

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
        began_at = time.monotonic()
        try:
            sandbox = await self._house(spec, id, template, image, before)
        except (errors.Unavailable, OSError) as failure:
            error = failure if isinstance(failure, errors.Unavailable) else out_of_files(failure)
            self._tally.not_created[error.code] += 1
            log.warning("sandbox.not_created", template=spec.template, reason=error.code)
            raise error from None
        if spec.owner:
            self._tally.sandbox_created(time.monotonic() - began_at)
        return sandbox

    async def _house(
        self, spec: SandboxSpec, id: str, template: Template, image: str | None, before: SandboxRecord | None
    ) -> Sandbox:
        """Gives it a cell. Its life begins when it has one."""
        self._check(spec)
        limits = spec.limits or default_limits(self._config, template)
        self._config.limits.check(limits)
        network = self._networks.policy_for(spec, template)
        mounts = await self._volumes.mounts(spec.volumes, spec.owner, template) if spec.volumes else None
        ready = await self._housing.take(template, spec.user, limits, mounts)
        if self.closing:
            await ready.aclose()
            raise shutting_down()
        try:
            stale = image is not None and await self._images.restore(ready.guest, image)
            if self.closing:  # meanwhile: nobody would end it
                raise shutting_down()
            sandbox = Sandbox(
                ready,
                spec,
                self._new_record(id, spec, template, limits, before),
                network=network,
                max_lifetime_seconds=self._config.lifetime.max_seconds,
                tally=self._tally if spec.owner else Tally(),
                on_change=self._keeper.on_change,
                on_due=self._keeper.on_due,
                transcript=Transcript(self._config.history.sandbox_bytes),
            )
        except BaseException:  # a spec that fits into no frame, say, or files that do not fit in
            await ready.aclose()
            raise
        self._keeper.add(sandbox)
        if self._networks.wants_door(network):
            await self._networks.open(sandbox)
        if stale:  # its first kernel was there before its packages were
            await sandbox.context().restart()
        return sandbox

    def _check(self, spec: SandboxSpec) -> None:
        if self.closing:
            raise shutting_down()
        most = self._config.lifetime.max_seconds
        if spec.lifetime_seconds is not None and spec.lifetime_seconds > most:
            raise errors.InvalidRequest(f"a lifetime can be {most:g} s on this host, not {spec.lifetime_seconds:g}")

    def _new_record(
        self, id: str, spec: SandboxSpec, template: Template, limits: Limits, before: SandboxRecord | None
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
        )


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
