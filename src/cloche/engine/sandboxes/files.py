"""A sandbox's files. The guest's init does all operations as the sandbox's user; the host opens no path."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Annotated, Any, cast

import msgspec

from cloche import errors
from cloche.engine.executions.kernel import number_field, parse_file_info
from cloche.engine.sandboxes.init_client import (
    CHUNK_BYTES,
    InitClient,
    InitReply,
    check_regular_file,
    read_whole_file,
    take_only_fd,
)
from cloche.events import Signal
from cloche.file_content import Chunk, Chunks, Content, encode_chunk, encode_chunks
from cloche.guest import wire
from cloche.isolation.channel import Header, PipeWriter, clean_text, make_input_pipe, make_socket_pair
from cloche.json_text import TooComplexJson, parse_json
from cloche.model import (
    GIB,
    MAX_WAITING_CHANGES,
    MIB,
    FileAttributes,
    FileChange,
    FileInfo,
    Limits,
    Struct,
    User,
    check_mode,
    check_user,
    sandbox_path,
)

# A file of a sandbox that is open for reading: in memory if it is small, else as a descriptor from init.


class OpenFile:
    """Its size and time are those of when it was opened. Owns the descriptor: `close`, or `async with`."""

    def __init__(self, size_bytes: int, modified_at: float, *, content: bytes = b"", fd: int | None = None):
        self.size_bytes = size_bytes
        self.modified_at = modified_at
        self._content = content
        self._fd = fd

    @property
    def inline_content(self) -> bytes | None:
        """The whole content, where it is so small that it has come with the answer."""
        return self._content if self._fd is None else None

    async def __aenter__(self) -> OpenFile:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def chunks(self, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes from `start` up to `end`, else to the file's own end, in chunks of up to 1 MiB.

        Fewer than that come where a program has cut the file meanwhile.
        """
        while chunk := await self._read_range(start, CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - start)):
            yield chunk
            start += len(chunk)

    async def until_read(self, end: int | None = None) -> AsyncGenerator[bytes, None]:
        """All chunks, up to `end`; the file is closed then."""
        async with self, contextlib.aclosing(self.chunks(end=end)) as chunks:
            async for chunk in chunks:
                yield chunk

    def close(self) -> None:
        """Harmless when it is closed."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._content = None, b""

    async def _read_range(self, start: int, size: int) -> bytes:
        if self._fd is None:
            return self._content[start : start + size]
        return await asyncio.to_thread(os.pread, self._fd, size, start)


class RelayedFile(OpenFile):
    """One that comes from the guest as a stream, from the place where it is read on. Owns the `relay` of it.

    `open_relay(offset)` opens another, which begins there.
    """

    def __init__(
        self,
        size_bytes: int,
        modified_at: float,
        relay: socket.socket,
        open_relay: Callable[[int], Awaitable[socket.socket]],
    ):
        super().__init__(size_bytes, modified_at)
        self._relay = relay
        self._open_relay = open_relay
        self._at = 0  # what comes next

    @property
    def inline_content(self) -> None:
        return None

    def close(self) -> None:
        self._relay.close()

    async def _read_range(self, start: int, size: int) -> bytes:
        if start != self._at:
            self._relay.close()
            self._relay, self._at = await self._open_relay(start), start
        if size <= 0:
            return b""
        content = await asyncio.get_running_loop().sock_recv(self._relay, size)
        self._at += len(content)
        return content


def open_file_reply(reply: InitReply) -> OpenFile:
    """The file that init has opened. Raises PermissionDenied unless it is a regular file, ProtocolViolation."""
    if not reply.fds:
        return OpenFile(len(reply.body), number_field(reply.ok, "modified_at"), content=reply.body)
    fd = take_only_fd(reply)
    try:
        about = check_regular_file(fd)
    except BaseException:
        os.close(fd)
        raise
    return OpenFile(about.st_size, about.st_mtime, fd=fd)


# A survey of the files below a directory of a sandbox, as its init reported it.

_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=8192)]
_Size = Annotated[int, msgspec.Meta(ge=0)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class SurveyedFile(Struct):
    """A regular file. Its SHA-256 is there if it was asked for and the size is the expected one."""

    path: str  # relative
    size_bytes: int
    sha256: str | None = None


class DirectorySurvey(Struct):
    """Regular files and empty directories, by their paths, which lead through no symlink.

    `passed` counts the entries left out: "symlink", "special", "hidden" and "deep" directories, "unreadable"
    ones, those that "packages" were installed into lately, and "unnamed": entries whose name is no text.
    """

    files: tuple[SurveyedFile, ...]
    empty: tuple[str, ...] = ()
    passed: dict[str, int] = {}
    whole: bool = True  # else there is more than could be reported
    at_ns: int = 0  # when it began, by the sandbox's clock


class _SurveyBody(msgspec.Struct):
    files: list[tuple[_Path, _Size, _Digest | None]]
    empty: list[_Path]


def parse_survey(reply: InitReply) -> DirectorySurvey:
    """Raises ProtocolViolation."""
    try:
        told = parse_json(reply.body, _SurveyBody)
        passed = msgspec.convert(reply.ok.get("passed"), dict[str, int])
        at_ns = msgspec.convert(reply.ok.get("at_ns"), _Size)
    except (msgspec.MsgspecError, UnicodeError, TooComplexJson):
        raise errors.ProtocolViolation("the guest's init sent no survey") from None
    paths = [path for path, _, _ in told.files] + told.empty
    if any(_is_invalid_path(path) for path in paths) or len(set(paths)) != len(paths):
        raise errors.ProtocolViolation("the guest's init sent a survey of paths that cannot be")
    files = tuple(_make_surveyed_file(*each) for each in sorted(told.files, key=lambda each: each[0]))
    whole = reply.ok.get("truncated") is False
    return DirectorySurvey(files=files, empty=tuple(sorted(told.empty)), passed=passed, whole=whole, at_ns=at_ns)


def _make_surveyed_file(path: str, size_bytes: int, digest: str | None) -> SurveyedFile:
    return SurveyedFile(path=path, size_bytes=size_bytes, sha256=digest)


def _is_invalid_path(path: str) -> bool:
    return any(name in ("", ".", "..") or "\0" in name for name in path.split("/"))


# Watches a directory of a sandbox for changes.

MAX_WATCHES = 64  # of one sandbox, over all clients
MAX_WAITING_BYTES = 1 * MIB  # of paths, as they lie in memory

_CHANGE_KINDS = ("created", "written", "removed", "renamed", "attributes")


class TooManyWatches(errors.InvalidRequest):
    """A sandbox has as many watches as it can have."""


class DirectoryWatch:
    """An async iterator of FileChange between `__aenter__` and `__aexit__`.

    Up to 10,000 changes wait for a slow reader, or 1 MiB of paths; `missed` counts those beyond. When the
    kernel has dropped some inside the sandbox it grows too, by one: their number is unknown.
    """

    def __init__(self, guest: InitClient, path: str, *, recursive: bool, user: User):
        self.path = path
        self.missed = 0
        self._guest = guest
        self._fields: dict[str, Any] = {"path": path, "recursive": recursive, "user": user}
        self._id = "w" + secrets.token_hex(8)
        self._changes: deque[FileChange] = deque()
        self._waiting_bytes = 0
        self._bell = Signal()
        self._open = False

    async def __aenter__(self) -> DirectoryWatch:
        """Raises TooManyWatches, the error of the sandbox's file system, or Gone."""
        if self._guest.count_subscribers("changes") >= MAX_WATCHES:
            raise TooManyWatches(f"a sandbox can have {MAX_WATCHES} watches: stop one that you do not need")
        self._guest.subscribe("changes", self._id, self._on_changes)
        try:
            await self._guest.request("watch_start", watch=self._id, **self._fields)
        except BaseException:
            self._stop_watching()
            raise
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops watching; a waiting reader gets the end of the iteration."""
        if not self._open:
            return
        self._open = False
        self._stop_watching()
        self._bell.wake_all()

    def __aiter__(self) -> DirectoryWatch:
        return self

    async def __anext__(self) -> FileChange:
        """Raises Gone if the sandbox ends while it is watched."""
        while not self._changes:
            if not self._open:
                raise StopAsyncIteration
            await self._guest.wait(self._bell.wait())
        change = self._changes.popleft()
        self._waiting_bytes -= sys.getsizeof(change.path)
        return change

    async def news(self) -> bool:
        """Waits until there is a change or something was missed; False if it was closed. Raises Gone."""
        while not self._changes and not self.missed:
            if not self._open:
                return False
            await self._guest.wait(self._bell.wait())
        return True

    async def collect(self) -> list[FileChange]:
        """All changes up to now that were not returned yet. Raises Gone if the sandbox has ended."""
        await self.catch_up()
        return self.take()

    async def catch_up(self) -> None:
        """Waits until everything that has changed up to now is here. Raises Gone."""
        await self._guest.request("watch_collect")

    def take(self) -> list[FileChange]:
        """The changes that are here, without waiting."""
        changes, self._changes = list(self._changes), deque()
        self._waiting_bytes = 0
        return changes

    def _stop_watching(self) -> None:
        self._guest.unsubscribe("changes", self._id)
        self._guest.tell("watch_stop", watch=self._id)

    def _on_changes(self, header: Header) -> None:
        changes = header.get("changes")
        for change in changes if isinstance(changes, list) else ():
            if (
                isinstance(change, list)
                and len(change) == 2
                and change[0] in _CHANGE_KINDS
                and isinstance(change[1], str)
            ):
                self._add_change(FileChange(kind=change[0], path=clean_text(change[1], 8192)))
        if header.get("missed") is True:
            self._count_missed()

    def _add_change(self, change: FileChange) -> None:
        size = sys.getsizeof(change.path)
        if len(self._changes) >= MAX_WAITING_CHANGES or self._waiting_bytes + size > MAX_WAITING_BYTES:
            self._count_missed()
            return
        self._changes.append(change)
        self._waiting_bytes += size
        self._bell.wake_all()

    def _count_missed(self) -> None:
        self.missed += 1
        self._bell.wake_all()


AUDIT_NAMES = {
    "file_read": "files.read",
    "file_write": "files.written",
    "file_make_dir": "files.written",
    "file_move": "files.moved",
    "file_remove": "files.removed",
    "file_change": "files.changed",
    "tree_guard": "files.changed",
}
"""The audit log's names of requests to init; all others only read. The log never has the file's name."""
LISTING_VERBS = frozenset({"file_list", "tree_survey"})

INLINE_BYTES = wire.INLINE_BYTES  # up to which a content goes by itself, and is not streamed
MIN_READ_LIMIT = 64 * MIB
MAX_READ_LIMIT = 2 * GIB


class DirectoryListing(msgspec.Struct):
    files: list[FileInfo]


class SandboxFiles:
    """Paths are absolute, or relative to the sandbox's cwd. `..` and symlinks never leave the sandbox.

    All methods raise InvalidPath, FileNotFound, PermissionDenied, IsADirectory, NotADirectory, NoSpace or FileError
    as the sandbox's file system says, and SandboxLost if it is gone.
    """

    def __init__(self, guest: InitClient, *, user: User, cwd: str, limits: Limits):
        self._guest = guest
        self._user = user
        self._cwd = cwd
        # A sparse file may claim any size; a size over the writable space cannot be real.
        self._read_limit = min(max(limits.space_bytes, MIN_READ_LIMIT), MAX_READ_LIMIT)

    async def read(self, path: str, *, user: User | None = None) -> bytes:
        """The whole content. Files over the sandbox's writable space or 2 GiB are refused: use `open_read`."""
        if not self._guest.cell.passes_descriptors:
            return await self._read_relayed(path, user)
        reply = await self._request_file("file_read", path, user, max_inline=INLINE_BYTES)
        if not reply.fds:
            return reply.body
        fd = take_only_fd(reply)
        try:
            size = check_regular_file(fd).st_size
            self._check_readable(path, size)
            return await asyncio.to_thread(read_whole_file, fd, size)
        finally:
            os.close(fd)

    async def _read_relayed(self, path: str, user: User | None) -> bytes:
        content = io.BytesIO()  # gives its bytes away without a copy
        async with await self.open_whole(path, user=user) as file:
            async for chunk in file.chunks(end=file.size_bytes):
                content.write(chunk)
        return content.getvalue()

    async def open(self, path: str, *, user: User | None = None) -> OpenFile:
        """A file to be read in parts. The caller closes it."""
        if self._guest.cell.passes_descriptors:
            return open_file_reply(await self._request_file("file_read", path, user, max_inline=INLINE_BYTES))
        reply, relay = await self._open_relay(path, user, INLINE_BYTES, 0)
        if reply.ok.get("relayed") is not True:
            relay.close()
            return open_file_reply(reply)

        async def open_relay(offset: int) -> socket.socket:
            return (await self._open_relay(path, user, 0, offset))[1]

        size = number_field(reply.ok, "size")
        return RelayedFile(int(size), number_field(reply.ok, "modified_at"), relay, open_relay)

    async def _open_relay(
        self, path: str, user: User | None, max_inline: int, offset: int
    ) -> tuple[InitReply, socket.socket]:
        """The file as a stream, unless it is so small that it comes with the answer."""
        ours, theirs = make_socket_pair()
        relay = socket.socket(fileno=ours)
        relay.setblocking(False)
        try:
            order: dict[str, Any] = {"relay": True, "max_inline": max_inline, "offset": offset}
            return await self._request_file("file_read", path, user, wires=(theirs,), **order), relay
        except BaseException:
            relay.close()
            raise

    async def open_whole(self, path: str, *, user: User | None = None) -> OpenFile:
        """As `open`, for callers that read all of it into memory. Raises FileError for sizes that `read` refuses."""
        file = await self.open(path, user=user)
        try:
            self._check_readable(path, file.size_bytes)
        except errors.FileError:
            file.close()
            raise
        return file

    def _check_readable(self, path: str, size: int) -> None:
        if size > self._read_limit:
            raise errors.FileError(
                f"{path} claims {size} bytes, and {self._read_limit} can be read at once: read it as a stream, "
                "with read_chunks"
            )

    async def open_read(self, path: str, *, user: User | None = None) -> AsyncGenerator[bytes, None]:
        """The content in chunks of up to 1 MiB, read as they are asked for. Raises before the first chunk.

        A caller that stops before the end closes it.
        """
        return (await self.open(path, user=user)).until_read()

    async def write(
        self,
        path: str,
        content: Content,
        *,
        user: User | None = None,
        mode: int | None = None,
        owner: User | None = None,
        attributes: FileAttributes | None = None,
        in_place: bool = False,
        below: str | None = None,
    ) -> FileInfo:
        """Makes or replaces a file, and the directories above it. A file that is replaced stays until all has come.

        It is done with the rights of `user`; new files and directories are given to `owner`. With `in_place` the
        file is overwritten, once all has come: programs that watch it or have it open keep the same file, but may
        see it half done. No symlink is followed that lies `below` that directory, at the path's end or on the way:
        FileError. Raises InvalidRequest also for an invalid mode or content.
        """
        check_mode(mode)
        check_user(owner)
        wishes: dict[str, Any] = {"mode": mode, "owner": owner, "in_place": in_place, "below": below}
        if attributes is not None:
            wishes["attributes"] = msgspec.structs.asdict(attributes)
        chunked = isinstance(content, (Iterable, AsyncIterable)) and not isinstance(content, Chunk)
        if chunked:
            return await self._write_stream(path, cast(Chunks, content), user, wishes)
        whole = encode_chunk(content)
        if len(whole) <= INLINE_BYTES:
            return await self._write_inline(path, whole, user, wishes)
        return await self._write_stream(path, (whole,), user, wishes)

    async def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> list[FileInfo]:
        """The entries of a directory, sorted by path, down to `depth` levels. Raises FileError for too many."""
        if type(depth) is not int or depth < 1:
            raise errors.InvalidRequest(f"depth must be 1 or more, not {depth!r}")
        reply = await self._request_file("file_list", path, user, depth=depth)
        if reply.ok.get("truncated") is not False:
            raise errors.FileError(
                f"{path} holds more than the 20,000 entries that can be listed at once: list its subdirectories one "
                "by one, with depth=1, or let a command look"
            )
        return [_check_file_info(one) for one in _parse_listing(reply.body)]

    async def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        """The entry at that path; a symlink is not followed."""
        return _check_file_info((await self._request_file("file_stat", path, user)).ok)

    async def exists(self, path: str, *, user: User | None = None) -> bool:
        try:
            await self.stat(path, user=user)
        except (errors.FileNotFound, errors.NotADirectory):
            return False
        return True

    async def make_dir(self, path: str, *, user: User | None = None, owner: User | None = None) -> bool:
        """Makes a directory and those above it, and gives them to `owner`. False if it was there."""
        check_user(owner)
        return (await self._request_file("file_make_dir", path, user, owner=owner)).ok.get("created") is True

    async def move(self, path: str, to: str, *, user: User | None = None, owner: User | None = None) -> FileInfo:
        """Moves a file or a directory. An existing target is replaced; a file moved to a directory lands in it.

        Directories that are made for it are given to `owner`.
        """
        check_user(owner)
        reply = await self._request_file("file_move", path, user, to=sandbox_path(to, self._cwd), owner=owner)
        return _check_file_info(reply.ok)

    async def remove(self, path: str, *, user: User | None = None, below: str | None = None) -> None:
        """Removes a file, or a directory with all that is in it. `below`: as with `write`."""
        await self._request_file("file_remove", path, user, below=below)

    async def change(
        self,
        path: str,
        *,
        uid: int | None = None,
        gid: int | None = None,
        mode: int | None = None,
        user: User | None = None,
        below: str | None = None,
    ) -> FileInfo:
        """Gives a file or directory another owner, group or mode. `below`: as with `write`."""
        check_mode(mode)
        return _check_file_info(
            (await self._request_file("file_change", path, user, uid=uid, gid=gid, mode=mode, below=below)).ok
        )

    async def survey(
        self, path: str, known: Mapping[str, int] | None = None, *, since_ns: int = 0, depth: int = 10
    ) -> DirectorySurvey:
        """All regular files below a directory that are worth keeping: see `DirectorySurvey`.

        `known` are relative paths with the sizes that those files had: for one that still has it, the SHA-256 is
        returned. `since_ns` is when an earlier survey began: packages that it reported are not reported again.
        """
        compared = msgspec.json.encode(dict(known or {}))
        reply = await self._request_file("tree_survey", path, None, compared, depth=depth, since_ns=since_ns)
        if len(reply.body) <= INLINE_BYTES:
            return parse_survey(reply)
        return await asyncio.to_thread(parse_survey, reply)  # others would wait for so much

    async def guard(self, path: str, names: Sequence[str]) -> Sequence[str]:
        """Takes these files below a directory from `user`, which can then neither change, replace nor remove them.

        The directories above them, with that one, become root's, and all users can still add to them. Returns those
        that it did not take: they are no regular files, or lie behind a symlink. Where `user` and `root` are one
        identity, it merely removes the permission to write, which `user` can restore.
        """
        reply = await self._request_file("tree_guard", path, "root", paths=list(names))
        missing = reply.ok.get("missing")
        if not isinstance(missing, list):
            raise errors.ProtocolViolation("the guest's init does not report the guarded paths")
        return [name for name in names if name in missing]

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> DirectoryWatch:
        """Changes below a directory from now on: `async with files.watch(p) as changes: async for change in ..`."""
        check_user(user)
        self._guest.noted("files.watched")
        return DirectoryWatch(self._guest, sandbox_path(path, self._cwd), recursive=recursive, user=user or self._user)

    async def _request_file(
        self, verb: str, path: str, user: User | None, body: bytes = b"", **fields: Any
    ) -> InitReply:
        full = sandbox_path(path, self._cwd)
        check_user(user)
        with _prefix_errors_with_path(path):
            reply = await self._guest.request(verb, body, path=full, user=user or self._user, **fields)
        if "stream" not in fields:  # a stream reports its own end
            moved = 0 if verb in LISTING_VERBS else max(len(body), len(reply.body))
            self._guest.noted(AUDIT_NAMES.get(verb, "files.listed"), bytes=moved)
        return reply

    async def _write_inline(self, path: str, content: bytes, user: User | None, wishes: dict[str, Any]) -> FileInfo:
        reply = await self._request_file("file_write", path, user, content, size=len(content), **wishes)
        return _check_file_info(reply.ok)

    async def _open_upload(self, path: str, user: User | None, write: str, wishes: dict[str, Any]) -> PipeWriter:
        ours, theirs = make_input_pipe()
        pipe = PipeWriter(ours)
        try:
            order = {"size": None, "stream": True, "write": write, **wishes}
            await self._request_file("file_write", path, user, wires=(theirs,), **order)
        except BaseException:
            pipe.close()
            raise
        return pipe

    async def _write_stream(self, path: str, content: Chunks, user: User | None, wishes: dict[str, Any]) -> FileInfo:
        """Without a commit the old file stays: the caller's chunks may fail, and the caller may disconnect."""
        write = "u" + secrets.token_hex(8)
        try:
            size = await _fill_pipe(await self._open_upload(path, user, write, wishes), content)
            with _prefix_errors_with_path(path):
                ended = await self._guest.request("write_end", write=write, commit=True, size=size)
            self._guest.noted("files.written", bytes=size)
            return _check_file_info(ended.ok)
        except BaseException:
            self._guest.tell("write_end", write=write, commit=False)
            raise


