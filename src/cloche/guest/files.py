"""File work, done here under the caller's own rights: a host that opened a guest's paths would be a confused deputy."""

from __future__ import annotations

import errno
import os
import secrets
import select
import shutil
import stat

from cloche.guest import failures, identity, wire
from cloche.guest.processes import InvalidPath
from cloche.linux import syscalls

MAX_LISTED = 20_000
MAX_REMOVED = 2_000_000
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20


class Files:
    def __init__(self, identities, defaults, watch_fd, event):
        self._identities = identities
        self._defaults = defaults
        self._watch_fd = watch_fd
        self._event = event
        self._writes: dict = {}
        self._next_write = 0

    def verbs(self) -> dict:
        plain = {
            "file_read": self._read,
            "file_write": self._write,
            "file_list": self._list,
            "file_stat": self._stat,
            "file_make_dir": self._make_dir,
            "file_move": self._move,
            "file_remove": self._remove,
        }
        return {name: self._as_caller(work) for name, work in plain.items()}

    def _as_caller(self, work):
        def verb(header: dict, body: bytes):
            self._identities.act_on_files_as(header.get("user") or self._defaults.user)
            try:
                return work(header, body)
            finally:
                self._identities.act_as_init()

        return verb

    def path(self, header: dict, key: str = "path") -> str:
        return self._defaults.path(header[key])

    # --- reading

    def _read(self, header: dict, _: bytes):
        fd = os.open(self.path(header), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        keep = False
        try:
            about = os.fstat(fd)
            if stat.S_ISDIR(about.st_mode):
                raise IsADirectoryError(errno.EISDIR, "is a directory")
            if not stat.S_ISREG(about.st_mode):
                raise InvalidPath("not a regular file")
            _refuse_proc(fd)
            limit = header.get("max_inline", wire.INLINE_BYTES)
            content = b"" if about.st_size > limit else _read_up_to(fd, limit + 1)
            if about.st_size <= limit and len(content) <= limit:
                return {"size": len(content)}, content, ()
            keep = True
            return {"size": about.st_size}, b"", (fd,)
        finally:
            if not keep:
                os.close(fd)

    # --- writing: into a file beside the old one, so that a full disk or a lost connection leaves the old one whole

    def _write(self, header: dict, body: bytes):
        draft = Draft(self.path(header), header.get("mode"))
        if header.get("stream"):
            return self._write_from_pipe(draft, header.get("user") or self._defaults.user)
        try:
            draft.add(body)
            return draft.finish()
        except BaseException:
            draft.discard()
            raise

    def _write_from_pipe(self, draft: Draft, user: str):
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        self._next_write += 1
        self._writes[read] = (self._next_write, draft, user)
        self._watch_fd(read, select.POLLIN | select.POLLHUP, lambda: self._take_piece(read))
        return {"write": self._next_write}, b"", (write,)

    def _take_piece(self, read: int) -> None:
        number, draft, user = self._writes[read]
        self._identities.act_on_files_as(user)
        try:
            moved = os.splice(read, draft.fd, _CHUNK)
            if moved:
                return
            outcome = {"info": draft.finish()}
        except BlockingIOError:
            return
        except OSError as error:
            draft.discard()
            outcome = {"err": failures.describe(error)}
        finally:
            self._identities.act_as_init()
        self._watch_fd(read, 0, None)
        os.close(read)
        del self._writes[read]
        self._event({"ev": "written", "write": number, **outcome})

    # --- the rest

    def _list(self, header: dict, _: bytes):
        path = self.path(header)
        found: list = []
        _walk(path, int(header.get("depth", 1)), found)
        files = [info(entry) for entry in found[:MAX_LISTED]]
        return {"files": [each for each in files if each], "truncated": len(found) > MAX_LISTED}

    def _stat(self, header: dict, _: bytes):
        return _known(self.path(header))

    def _make_dir(self, header: dict, _: bytes):
        path = self.path(header)
        created = not os.path.isdir(path)
        if created:
            os.makedirs(path)
        return {**_known(path), "created": created}

    def _move(self, header: dict, _: bytes):
        source, target = self.path(header), self.path(header, "to")
        os.lstat(source)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.move(source, target) if os.path.isdir(target) and not os.path.isdir(source) else os.rename(
            source, target
        )
        return _known(target)

    def _remove(self, header: dict, _: bytes):
        path = self.path(header)
        if stat.S_ISDIR(os.lstat(path).st_mode):
            remove_tree(path)
        else:
            os.unlink(path)
        return {}


class Draft:
    """A file being written beside the one that it will replace."""

    def __init__(self, path: str, mode: int | None):
        self._target = os.path.realpath(path)
        if os.path.isdir(self._target):
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        os.makedirs(os.path.dirname(self._target), exist_ok=True)
        self._draft = f"{os.path.dirname(self._target)}/.cloche-{secrets.token_hex(8)}"
        self.fd = self._open(mode)

    def _open(self, mode: int | None) -> int:
        """Where the directory takes no new file, an existing one that may be written is written in place."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self._draft, flags | os.O_EXCL, 0o644)
        except PermissionError:
            self._draft = self._target
            fd = os.open(self._target, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                _refuse_proc(fd)
            except PermissionError:
                os.close(fd)
                raise
            return fd
        self._set_mode(fd, mode)
        return fd

    def _set_mode(self, fd: int, mode: int | None) -> None:
        """As asked; else as the file had it that is replaced."""
        if mode is None and os.path.lexists(self._target):
            mode = stat.S_IMODE(os.lstat(self._target).st_mode)
        if mode is not None:
            os.fchmod(fd, mode)

    def add(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(self.fd, view) :]

    def finish(self) -> dict:
        os.close(self.fd)
        if self._draft != self._target:
            os.rename(self._draft, self._target)
        return _known(self._target)

    def discard(self) -> None:
        os.close(self.fd)
        if self._draft != self._target:
            os.unlink(self._draft)


def remove_tree(path: str) -> None:
    """Removes a directory with all that is in it, however deep a program made it: no recursion, two descriptors.

    Directories in a directory are moved up to the top before it is removed.
    """
    top = os.open(path, _DIRECTORY)
    try:
        waiting, left = os.listdir(top), MAX_REMOVED
        while waiting:
            name = waiting.pop()
            left -= 1
            if left < 0:
                raise OSError(errno.EBUSY, "more comes in than can be removed")
            if _is_directory(name, top):
                waiting += _remove_directory(name, top)
            else:
                os.unlink(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _remove_directory(name: str, top: int) -> list:
    """Removes one directory; those in it are now in `top`, under the names that are returned."""
    moved = []
    inner = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        for child in os.listdir(inner):
            if _is_directory(child, inner):
                moved.append(f".cloche-{secrets.token_hex(8)}")
                os.rename(child, moved[-1], src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(child, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
    return moved


def _is_directory(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _refuse_proc(fd: int) -> None:
    """What lies in /proc is init's own, when init opens it: a link to `/proc/self` must not lead into init."""
    if syscalls.filesystem_type(fd) == syscalls.PROC_SUPER_MAGIC:
        raise PermissionError(errno.EACCES, "files of /proc can be read by programs only")


def _read_up_to(fd: int, size: int) -> bytes:
    pieces, left = [], size
    while left > 0:
        piece = os.read(fd, left)
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _walk(path: str, depth: int, found: list) -> None:
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            found.append(entry.path)
            if len(found) > MAX_LISTED:
                return
            if depth > 1 and entry.is_dir(follow_symlinks=False):
                _walk_inner(entry.path, depth - 1, found)


def _walk_inner(path: str, depth: int, found: list) -> None:
    try:
        _walk(path, depth, found)
    except PermissionError:
        pass  # listed, but what is in it is not the caller's to see


def info(path: str) -> dict | None:
    """What the host's FileInfo says, or None if there is nothing (any more)."""
    try:
        about = os.lstat(path)
        target = os.readlink(path) if stat.S_ISLNK(about.st_mode) else None
    except FileNotFoundError:
        return None
    return {
        "path": path,
        "name": os.path.basename(path) or "/",
        "kind": _kind(about.st_mode),
        "size_bytes": about.st_size,
        "mode": stat.S_IMODE(about.st_mode),
        "owner": identity.name_of(about.st_uid),
        "group": identity.name_of(about.st_gid),
        "modified_at": about.st_mtime,
        "target": target,
    }


def _known(path: str) -> dict:
    found = info(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such file or directory")
    return found


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"
