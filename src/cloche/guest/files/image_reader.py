"""The reader of an image: makes its files again, in a fork of init.

An image is hostile input: the owner of the sandbox may have written it. So no part of it is ever a path. Each
entry is one name in a directory that is open already, is made there and followed nowhere: no symlink, made
earlier or not, leads out of the places. Any other content of an image is an error.
"""

from __future__ import annotations

import errno
import os
import stat

from cloche.guest.files import image_format as form
from cloche.guest.files import move, ranges
from cloche.guest.files.deep_walk import DirectoryStack, open_directory

_READ_BYTES = 256 << 10
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOREIGN_IDS = frozenset({errno.EINVAL, errno.EPERM})  # this sandbox has no such user: it stays ours
_UNKNOWN_ATTRIBUTES = frozenset({errno.ENOTSUP, errno.EINVAL, errno.EPERM, errno.EACCES, errno.E2BIG})


def damaged_image(what: str) -> OSError:
    return OSError(errno.EBADMSG, f"the image is damaged: {what}")


class ImageReader:
    """Empties `places`, a dict of names and directories, and fills them from the pipe `source`. Raises OSError.

    The directories themselves stay: programs may have them open.
    """

    def __init__(self, source: int, places: dict):
        self._stream = _ImageStream(source)
        self._places = places
        self._root = -1
        self._way = DirectoryStack()  # each level's load is its node: (the node above, name)
        self._shared: list = []  # (node of the directory, name)
        self._source_of_links: tuple = (None, -1)
        self._ids = (os.geteuid(), os.getegid())
        self._makers = {
            form.PLACE: self._enter_place,
            form.DIRECTORY: self._enter_directory,
            form.FILE: self._make_file,
            form.PIECES: self._make_file,
            form.SYMLINK: self._make_symlink,
            form.FIFO: self._make_fifo,
            form.LINK: self._make_link,
            form.LEAVE: self._leave_directory,
        }

    def read(self) -> None:
        os.umask(0)
        if self._stream.take(len(form.MAGIC)) != form.MAGIC:
            raise damaged_image("it does not begin as one")
        for path in self._places.values():
            _empty_place(path, self._places)
        while (head := self._read_head()).kind != form.END:
            maker = self._makers.get(head.kind)
            if maker is None or bool(len(self._way)) == (head.kind == form.PLACE):
                raise damaged_image(f"a record of kind {head.kind} is where none can be")
            maker(head)
        if len(self._way):
            raise damaged_image("it ends in the middle of a directory")

    def _read_head(self) -> _EntryHeader:
        head = _EntryHeader(form.HEAD.unpack(self._stream.take(form.HEAD.size)))
        head.name = self._stream.take(head.name_bytes) if head.name_bytes else b""
        if head.kind not in (form.LEAVE, form.END):
            _check_name(head.name)
        return head

    # --- directories

    def _enter_place(self, head: _EntryHeader) -> None:
        path = self._places.get(head.name.decode("ascii", "replace"))
        if path is None:
            raise damaged_image("it has a place that is not here")
        self._shared = []
        self._close_source()
        self._root = open_directory(path)
        self._way.enter(self._root, None)

    def _enter_directory(self, head: _EntryHeader) -> None:
        parent = self._way.fd
        try:
            os.mkdir(head.name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(head.name, dir_fd=parent, follow_symlinks=False).st_mode):
                os.unlink(head.name, dir_fd=parent)
                os.mkdir(head.name, 0o700, dir_fd=parent)
        self._way.enter(open_directory(head.name, parent), (self._way.load, head.name))

    def _leave_directory(self, head: _EntryHeader) -> None:
        """Sets the directory's attributes last: a read-only one could not be filled, its time would not be kept."""
        fd = self._way.fd
        self._set_attributes(fd, head)
        _ignore_errors(_FOREIGN_IDS, lambda: os.fchown(fd, head.uid, head.gid))
        os.fchmod(fd, head.mode)
        os.utime(fd, ns=head.times)
        if len(self._way) == 1:
            self._close_source()
        self._way.leave()

    # --- what is in them

    def _make_file(self, head: _EntryHeader) -> None:
        mode = head.mode & 0o777 | 0o600  # whoever may not write to it could not set its attributes
        fd = self._create_entry(head, os.open, head.name, _NEW_FILE, mode, dir_fd=self._way.fd)
        try:
            if head.kind == form.FILE:
                ranges.write_whole(fd, self._stream.take(head.checked_size(form.INLINE_BYTES)))
            else:
                self._fill_pieces(fd, head.size)
            self._set_attributes(fd, head)
            if (head.uid, head.gid) != self._ids:
                _ignore_errors(_FOREIGN_IDS, lambda: os.fchown(fd, head.uid, head.gid))
            if head.mode != mode or head.attributes:  # a list of who may access it has changed it, too
                os.fchmod(fd, head.mode)
            os.utime(fd, ns=head.times)
        finally:
            os.close(fd)
        self._record_shared(head)

    def _fill_pieces(self, fd: int, size: int) -> None:
        if size >= 1 << 63:
            raise damaged_image("a file is larger than one can be")
        os.ftruncate(fd, size)
        while True:
            at, length = form.PIECE.unpack(self._stream.take(form.PIECE.size))
            if at + length > size:
                raise damaged_image("a piece lies outside of its file")
            if not length:
                return
            self._stream.move(fd, at, length)

    def _make_symlink(self, head: _EntryHeader) -> None:
        target = self._stream.take(head.checked_size(form.MAX_TARGET_BYTES))
        if b"\0" in target:
            raise damaged_image("a symlink's target contains a zero byte")
        self._create_entry(head, os.symlink, target, head.name, dir_fd=self._way.fd)
        self._finish_name(head)

    def _make_fifo(self, head: _EntryHeader) -> None:
        self._create_entry(head, os.mkfifo, head.name, head.mode & 0o777, dir_fd=self._way.fd)
        self._finish_name(head)

    def _finish_name(self, head: _EntryHeader) -> None:
        fd = self._way.fd
        if (head.uid, head.gid) != self._ids:
            _ignore_errors(
                _FOREIGN_IDS, lambda: os.chown(head.name, head.uid, head.gid, dir_fd=fd, follow_symlinks=False)
            )
        os.utime(head.name, ns=head.times, dir_fd=fd, follow_symlinks=False)
        self._record_shared(head)

    def _make_link(self, head: _EntryHeader) -> None:
        if head.size >= len(self._shared):
            raise damaged_image("a link leads to what is not there")
        node, name = self._shared[head.size]
        where = {"src_dir_fd": self._open_source(node), "dst_dir_fd": self._way.fd}
        self._create_entry(head, os.link, name, head.name, **where, follow_symlinks=False)

    def _create_entry(self, head: _EntryHeader, make, *args, **where):
        """Returns the result of `make`.

        An existing entry is replaced: a program was faster, or an image names one twice.
        """
        try:
            return make(*args, **where)
        except FileExistsError:
            os.unlink(head.name, dir_fd=self._way.fd)
            return make(*args, **where)

    def _record_shared(self, head: _EntryHeader) -> None:
        if head.flags & form.SHARED:
            self._shared.append((self._way.load, head.name))

    # --- links: to find the directory of an entry that was made before

    def _open_source(self, node: tuple | None) -> int:
        """The directory of that node. Kept for the next link: links often follow each other."""
        known, fd = self._source_of_links
        if fd < 0 or known is not node:
            self._close_source()
            fd = self._open_node(node)
            self._source_of_links = (node, fd)
        return fd

    def _open_node(self, node: tuple | None) -> int:
        names = []
        while node is not None:
            node, name = node
            names.append(name)
        fd = os.dup(self._root)
        for name in reversed(names):
            try:
                inner = open_directory(name, fd)
            finally:
                os.close(fd)
            fd = inner
        return fd

    def _close_source(self) -> None:
        if self._source_of_links[1] >= 0:
            os.close(self._source_of_links[1])
        self._source_of_links = (None, -1)

    # --- what an entry has

    def _set_attributes(self, fd: int, head: _EntryHeader) -> None:
        for _ in range(head.attributes):
            name, value = self._read_attribute()
            _ignore_errors(_UNKNOWN_ATTRIBUTES, lambda name=name, value=value: os.setxattr(fd, name, value))

    def _read_attribute(self) -> tuple:
        name_bytes, value_bytes = form.ATTRIBUTE.unpack(self._stream.take(form.ATTRIBUTE.size))
        if name_bytes > form.MAX_ATTRIBUTE_NAME_BYTES or value_bytes > form.MAX_ATTRIBUTE_BYTES:
            raise damaged_image("an attribute is longer than one can be")
        name, value = os.fsdecode(self._stream.take(name_bytes)), self._stream.take(value_bytes)
        if not name.startswith(form.OWN_ATTRIBUTES) and name not in form.ACCESS_LISTS:
            raise damaged_image("an attribute is not of a kind that is kept")
        return name, value