async def _fill_pipe(pipe: PipeWriter, content: Chunks) -> int:
    """Writes the content into the pipe, closes it, and returns the number of bytes."""
    size = 0
    try:
        async with contextlib.aclosing(encode_chunks(content)) as chunks:
            async for chunk in chunks:
                try:
                    await pipe.write(chunk)
                except BrokenPipeError:
                    break  # init has stopped reading; its reply to the commit says why
                size += len(chunk)
    finally:
        pipe.close()
    return size


@contextlib.contextmanager
def _prefix_errors_with_path(path: str) -> Iterator[None]:
    """Puts the path before init's error messages about a file."""
    try:
        yield
    except (errors.FileError, errors.FileNotFound, errors.InvalidPath) as error:
        raise type(error)(f"{path}: {error}") from None


def _parse_listing(body: bytes) -> list[FileInfo]:
    if len(body) > wire.MAX_LISTING_BYTES:
        raise errors.ProtocolViolation(f"the guest's init sent a list of files of {len(body)} bytes")
    try:
        return msgspec.json.decode(body, type=DirectoryListing).files
    except (msgspec.MsgspecError, UnicodeError):
        raise errors.ProtocolViolation("the guest's init sent no list of files") from None


def _check_file_info(described: object) -> FileInfo:
    try:
        return parse_file_info(described)
    except wire.WireError as error:
        raise errors.ProtocolViolation(str(error)) from None
