"""Pause, resume, snapshot and fork."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from cloche import errors
from cloche.config import RetentionLimits
from cloche.engine.instance import Instance
from cloche.engine.pauses.images import SandboxImages
from cloche.engine.pauses.snapshots import SnapshotRegistry
from cloche.engine.sandboxes.deadline import WallClockWatch
from cloche.engine.sandboxes.endings import PAUSED_TOO_LONG, not_running_error
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.engine.stores import Stores
from cloche.model import GIB, MIB, SandboxSpec, Snapshot, new_id
from cloche.network_policy import NetworkPolicy
from cloche.store.base import PausedFiles, RecordState, SandboxRecord, SandboxRecords
from cloche.store.retention_clock import retention_now
from cloche.tasks import TaskSet
from cloche.telemetry import log

if TYPE_CHECKING:
    from cloche.engine.engine import Engine

# The steps of pausing and resuming a sandbox, and of imaging its files while its programs are frozen.

T = TypeVar("T")

SAVING_BYTES = 64 * MIB  # the memory limit of the process that saves a sandbox's files
REMOVE_IMAGE_SECONDS = 0.05  # the client of a resume waits for its answer: the cleanup comes after that


class PauseTransitions:
    """Completes each transition that it begins, also when the caller has disconnected.

    `on_left` is called for each sandbox paused without its memory, before a request can look for it.
    `check_size(owner, bytes)` raises InvalidRequest or QuotaExceeded where an owner's paused ones would take
    too much.
    """

    def __init__(
        self,
        images: SandboxImages,
        records: SandboxRecords,
        on_left: Callable[[SandboxRecord, NetworkPolicy], None],
        check_size: Callable[[str, int], Awaitable[None]],
    ):
        self._images = images
        self._records = records
        self._on_left = on_left
        self._check_size = check_size
        self._errands: set[asyncio.Task[Any]] = set()
        self._too_large: WeakKeyDictionary[Sandbox, int] = WeakKeyDictionary()  # bytes that were refused

    async def pause(self, sandbox: Sandbox, *, memory: bool) -> None:
        """Afterwards it is paused, and its files are on a disk. Raises SandboxPaused, Gone.

        Raises InvalidRequest, Unavailable, TooLarge: then it runs as before.
        """
        await self._run_shielded(self._pause_sandbox(sandbox, memory))

    async def resume(self, sandbox: Sandbox, seconds: float | None) -> None:
        """Resumes one that is paused with its memory. Harmless when it runs. Raises Gone, Unavailable, Busy."""
        await self._run_shielded(self._resume_sandbox(sandbox, seconds))

    async def image(self, sandbox: Sandbox) -> tuple[str, int]:
        """An image of the files of a running or paused sandbox at one moment: its id, and its bytes.

        Raises Gone, Unavailable, TooLarge.
        """
        making = self._run_task(self._save_frozen(sandbox))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._remove_made_image)
            raise

    async def aclose(self) -> None:
        await asyncio.gather(*self._errands, return_exceptions=True)

    async def _pause_sandbox(self, sandbox: Sandbox, memory: bool) -> None:
        async with sandbox.changing:
            sandbox.check_running()
            await self._check_expected_size(sandbox)
            await sandbox.freezer.hold()
            image = ""
            try:
                image, size_bytes = await self._save_files(sandbox)
                await self._check_saved_size(sandbox, size_bytes)
                record = sandbox.rest(PausedFiles(image=image, bytes=size_bytes), memory=memory)
                await self._records.keep(record)
                if sandbox.ending is not None:  # it was killed meanwhile: its own record counts
                    sandbox.check_running()
            except BaseException:
                await self._undo_pause(sandbox, image)
                raise
            sandbox.mark_paused(record)
            if not memory:
                self._on_left(sandbox.record, sandbox.network.policy)
                sandbox.release_cell("the sandbox was paused without its memory")
            log.info("sandbox.paused", sandbox=sandbox.id, owner=record.owner, memory=memory)

    async def _check_expected_size(self, sandbox: Sandbox) -> None:
        """Checks the expected size before the costly write of the files: a refused size is likely refused again.

        Its files may be fewer by now: after each refusal without a write, half as many bytes are expected.
        """
        expected = self._too_large.pop(sandbox, 0)
        try:
            await self._check_size(sandbox.spec.owner, expected)
        except errors.ClocheError:
            if expected:
                self._too_large[sandbox] = expected // 2
            raise

    async def _check_saved_size(self, sandbox: Sandbox, size_bytes: int) -> None:
        try:
            await self._check_size(sandbox.spec.owner, size_bytes)
        except errors.ClocheError:
            self._too_large[sandbox] = size_bytes
            raise

    async def _undo_pause(self, sandbox: Sandbox, image: str) -> None:
        """The pause has failed: it runs on."""
        if sandbox.ending is None:
            self._records.put(sandbox.record)
            with contextlib.suppress(errors.ClocheError):
                await sandbox.freezer.release()
        if image:
            await self._images.remove(image)

    async def _resume_sandbox(self, sandbox: Sandbox, seconds: float | None) -> None:
        async with sandbox.changing:
            if sandbox.record.state != "paused" or sandbox.ending is not None:
                sandbox.check_running()
                return
            files = sandbox.record.files
            sandbox.execution_slots.reclaim_slots()
            try:
                await sandbox.freezer.release()
            except BaseException:
                sandbox.execution_slots.rest()
                raise
            sandbox.mark_running(seconds)
            log.info("sandbox.resumed", sandbox=sandbox.id, owner=sandbox.record.owner, memory=True)
        if files is not None:
            self._run_task(self._remove_image_later(sandbox.id, files.image))

    async def _remove_image_later(self, id: str, image: str) -> None:
        await asyncio.sleep(REMOVE_IMAGE_SECONDS)
        await self.remove_unneeded_image(id, image)

    async def remove_unneeded_image(self, id: str, image: str) -> None:
        """Removes an image of that sandbox's, unless its record still names the image."""
        try:
            record = await self._records.get(id)
        except errors.Unavailable as error:
            log.error("image.not_removed", sandbox=id, reason=str(error))
            return
        if record is None or record.files is None or record.files.image != image:
            await self._images.remove(image)

    async def _save_frozen(self, sandbox: Sandbox) -> tuple[str, int]:
        async with sandbox.changing, _frozen_programs(sandbox):
            return await self._save_files(sandbox)

    async def _save_files(self, sandbox: Sandbox) -> tuple[str, int]:
        # Without it, one that uses all it may could not be saved, or one of its programs would be ended for it.
        with sandbox.quota_lease.extra_room_to_save(SAVING_BYTES):
            saved = await self._images.save(sandbox.guest, sandbox.limits.space_bytes)
        return saved.id, saved.bytes

    async def _run_shielded(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._run_task(work))

    def _run_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _remove_made_image(self, making: asyncio.Task[tuple[str, int]]) -> None:
        """Removes an image whose caller was cancelled."""
        if not making.cancelled() and making.exception() is None:
            self._run_task(self._images.remove(making.result()[0]))

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._errands.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have been cancelled