class _EntryHeader:
    __slots__ = ("attributes", "flags", "gid", "kind", "mode", "name", "name_bytes", "size", "times", "uid")

    def __init__(self, fields: tuple):
        self.kind, self.flags, mode, self.uid, self.gid, read, read_ns, written, written_ns, *rest = fields
        self.size, self.name_bytes, self.attributes = rest
        self.mode = mode & 0o7777
        self.times = (read * form.SECOND_NS + read_ns, written * form.SECOND_NS + written_ns)
        self.name = b""
        if self.name_bytes > form.MAX_NAME_BYTES:
            raise damaged_image("a name is longer than one can be")

    def checked_size(self, most: int) -> int:
        if self.size > most:
            raise damaged_image("an entry is larger than it can be")
        return self.size


class _ImageStream:
    """The bytes of a pipe. An end before the image's end is an error."""

    def __init__(self, source: int):
        self._source = source
        self._buffer = b""
        self._at = 0

    def take(self, count: int) -> bytes:
        at = self._at
        if len(self._buffer) - at < count:
            self._fill_buffer(count)
            at = 0
        self._at = at + count
        return self._buffer[at : at + count]

    def move(self, target: int, at: int, length: int) -> None:
        """Moves the next `length` bytes into a file."""
        end = at + length
        ready = self._buffer[self._at : self._at + length]
        self._at += len(ready)
        os.lseek(target, at, os.SEEK_SET)
        ranges.write_whole(target, ready)
        at += len(ready)
        while at < end:
            moved = ranges.splice_some(self._source, target, end - at)
            if not moved:
                raise damaged_image("it is cut short")
            at += moved

    def _fill_buffer(self, count: int) -> None:
        pieces = [self._buffer[self._at :]]
        have = len(pieces[0])
        while have < count:
            piece = os.read(self._source, _READ_BYTES)
            if not piece:
                raise damaged_image("it is cut short")
            pieces.append(piece)
            have += len(piece)
        self._buffer, self._at = b"".join(pieces), 0


def _check_name(name: bytes) -> None:
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise damaged_image("a name is none")


def _ignore_errors(numbers: frozenset, work) -> None:
    """Runs `work` and ignores an OSError with one of those numbers."""
    try:
        work()
    except OSError as error:
        if error.errno not in numbers:
            raise


def _empty_place(path: str, places: dict) -> None:
    """Removes the contents of a place. Sockets stay, which may have listeners, and other places."""
    kept = {os.path.realpath(place) for place in places.values()}
    with os.scandir(path) as listed:
        entries = list(listed)
    for entry in entries:
        mode = entry.stat(follow_symlinks=False).st_mode
        if not stat.S_ISSOCK(mode) and os.path.realpath(entry.path) not in kept:
            move.remove_path(entry.path)
