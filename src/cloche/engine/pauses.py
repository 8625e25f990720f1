"""Pausing and resuming sandboxes, and images of their files while programs stand still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from cloche import errors
from cloche.engine.images import Images
from cloche.engine.sandbox import Sandbox
from cloche.model import MIB
from cloche.network_policy import NetworkPolicy
from cloche.store.base import Records, SandboxRecord
from cloche.telemetry import log

T = TypeVar("T")

SAVING_BYTES = 64 * MIB  # what the one who saves a sandbox's files may use of memory
FORGET_SECONDS = 0.05  # whoever has resumed a sandbox waits for an answer of it: what clears away comes after that


class Pauses:
    """What it begins it brings to an end, also when whoever asked for it has left.

    `on_left` hears of each that is paused without its memory, before anybody can look for it. `check_size(owner,
    bytes)` raises InvalidRequest or QuotaExceeded where an owner's paused ones would take too much.
    """

    def __init__(
        self,
        images: Images,
        records: Records,
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
        await self._to_its_end(self._pause(sandbox, memory))

    async def resume(self, sandbox: Sandbox, seconds: float | None) -> None:
        """Of one that is paused with its memory. Harmless when it runs. Raises Gone, Unavailable, Busy."""
        await self._to_its_end(self._resume(sandbox, seconds))

    async def image(self, sandbox: Sandbox) -> tuple[str, int]:
        """The files of one that runs or rests, as they are at one moment: the image's id, and its bytes.

        Raises Gone, Unavailable, TooLarge.
        """
        making = self._run(self._image(sandbox))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._drop)
            raise

    async def aclose(self) -> None:
        await asyncio.gather(*self._errands, return_exceptions=True)

    async def _pause(self, sandbox: Sandbox, memory: bool) -> None:
        async with sandbox.changing:
            sandbox.check_running()
            await self._check_expected(sandbox)
            await sandbox.stillness.hold()
            image = ""
            try:
                image, size_bytes = await self._save(sandbox)
                await self._check_saved(sandbox, size_bytes)
                record = sandbox.rest(sandbox.revival(image, size_bytes), memory=memory)
                await self._records.keep(record)
                if sandbox.ending is not None:  # it was killed meanwhile, and its own record is what counts
                    sandbox.check_running()
            except BaseException:
                await self._undo(sandbox, image)
                raise
            sandbox.lie_down(record)
            if not memory:
                self._on_left(sandbox.record, sandbox.network.policy)
                sandbox.leave_cell("the sandbox was paused without its memory")
            log.info("sandbox.paused", sandbox=sandbox.id, owner=record.owner, memory=memory)

    async def _check_expected(self, sandbox: Sandbox) -> None:
        """Before its files are written, which costs much. What was refused once is likely to be so again.

        Its files may be fewer by now: each time that they are not even looked at, half as many are expected.
        """
        expected = self._too_large.pop(sandbox, 0)
        try:
            await self._check_size(sandbox.spec.owner, expected)
        except errors.ClocheError:
            if expected:
                self._too_large[sandbox] = expected // 2
            raise

    async def _check_saved(self, sandbox: Sandbox, size_bytes: int) -> None:
        try:
            await self._check_size(sandbox.spec.owner, size_bytes)
        except errors.ClocheError:
            self._too_large[sandbox] = size_bytes
            raise

    async def _undo(self, sandbox: Sandbox, image: str) -> None:
        """The pause has failed: it runs on."""
        if sandbox.ending is None:
            self._records.put(sandbox.record)
            with contextlib.suppress(errors.ClocheError):
                await sandbox.stillness.release()
        if image:
            await self._images.remove(image)

    async def _resume(self, sandbox: Sandbox, seconds: float | None) -> None:
        async with sandbox.changing:
            if sandbox.record.state != "paused" or sandbox.ending is not None:
                sandbox.check_running()
                return
            revival = sandbox.record.revival
            sandbox.turns.rise()
            try:
                await sandbox.stillness.release()
            except BaseException:
                sandbox.turns.rest()
                raise
            sandbox.get_up(seconds)
            log.info("sandbox.resumed", sandbox=sandbox.id, owner=sandbox.record.owner, memory=True)
        if revival is not None:
            self._run(self._forget_later(sandbox.id, revival.image))

    async def _forget_later(self, id: str, image: str) -> None:
        await asyncio.sleep(FORGET_SECONDS)
        await self.forget_image(id, image)

    async def forget_image(self, id: str, image: str) -> None:
        """Removes an image of that sandbox's, unless what is on record says that the sandbox could come to need it."""
        try:
            record = await self._records.get(id)
        except errors.Unavailable as error:
            log.error("image.not_removed", sandbox=id, reason=str(error))
            return
        if record is None or record.revival is None or record.revival.image != image:
            await self._images.remove(image)

    async def _image(self, sandbox: Sandbox) -> tuple[str, int]:
        async with sandbox.changing, _standing_still(sandbox):
            return await self._save(sandbox)

    async def _save(self, sandbox: Sandbox) -> tuple[str, int]:
        # Without it, one that uses all it may could not be saved, or one of its programs would be ended for it.
        with sandbox.charge.room_to_save(SAVING_BYTES):
            saved = await self._images.save(sandbox.guest, sandbox.limits.space_bytes)
        return saved.id, saved.bytes

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._run(work))

    def _run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._done)
        return task

    def _drop(self, making: asyncio.Task[tuple[str, int]]) -> None:
        """Whoever asked for that image has left."""
        if not making.cancelled() and making.exception() is None:
            self._run(self._images.remove(making.result()[0]))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._errands.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may have left


@contextlib.asynccontextmanager
async def _standing_still(sandbox: Sandbox) -> AsyncIterator[None]:
    """Raises Gone, Unavailable."""
    if sandbox.ending is not None:
        sandbox.check_running()
    await sandbox.stillness.hold()
    try:
        yield
    finally:
        if sandbox.ending is None:
            await sandbox.stillness.release()
