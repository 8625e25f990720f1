"""All sandboxes of one host process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from cloche import errors
from cloche.config import Config
from cloche.engine.builds.builds import Builds, Site
from cloche.engine.executions.runs import Runs
from cloche.engine.instance import CONTROL_SOCKET, Instance
from cloche.engine.operations.audit import Trail
from cloche.engine.operations.counters import Tally
from cloche.engine.operations.lifecycle_log import Chronicle
from cloche.engine.pauses.images import Images
from cloche.engine.pauses.pause import MAX_FORKS, Lasting, Source
from cloche.engine.pauses.snapshots import Snapshots, is_id
from cloche.engine.quotas.quotas import Quotas
from cloche.engine.sandboxes.create import Making, from_snapshot, launched, shutting_down
from cloche.engine.sandboxes.endings import KILLED_BY_OWNER, absent, gone, never
from cloche.engine.sandboxes.networks import Networks
from cloche.engine.sandboxes.pool import Housing, Templates, default_limits
from cloche.engine.sandboxes.sandbox import Sandbox, info_of
from cloche.engine.sandboxes.volumes import Volumes
from cloche.engine.stores import Stores
from cloche.isolation.base import Backend
from cloche.model import Limits, SandboxInfo, SandboxSpec, Snapshot, Template, check_seconds, new_id
from cloche.store.base import SHUT_DOWN, SandboxRecord
from cloche.telemetry import log

MAX_HISTORY = 10_000


class Engine:
    """Use as `async with Engine(..) as engine`. On leaving, every sandbox ends and nothing of them remains."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        catalogue: Templates,
        instance: Instance,
        stores: Stores,
    ):
        self.config = config
        self._backend = backend
        self.records = stores.records
        self._instance = instance
        self._sandboxes: dict[str, Sandbox] = {}
        self.tally, self.trail = Tally(), Trail()
        self._chronicle = Chronicle(self.tally, self.trail)
        self.quotas = Quotas(config.quotas, stores.quotas)
        stores.guard(self.quotas.check_stored)
        self._destroying: set[asyncio.Task[None]] = set()
        kept = Path(config.data_dir, "cache", "packages")
        self.networks = Networks(config.network, config.packages, kept, sealed=backend.seals_network)
        self.housing = Housing(config, backend, catalogue, door=self.networks.always_open)
        self._images = Images(Path(config.data_dir, "images"), instance.name)
        self.snapshots = Snapshots(stores.snapshots, self._images, config.kept, config.aliases, self.trail)
        self.volumes = Volumes(config.volumes, stores.volumes, self._images, instance, self.housing, self.trail)
        self._lasting = Lasting(config.kept, self, instance, stores, self._images, self.snapshots)
        self.runs = Runs(stores.runs, instance, config.runs)
        self.builds = Builds(self._site(), stores, instance, config.aliases, self.trail)
        self._making = Making(
            config, instance, self.housing, self.networks, self._images, self.volumes, self.quotas, self.tally, self
        )

    async def __aenter__(self) -> Engine:
        await self.records.open()
        await self.quotas.open()
        if await self.quotas.has_several_owners():
            self.housing.admission.share()
        lost = await self.records.mark_lost(self._instance.is_live, time.time())
        dead = self._instance.clean()
        if lost or dead:
            log.info("instance.cleaned", instances=len(dead), sandboxes=len(lost))
            self._chronicle.lost(lost)
        await self._lasting.open()
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
        found = await self._found(spec.template, spec.owner)
        if isinstance(found, Template):
            return await self._making.create(spec, id or new_id(), found)
        return await launched(await self.make(from_snapshot(spec, found), id, image=found.image), found.launch)

    async def make(
        self, spec: SandboxSpec, id: str | None, *, image: str, before: SandboxRecord | None = None
    ) -> Sandbox:
        """As `create`, with the files of that image; `before`: the paused sandbox that it is to be again."""
        template = await self.housing.template(spec.template)
        return await self._making.create(spec, id or new_id(), template, image=image, before=before)

    async def get(self, id: str, owner: str) -> Sandbox:
        """A sandbox to be used. One that is paused is resumed, if it is to be by whoever uses it.

        Raises SandboxPaused, SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost: which, when and why, also
        after a restart.
        """
        return await self._awake(await self._known(id, owner))

    async def find(self, id: str) -> Sandbox:
        """As `get`, whoever the owner is: for callers who hold a secret of that very sandbox instead of a key."""
        return await self._awake(await self._known(id, None))

    async def _awake(self, known: Sandbox | SandboxRecord) -> Sandbox:
        if isinstance(known, Sandbox) and known.record.state != "paused":
            return known
        record = known.record if isinstance(known, Sandbox) else known
        if not record.auto_resume:
            raise absent(record)
        return await self._resumed(known, None)

    async def _known(self, id: str, owner: str | None) -> Sandbox | SandboxRecord:
        """One that has a cell here, or one that is paused on a disk. Raises SandboxNotFound, Gone."""
        sandbox = self._sandboxes.get(id)
        if sandbox is not None and owner in (None, sandbox.spec.owner):
            return sandbox
        record = await self._lasting.asleep.find(id, owner) or await self.records.get(id, owner)
        if record is None:
            raise never(id)
        if id in self._sandboxes:  # it was woken while we looked
            return self._sandboxes[id]
        if record.state == "paused" and not self._is_elsewhere(record):
            return record
        raise self._absent(record)

    def _is_elsewhere(self, record: SandboxRecord) -> bool:
        return record.instance != self._instance.name and self._instance.is_live(record.instance)

    def _absent(self, record: SandboxRecord) -> errors.ClocheError:
        if record.state not in ("running", "paused"):
            return gone(record)
        if self._instance.is_live(record.instance):
            how = "is paused" if record.state == "paused" else "runs"
            return errors.SandboxNotFound(
                f"sandbox {record.id!r} {how} in another process of this host, not in this one"
            )
        return errors.SandboxLost(f"sandbox {record.id} was lost: its host process died; create a new one")

    # -- what lasts

    async def pause(self, id: str, owner: str, *, memory: bool = True) -> SandboxInfo:
        """Its programs stand still until it is resumed; without `memory` they end, and only its files are kept.

        Raises SandboxPaused if it is paused already, SandboxNotFound, Gone. Raises InvalidRequest, Unavailable or
        TooLarge where it cannot be done: then it runs as before.
        """
        known = await self._known(id, owner)
        if not isinstance(known, Sandbox):
            raise absent(known)
        await self._lasting.pause(known, memory=memory)
        return known.info

    async def resume(self, id: str, owner: str, *, seconds: float | None = None) -> Sandbox:
        """Runs again, for so many seconds from now or as many as it was first given. One that runs is as it was.

        Raises SandboxNotFound, Gone, and as `create` where there is no memory to go on from.
        """
        check_seconds("lifetime", seconds)
        return await self._resumed(await self._known(id, owner), seconds)

    async def _resumed(self, known: Sandbox | SandboxRecord, seconds: float | None) -> Sandbox:
        if self._making.closing:
            raise shutting_down()
        seconds = None if seconds is None else min(seconds, self.config.lifetime.max_seconds)
        while isinstance(known, Sandbox):
            try:
                return await self._lasting.resume(known, seconds)
            except errors.SandboxPaused:  # it has left its cell at this very moment
                known = await self._moved(known)
        return await self._lasting.wake(known, seconds)

    async def _moved(self, sandbox: Sandbox) -> Sandbox | SandboxRecord:
        """Where one is that was paused without its memory. Raises SandboxPaused where it is where it was, Gone."""
        known = await self._known(sandbox.id, sandbox.spec.owner)
        if known is sandbox:
            raise absent(sandbox.record)
        return known

    async def kill(self, id: str, owner: str, reason: str = KILLED_BY_OWNER) -> None:
        """Ends one that runs or is paused. Raises SandboxNotFound, Gone."""
        known = await self._known(id, owner)
        if isinstance(known, Sandbox):
            await known.kill(reason)
        else:
            await self._lasting.end(known, reason)

    async def snapshot(self, id: str, owner: str, *, name: str | None = None) -> Snapshot:
        """The files of a sandbox, and what its programs were given, to make new ones from.

        Raises SandboxNotFound, Gone, Unavailable, TooLarge; InvalidRequest for a name that is none, or a template's.
        """
        if name is not None:
            await self.snapshots.check_name(name, owner, await self.templates())
        await self.snapshots.check_room(owner)
        return await self._lasting.snapshot(await self._source(id, owner), name)

    async def fork(
        self, id: str, owner: str, count: int = 1, *, seconds: float | None = None
    ) -> Sequence[Sandbox | errors.ClocheError]:
        """New sandboxes with its files and settings, and none of its memory; for each that failed, why.

        Raises as `snapshot`.
        """
        if not 1 <= count <= MAX_FORKS:
            raise errors.InvalidRequest(f"a sandbox can be forked into 1 to {MAX_FORKS} at once, not {count}")
        check_seconds("lifetime", seconds)
        return await self._lasting.fork(await self._source(id, owner), count, seconds)

    async def _source(self, id: str, owner: str) -> Source:
        known = await self._known(id, owner)
        while isinstance(known, Sandbox):
            try:
                return await self._lasting.source_of(known)
            except errors.SandboxPaused:  # as above
                known = await self._moved(known)
        return await self._lasting.source_asleep(known)

    def living(self) -> Sequence[Sandbox]:
        return [*self._sandboxes.values()]

    def known(self, owner: str | None) -> Sequence[SandboxRecord]:
        here = [each.record for each in self._sandboxes.values() if each.spec.owner]
        return [*(each for each in here if owner in (None, each.owner)), *self._lasting.asleep.list(owner)]

    def list(self, owner: str | None) -> list[SandboxInfo]:
        """The sandboxes of that owner in this process, or with None of all, running and paused, the oldest first."""
        return [info_of(each) for each in sorted(self.known(owner), key=lambda each: each.created_at)]

    async def describe(self, id: str, owner: str | None) -> SandboxInfo:
        """What is known of a sandbox of that owner, or with None of anybody's, also long after it has ended.

        Raises SandboxNotFound.
        """
        sandbox = self._sandboxes.get(id)
        record = None if sandbox is None or owner not in (None, sandbox.spec.owner) else sandbox.record
        record = record or await self._lasting.asleep.find(id, owner) or await self.records.get(id, owner)
        if record is None:
            raise never(id)
        return info_of(record)

    async def history(
        self, owner: str, label: str, value: str | None = None, *, limit: int = MAX_HISTORY
    ) -> Sequence[SandboxInfo]:
        """The newest with such metadata of that owner's sandboxes that have ended though nobody killed them."""
        return [info_of(record) for record in await self.records.ended(owner, label, value, limit)]

    async def disclaim(self, id: str, owner: str, reason: str) -> None:
        """A sandbox that has ended counts as killed by its owner from now on, for that reason."""
        record = await self.records.get(id)
        if record is not None and record.owner == owner and record.state not in ("running", "paused"):
            self._record(msgspec.structs.replace(record, state="killed", end_reason=reason))

    async def template(self, ref: str, owner: str | None = None) -> Template:
        """The template that a sandbox would be made from; with `owner` also that of a snapshot of theirs.

        Raises as `create` does.
        """
        found = await self.housing.template(ref) if owner is None else await self._found(ref, owner)
        return found if isinstance(found, Template) else await self.housing.template(found.template)

    async def templates(self) -> Sequence[Template]:
        """All that are built, by name, the newest of each first."""
        return await self.housing.templates()

    async def limits_of(self, ref: str, owner: str | None = None) -> Limits:
        """The limits of a sandbox of that template, or snapshot, that asks for none. Raises as `create` does."""
        found = await self.housing.template(ref) if owner is None else await self._found(ref, owner)
        return default_limits(self.config, found) if isinstance(found, Template) else found.limits

    @property
    def instance(self) -> Instance:
        """This host process, among those that share the data directory."""
        return self._instance

    @property
    def control_socket(self) -> Path:
        """Where this process listens for whoever runs it, if it is a server."""
        return self._instance.directory / CONTROL_SOCKET

    @property
    def closing(self) -> bool:
        """Whether it takes no more sandboxes, because it is about to end."""
        return self._making.closing

    @property
    def waiting(self) -> int:
        """How many cells wait in pools."""
        return self.housing.ready

    @property
    def running(self) -> int:
        """How many sandboxes run."""
        return sum(1 for each in self._sandboxes.values() if each.spec.owner and each.record.state == "running")

    @property
    def paused(self) -> int:
        """How many sandboxes are paused."""
        return len(self._lasting.resting()) + len(self._lasting.asleep.list(None))

    async def aclose(self) -> None:
        """Ends all sandboxes (their executions say "shutdown"), then everything that made them."""
        self._making.close()
        await self.builds.aclose()
        await self._lasting.finish_waking()
        await asyncio.gather(*(self._lasting.lay_down(each) for each in list(self._sandboxes.values())))
        ending = [each.end("killed", "shutdown", SHUT_DOWN) for each in list(self._sandboxes.values())]
        await asyncio.gather(*ending, self.housing.close_pools())
        await self.runs.aclose()
        await self._lasting.aclose()
        await asyncio.gather(*self._destroying)  # those that had ended just before
        await self.volumes.aclose()
        await self.housing.close_nurseries()
        await self.networks.aclose()
        clean = await self._backend.aclose()
        self.quotas.save()
        await self.records.aclose()
        self._instance.close(keep=not clean)

    def disown(self) -> None:
        """In a forked child: lets go of what must end with the parent."""
        self._instance.disown()
        self._backend.disown()

    def _site(self) -> Site:
        return Site(
            found=self._found,
            create=self.create,
            restore=lambda spec, image: self.make(spec, None, image=image),
            source_of=self._lasting.source_of,
            discard=self._images.remove,
            check_room=lambda owner: self.snapshots.check_room(owner, for_build=True),
            check_limits=self.config.limits.check,
        )

    async def _found(self, ref: str, owner: str) -> Template | Snapshot:
        """What a new sandbox is to be made from. Templates come first: they are what nearly everybody asks for."""
        if is_id(ref) and (snapshot := await self.snapshots.find(ref, owner)) is not None:
            return snapshot
        try:
            return await self.housing.template(ref)
        except errors.TemplateNotFound as error:
            if (named := await self.snapshots.find(ref, owner)) is None:
                raise await self.builds.why_not(ref, owner) or error from None
            return named

    # -- for those who make sandboxes

    def add(self, sandbox: Sandbox) -> None:
        """It has a cell, and is one of ours from now on."""
        self._sandboxes[sandbox.id] = sandbox
        self._lasting.asleep.forget(sandbox.id)
        self._record(sandbox.record)
        self._chronicle.added(sandbox.record)

    def on_due(self, sandbox: Sandbox) -> None:
        self._lasting.on_due(sandbox)

    def on_change(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        self._record(record)
        left = sandbox.ending is not None and self._sandboxes.get(sandbox.id) is sandbox
        self._chronicle.changed(record, left=left)
        if left:
            del self._sandboxes[sandbox.id]
            self._wait_for(sandbox.destroying)
            if sandbox.unneeded is not None:
                self._lasting.forget(sandbox.unneeded)

    def _record(self, record: SandboxRecord) -> None:
        if record.owner:
            self.records.put(record)

    def _wait_for(self, destroying: asyncio.Task[None] | None) -> None:
        if destroying is not None:
            self._destroying.add(destroying)
            destroying.add_done_callback(self._destroying.discard)