@contextlib.asynccontextmanager
async def _frozen_programs(sandbox: Sandbox) -> AsyncIterator[None]:
    """Raises Gone, Unavailable."""
    if sandbox.ending is not None:
        sandbox.check_running()
    await sandbox.freezer.hold()
    try:
        yield
    finally:
        if sandbox.ending is None:
            await sandbox.freezer.release()


# Sandboxes that are paused without their memory: only their files remain, on a disk.


class PausedOnDisk:
    """The paused sandboxes that this process may wake: its own, and those of host processes that have ended."""

    def __init__(self, records: SandboxRecords, is_live: Callable[[str], bool]):
        self._records = records
        self._is_live = is_live
        self._known: dict[str, SandboxRecord] = {}
        self._policies: dict[str, NetworkPolicy] = {}  # with their secrets, which no disk has

    async def open(self) -> None:
        for record in await self._records.paused():
            if not self._is_live(record.instance):
                self._known[record.id] = _record_without_memory(record)

    def add(self, record: SandboxRecord, policy: NetworkPolicy | None = None) -> None:
        """`policy`: the network policy when it wakes in this process; else the recorded one."""
        self._known[record.id] = record
        if policy is not None:
            self._policies[record.id] = policy

    def policy(self, id: str) -> NetworkPolicy | None:
        return self._policies.get(id)

    def forget(self, id: str) -> None:
        """Harmless when it is not known."""
        self._known.pop(id, None)
        self._policies.pop(id, None)

    async def find(self, id: str, owner: str | None) -> SandboxRecord | None:
        """A record that can be woken here, also if the host process that paused it ended a moment ago.

        With an owner, only if it is theirs: else None, as for an id that never existed.
        """
        known = self._known.get(id)
        if known is not None and owner in (None, known.owner):
            return known
        record = await self._records.get(id, owner)
        if record is None or record.state != "paused" or self._is_live(record.instance):
            return None
        return _record_without_memory(record)

    def list(self, owner: str | None) -> Sequence[SandboxRecord]:
        return [each for each in self._known.values() if owner in (None, each.owner)]


