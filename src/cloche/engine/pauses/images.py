"""The files of a sandbox as one image: taken from it, kept, and given to another one.

An image is hostile bytes from inside a sandbox. It is never looked into here: it goes into another sandbox of the same
owner as it came, and that one unpacks it within its own walls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from cloche import errors
from cloche.engine.sandboxes.init_client import Guest, Reply, error_of, only_fd
from cloche.isolation.channel import Header
from cloche.model import MIB, Struct
from cloche.store.images import Draft, ImageFiles, disk_troubles

T = TypeVar("T")

# Names, owners, times and attributes come to this at the very most, beside what the files themselves hold.
OVERHEAD_SHARE, OVERHEAD_BYTES = 2, 16 * MIB
IDLE_SECONDS = 60.0  # in which not a byte moves: the other side hangs
_MOVE_BYTES = 1 * MIB
_TURN_BYTES = 32 * MIB  # moved in a thread before others get it
_LINGER_MILLISECONDS = 5  # so long a thread waits for more: to leave it and come back takes a tenth of that


class SavedImage(Struct):
    id: str
    bytes: int


class Images:
    """All methods may be cancelled; nothing is left then."""

    def __init__(self, directory: Path, instance: str):
        self._files = ImageFiles(directory, instance)

    async def save(self, guest: Guest, max_bytes: int) -> SavedImage:
        """An image of a sandbox's files, kept when this returns. `max_bytes`: the writable space that it has.

        Raises TooLarge, Unavailable (this host's disk is full, or the sandbox could not do it), Gone.
        """
        draft = await _in_thread(self._files.create, undo=self._files.discard)
        try:
            await _receive(guest, draft, max_bytes + max_bytes // OVERHEAD_SHARE + OVERHEAD_BYTES)
            return SavedImage(id=draft.id, bytes=await _in_thread(self._files.keep, draft))
        except BaseException:
            await _in_thread(self._files.discard, draft)
            raise

    async def restore(self, guest: Guest, id: str) -> bool:
        """Puts the files of an image into a sandbox, in the place of those that it has.

        True if packages are among them: a kernel that was there before has imported others, and must start again.
        Raises NotFound, NoSpace if they do not fit, Unavailable, Gone; then the sandbox is of no use any more.
        """
        file = await _in_thread(self._files.open, id, undo=os.close)
        try:
            async with _transfer(guest, "image_restore") as transfer:
                await _send(file, transfer.pipe)
            return transfer.packages
        finally:
            os.close(file)

    async def copy(self, id: str) -> SavedImage:
        """The same image under another id. Raises NotFound, Unavailable."""
        copy = await _in_thread(self._files.copy, id, undo=self._files.remove)
        return SavedImage(id=copy, bytes=await _in_thread(self._files.size, copy))

    async def remove(self, id: str) -> None:
        """Harmless when it is not there."""
        await _in_thread(self._files.remove, id)

    async def remove_orphans(
        self, known: Callable[[], Awaitable[Collection[str]]], is_live: Callable[[str], bool]
    ) -> int:
        """Removes what host processes left that are not live any more, and nobody knows. How many there were.

        What is `known` is asked for after they were found dead: the last thing that one did may be to make it known.
        """
        left = await _in_thread(self._files.left, is_live)
        ids = await known() if left else ()
        orphans = [path for path in left if path.name not in ids]
        await _in_thread(self._files.remove_all, orphans)
        return len(orphans)


class _Transfer:
    def __init__(self, pipe: int):
        self.pipe = pipe
        self.packages = False  # known when it has ended


@asynccontextmanager
async def _transfer(guest: Guest, verb: str) -> AsyncIterator[_Transfer]:
    """With our end of the pipe. When the block is left, waits until the guest's side has ended; raises how it ended."""
    name = secrets.token_hex(8)
    ended: asyncio.Future[Header] = asyncio.get_running_loop().create_future()
    guest.subscribe("image_ended", name, lambda header: _settle(ended, header))
    try:
        pipe = only_fd(await _ask(guest, verb, name))
        try:
            if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
                raise errors.ProtocolViolation("the guest's init passed no pipe for an image")
            transfer = _Transfer(pipe)
            yield transfer
        finally:
            os.close(pipe)
        async with _patience():
            header = await guest.wait(ended)
        _check(header)
        transfer.packages = header.get("packages") is True
    finally:
        guest.unsubscribe("image_ended", name)


async def _ask(guest: Guest, verb: str, name: str) -> Reply:
    try:
        return await guest.request(verb, image=name)
    except (errors.FileError, errors.InvalidRequest) as error:  # it has no memory for it, or too many processes
        raise _unable(error) from None


def _check(ended: Header) -> None:
    """Raises what the guest says went wrong."""
    described = ended.get("err")
    if described is None:
        return
    error = error_of(described)
    if isinstance(error, (errors.NoSpace, errors.ProtocolViolation)):
        raise error
    raise _unable(error)


def _unable(error: errors.ClocheError) -> errors.Unavailable:
    return errors.Unavailable(f"the sandbox could not save or take its files: {error}")


async def _receive(guest: Guest, draft: Draft, max_bytes: int) -> None:
    async with _transfer(guest, "image_save") as transfer:
        pipe, left = transfer.pipe, max_bytes
        while moved := await _turn(pipe, select.POLLIN, _take, pipe, draft, left):
            left -= moved
            if left < 0:
                raise errors.TooLarge(f"the files of this sandbox make an image of more than {max_bytes} bytes")


async def _send(file: int, pipe: int) -> None:
    while await _turn(pipe, select.POLLOUT, _give, file, pipe):
        pass


async def _turn(pipe: int, events: int, work: Callable[..., int | None], *args: object) -> int:
    """How many bytes `work` moved, which is done in a thread once the pipe is ready; 0 at the end."""
    while True:
        async with _patience():
            await _ready(pipe, events)
        moved = await _in_thread(work, *args)
        if moved is not None:
            return moved


@asynccontextmanager
async def _patience() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            yield
    except TimeoutError:
        raise errors.Unavailable(f"the sandbox did nothing about its image for {IDLE_SECONDS:.0f} seconds") from None


async def _ready(pipe: int, events: int) -> None:
    """Until that pipe can be read from, or written to."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (
        (loop.add_reader, loop.remove_reader) if events == select.POLLIN else (loop.add_writer, loop.remove_writer)
    )
    add(pipe, _settle, ready, None)
    try:
        await ready
    finally:
        remove(pipe)


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _take(pipe: int, draft: Draft, room: int) -> int | None:
    """Moves what is in the pipe to the end of the draft, and at most one byte more than `room`."""
    with disk_troubles():
        draft.check_room()
        return _move(pipe, draft.fd, pipe, select.POLLIN, min(_TURN_BYTES, room + 1))


def _give(file: int, pipe: int) -> int | None:
    """Moves what follows in the file to the pipe. 0 also if nobody reads any more: who does not, says why elsewhere."""
    with disk_troubles():
        try:
            return _move(file, pipe, pipe, select.POLLOUT, _TURN_BYTES)
        except BrokenPipeError:
            return 0


def _move(source: int, target: int, pipe: int, events: int, most: int) -> int | None:
    """How many bytes were moved; 0 at the end, None if the pipe was not ready.

    Whether a pipe waits is asked for call by call: the guest has the same open file, and could change its flags.
    """
    moved, poll = 0, select.poll()
    poll.register(pipe, events)
    while moved < most:
        try:
            count = os.splice(source, target, min(most - moved, _MOVE_BYTES), flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            if poll.poll(_LINGER_MILLISECONDS):
                continue
            return moved or None
        if not count:
            return moved
        moved += count
    return moved


async def _in_thread(work: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None) -> T:
    """Whoever is cancelled waits for it: a thread goes on, with descriptors that would be closed under it.

    Then nobody gets what it gives: `undo(it)` is called.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        if undo is not None and working.exception() is None:
            undo(working.result())
        raise
