"""The writer of an image. It runs in a fork of init and waits only for the reader of its pipe.

Programs may run meanwhile. Each file is then as it was when its turn came, and files that are gone by then
are left out; the image is well-formed in any case.
"""

from __future__ import annotations

import errno
import os
import re
import stat

from cloche.guest.files import image_format as form
from cloche.guest.files import ranges
from cloche.guest.files.deep_walk import DirectoryStack, open_directory

_FLUSH_BYTES = 256 << 10
_SMALL_PIECE_BYTES = 64 << 10
_ZEROS = bytes(1 << 16)
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL})
_NO_ATTRIBUTES = frozenset({errno.ENOTSUP, errno.ENODATA, errno.ENOENT, errno.EPERM, errno.EACCES})
_DRAFT = re.compile(r"\.cloche-[0-9a-f]{16}")  # of a write that has not come to its end: see `drafts`
_FILES, _DIRECTORIES, _OTHERS = range(3)
_SPARE_ENTRIES = 1 << 20  # entries beyond twice what the file system holds: for file systems that do not say


class ImageWriter:
    """Writes an image of `places`, pairs of a name and a directory, to `out`. `write` raises OSError."""

    def __init__(self, out: int, places: list):
        self._out = out
        self._places = places
        self._roots = {_directory_identity(os.stat(path)) for _, path in places}
        self._waiting: list = []
        self._waiting_bytes = 0
        self._way = DirectoryStack()
        self._device = 0
        self._left = 0
        self._shared: dict = {}  # what an inode is known by -> number

    def write(self) -> None:
        self._write_bytes(form.MAGIC)
        for name, path in self._places:
            self._write_place(name, path)
        self._write_bytes(_encode_head(form.END, None))
        self._flush()

    def _write_place(self, name: str, path: str) -> None:
        self._shared = {}
        fd = _open_unread(path, None)
        self._device = os.fstat(fd).st_dev
        self._left = 2 * os.fstatvfs(fd).f_files + _SPARE_ENTRIES
        self._enter_directory(form.PLACE, name, fd)
        while len(self._way):
            entries = self._way.load
            if entries:
                self._write_entry(*entries.pop())
            else:
                self._leave_directory()

    def _enter_directory(self, kind: int, name: str, fd: int) -> None:
        entries = _list_entries(fd)
        self._write_bytes(_encode_head(kind, None, name=name))
        self._way.enter(fd, entries)

    def _leave_directory(self) -> None:
        fd = self._way.fd
        attributes = _read_attributes(fd)
        self._write_bytes(_encode_head(form.LEAVE, os.fstat(fd), attributes=len(attributes)))
        self._write_attributes(attributes)
        self._way.leave()

    def _write_entry(self, name: str, kind: int) -> None:
        """Writes one entry. An entry that is gone by now, or is of another kind, is left out."""
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.EBUSY, "directories are moved about faster than they can be read")
        try:
            if kind == _FILES:
                self._write_file(name)
            elif kind == _DIRECTORIES:
                self._write_directory(name)
            else:
                self._write_other(name)
        except OSError as error:
            if error.errno not in _GONE or error.filename is None:
                raise

    def _write_directory(self, name: str) -> None:
        fd = _open_unread(name, self._way.fd)
        about = os.fstat(fd)
        if (
            about.st_dev != self._device or _directory_identity(about) in self._roots
        ):  # not ours, or to be written by itself
            os.close(fd)
        else:
            self._enter_directory(form.DIRECTORY, name, fd)

    def _write_file(self, name: str) -> None:
        fd = _open_noatime(name, _FILE, self._way.fd)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or (name.startswith(".cloche-") and _DRAFT.fullmatch(name)):
                return
            if self._write_link(name, about):
                return
            attributes = _read_attributes(fd)
            if about.st_size > form.INLINE_BYTES or about.st_blocks * 512 < about.st_size:
                self._write_pieces(fd, name, about, len(attributes))
            else:
                content = _read_content(fd, about.st_size)
                self._write_bytes(self._encode_entry(form.FILE, name, about, len(content), len(attributes)))
                self._write_bytes(content)
            self._write_attributes(attributes)
        finally:
            os.close(fd)

    def _write_other(self, name: str) -> None:
        """Writes a symlink or a FIFO. Sockets are left out: their listeners are gone.

        No program here can make devices.
        """
        about = os.stat(name, dir_fd=self._way.fd, follow_symlinks=False)
        if about.st_nlink > 1 and stat.S_IFMT(about.st_mode) != stat.S_IFSOCK and self._write_link(name, about):
            return
        if stat.S_ISLNK(about.st_mode):
            target = os.fsencode(os.readlink(name, dir_fd=self._way.fd))
            self._write_bytes(self._encode_entry(form.SYMLINK, name, about, len(target)))
            self._write_bytes(target)
        elif stat.S_ISFIFO(about.st_mode):
            self._write_bytes(self._encode_entry(form.FIFO, name, about, 0))

    def _write_link(self, name: str, about: os.stat_result) -> bool:
        """True if the entry is one more name of a file that is written already.

        Also where it has a single name: it was moved from a directory already visited into this one, and takes its
        space once.
        """
        number = self._shared.get(_inode_key(about))
        if number is not None:
            self._write_bytes(_encode_head(form.LINK, None, name=name, size=number))
        return number is not None

    def _encode_entry(self, kind: int, name: str, about: os.stat_result, size: int, attributes: int = 0) -> bytes:
        shared = about.st_nlink > 1 or kind in (form.FILE, form.PIECES)
        if shared:
            self._shared[_inode_key(about)] = len(self._shared)
        return _encode_head(kind, about, shared * form.SHARED, name, size, attributes)

    # --- large files, and those with holes

    def _write_pieces(self, fd: int, name: str, about: os.stat_result, attributes: int) -> None:
        """Holes stay holes."""
        size = about.st_size
        self._write_bytes(self._encode_entry(form.PIECES, name, about, size, attributes))
        at = 0
        while (at := ranges.next_data(fd, at, size)) < size:
            end = ranges.next_hole(fd, at, size)
            if end > at:  # else the data that was there has become a hole meanwhile: a piece of nothing ends the file
                self._write_bytes(form.PIECE.pack(at, end - at))
                self._send_range(fd, at, end)
            at = max(end, at + 1)
        self._write_bytes(form.PIECE.pack(size, 0))

    def _send_range(self, fd: int, at: int, end: int) -> None:
        """Sends exactly the announced range, filled up with zeros if the file was cut short meanwhile."""
        if end - at <= _SMALL_PIECE_BYTES:
            content = os.pread(fd, end - at, at)
            self._write_bytes(content)
            at += len(content)
        else:
            self._flush()
            while at < end and (moved := ranges.send_some(self._out, fd, at, end - at)):
                at += moved
        while at < end:
            zeros = _ZEROS[: end - at]
            self._write_bytes(zeros)
            at += len(zeros)

    # --- the pipe

    def _write_attributes(self, attributes: list) -> None:
        for name, value in attributes:
            self._write_bytes(form.ATTRIBUTE.pack(len(name), len(value)) + name + value)

    def _write_bytes(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        rest = memoryview(b"".join(self._waiting))
        self._waiting, self._waiting_bytes = [], 0
        while rest:
            rest = rest[os.write(self._out, rest) :]


def _encode_head(
    kind: int, about: os.stat_result | None, flags: int = 0, name: str = "", size: int = 0, attributes: int = 0
) -> bytes:
    raw = os.fsencode(name)
    if about is None:
        return form.HEAD.pack(kind, flags, 0, 0, 0, 0, 0, 0, 0, size, len(raw), attributes) + raw
    times = (*divmod(about.st_atime_ns, form.SECOND_NS), *divmod(about.st_mtime_ns, form.SECOND_NS))
    owner = (about.st_uid, about.st_gid)
    return form.HEAD.pack(kind, flags, about.st_mode & 0o7777, *owner, *times, size, len(raw), attributes) + raw


def _read_content(fd: int, size: int) -> bytes:
    """Reads at most `size` bytes; fewer at the end of the file."""
    content = os.read(fd, size) if size else b""
    while len(content) < size and (more := os.read(fd, size - len(content))):
        content += more
    return content


def _list_entries(fd: int) -> list:
    """The names in a directory, each with its kind as the directory entry gives it."""
    with os.scandir(fd) as listed:
        return [(each.name, _entry_kind(each)) for each in listed]


def _entry_kind(entry) -> int:
    if entry.is_file(follow_symlinks=False):
        return _FILES
    return _DIRECTORIES if entry.is_dir(follow_symlinks=False) else _OTHERS


def _open_noatime(path: str, flags: int, parent: int | None) -> int:
    """Opens without changing the access time, which only the owner or root may ask for; else opens plainly."""
    try:
        return os.open(path, flags | os.O_NOATIME, dir_fd=parent)
    except PermissionError:
        return os.open(path, flags, dir_fd=parent)


def _open_unread(path: str, parent: int | None) -> int:
    """The same for a directory."""
    try:
        return open_directory(path, parent, os.O_NOATIME)
    except PermissionError:
        return open_directory(path, parent)


def _read_attributes(fd: int) -> list:
    try:
        names = os.listxattr(fd)
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise
        return []
    found = []
    for name in names:
        if name.startswith(form.OWN_ATTRIBUTES) or name in form.ACCESS_LISTS:
            try:
                found.append((os.fsencode(name), os.getxattr(fd, name)))
            except OSError as error:
                if error.errno not in _NO_ATTRIBUTES:
                    raise
    return found


def _inode_key(about: os.stat_result) -> tuple:
    """The key that recognizes a file again.

    An inode number may be reused by now, unless the file has more names.
    """
    if about.st_nlink > 1:
        return (about.st_ino,)
    return about.st_ino, about.st_mtime_ns, about.st_size


def _directory_identity(about: os.stat_result) -> tuple:
    return about.st_dev, about.st_ino
