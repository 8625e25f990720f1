"""Files of containers: regular files below /mnt/data, and pictures that code has shown.

A file gets an id when it is first reported, and keeps it while its path stays. An uploaded, cited or shown
file is *kept*: its content is copied to the host, so that it can be fetched after the container's end and put
into the container that replaces it. Small files are copied at once; large ones in the background, from a
descriptor that is open already, so that the copy is whole even if the sandbox ends meanwhile.
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
from cloche.gateway.attachments import AttachedFile
from cloche.gateway.containers import Container, find_free_name, sanitize_file_name
from cloche.gateway.outputs import Picture
from cloche.model import GIB, MIB, FileInfo
from cloche.store.files import COPY_PREFIX, FileSource, StoredContainerFile, StoredContainerFiles, new_container_file_id
from cloche.store.files import FILE_PREFIX as FILE
from cloche.store.gateway import GatewayStore
from cloche.tasks import TaskSet
from cloche.telemetry import log

# The data directory of a container: regular files below /mnt/data.

DATA_DIRECTORY = "/mnt/data/"
MAX_DATA_DEPTH = 16
MAX_LISTED_FILES = 5000
_NOT_UTF8 = re.compile(r"\\udc[89a-f][0-9a-f]")  # how such bytes of a name are shown: no client could request that file


async def find_regular_file(sandbox: Sandbox, path: str) -> FileInfo | None:
    """The file at a path below /mnt/data that leads through no symlink; None if there is none. Raises Gone."""
    path = posixpath.normpath(path)
    names = path.removeprefix(DATA_DIRECTORY).split("/")
    if not path.startswith(DATA_DIRECTORY) or len(names) > MAX_DATA_DEPTH:
        return None
    try:
        for depth in range(1, len(names)):
            if (await sandbox.files.stat(DATA_DIRECTORY + "/".join(names[:depth]))).kind != "directory":
                return None
        info = await sandbox.files.stat(path)
    except (errors.FileError, errors.NotFound, errors.InvalidPath):
        return None
    return info if info.kind == "file" else None


async def list_regular_files(sandbox: Sandbox) -> tuple[list[FileInfo], bool]:
    """Lists the files, and whether the list is complete."""
    try:
        found, is_all = await _list_directory(sandbox, MAX_DATA_DEPTH), True
    except errors.FileError:  # too many: those in its subdirectories are left out
        found, is_all = await _list_directory(sandbox, 1), False
    files = [each for each in found if each.kind == "file" and not _NOT_UTF8.search(each.path)]
    return files[:MAX_LISTED_FILES], is_all and len(files) <= MAX_LISTED_FILES


async def reserve_name(sandbox: Sandbox, name: str, reserved: set[str]) -> str:
    """Reserves a name like this that neither a file nor a reservation has, and adds it to `reserved`."""
    taken: set[str] = set()
    while True:
        free = find_free_name(name, taken | reserved)
        reserved.add(free)  # before the await: another request can come meanwhile
        try:
            if not await sandbox.files.exists(DATA_DIRECTORY + free):
                return free
        except BaseException:
            reserved.discard(free)
            raise
        reserved.discard(free)
        taken.add(free)


async def _list_directory(sandbox: Sandbox, depth: int) -> list[FileInfo]:
    try:
        return await sandbox.files.list(DATA_DIRECTORY, depth=depth)
    except errors.FileError:
        raise errors.FileError(
            "/mnt/data has more files than can be listed: let code remove some, or pack them"
        ) from None


# Limits the kept bytes of containers' files: per file, per container, per owner.

MAX_KEPT_FILE_BYTES = 128 * MIB
MAX_KEPT_BYTES = 512 * MIB  # of one container
MAX_OWNER_BYTES = 32 * GIB


class ContainerStorageLimit:
    """Counts copies in progress like kept files: concurrent copies get no more room than sequential ones."""

    def __init__(self, rows: StoredContainerFiles):
        self._rows = rows
        self._of_owner: Counter[str] = Counter()  # bytes that are being copied
        self._of_sandbox: Counter[str] = Counter()

    async def take(self, sandbox: Sandbox, size: int, *, instead_of: str | None = None) -> bool:
        """Whether there is room; then it is taken until `release`.

        `instead_of` is the id of the file to be replaced.
        """
        if not 0 <= size <= MAX_KEPT_FILE_BYTES:  # a sandbox's answer is not trusted
            return False
        with contextlib.ExitStack() as taken:
            self._count_bytes(sandbox, size)  # before the await: another request can come meanwhile
            taken.callback(self.release, sandbox, size)
            owner = sandbox.spec.owner
            of_owner, of_sandbox = await self._rows.kept_bytes(owner, sandbox.id, without=instead_of)
            if of_owner + self._of_owner[owner] > MAX_OWNER_BYTES or not await self._quota_allows(owner, size):
                return False
            if of_sandbox + self._of_sandbox[sandbox.id] > MAX_KEPT_BYTES:
                return False
            taken.pop_all()
        return True

    def release(self, sandbox: Sandbox, size: int) -> None:
        self._count_bytes(sandbox, -size)

    @contextlib.asynccontextmanager
    async def taking(self, sandbox: Sandbox, size: int) -> AsyncGenerator[bool, None]:
        """Whether there is room; it is taken within the block."""
        fits = await self.take(sandbox, size)
        try:
            yield fits
        finally:
            if fits:
                self.release(sandbox, size)

    async def has_room_for_link(self, sandbox: Sandbox, size: int) -> bool:
        """Whether there is room for a link: it takes none, until its file is deleted."""
        of_owner, _ = await self._rows.kept_bytes(sandbox.spec.owner, sandbox.id)
        return of_owner + size <= MAX_OWNER_BYTES

    async def _quota_allows(self, owner: str, size: int) -> bool:
        try:
            await self._rows.allow(owner, size)
        except errors.QuotaExceeded:
            return False
        return True

    def _count_bytes(self, sandbox: Sandbox, size: int) -> None:
        for counter, key in ((self._of_owner, sandbox.spec.owner), (self._of_sandbox, sandbox.id)):
            counter[key] += size
            if not counter[key]:
                del counter[key]


INLINE_COPY_BYTES = 1 * MIB
MAX_REFRESHED_BYTES = 16 * MIB  # of a file that code has changed: larger ones are kept no more, until they are cited
MAX_REFRESHED_FILES = 200
REFRESH_DELAY_SECONDS = 0.1  # after a run


class ContainerFiles:
    def __init__(self, gateway_store: GatewayStore):
        self._files = gateway_store.files
        self._rows = gateway_store.container_files
        self._blobs = gateway_store.blobs
        self._room = ContainerStorageLimit(gateway_store.container_files)
        self._copying = TaskSet()
        self._looking: set[str] = set()  # sandboxes in which that is about to begin
        self._reserved: dict[str, set[str]] = {}  # names of files that are being written, by sandbox

    # -- listing

    async def list(self, container: Container) -> list[StoredContainerFile]:
        """Lists all files, the oldest first. Raises FileError if there are too many."""
        rows = await self._rows.list_by_sandbox(container.owner, container.sandbox.id)
        known = {row.path: row for row in rows}
        inside, is_all = await list_regular_files(container.sandbox)
        if is_all:
            await self._rows.lose(_find_removed(rows, inside))
        new = sorted((each for each in inside if each.path not in known), key=lambda each: each.modified_at)
        known |= {row.path: row for row in await self._rows.register(_new_row(container, each) for each in new)}
        if any(row.kept and _has_changed(row, each) for each in inside if (row := known.get(each.path)) is not None):
            self.refresh_kept(container)
        there = [_with_size(known[each.path], each) for each in inside if each.path in known]
        return sorted([*there, *(row for row in rows if row.shown)], key=lambda row: row.id)

    async def list_registered(self, container: Container) -> Sequence[StoredContainerFile]:
        """Returns the files with an id: all that were reported to a client or model."""
        return await self._rows.list_by_sandbox(container.owner, container.sandbox.id)

    async def get(self, container: Container, id: str) -> StoredContainerFile:
        """Returns the file. Raises FileNotFound, also for a file that a program has removed."""
        row = await self._rows.get(container.owner, container.sandbox.id, id)
        if row.shown:
            return row
        info = await find_regular_file(container.sandbox, row.path)
        if info is None:
            raise errors.FileNotFound(f"Container file with id '{id[:100]}' not found.")
        return _with_size(row, info)

    async def find(self, container: Container, id: str) -> StoredContainerFile:
        """Returns the file, even if a program has removed it. Raises FileNotFound."""
        return await self._rows.get(container.owner, container.sandbox.id, id)

    async def get_kept(self, owner: str, sandbox: str, id: str) -> StoredContainerFile:
        """Returns a kept file of a container that has ended. Raises FileNotFound."""
        row = await self._rows.get(owner, sandbox, id)
        if not row.kept:
            raise errors.FileNotFound(f"Container file with id '{id[:100]}' not found.")
        return row

    async def list_kept(self, owner: str, sandbox: str) -> Sequence[StoredContainerFile]:
        return [row for row in await self._rows.list_by_sandbox(owner, sandbox) if row.kept]

    async def open(
        self, container: Container | None, file: StoredContainerFile
    ) -> tuple[int, AsyncGenerator[bytes, None]]:
        """Returns size and content, as inside; without a container, of the kept copy. Raises FileNotFound."""
        if container is None or file.shown:
            return file.bytes, await self._blobs.chunks(file.id)
        opened = await container.sandbox.files.open(file.path)
        return opened.size_bytes, opened.until_read()

    # -- uploads

    @contextlib.asynccontextmanager
    async def reserve_path(self, container: Container, name: str) -> AsyncGenerator[str, None]:
        """Reserves a path below /mnt/data for a new file of such a name, for the duration of the block."""
        reserved = self._reserved.setdefault(container.sandbox.id, set())
        names: set[str] = set()
        try:
            free = await reserve_name(container.sandbox, sanitize_file_name(name), reserved)
            names.add(free)
            yield DATA_DIRECTORY + free
        finally:
            self._release_names(container.sandbox.id, names)

    @contextlib.contextmanager
    def claim(self, container: Container, paths: Iterable[str]) -> Iterator[None]:
        """Reserves these paths for the duration of the block, whether they exist or not."""
        reserved = self._reserved.setdefault(container.sandbox.id, set())
        names = {path.removeprefix(DATA_DIRECTORY) for path in paths} - reserved
        reserved |= names
        try:
            yield
        finally:
            self._release_names(container.sandbox.id, names)

    def _release_names(self, sandbox: str, names: set[str]) -> None:
        reserved = self._reserved.get(sandbox)
        if reserved is None:
            return  # another request has released the last name
        reserved -= names
        if not reserved:
            del self._reserved[sandbox]

    async def upload(self, container: Container, path: str, chunks: AsyncIterable[bytes]) -> StoredContainerFile:
        """Writes a user's file. Raises the errors of writing; Gone if the container ends before the file is kept."""
        info = await container.sandbox.files.write(path, chunks)
        row = _new_row(container, info, source="user")
        await self._rows.put(row)
        try:
            await self._keep_content(container.sandbox, row, info)
        except errors.Gone:
            await self._rows.remove([row])
            raise
        return row

    async def place(self, container: Container, path: str, attachment: AttachedFile) -> StoredContainerFile:
        """Writes a file that came with a request.

        Raises the errors of writing, FileNotFound if it is no longer stored.
        """
        stored = attachment.stored
        content = attachment.content if stored is None else await self._files.chunks(stored)
        info = await container.sandbox.files.write(path, content)
        row = msgspec.structs.replace(
            _new_row(container, info, source="user"), origin=attachment.origin, bytes=attachment.size_bytes
        )
        if stored is not None:
            return await self._put_linked(container.sandbox, row, stored.id)
        async with self._room.taking(container.sandbox, row.bytes) as fits:
            kept = fits and await self._try_write(
                row, self._blobs.put(row.id, _single_chunk(attachment.content), row.bytes)
            )
            return await self._put_row(row, kept)

    async def _put_linked(self, sandbox: Sandbox, row: StoredContainerFile, stored: str) -> StoredContainerFile:
        fits = await self._room.has_room_for_link(sandbox, row.bytes)
        return await self._put_row(row, fits and await self._try_write(row, self._blobs.link(stored, row.id)))

    async def _put_row(self, row: StoredContainerFile, kept: bool) -> StoredContainerFile:
        row = msgspec.structs.replace(row, kept=kept)
        await self._rows.put(row)
        return row

    async def _try_write(self, row: StoredContainerFile, writing: Coroutine[None, None, object]) -> bool:
        """Whether its content could be written."""
        try:
            await writing
        except (errors.Unavailable, errors.FileNotFound, OSError) as error:
            log.warning("file.not_kept", sandbox=row.sandbox, error=type(error).__name__)
            return False
        return True

    async def restore(self, sandbox: str, container: Container) -> Sequence[StoredContainerFile]:
        """Puts the kept files of a sandbox of the same owner into a new container.

        Files that do not fit are left out.
        """
        restored = []
        for row in await self.list_kept(container.owner, sandbox):
            if not row.shown:
                try:
                    restored.append(await self._restore_file(row, container))
                except (errors.FileError, errors.NotFound, errors.Unavailable) as error:
                    log.warning("file.not_restored", container=container.id, reason=error.code)
        return restored

    async def _restore_file(self, old: StoredContainerFile, container: Container) -> StoredContainerFile:
        info = await container.sandbox.files.write(old.path, await self._blobs.chunks(old.id))
        row = _new_row(container, info, source=old.source)
        await self._blobs.link(old.id, row.id)
        return await self._put_row(msgspec.structs.replace(row, origin=old.origin, bytes=old.bytes), kept=True)

    # -- citations

    async def cite(self, container: Container, path: str) -> StoredContainerFile | None:
        """Returns the file at that path and keeps it from now on; None if there is no such file. Raises Gone."""
        info = await find_regular_file(container.sandbox, path)
        if info is None:
            rows = await self._rows.list_by_sandbox(container.owner, container.sandbox.id)
            return next((row for row in rows if row.shown and row.path == path), None)
        (row,) = await self._rows.register([_new_row(container, info)])
        await self._keep_content(container.sandbox, row, info)
        return row

    async def cite_kept(self, owner: str, sandbox: str, path: str) -> StoredContainerFile | None:
        """Returns the kept file at that path, of a container that has ended."""
        return next((row for row in await self.list_kept(owner, sandbox) if row.path == path), None)

    async def show(self, container: Container, picture: Picture) -> StoredContainerFile | None:
        """Makes a picture a file of the container, invisible to programs inside. None if it cannot be kept."""
        id, size = new_container_file_id(), len(picture.content)
        row = StoredContainerFile(
            id=id,
            sandbox=container.sandbox.id,
            owner=container.owner,
            path=f"{DATA_DIRECTORY}{id}.{picture.file_extension}",
            source="assistant",
            bytes=size,
            created_at=time.time(),
            kept=True,
        )
        async with self._room.taking(container.sandbox, size) as fits:
            if not fits or not await self._try_write(row, self._blobs.put(id, _single_chunk(picture.content), size)):
                return None
            return (await self._rows.register([row]))[0]

    # -- removal

    async def remove(self, container: Container, file: StoredContainerFile) -> None:
        """Removes the file and its row. Raises the errors of removing."""
        if not file.shown and await find_regular_file(container.sandbox, file.path) is not None:
            await container.sandbox.files.remove(file.path)
        await self._rows.remove([file])

    async def forget(self, owner: str, sandbox: str) -> None:
        """Removes all rows and kept contents of a container that its owner deleted."""
        await self._rows.remove(await self._rows.list_by_sandbox(owner, sandbox))

    async def aclose(self) -> None:
        """Waits for the copies in progress."""
        while self._copying:
            await asyncio.gather(*self._copying)

    # -- keeping

    def refresh_kept(self, container: Container) -> None:
        """Schedules an update after code has run: changed kept files are copied anew, removed ones dropped."""
        if container.sandbox.id not in self._looking:
            self._looking.add(container.sandbox.id)
            self._copying.start(self._refresh_changed(container.sandbox))

    async def _refresh_changed(self, sandbox: Sandbox) -> None:
        try:
            await asyncio.sleep(REFRESH_DELAY_SECONDS)  # the turn continues first, and often with more code
            rows = await self._rows.list_by_sandbox(sandbox.spec.owner, sandbox.id)
            self._looking.discard(sandbox.id)  # changes by code that starts after this are not seen
            for row in [row for row in rows if row.kept and not row.shown][:MAX_REFRESHED_FILES]:
                await self._refresh_file(sandbox, row)
        except (errors.ClocheError, OSError, sqlite3.Error) as error:
            log.warning("files.not_looked_at", sandbox=sandbox.id, error=type(error).__name__)
        finally:
            self._looking.discard(sandbox.id)

    async def _refresh_file(self, sandbox: Sandbox, row: StoredContainerFile) -> None:
        info = await find_regular_file(sandbox, row.path)
        if info is None:
            sandbox.check_running()  # files that are missing because the sandbox ended were not removed
            await self._rows.lose([row])
        elif _has_changed(row, info) and (
            info.size_bytes > MAX_REFRESHED_BYTES or not await self._keep_content(sandbox, row, info)
        ):
            await self._rows.drop_content(row)

    async def _keep_content(self, sandbox: Sandbox, row: StoredContainerFile, info: FileInfo) -> bool:
        """Keeps the content. Whether there is room for it. Raises Gone."""
        size = info.size_bytes
        if row.kept and not _has_changed(row, info):
            return True
        if not await self._room.take(sandbox, size, instead_of=row.id):
            return False
        row = msgspec.structs.replace(row, bytes=size, modified_at=info.modified_at, origin=_mark_copied(row.origin))
        with contextlib.ExitStack() as held:
            held.callback(self._room.release, sandbox, size)
            try:
                file = await sandbox.files.open(row.path)
            except (errors.FileError, errors.NotFound, errors.SandboxPaused):
                return True  # a program was faster
            held.callback(file.close)
            copying = self._copying.start(self._copy_content(file, row, held.pop_all()))
        if file.size_bytes <= INLINE_COPY_BYTES:
            await asyncio.shield(copying)
        return True

    async def _copy_content(self, file: OpenFile, row: StoredContainerFile, held: contextlib.ExitStack) -> None:
        """Copies the content. A file larger than the sandbox reported is not kept: only that much room is taken."""
        with held:
            try:
                size = await self._blobs.put(row.id, file.until_read(), row.bytes)
                if not await self._rows.mark_kept(msgspec.structs.replace(row, bytes=size)):
                    await self._blobs.remove(row.id)
            except (errors.ClocheError, OSError, sqlite3.Error) as error:
                log.warning("file.not_kept", sandbox=row.sandbox, error=type(error).__name__)


