"""Files of containers: those below /mnt/data, and pictures that code has shown.

A file has an id from when somebody first hears of it, and keeps it while its path stays. What was uploaded, cited or
shown is *kept*: its content is copied to the host, so that it can be fetched after the container's end and put into the
container that replaces it. Small files are copied at once; large ones in the background, from a descriptor that is open
already, so that the copy is whole even if the sandbox ends meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Iterable, Iterator, Sequence

import msgspec

from cloche import errors
from cloche.engine.sandboxes.files import OpenFile
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.gateway.attachments import Attachment
from cloche.gateway.containers import Container, free_name, plain_name
from cloche.gateway.outputs import Picture
from cloche.model import GIB, MIB, FileInfo
from cloche.store.files import COPY, ContainerFile, Source, StoredContainerFiles, new_container_file_id
from cloche.store.files import FILE_PREFIX as FILE
from cloche.store.gateway import Shelf
from cloche.telemetry import log

# The directory of a container that its files are in, as a user sees it: regular files below /mnt/data.

DATA = "/mnt/data/"
MAX_DEPTH = 16
MAX_LISTED = 5000
_NOT_UTF8 = re.compile(r"\\udc[89a-f][0-9a-f]")  # how such bytes of a name are shown: nobody could ask for that file


async def regular_file(sandbox: Sandbox, path: str) -> FileInfo | None:
    """The file at a path below /mnt/data that leads through no symlink; None if there is none. Raises Gone."""
    path = posixpath.normpath(path)
    names = path.removeprefix(DATA).split("/")
    if not path.startswith(DATA) or len(names) > MAX_DEPTH:
        return None
    try:
        for depth in range(1, len(names)):
            if (await sandbox.files.stat(DATA + "/".join(names[:depth]))).kind != "directory":
                return None
        info = await sandbox.files.stat(path)
    except (errors.FileError, errors.NotFound, errors.InvalidPath):
        return None
    return info if info.kind == "file" else None


async def regular_files(sandbox: Sandbox) -> tuple[list[FileInfo], bool]:
    """Whether these are all."""
    try:
        found, is_all = await _listed(sandbox, MAX_DEPTH), True
    except errors.FileError:  # too many: those in its subdirectories are left out
        found, is_all = await _listed(sandbox, 1), False
    files = [each for each in found if each.kind == "file" and not _NOT_UTF8.search(each.path)]
    return files[:MAX_LISTED], is_all and len(files) <= MAX_LISTED


async def reserve(sandbox: Sandbox, name: str, reserved: set[str]) -> str:
    """Such a name that neither a file has nor anybody else; it is added to `reserved`."""
    taken: set[str] = set()
    while True:
        free = free_name(name, taken | reserved)
        reserved.add(free)  # before looking: somebody else may ask meanwhile
        try:
            if not await sandbox.files.exists(DATA + free):
                return free
        except BaseException:
            reserved.discard(free)
            raise
        reserved.discard(free)
        taken.add(free)


async def _listed(sandbox: Sandbox, depth: int) -> list[FileInfo]:
    try:
        return await sandbox.files.list(DATA, depth=depth)
    except errors.FileError:
        raise errors.FileError(
            "/mnt/data has more files than can be listed: let code remove some, or pack them"
        ) from None


# How much is kept of containers' files: of one file, one container, one owner.

MAX_KEPT_FILE_BYTES = 128 * MIB
MAX_KEPT_BYTES = 512 * MIB  # of one container
MAX_OWNER_BYTES = 32 * GIB


class Room:
    """What is being copied counts like what is kept: many copies at once find no more room than one after another."""

    def __init__(self, rows: StoredContainerFiles):
        self._rows = rows
        self._of_owner: Counter[str] = Counter()  # bytes that are being copied
        self._of_sandbox: Counter[str] = Counter()

    async def take(self, sandbox: Sandbox, size: int, *, instead_of: str | None = None) -> bool:
        """Whether there is room; then it is taken until `release`. `instead_of` is the id of what is replaced."""
        if not 0 <= size <= MAX_KEPT_FILE_BYTES:  # a sandbox says what it likes
            return False
        with contextlib.ExitStack() as taken:
            self._add(sandbox, size)  # before looking: somebody else may ask meanwhile
            taken.callback(self.release, sandbox, size)
            owner = sandbox.spec.owner
            of_owner, of_sandbox = await self._rows.kept_bytes(owner, sandbox.id, without=instead_of)
            if of_owner + self._of_owner[owner] > MAX_OWNER_BYTES or not await self._may(owner, size):
                return False
            if of_sandbox + self._of_sandbox[sandbox.id] > MAX_KEPT_BYTES:
                return False
            taken.pop_all()
        return True

    def release(self, sandbox: Sandbox, size: int) -> None:
        self._add(sandbox, -size)

    @contextlib.asynccontextmanager
    async def taking(self, sandbox: Sandbox, size: int) -> AsyncGenerator[bool, None]:
        """Whether there is room; it is taken within the block."""
        fits = await self.take(sandbox, size)
        try:
            yield fits
        finally:
            if fits:
                self.release(sandbox, size)

    async def has_for_link(self, sandbox: Sandbox, size: int) -> bool:
        """A link takes no room, until the file is deleted that it is of."""
        of_owner, _ = await self._rows.kept_bytes(sandbox.spec.owner, sandbox.id)
        return of_owner + size <= MAX_OWNER_BYTES

    async def _may(self, owner: str, size: int) -> bool:
        try:
            await self._rows.allow(owner, size)
        except errors.QuotaExceeded:
            return False
        return True

    def _add(self, sandbox: Sandbox, size: int) -> None:
        for counter, key in ((self._of_owner, sandbox.spec.owner), (self._of_sandbox, sandbox.id)):
            counter[key] += size
            if not counter[key]:
                del counter[key]


AT_ONCE_BYTES = 1 * MIB
MAX_KEPT_ANEW_BYTES = 16 * MIB  # of a file that code has changed: larger ones are kept no more, until they are cited
MAX_LOOKED_AT = 200
LOOK_SECONDS = 0.1  # after a run


class ContainerFiles:
    def __init__(self, shelf: Shelf):
        self._files = shelf.files
        self._rows = shelf.container_files
        self._blobs = shelf.blobs
        self._room = Room(shelf.container_files)
        self._copying: set[asyncio.Task[None]] = set()
        self._looking: set[str] = set()  # sandboxes in which that is about to begin
        self._reserved: dict[str, set[str]] = {}  # names of files that are being written, by sandbox

    # -- what there is

    async def list(self, container: Container) -> list[ContainerFile]:
        """All, the oldest first. Raises FileError if there are too many."""
        rows = await self._rows.of_sandbox(container.owner, container.sandbox.id)
        known = {row.path: row for row in rows}
        inside, is_all = await regular_files(container.sandbox)
        if is_all:
            await self._rows.lose(_gone(rows, inside))
        new = sorted((each for each in inside if each.path not in known), key=lambda each: each.modified_at)
        known |= {row.path: row for row in await self._rows.register(_row(container, each) for each in new)}
        if any(row.kept and _changed(row, each) for each in inside if (row := known.get(each.path)) is not None):
            self.look_again(container)
        there = [_with_size(known[each.path], each) for each in inside if each.path in known]
        return sorted([*there, *(row for row in rows if row.shown)], key=lambda row: row.id)

    async def registered(self, container: Container) -> Sequence[ContainerFile]:
        """Those that somebody was told of."""
        return await self._rows.of_sandbox(container.owner, container.sandbox.id)

    async def get(self, container: Container, id: str) -> ContainerFile:
        """Raises FileNotFound, also for one that a program has removed."""
        row = await self._rows.get(container.owner, container.sandbox.id, id)
        if row.shown:
            return row
        info = await regular_file(container.sandbox, row.path)
        if info is None:
            raise errors.FileNotFound(f"Container file with id '{id[:100]}' not found.")
        return _with_size(row, info)

    async def find(self, container: Container, id: str) -> ContainerFile:
        """Also one that a program has removed. Raises FileNotFound."""
        return await self._rows.get(container.owner, container.sandbox.id, id)

    async def get_kept(self, owner: str, sandbox: str, id: str) -> ContainerFile:
        """Of a container that has ended. Raises FileNotFound."""
        row = await self._rows.get(owner, sandbox, id)
        if not row.kept:
            raise errors.FileNotFound(f"Container file with id '{id[:100]}' not found.")
        return row

    async def list_kept(self, owner: str, sandbox: str) -> Sequence[ContainerFile]:
        return [row for row in await self._rows.of_sandbox(owner, sandbox) if row.kept]

    async def open(self, container: Container | None, file: ContainerFile) -> tuple[int, AsyncGenerator[bytes, None]]:
        """Its size and its content, as it is inside; without a container, what is kept. Raises FileNotFound."""
        if container is None or file.shown:
            return file.bytes, await self._blobs.chunks(file.id)
        opened = await container.sandbox.files.open(file.path)
        return opened.size_bytes, opened.until_read()

    # -- what comes in

    @contextlib.asynccontextmanager
    async def new_path(self, container: Container, name: str) -> AsyncGenerator[str, None]:
        """A path below /mnt/data for a new file of such a name; nobody else is given it within the block."""
        reserved = self._reserved.setdefault(container.sandbox.id, set())
        names: set[str] = set()
        try:
            free = await reserve(container.sandbox, plain_name(name), reserved)
            names.add(free)
            yield DATA + free
        finally:
            self._release(container.sandbox.id, names)

    @contextlib.contextmanager
    def claim(self, container: Container, paths: Iterable[str]) -> Iterator[None]:
        """Nobody is given these paths within the block, whether they are there or not."""
        reserved = self._reserved.setdefault(container.sandbox.id, set())
        names = {path.removeprefix(DATA) for path in paths} - reserved
        reserved |= names
        try:
            yield
        finally:
            self._release(container.sandbox.id, names)

    def _release(self, sandbox: str, names: set[str]) -> None:
        reserved = self._reserved.get(sandbox)
        if reserved is None:
            return  # somebody else was the last who had a name
        reserved -= names
        if not reserved:
            del self._reserved[sandbox]

    async def upload(self, container: Container, path: str, chunks: AsyncIterable[bytes]) -> ContainerFile:
        """A user's file. Raises what writing raises; Gone where the container ends before it is kept."""
        info = await container.sandbox.files.write(path, chunks)
        row = _row(container, info, source="user")
        await self._rows.put(row)
        try:
            await self._keep(container.sandbox, row, info)
        except errors.Gone:
            await self._rows.remove([row])
            raise
        return row

    async def place(self, container: Container, path: str, attachment: Attachment) -> ContainerFile:
        """A file that came with a request. Raises what writing raises, FileNotFound if it is no longer stored."""
        stored = attachment.stored
        content = attachment.content if stored is None else await self._files.chunks(stored)
        info = await container.sandbox.files.write(path, content)
        row = msgspec.structs.replace(
            _row(container, info, source="user"), origin=attachment.origin, bytes=attachment.size_bytes
        )
        if stored is not None:
            return await self._put_link(container.sandbox, row, stored.id)
        async with self._room.taking(container.sandbox, row.bytes) as fits:
            kept = fits and await self._is_kept(row, self._blobs.put(row.id, _once(attachment.content), row.bytes))
            return await self._put(row, kept)

    async def _put_link(self, sandbox: Sandbox, row: ContainerFile, stored: str) -> ContainerFile:
        fits = await self._room.has_for_link(sandbox, row.bytes)
        return await self._put(row, fits and await self._is_kept(row, self._blobs.link(stored, row.id)))

    async def _put(self, row: ContainerFile, kept: bool) -> ContainerFile:
        row = msgspec.structs.replace(row, kept=kept)
        await self._rows.put(row)
        return row

    async def _is_kept(self, row: ContainerFile, writing: Coroutine[None, None, object]) -> bool:
        """Whether its content could be written."""
        try:
            await writing
        except (errors.Unavailable, errors.FileNotFound, OSError) as error:
            log.warning("file.not_kept", sandbox=row.sandbox, error=type(error).__name__)
            return False
        return True

    async def restore(self, sandbox: str, container: Container) -> Sequence[ContainerFile]:
        """Puts what is kept of a sandbox of the same owner into a new container. What does not fit is left out."""
        restored = []
        for row in await self.list_kept(container.owner, sandbox):
            if not row.shown:
                try:
                    restored.append(await self._restore(row, container))
                except (errors.FileError, errors.NotFound, errors.Unavailable) as error:
                    log.warning("file.not_restored", container=container.id, reason=error.code)
        return restored

    async def _restore(self, old: ContainerFile, container: Container) -> ContainerFile:
        info = await container.sandbox.files.write(old.path, await self._blobs.chunks(old.id))
        row = _row(container, info, source=old.source)
        await self._blobs.link(old.id, row.id)
        return await self._put(msgspec.structs.replace(row, origin=old.origin, bytes=old.bytes), kept=True)

    # -- what is cited

    async def cite(self, container: Container, path: str) -> ContainerFile | None:
        """The file at that path, which is kept from now on; None if there is no such file. Raises Gone."""
        info = await regular_file(container.sandbox, path)
        if info is None:
            rows = await self._rows.of_sandbox(container.owner, container.sandbox.id)
            return next((row for row in rows if row.shown and row.path == path), None)
        (row,) = await self._rows.register([_row(container, info)])
        await self._keep(container.sandbox, row, info)
        return row

    async def cite_kept(self, owner: str, sandbox: str, path: str) -> ContainerFile | None:
        """Of a container that has ended."""
        return next((row for row in await self.list_kept(owner, sandbox) if row.path == path), None)

    async def show(self, container: Container, picture: Picture) -> ContainerFile | None:
        """A picture becomes a file of the container, which programs inside do not see. None if it cannot be kept."""
        id, size = new_container_file_id(), len(picture.content)
        row = ContainerFile(
            id=id,
            sandbox=container.sandbox.id,
            owner=container.owner,
            path=f"{DATA}{id}.{picture.extension}",
            source="assistant",
            bytes=size,
            created_at=time.time(),
            kept=True,
        )
        async with self._room.taking(container.sandbox, size) as fits:
            if not fits or not await self._is_kept(row, self._blobs.put(id, _once(picture.content), size)):
                return None
            return (await self._rows.register([row]))[0]

    # -- what goes

    async def remove(self, container: Container, file: ContainerFile) -> None:
        """Raises what removing raises."""
        if not file.shown and await regular_file(container.sandbox, file.path) is not None:
            await container.sandbox.files.remove(file.path)
        await self._rows.remove([file])

    async def forget(self, owner: str, sandbox: str) -> None:
        """All that is known and kept of a container that its owner deleted."""
        await self._rows.remove(await self._rows.of_sandbox(owner, sandbox))

    async def aclose(self) -> None:
        """Waits for what is being copied."""
        while self._copying:
            await asyncio.gather(*self._copying)

    # -- keeping

    def look_again(self, container: Container) -> None:
        """Code may have run: what it changed of what is kept is kept anew, soon, and what it removed no longer."""
        if container.sandbox.id not in self._looking:
            self._looking.add(container.sandbox.id)
            self._in_background(self._look_again(container.sandbox))

    async def _look_again(self, sandbox: Sandbox) -> None:
        try:
            await asyncio.sleep(LOOK_SECONDS)  # the turn goes on first, and often with more code
            rows = await self._rows.of_sandbox(sandbox.spec.owner, sandbox.id)
            self._looking.discard(sandbox.id)  # whoever runs code from here on is not seen any more
            for row in [row for row in rows if row.kept and not row.shown][:MAX_LOOKED_AT]:
                await self._look_at(sandbox, row)
        except (errors.ClocheError, OSError, sqlite3.Error) as error:
            log.warning("files.not_looked_at", sandbox=sandbox.id, error=type(error).__name__)
        finally:
            self._looking.discard(sandbox.id)

    async def _look_at(self, sandbox: Sandbox, row: ContainerFile) -> None:
        info = await regular_file(sandbox, row.path)
        if info is None:
            sandbox.check_running()  # what is not there since all has ended was not removed
            await self._rows.lose([row])
        elif _changed(row, info) and (
            info.size_bytes > MAX_KEPT_ANEW_BYTES or not await self._keep(sandbox, row, info)
        ):
            await self._rows.keep_no_more(row)

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._copying.add(task)
        task.add_done_callback(self._copying.discard)
        return task

    async def _keep(self, sandbox: Sandbox, row: ContainerFile, info: FileInfo) -> bool:
        """Whether there is room for it. Raises Gone."""
        size = info.size_bytes
        if row.kept and not _changed(row, info):
            return True
        if not await self._room.take(sandbox, size, instead_of=row.id):
            return False
        row = msgspec.structs.replace(row, bytes=size, modified_at=info.modified_at, origin=_copied(row.origin))
        with contextlib.ExitStack() as held:
            held.callback(self._room.release, sandbox, size)
            try:
                file = await sandbox.files.open(row.path)
            except (errors.FileError, errors.NotFound, errors.SandboxPaused):
                return True  # a program was faster
            held.callback(file.close)
            copying = self._in_background(self._copy(file, row, held.pop_all()))
        if file.size_bytes <= AT_ONCE_BYTES:
            await asyncio.shield(copying)
        return True

    async def _copy(self, file: OpenFile, row: ContainerFile, held: contextlib.ExitStack) -> None:
        """What has more than the sandbox said is not kept: there is room for that much only."""
        with held:
            try:
                size = await self._blobs.put(row.id, file.until_read(), row.bytes)
                if not await self._rows.mark_kept(msgspec.structs.replace(row, bytes=size)):
                    await self._blobs.remove(row.id)
            except (errors.ClocheError, OSError, sqlite3.Error) as error:
                log.warning("file.not_kept", sandbox=row.sandbox, error=type(error).__name__)


def _gone(rows: Sequence[ContainerFile], inside: Sequence[FileInfo]) -> list[ContainerFile]:
    """Those of which something is known that is no longer there."""
    there = {each.path for each in inside}
    missing = [row for row in rows if not row.shown and row.path not in there]
    return [row for row in missing if row.kept or row.origin is None]


def _changed(row: ContainerFile, info: FileInfo) -> bool:
    return (row.bytes, row.modified_at) != (info.size_bytes, info.modified_at)


def _copied(origin: str | None) -> str | None:
    """Of a content that is copied from inside: it is no link of a stored file any more."""
    return COPY + origin if origin is not None and origin.startswith(FILE) else origin


def _row(container: Container, info: FileInfo, *, source: Source = "assistant") -> ContainerFile:
    return ContainerFile(
        id=new_container_file_id(),
        sandbox=container.sandbox.id,
        owner=container.owner,
        path=info.path,
        source=source,
        bytes=info.size_bytes,
        created_at=time.time(),
        modified_at=info.modified_at,
    )


def _with_size(row: ContainerFile, info: FileInfo) -> ContainerFile:
    return msgspec.structs.replace(row, bytes=info.size_bytes)


async def _once(content: bytes) -> AsyncGenerator[bytes, None]:
    yield content
