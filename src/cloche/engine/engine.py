"""All sandboxes of one host process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from weakref import WeakValueDictionary

import msgspec

from cloche import errors
from cloche.config import Config
from cloche.engine.builds.builds import Builds, EngineFunctions
from cloche.engine.executions.runs import DetachedRuns
from cloche.engine.instance import CONTROL_SOCKET, Instance
from cloche.engine.operations.audit import AuditLog
from cloche.engine.operations.lifecycle_log import LifecycleLog
from cloche.engine.operations.metrics import EngineCounters
from cloche.engine.pauses.images import SandboxImages
from cloche.engine.pauses.pause import Pauses
from cloche.engine.pauses.snapshots import SnapshotRegistry, is_snapshot_id
from cloche.engine.quotas.quotas import Quotas
from cloche.engine.sandboxes.create import SandboxFactory, launch_sandbox, spec_from_snapshot
from cloche.engine.sandboxes.endings import (
    KILLED_BY_OWNER,
    sandbox_gone_error,
    sandbox_not_found_error,
)
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.networks import Networks
from cloche.engine.sandboxes.pool import CellSupply, TemplateSource, default_limits
from cloche.engine.sandboxes.sandbox import Sandbox, sandbox_info
from cloche.engine.sandboxes.volumes import VolumeRegistry
from cloche.engine.stores import Stores
from cloche.isolation.base import IsolationBackend
from cloche.model import Limits, SandboxInfo, SandboxSpec, Snapshot, Template, new_id
from cloche.store.base import SHUT_DOWN_REASON, SandboxRecord
from cloche.tasks import TaskSet
from cloche.telemetry import log

MAX_HISTORY = 10_000


class Engine:
    """Use as `async with Engine(..) as engine`. On leaving, every sandbox ends and nothing of them remains."""

    def __init__(
        self,
        config: Config,
        backend: IsolationBackend,
        catalogue: TemplateSource,
        instance: Instance,
        stores: Stores,
    ):
        self.config = config
        self._backend = backend
        self.records = stores.records
        self._instance = instance
        self._sandboxes: dict[str, Sandbox] = {}  # those that have a cell here
        self._handles: WeakValueDictionary[str, SandboxHandle] = WeakValueDictionary()
        self.counters, self.audit_log = EngineCounters(), AuditLog()
        self._lifecycle_log = LifecycleLog(self.counters, self.audit_log)
        self.quotas = Quotas(config.quotas, stores.quotas)
        stores.guard(self.quotas.check_stored)
        self._destroying = TaskSet()
        kept = Path(config.data_dir, "cache", "packages")
        self.networks = Networks(config.network, config.packages, kept, sealed=backend.seals_network)
        self.cell_supply = CellSupply(config, backend, catalogue, door=self.networks.is_always_open)
        self._images = SandboxImages(Path(config.data_dir, "images"), instance.name)
        self.snapshots = SnapshotRegistry(stores.snapshots, self._images, config.kept, config.aliases, self.audit_log)
        self.volumes = VolumeRegistry(
            config.volumes, stores.volumes, self._images, instance, self.cell_supply, self.audit_log
        )
        self.pauses = Pauses(config.kept, self, instance, stores, self._images, self.snapshots)
        self.runs = DetachedRuns(stores.runs, instance, config.runs)
        self.builds = Builds(self._build_functions(), stores, instance, config.aliases, self.audit_log)
        self._factory = SandboxFactory(self, self._images)

    async def __aenter__(self) -> Engine:
        await self.records.open()
        await self.quotas.open()
        if await self.quotas.has_several_owners():
            self.cell_supply.admission.share()
        lost = await self.records.mark_lost(self._instance.is_live, time.time())
        dead = self._instance.clean()
        if lost or dead:
            log.info("instance.cleaned", instances=len(dead), sandboxes=len(lost))
            self._lifecycle_log.lost(lost)
        await self.pauses.open()
        await self.builds.open()
        self.runs.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def create(self, spec: SandboxSpec, *, id: str | None = None) -> Sandbox:
        """A running sandbox. `id` is one of `new_id()`, where the caller must know it before.

        A sandbox without an owner (the empty string) is neither recorded nor counted nor listed.

        Raises InvalidRequest for limits or a lifetime that this host does not allow, QuotaExceeded, TemplateNotFound,
        TemplateBuildFailed, NurseryFailed, IsolationUnavailable, ShuttingDown, and Unavailable where too many files are
        open for one more.
        """
        found = await self._find_template(spec.template, spec.owner)
        if isinstance(found, Template):
            return await self._factory.create(spec, id or new_id(), found)
        return await launch_sandbox(
            await self.make(spec_from_snapshot(spec, found), id, image=found.image), found.launch
        )

    async def make(
        self, spec: SandboxSpec, id: str | None, *, image: str, before: SandboxRecord | None = None
    ) -> Sandbox:
        """As `create`, with the files of that image; `before`: the paused sandbox that it is to be again."""
        template = await self.cell_supply.template(spec.template)
        return await self._factory.create(spec, id or new_id(), template, image=image, before=before)

    # -- the way to a sandbox

    async def handle(self, id: str, owner: str | None) -> SandboxHandle:
        """The handle of a sandbox that runs or is paused; the same one for as long as it is held.

        An owner of None stands for a caller that holds a secret of that very sandbox instead of a key. Raises
        SandboxNotFound, also for a sandbox of another owner; SandboxExpired, SandboxKilled or SandboxLost.
        """
        place = await self.locate(id, owner)
        return place.handle if isinstance(place, Sandbox) else self.known_handle(id, place.owner)

    async def locate(self, id: str, owner: str | None) -> Sandbox | SandboxRecord:
        """A sandbox that has a cell here, or the record of one paused on a disk. Raises SandboxNotFound, Gone."""
        sandbox = self._sandboxes.get(id)
        if sandbox is not None and owner in (None, sandbox.spec.owner):
            return sandbox
        record = await self.pauses.paused_on_disk.find(id, owner) or await self.records.get(id, owner)
        if record is None:
            raise sandbox_not_found_error(id)
        if id in self._sandboxes:  # it was woken meanwhile
            return self._sandboxes[id]
        if record.state == "paused" and not self._is_elsewhere(record):
            return record
        raise self._absence_error(record)

    def known_handle(self, id: str, owner: str) -> SandboxHandle:
        """The handle of a sandbox that is known to be that owner's. Its place is found when it is used."""
        handle = self._handles.get(id)
        if handle is None:
            handle = self._handles[id] = SandboxHandle(self, id, owner)
        return handle

    def _is_elsewhere(self, record: SandboxRecord) -> bool:
        return record.instance != self._instance.name and self._instance.is_live(record.instance)

    def _absence_error(self, record: SandboxRecord) -> errors.ClocheError:
        if record.state not in ("running", "paused"):
            return sandbox_gone_error(record)
        if self._instance.is_live(record.instance):
            how = "is paused" if record.state == "paused" else "runs"
            return errors.SandboxNotFound(
                f"sandbox {record.id!r} {how} in another process of this host, not in this one"
            )
        return errors.SandboxLost(f"sandbox {record.id} was lost: its host process died; create a new one")

    # -- shorthands for one use of a handle

    async def get(self, id: str, owner: str) -> Sandbox:
        """See `SandboxHandle.running`."""
        return await (await self.handle(id, owner)).running()

    async def pause(self, id: str, owner: str, *, memory: bool = True) -> SandboxInfo:
        """See `SandboxHandle.pause`."""
        return await (await self.handle(id, owner)).pause(memory=memory)

    async def resume(self, id: str, owner: str, *, seconds: float | None = None) -> Sandbox:
        """See `SandboxHandle.resume`."""
        return await (await self.handle(id, owner)).resume(seconds=seconds)

    async def kill(self, id: str, owner: str, reason: str = KILLED_BY_OWNER) -> None:
        """See `SandboxHandle.kill`."""
        await (await self.handle(id, owner)).kill(reason)

    async def snapshot(self, id: str, owner: str, *, name: str | None = None) -> Snapshot:
        """See `SandboxHandle.snapshot`."""
        return await (await self.handle(id, owner)).snapshot(name=name)

    async def fork(
        self, id: str, owner: str, count: int = 1, *, seconds: float | None = None
    ) -> Sequence[Sandbox | errors.ClocheError]:
        """See `SandboxHandle.fork`."""
        return await (await self.handle(id, owner)).fork(count, seconds=seconds)

    # -- all of them

    def live_sandboxes(self) -> Sequence[Sandbox]:
        return [*self._sandboxes.values()]

    def known(self, owner: str | None) -> Sequence[SandboxRecord]:
        here = [each.record for each in self._sandboxes.values() if each.spec.owner]
        return [*(each for each in here if owner in (None, each.owner)), *self.pauses.paused_on_disk.list(owner)]

    def list(self, owner: str | None) -> list[SandboxInfo]:
        """The sandboxes of that owner in this process, or with None of all, running and paused, the oldest first."""
        return [sandbox_info(each) for each in sorted(self.known(owner), key=lambda each: each.created_at)]

    async def describe(self, id: str, owner: str | None) -> SandboxInfo:
        """The info of a sandbox of that owner, or with None of any, also long after it has ended.

        Raises SandboxNotFound.
        """
        sandbox = self._sandboxes.get(id)
        record = None if sandbox is None or owner not in (None, sandbox.spec.owner) else sandbox.record
        record = record or await self.pauses.paused_on_disk.find(id, owner) or await self.records.get(id, owner)
        if record is None:
            raise sandbox_not_found_error(id)
        return sandbox_info(record)

    async def history(
        self, owner: str, label: str, value: str | None = None, *, limit: int = MAX_HISTORY
    ) -> Sequence[SandboxInfo]:
        """The newest of that owner's sandboxes with such metadata that have ended without being killed."""
        return [sandbox_info(record) for record in await self.records.ended(owner, label, value, limit)]

    async def mark_killed_by_owner(self, id: str, owner: str, reason: str) -> None:
        """Records a sandbox that has ended as killed by its owner, for that reason."""
        record = await self.records.get(id)
        if record is not None and record.owner == owner and record.state not in ("running", "paused"):
            self._store_record(msgspec.structs.replace(record, state="killed", end_reason=reason))

    async def template(self, ref: str, owner: str | None = None) -> Template:
        """The template that a sandbox would be made from; with `owner` also that of a snapshot of theirs.

        Raises as `create` does.
        """
        found = await self.cell_supply.template(ref) if owner is None else await self._find_template(ref, owner)
        return found if isinstance(found, Template) else await self.cell_supply.template(found.template)

    async def templates(self) -> Sequence[Template]:
        """Every built template, by name, the newest of each first."""
        return await self.cell_supply.templates()

    async def limits_of(self, ref: str, owner: str | None = None) -> Limits:
        """The limits of a sandbox of that template, or snapshot, that asks for none. Raises as `create` does."""
        found = await self.cell_supply.template(ref) if owner is None else await self._find_template(ref, owner)
        return default_limits(self.config, found) if isinstance(found, Template) else found.limits

    @property
    def instance(self) -> Instance:
        """This host process, among those that share the data directory."""
        return self._instance

    @property
    def control_socket(self) -> Path:
        """The socket on which this process, if it is a server, listens for the operator's commands."""
        return self._instance.directory / CONTROL_SOCKET

    @property
    def closing(self) -> bool:
        """Whether it takes no more sandboxes, because it is about to end."""
        return self._factory.closing

    @property
    def waiting(self) -> int:
        """How many cells wait in pools."""
        return self.cell_supply.ready

    @property
    def running(self) -> int:
        """How many sandboxes run."""
        return sum(1 for each in self._sandboxes.values() if each.spec.owner and each.record.state == "running")

    @property
    def paused(self) -> int:
        """How many sandboxes are paused."""
        return len(self.pauses.resting()) + len(self.pauses.paused_on_disk.list(None))

    async def aclose(self) -> None:
        """Ends all sandboxes (their executions end with "shutdown"), then pools, nurseries and stores."""
        self._factory.close()
        await self.builds.aclose()
        await self.pauses.finish_waking()
        await asyncio.gather(*(self.pauses.save_for_shutdown(each) for each in list(self._sandboxes.values())))
        ending = [each.end("killed", "shutdown", SHUT_DOWN_REASON) for each in list(self._sandboxes.values())]
        await asyncio.gather(*ending, self.cell_supply.close_pools())
        await self.runs.aclose()
        await self.pauses.aclose()
        await asyncio.gather(*self._destroying)  # those that had ended just before
        await self.volumes.aclose()
        await self.cell_supply.close_nurseries()
        await self.networks.aclose()
        clean = await self._backend.aclose()
        self.quotas.save()
        await self.records.aclose()
        self._instance.close(keep=not clean)

    def disown(self) -> None:
        """In a forked child: closes the descriptors that must end with the parent."""
        self._instance.disown()
        self._backend.disown()

    def _build_functions(self) -> EngineFunctions:
        return EngineFunctions(
            found=self._find_template,
            create=self.create,
            restore=lambda spec, image: self.make(spec, None, image=image),
            source_of=self.pauses.source_of,
            discard=self._images.remove,
            check_room=lambda owner: self.snapshots.check_room(owner, for_build=True),
            check_limits=self.config.limits.check,
        )

    async def _find_template(self, ref: str, owner: str) -> Template | Snapshot:
        """The template or snapshot that a new sandbox is made from. Templates come first: most requests name one."""
        if is_snapshot_id(ref) and (snapshot := await self.snapshots.find(ref, owner)) is not None:
            return snapshot
        try:
            return await self.cell_supply.template(ref)
        except errors.TemplateNotFound as error:
            if (named := await self.snapshots.find(ref, owner)) is None:
                raise await self.builds.explain_not_found(ref, owner) or error from None
            return named

    # -- for creations

    def add(self, sandbox: Sandbox) -> None:
        """Adds a sandbox that has a cell."""
        self._sandboxes[sandbox.id] = sandbox
        sandbox.handle = self.known_handle(sandbox.id, sandbox.spec.owner)
        sandbox.handle.here = sandbox
        self.pauses.paused_on_disk.forget(sandbox.id)
        self._store_record(sandbox.record)
        self._lifecycle_log.on_sandbox_added(sandbox.record)

    def on_due(self, sandbox: Sandbox) -> None:
        self.pauses.on_due(sandbox)

    def on_change(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        self._store_record(record)
        left = sandbox.ending is not None and self._sandboxes.get(sandbox.id) is sandbox
        self._lifecycle_log.changed(record, left=left)
        if left:
            del self._sandboxes[sandbox.id]
            if record.state == "paused":
                sandbox.handle.here = None
            self._track_destruction(sandbox.destroy_task)
            if sandbox.unneeded is not None:
                self.pauses.forget(sandbox.unneeded)

    def _store_record(self, record: SandboxRecord) -> None:
        if record.owner:
            self.records.put(record)

    def _track_destruction(self, destroying: asyncio.Task[None] | None) -> None:
        if destroying is not None:
            self._destroying.keep(destroying)