def _find_removed(rows: Sequence[StoredContainerFile], inside: Sequence[FileInfo]) -> list[StoredContainerFile]:
    """Returns the rows of files that no longer exist, if their content is kept or they have no origin."""
    there = {each.path for each in inside}
    missing = [row for row in rows if not row.shown and row.path not in there]
    return [row for row in missing if row.kept or row.origin is None]


def _has_changed(row: StoredContainerFile, info: FileInfo) -> bool:
    return (row.bytes, row.modified_at) != (info.size_bytes, info.modified_at)


def _mark_copied(origin: str | None) -> str | None:
    """Marks the origin of a content copied from inside: it is no longer a link of a stored file."""
    return COPY_PREFIX + origin if origin is not None and origin.startswith(FILE) else origin


def _new_row(container: Container, info: FileInfo, *, source: FileSource = "assistant") -> StoredContainerFile:
    return StoredContainerFile(
        id=new_container_file_id(),
        sandbox=container.sandbox.id,
        owner=container.owner,
        path=info.path,
        source=source,
        bytes=info.size_bytes,
        created_at=time.time(),
        modified_at=info.modified_at,
    )


def _with_size(row: StoredContainerFile, info: FileInfo) -> StoredContainerFile:
    return msgspec.structs.replace(row, bytes=info.size_bytes)


async def _single_chunk(content: bytes) -> AsyncGenerator[bytes, None]:
    yield content