def _record_without_memory(record: SandboxRecord) -> SandboxRecord:
    """Its host process has ended, and its memory with it."""
    return msgspec.structs.replace(record, memory_kept=False)


RETRY_SECONDS = 30.0  # between the first tries to pause one past its deadline, and twice as long each time
MAX_RETRY_SECONDS = 600.0
OVERTIME_SECONDS = 3600.0
PAUSE_SWEEP_SECONDS = 3600.0
MAX_FORKS = 20


class SandboxSource(NamedTuple):
    """A sandbox's files and settings, to make others from. The caller removes the image."""

    record: SandboxRecord
    policy: NetworkPolicy | None
    image: str
    bytes: int


class Pauses:
    def __init__(
        self,
        kept: RetentionLimits,
        engine: Engine,
        instance: Instance,
        stores: Stores,
        images: SandboxImages,
        snapshots: SnapshotRegistry,
    ):
        records = stores.records
        self._volumes = stores.volumes
        self.paused_on_disk = PausedOnDisk(records, instance.is_live)
        self._snapshots = snapshots
        self._kept = kept
        self._instance = instance
        self._engine = engine
        self._records = records
        self._images = images
        self._pauses = PauseTransitions(images, records, self.paused_on_disk.add, self._check_stored_size)
        self._pausing: Counter[str] = Counter()  # by owner
        self._tries: WeakKeyDictionary[Sandbox, int] = WeakKeyDictionary()  # to pause one, that failed
        self._waking: dict[str, asyncio.Task[Sandbox]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._jumps = WallClockWatch(self._adjust_deadlines)
        self._background = TaskSet()
        self._closed = False

    async def open(self) -> None:
        """Loads the paused sandboxes, and removes the leftovers of killed processes."""
        self._engine.cell_supply.admission.lockout.add_listener(self._finish_waking_of)
        await self.paused_on_disk.open()
        await self._images.remove_orphans(self._known_images, self._instance.is_live)
        self._schedule_sweep()
        self._jumps.open()

    async def _known_images(self) -> set[str]:
        paused = {each.files.image for each in await self._records.paused() if each.files is not None}
        return paused | await self._snapshots.images() | await self._volumes.images()

    def resting(self) -> Sequence[Sandbox]:
        """The sandboxes that are paused and have a cell."""
        return [each for each in self._engine.live_sandboxes() if each.record.state == "paused"]

    def _adjust_deadlines(self) -> None:
        for sandbox in self._engine.live_sandboxes():
            sandbox.adjust_deadline()

    async def aclose(self) -> None:
        self._closed = True
        self._jumps.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self._pauses.aclose()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def finish_waking(self) -> None:
        """Waits until all sandboxes that are being woken run, or are paused as before."""
        await asyncio.gather(*self._waking.values(), return_exceptions=True)

    async def _finish_waking_of(self, owner: str) -> None:
        theirs = [task for task in self._waking.values() if task.get_name() == owner]
        await asyncio.gather(*theirs, return_exceptions=True)

    # -- pauses

    async def pause(self, sandbox: Sandbox, *, memory: bool) -> None:
        """Raises SandboxPaused, Gone; InvalidRequest, Unavailable, TooLarge: then it runs as before."""
        sandbox.check_running()
        owner = sandbox.spec.owner
        self._check_room(owner)
        self._pausing[owner] += 1
        try:
            await self._pauses.pause(sandbox, memory=memory)
        finally:
            self._pausing[owner] -= 1

    def on_due(self, sandbox: Sandbox) -> None:
        """Pauses a sandbox whose deadline has passed and that is to be paused then."""
        if not self._closed:
            self._background.start(self._pause_when_due(sandbox))

    async def _pause_when_due(self, sandbox: Sandbox) -> None:
        """One that cannot be paused runs on, and it is tried again: to end it would lose the state it was to keep.

        But not for ever: an hour after it has run for as long as any may, it ends.
        """
        try:
            await self.pause(sandbox, memory=sandbox.spec.pause_memory)
            self._tries.pop(sandbox, None)
        except (errors.Gone, errors.SandboxPaused):
            pass
        except errors.ClocheError as error:
            log.error("sandbox.not_paused", sandbox=sandbox.id, owner=sandbox.spec.owner, reason=error.code)
            if sandbox.over_seconds > OVERTIME_SECONDS:
                await sandbox.end("expired", "deadline", f"its deadline passed, and it could not be paused: {error}")
            elif sandbox.record.state == "running" and not self._closed:
                sandbox.defer_deadline(self._retry_seconds(sandbox))

    def _retry_seconds(self, sandbox: Sandbox) -> float:
        """Grows with each try, which may cost a write of all its files."""
        tries = self._tries[sandbox] = self._tries.get(sandbox, -1) + 1
        return min(RETRY_SECONDS * 2.0 ** min(tries, 16), MAX_RETRY_SECONDS)

    async def resume(self, sandbox: Sandbox, seconds: float | None) -> Sandbox:
        """The same sandbox, running. Raises Gone, Unavailable."""
        await self._pauses.resume(sandbox, seconds)
        return sandbox

    async def save_for_shutdown(self, sandbox: Sandbox) -> None:
        """Saves the files of a sandbox that is paused, or was, or is to be at its deadline: the host shuts down.

        Failures are logged, not raised: the other sandboxes have to be saved as well.
        """
        if sandbox.record.state == "paused" and sandbox.ending is None:
            sandbox.release_cell("shutdown")
        elif sandbox.record.state == "running" and _survives_shutdown(sandbox.record):
            try:
                await self._pauses.pause(sandbox, memory=False)
            except (errors.ClocheError, OSError, RuntimeError) as error:
                log.error("sandbox.not_paused", sandbox=sandbox.id, owner=sandbox.spec.owner, reason=str(error))

    # -- those without a cell

    async def wake_from_disk(self, record: SandboxRecord, seconds: float | None) -> Sandbox:
        """Resumes one paused without memory, with its files in a new cell. Raises as `Engine.create` does, Gone."""
        if record.id not in self._waking:
            task = self._waking[record.id] = asyncio.create_task(self._wake_claimed(record, seconds), name=record.owner)
            task.add_done_callback(lambda _: self._waking.pop(record.id, None))
        return await asyncio.shield(self._waking[record.id])

    async def _wake_claimed(self, record: SandboxRecord, seconds: float | None) -> Sandbox:
        """Until it has its files it is on record as paused: if this process is killed, it still is."""
        policy = self.paused_on_disk.policy(record.id)
        claimed = await self._records.claim(record, self._instance.name)
        if claimed is None or claimed.files is None:
            self.paused_on_disk.forget(record.id)
            raise not_running_error(await self._records.get(record.id) or record)
        files, claimed = claimed.files, msgspec.structs.replace(claimed, memory_kept=False)
        try:
            spec = _make_restored_spec(claimed, policy, seconds)
            sandbox = await self._engine.make(spec, claimed.id, image=files.image, before=claimed)
        except BaseException:
            await asyncio.shield(self._restore_paused_record(claimed, policy))
            raise
        await self._pauses.remove_unneeded_image(record.id, files.image)
        log.info("sandbox.resumed", sandbox=record.id, owner=record.owner, memory=False)
        return sandbox

    async def _restore_paused_record(self, record: SandboxRecord, policy: NetworkPolicy | None) -> None:
        """Restores the record of a sandbox that could not be woken."""
        await self._records.keep(record)
        self.paused_on_disk.add(record, policy)

    async def end(self, record: SandboxRecord, reason: str, *, expired: bool = False) -> None:
        """Ends a sandbox that is paused on a disk. Raises Gone where another request was faster."""
        if (waking := self._waking.get(record.id)) is not None:
            with contextlib.suppress(errors.ClocheError):
                await (await asyncio.shield(waking)).kill(reason)
                return
        state: RecordState = "expired" if expired else "killed"
        ended = msgspec.structs.replace(
            record, state=state, ended_at=time.time(), end_reason=reason, files=None, paused_at=None
        )
        self.paused_on_disk.forget(record.id)
        if not await self._records.conclude(ended):
            raise not_running_error(await self._records.get(record.id) or record)
        if record.files is not None:
            await self._images.remove(record.files.image)
        log.info("sandbox.ended", sandbox=record.id, owner=record.owner, state=state, reason=reason)
        self._engine.audit_log.record(
            "sandbox.ended", record.owner, sandbox=record.id, outcome=state, about=reason, itself=expired
        )

    # -- snapshots and forks

    def forget(self, image: str) -> None:
        """Removes an image that is not needed any more, in the background."""
        self._background.start(self._images.remove(image))

    async def snapshot(self, source: SandboxSource, name: str | None) -> Snapshot:
        """Raises InvalidRequest where the owner is at the limit; the image is gone then."""
        snapshot = Snapshot(
            id=new_id("s"),
            owner=source.record.owner,
            sandbox=source.record.id,
            template=source.record.template,
            image=source.image,
            bytes=source.bytes,
            created_at=time.time(),
            name=name,
            env=source.record.spec.env,
            limits=source.record.limits,
            network=source.record.spec.network,
            volumes=source.record.spec.volumes,
        )
        try:
            await self._snapshots.add(snapshot)
        except BaseException:
            await asyncio.shield(self._images.remove(source.image))
            raise
        log.info("snapshot.made", snapshot=snapshot.id, sandbox=snapshot.sandbox, owner=snapshot.owner)
        self._engine.audit_log.record(
            "snapshot.made", snapshot.owner, sandbox=snapshot.sandbox, id=snapshot.id, bytes=snapshot.bytes
        )
        return snapshot

    async def fork(
        self, source: SandboxSource, count: int, seconds: float | None
    ) -> Sequence[Sandbox | errors.ClocheError]:
        """New sandboxes with the source's files and settings; an error for each that could not be made."""
        spec = _make_restored_spec(source.record, source.policy, seconds)
        specs = {id: _replace_own_id(spec, source.record.id, id) for id in (new_id() for _ in range(count))}
        self._engine.audit_log.record("sandbox.forked", spec.owner, sandbox=source.record.id, about=f"into {count}")
        try:
            made = await asyncio.gather(
                *(self._engine.make(each, id, image=source.image) for id, each in specs.items()), return_exceptions=True
            )
        finally:
            await asyncio.shield(self._images.remove(source.image))
        return [_raise_unexpected(each) for each in made]

    async def source_of(self, sandbox: Sandbox) -> SandboxSource:
        """Raises Gone, Unavailable, TooLarge."""
        policy = sandbox.network.policy
        image, size = await self._pauses.image(sandbox)
        return SandboxSource(sandbox.without_secrets(), policy, image, size)

    async def source_on_disk(self, record: SandboxRecord) -> SandboxSource:
        """Raises SandboxLost where its files are gone."""
        assert record.files is not None
        copied = await self._images.copy(record.files.image)
        return SandboxSource(record, self.paused_on_disk.policy(record.id), copied.id, copied.bytes)

    # -- inside

    def _check_room(self, owner: str) -> None:
        count = len(self._paused_records(owner)) + self._pausing[owner]
        if count >= self._kept.paused:
            raise errors.InvalidRequest(
                f"{count} sandboxes are paused already, as many as one may have here: kill or resume one first"
            )

    async def _check_stored_size(self, owner: str, more_bytes: int) -> None:
        await self._engine.quotas.check_stored(owner, more_bytes)
        size = more_bytes + sum(each.files.bytes for each in self._paused_records(owner) if each.files is not None)
        if size > self._kept.paused_bytes:
            raise errors.InvalidRequest(
                f"the files of paused sandboxes would take {size / GIB:.1f} GiB, of "
                f"{self._kept.paused_bytes / GIB:.1f} that one may have here: kill or resume one first"
            )

    def _paused_records(self, owner: str) -> list[SandboxRecord]:
        resting = [each.record for each in self.resting() if each.spec.owner == owner]
        return [*resting, *self.paused_on_disk.list(owner)]

    def _schedule_sweep(self) -> None:
        """Expires sandboxes that have been paused for too long, now and every hour."""
        if not self._closed:
            self._background.start(self._expire_old_pauses())
            self._sweeping = asyncio.get_running_loop().call_later(PAUSE_SWEEP_SECONDS, self._schedule_sweep)

    async def _expire_old_pauses(self) -> None:
        before = retention_now() - self._kept.paused_seconds
        for sandbox in self.resting():
            if sandbox.record.state == "paused" and (sandbox.record.paused_at or 0.0) < before:
                await sandbox.end("expired", "deadline", PAUSED_TOO_LONG)
        for record in list(self.paused_on_disk.list(None)):
            if (record.paused_at or 0.0) < before:
                try:
                    await self.end(record, PAUSED_TOO_LONG, expired=True)
                except errors.ClocheError as error:
                    log.warning("sandbox.not_given_up", sandbox=record.id, reason=error.code)


def _survives_shutdown(record: SandboxRecord) -> bool:
    """Whether it is to be paused at its deadline, or was paused before: its owner wants to keep it."""
    return record.spec.on_deadline == "pause" or record.resumed_at is not None


def _make_restored_spec(record: SandboxRecord, policy: NetworkPolicy | None, seconds: float | None) -> SandboxSpec:
    """The spec to make that sandbox again, with its network policy, or else the recorded one."""
    spec = record.spec
    return msgspec.structs.replace(
        spec, network=policy or spec.network, lifetime_seconds=seconds or spec.lifetime_seconds
    )


def _replace_own_id(spec: SandboxSpec, before: str, id: str) -> SandboxSpec:
    """Replaces the sandbox's own id by the new one's in its environment."""
    return msgspec.structs.replace(spec, env={name: id if text == before else text for name, text in spec.env.items()})


def _raise_unexpected(made: Sandbox | BaseException) -> Sandbox | errors.ClocheError:
    if isinstance(made, Sandbox | errors.ClocheError):
        return made
    raise made
