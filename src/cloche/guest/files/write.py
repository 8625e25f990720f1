"""Files written by the host, each beside the old one, which stays whole until the new one is complete."""

from __future__ import annotations

import errno
import os
import select
import stat

from cloche.guest.files import directories, ranges
from cloche.guest.init.defaults import InvalidGuestPath
from cloche.linux import syscalls

DRAFT_PREFIX = ".cloche-"
_CHUNK = 1 << 20
_SCRATCH = "/tmp"


class UnknownWrite(LookupError):
    code = "invalid_request"


class WriteOptions:
    """Mode, owner and attributes of a file that is written. Without a value it stays as it is, or is as usual."""

    def __init__(self, mode: int | None = None, owner: tuple | None = None, attributes: dict | None = None):
        self.mode = mode
        self.owner = owner  # (uid, gid)
        self.attributes = attributes  # {"space":.., "values":{..}}

    def apply_to(self, fd: int) -> None:
        """Applies them to an open file. The owner first: changing it clears bits of the mode."""
        if self.owner is not None:
            os.fchown(fd, *self.owner)
        if self.mode is not None:
            os.fchmod(fd, self.mode)
        if self.attributes is not None:
            directories.replace_attributes(fd, self.attributes["space"], self.attributes["values"])


class FileDraft:
    """A file being written. `finish` puts it in its place; `discard` leaves the old one as it was."""

    def __init__(self, path: str, wishes: WriteOptions):
        self._target = _resolve_target(path, wishes)
        self._wishes = wishes
        draft = draft_path(self._target)
        self._draft: str | None = draft
        self.fd = self._in_place = -1
        try:
            self._open_draft(draft)
        except BaseException:
            self.discard()
            raise

    def _open_draft(self, draft: str) -> None:
        try:
            self.fd = _create_file(draft)
        except PermissionError:
            # The directory takes no new file, but one that may be written can be overwritten, when all has come.
            self._draft = None
            self._in_place = _open_existing(self._target)
            self.fd = _create_scratch()
        else:
            if self._wishes.mode is None and os.path.lexists(self._target):
                os.fchmod(self.fd, stat.S_IMODE(os.lstat(self._target).st_mode))
            self._wishes.apply_to(self.fd)

    def add(self, content: bytes) -> None:
        _write_all(self.fd, content)

    def finish(self) -> str:
        """Returns the path of the file that is now there. Raises OSError; then the draft must be discarded."""
        if self._draft is None:
            _overwrite_from(self._in_place, self.fd)
        else:
            os.rename(self._draft, self._target)
            self._draft = None
        self._close_files()
        return self._target

    def discard(self) -> None:
        """Removes the draft. Harmless when it was finished, or when a program has removed it."""
        self._close_files()
        if self._draft is not None:
            try:
                os.unlink(self._draft)
            except OSError:
                pass

    def _close_files(self) -> None:
        for fd in (self.fd, self._in_place):
            if fd >= 0:
                os.close(fd)
        self.fd = self._in_place = -1


