"""Images of a sandbox's files: saved from it, stored, and restored into another sandbox.

An image is hostile bytes from inside a sandbox. The host never looks into it: another sandbox of the same
owner gets it as it came, and unpacks it within its own walls.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from cloche import errors
from cloche.engine.sandboxes.init_client import InitClient, error_from_init
from cloche.isolation.channel import PIPE_BYTES, Header, make_input_pipe, make_output_pipe
from cloche.model import MIB, Struct
from cloche.store.images import ImageDraft, ImageFiles, translate_disk_errors

T = TypeVar("T")

# Names, owners, times and attributes come to this at the very most, beside the contents of the files.
OVERHEAD_SHARE, OVERHEAD_BYTES = 2, 16 * MIB
IDLE_SECONDS = 60.0  # in which not a byte moves: the other side hangs
_MOVE_BYTES = 1 * MIB
_TURN_BYTES = 32 * MIB  # moved in a thread before others get it
_LINGER_MILLISECONDS = 5  # so long a thread waits for more: to leave it and come back takes a tenth of that


class SavedImage(Struct):
    id: str
    bytes: int


class SandboxImages:
    """All methods may be cancelled; nothing is left then."""

    def __init__(self, directory: Path, instance: str):
        self._files = ImageFiles(directory, instance)

    async def save(self, guest: InitClient, max_bytes: int) -> SavedImage:
        """An image of a sandbox's files, kept when this returns. `max_bytes`: the writable space that it has.

        Raises TooLarge, Unavailable (this host's disk is full, or the sandbox could not do it), Gone.
        """
        draft = await _run_in_thread(self._files.create, undo=self._files.discard)
        try:
            await _receive_image(guest, draft, max_bytes + max_bytes // OVERHEAD_SHARE + OVERHEAD_BYTES)
            return SavedImage(id=draft.id, bytes=await _run_in_thread(self._files.keep, draft))
        except BaseException:
            await _run_in_thread(self._files.discard, draft)
            raise

    async def restore(self, guest: InitClient, id: str) -> bool:
        """Replaces the files of a sandbox by those of an image.

        True if packages are among them: a kernel that was there before has imported others, and must start again.
        Raises NotFound, NoSpace if they do not fit, Unavailable, Gone; then the sandbox is of no use any more.
        """
        file = await _run_in_thread(self._files.open, id, undo=os.close)
        try:
            async with _open_transfer(guest, "image_restore") as transfer:
                await _send_image(file, transfer.pipe)
            return transfer.packages
        finally:
            os.close(file)

    async def copy(self, id: str) -> SavedImage:
        """The same image under another id. Raises NotFound, Unavailable."""
        copy = await _run_in_thread(self._files.copy, id, undo=self._files.remove)
        return SavedImage(id=copy, bytes=await _run_in_thread(self._files.size, copy))

    async def remove(self, id: str) -> None:
        """Harmless when it is not there."""
        await _run_in_thread(self._files.remove, id)

    async def remove_orphans(
        self, known: Callable[[], Awaitable[Collection[str]]], is_live: Callable[[str], bool]
    ) -> int:
        """Removes unknown images of host processes that are not live any more. Returns how many.

        The `known` ids are read after those processes were found dead: a process may make an image known as its
        last act.
        """
        left = await _run_in_thread(self._files.left, is_live)
        ids = await known() if left else ()
        orphans = [path for path in left if path.name not in ids]
        await _run_in_thread(self._files.remove_all, orphans)
        return len(orphans)


class _ImageTransfer:
    def __init__(self, pipe: int):
        self.pipe = pipe
        self.packages = False  # known when it has ended


@asynccontextmanager
async def _open_transfer(guest: InitClient, verb: str) -> AsyncIterator[_ImageTransfer]:
    """Yields the host's end of the pipe. On exit waits until the guest's side has ended; raises its failure."""
    name = secrets.token_hex(8)
    ended: asyncio.Future[Header] = asyncio.get_running_loop().create_future()
    guest.subscribe("image_ended", name, lambda header: _settle_future(ended, header))
    try:
        pipe, theirs = make_output_pipe() if verb == "image_save" else make_input_pipe()
        try:
            _enlarge_pipe(pipe)
            await _request_transfer(guest, verb, name, theirs)
            transfer = _ImageTransfer(pipe)
            yield transfer
        finally:
            os.close(pipe)
        async with _idle_timeout():
            header = await guest.wait(ended)
        _check_transfer_ended(header)
        transfer.packages = header.get("packages") is True
    finally:
        guest.unsubscribe("image_ended", name)


def _enlarge_pipe(pipe: int) -> None:
    with contextlib.suppress(OSError):  # this user has too many large pipes: small ones work
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


async def _request_transfer(guest: InitClient, verb: str, name: str, pipe: int) -> None:
    try:
        await guest.request(verb, wires=(pipe,), image=name)
    except (errors.FileError, errors.InvalidRequest) as error:  # it has no memory for it, or too many processes
        raise _transfer_error(error) from None


def _check_transfer_ended(ended: Header) -> None:
    """Raises the failure that the guest reports."""
    described = ended.get("err")
    if described is None:
        return
    error = error_from_init(described)
    if isinstance(error, (errors.NoSpace, errors.ProtocolViolation)):
        raise error
    raise _transfer_error(error)


def _transfer_error(error: errors.ClocheError) -> errors.Unavailable:
    return errors.Unavailable(f"the sandbox could not save or take its files: {error}")


async def _receive_image(guest: InitClient, draft: ImageDraft, max_bytes: int) -> None:
    async with _open_transfer(guest, "image_save") as transfer:
        pipe, left = transfer.pipe, max_bytes
        while moved := await _move_when_ready(pipe, select.POLLIN, _receive_chunk, pipe, draft, left):
            left -= moved
            if left < 0:
                raise errors.TooLarge(f"the files of this sandbox make an image of more than {max_bytes} bytes")


async def _send_image(file: int, pipe: int) -> None:
    while await _move_when_ready(pipe, select.POLLOUT, _send_chunk, file, pipe):
        pass


async def _move_when_ready(pipe: int, events: int, work: Callable[..., int | None], *args: object) -> int:
    """Runs `work` in a thread once the pipe is ready. The number of bytes moved; 0 at the end."""
    while True:
        async with _idle_timeout():
            await _wait_pipe_ready(pipe, events)
        moved = await _run_in_thread(work, *args)
        if moved is not None:
            return moved


@asynccontextmanager
async def _idle_timeout() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            yield
    except TimeoutError:
        raise errors.Unavailable(f"the sandbox did nothing about its image for {IDLE_SECONDS:.0f} seconds") from None


async def _wait_pipe_ready(pipe: int, events: int) -> None:
    """Waits until the pipe can be read from, or written to."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (
        (loop.add_reader, loop.remove_reader) if events == select.POLLIN else (loop.add_writer, loop.remove_writer)
    )
    add(pipe, _settle_future, ready, None)
    try:
        await ready
    finally:
        remove(pipe)


def _settle_future(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _receive_chunk(pipe: int, draft: ImageDraft, room: int) -> int | None:
    """Moves the pipe's content to the end of the draft, and at most one byte more than `room`."""
    with translate_disk_errors():
        draft.check_room()
        return _splice_bytes(pipe, draft.fd, pipe, select.POLLIN, min(_TURN_BYTES, room + 1))


def _send_chunk(file: int, pipe: int) -> int | None:
    """Moves the file's next bytes to the pipe. 0 also if the reader is gone: init reports why elsewhere."""
    with translate_disk_errors():
        try:
            return _splice_bytes(file, pipe, pipe, select.POLLOUT, _TURN_BYTES)
        except BrokenPipeError:
            return 0


def _splice_bytes(source: int, target: int, pipe: int, events: int, most: int) -> int | None:
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


async def _run_in_thread(work: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None) -> T:
    """Runs `work` in a thread. On cancellation waits for it: it uses descriptors that would be closed under it.

    Its result is then passed to `undo`.
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