class InPlaceWrite:
    """As a FileDraft, for a file that keeps its identity: the same inode, the same links, the same watchers.

    The content gathers in a file without a name: a writer that goes away leaves neither half a file nor a damaged
    one. Only then is the file opened, made if it was not there, and filled.
    """

    def __init__(self, path: str, wishes: WriteOptions, streamed: bool):
        self._target = _resolve_target(path, wishes)
        self._wishes = wishes
        self._content = b""
        self.fd = _create_scratch() if streamed else -1

    def add(self, content: bytes) -> None:
        self._content = content

    def finish(self) -> str:
        is_new = not os.path.lexists(self._target)
        target = _open_existing(self._target, os.O_CREAT | os.O_NOFOLLOW)
        try:
            self._wishes.apply_to(target)
            if self.fd >= 0:
                _overwrite_from(target, self.fd)
            else:
                _overwrite_with(target, self._content)
        except BaseException:
            if is_new:
                os.unlink(self._target)
            raise
        finally:
            os.close(target)
        self.discard()
        return self._target

    def discard(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _resolve_target(path: str, wishes: WriteOptions) -> str:
    """The target file behind all symlinks; makes the directories above it."""
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    directories.make_directories(os.path.dirname(target), wishes.owner)
    return target


class Uploads:
    """Drafts that are filled from pipes. The end of a pipe decides nothing: the host says whether all has come."""

    def __init__(self, identities, watch_fd):
        self._identities = identities
        self._watch_fd = watch_fd
        self._open: dict = {}

    def start(self, header: dict, draft: FileDraft, user: str) -> None:
        """The header's wire is the end of the pipe that the host writes to."""
        read = os.dup(header["wires"][0])
        os.set_blocking(read, False)
        upload = _PipeUpload(draft, user, read)
        self._open[header["write"]] = upload
        self._watch_fd(read, select.POLLIN | select.POLLHUP, lambda: self._take_piece(upload))

    def end(self, name: str, commit: bool, size: int) -> str | None:
        """Commits the `size` bytes that the host has put into the pipe, and returns the path; or discards them.

        The size, not the pipe's end, says that all has come: a fork of the host may hold the pipe open.
        """
        upload = self._open.pop(name, None)
        if upload is None:
            raise UnknownWrite("there is no such write")
        self._identities.act_on_files_as(upload.user)
        try:
            return self._commit_upload(upload, size) if commit else None
        finally:
            self._stop_reading(upload)
            upload.draft.discard()
            self._identities.act_as_init()

    def _commit_upload(self, upload: _PipeUpload, size: int) -> str:
        while upload.taken < size and self._move_piece(upload):
            pass
        if upload.failure:
            raise upload.failure
        if upload.taken != size:
            raise OSError(errno.EIO, "not all of it has come")
        return upload.draft.finish()

    def _take_piece(self, upload: _PipeUpload) -> None:
        self._identities.act_on_files_as(upload.user)
        try:
            self._move_piece(upload)
        finally:
            self._identities.act_as_init()

    def _move_piece(self, upload: _PipeUpload) -> bool:
        """Moves one piece. A failure is kept for the host's commit; the closed pipe makes the host ask for it."""
        if upload.read < 0:
            return False
        try:
            moved = ranges.splice_some(upload.read, upload.draft.fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError as error:
            moved, upload.failure = 0, error
            upload.draft.discard()  # at once: it may be what fills the disk
        upload.taken += moved
        if not moved:
            self._stop_reading(upload)
        return moved > 0

    def _stop_reading(self, upload: _PipeUpload) -> None:
        if upload.read >= 0:
            self._watch_fd(upload.read, 0, None)
            os.close(upload.read)
            upload.read = -1


class _PipeUpload:
    def __init__(self, draft: FileDraft, user: str, read: int):
        self.draft = draft
        self.user = user
        self.read = read  # -1 when it has ended
        self.taken = 0
        self.failure: OSError | None = None


def draft_path(path: str) -> str:
    """A new name in the same directory, which watches do not report."""
    return f"{os.path.dirname(path)}/{DRAFT_PREFIX}{os.urandom(8).hex()}"


def refuse_symlinks(path: str, root: str) -> None:
    """Raises OSError if the file, or a directory between it and `root`, is a symlink: it would lead elsewhere."""
    if os.path.realpath(path) != os.path.join(os.path.realpath(root), os.path.relpath(path, root)):
        raise OSError(errno.ELOOP, "a symlink is in its place, or on the way to it")


def refuse_proc(fd: int) -> None:
    """Raises PermissionError for a file in /proc: opened by init, `/proc/self` would be init's own."""
    if syscalls.filesystem_type(fd) == syscalls.PROC_SUPER_MAGIC:
        raise PermissionError(errno.EACCES, "files of /proc can be read by programs only")


def check_regular(fd: int) -> os.stat_result:
    """Raises OSError or InvalidGuestPath unless `fd` is a regular file outside /proc."""
    about = os.fstat(fd)
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    if not stat.S_ISREG(about.st_mode):
        raise InvalidGuestPath("not a regular file")
    refuse_proc(fd)
    return about


def _create_file(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _open_existing(path: str, flags: int = 0) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o644)
    try:
        check_regular(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_scratch() -> int:
    """A file without a name, in the sandbox's common space."""
    path = draft_path(f"{_SCRATCH}/x")
    fd = _create_file(path)
    os.unlink(path)
    return fd


def _overwrite_from(target: int, source: int) -> None:
    size = os.fstat(source).st_size
    _reserve_space(target, size)
    done = 0
    while done < size and (moved := os.sendfile(target, source, done, _CHUNK)):
        done += moved
    _truncate_to(target, size)


def _overwrite_with(target: int, content: bytes) -> None:
    _reserve_space(target, len(content))
    _write_all(target, content)
    _truncate_to(target, len(content))


def _reserve_space(fd: int, size: int) -> None:
    """Reserves the space before anything is overwritten, so that a full disk leaves the old content whole."""
    before = os.fstat(fd).st_size
    if size:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.ftruncate(fd, before)
            raise


def _truncate_to(fd: int, size: int) -> None:
    """Truncates a longer file. Watchers would see a truncation as a change even if it cuts nothing off."""
    if os.fstat(fd).st_size > size:
        os.ftruncate(fd, size)


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
