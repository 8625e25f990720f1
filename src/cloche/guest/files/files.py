"""File work, done here under the caller's own rights: a host that opened a guest's paths would be a confused deputy."""

from __future__ import annotations

import errno
import json
import os
import stat
from itertools import islice

from cloche.guest import wire
from cloche.guest.files import directories, move, tree, write
from cloche.guest.init import identity

MAX_LISTED = 20_000
MAX_LISTING_BYTES = wire.MAX_LISTING_BYTES - 1024
# What lies in such a directory is not the caller's to see, is gone by now, or has paths that are too long to be used.
_UNSEEN = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})


class Files:
    def __init__(self, identities, defaults, watch_fd):
        self._identities = identities
        self._defaults = defaults
        self._uploads = write.Uploads(identities, watch_fd)

    def verbs(self) -> dict:
        plain = {
            "file_read": self._read,
            "file_write": self._write,
            "file_list": self._list,
            "file_stat": self._stat,
            "file_make_dir": self._make_dir,
            "file_move": self._move,
            "file_remove": self._remove,
            "file_change": self._change,
            "tree_survey": self._survey,
        }
        own = {"write_end": self._write_end, "tree_guard": self._guard}
        return {**{name: self._as_caller(work) for name, work in plain.items()}, **own}

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
            about = write.check_regular(fd)
            limit = header.get("max_inline", wire.INLINE_BYTES)
            content = b"" if about.st_size > limit else _read_up_to(fd, limit + 1)
            if about.st_size <= limit and len(content) <= limit:
                return {"size": len(content), "modified_at": about.st_mtime}, content, ()
            keep = True
            return {"size": about.st_size}, b"", (fd,)
        finally:
            if not keep:
                os.close(fd)

    # --- writing

    def _write(self, header: dict, body: bytes):
        draft = self._draft(header)
        try:
            if header.get("stream"):
                user = header.get("user") or self._defaults.user
                return {}, b"", (self._uploads.start(header["write"], draft, user),)
            draft.add(body)
            return _known(draft.finish())
        except BaseException:
            draft.discard()
            raise

    def _draft(self, header: dict):
        self._refuse_symlinks(header)
        wishes = write.Wishes(header.get("mode"), self._owner(header), header.get("attributes"))
        if header.get("in_place"):
            return write.Overwriting(self.path(header), wishes, bool(header.get("stream")))
        return write.Draft(self.path(header), wishes)

    def _refuse_symlinks(self, header: dict) -> None:
        if header.get("below"):
            write.refuse_symlinks(self.path(header), self.path(header, "below"))

    def _owner(self, header: dict) -> tuple | None:
        """Whose what is made shall be; None: the caller's, as it comes."""
        owner = header.get("owner")
        return None if owner is None else self._identities.ids(owner)

    def _write_end(self, header: dict, _: bytes):
        path = self._uploads.end(header["write"], bool(header.get("commit")), int(header.get("size") or 0))
        return {} if path is None else _known(path)

    # --- the rest

    def _list(self, header: dict, _: bytes):
        found = _walk(self.path(header), int(header.get("depth", 1)))
        listing = None if found is None else _listing(found)
        return {"truncated": listing is None}, listing or b"", ()

    def _stat(self, header: dict, _: bytes):
        return _known(self.path(header))

    def _make_dir(self, header: dict, _: bytes):
        path = self.path(header)
        created = directories.make(path, self._owner(header))
        return {**_known(path), "created": created}

    def _move(self, header: dict, _: bytes):
        return _known(move.move(self.path(header), self.path(header, "to"), self._owner(header)))

    def _remove(self, header: dict, _: bytes):
        self._refuse_symlinks(header)
        move.remove(self.path(header))
        return {}

    def _change(self, header: dict, _: bytes):
        """Owner, group and mode, where they are given. Of a symlink it is the link itself that is changed.

        With a single uid there is nobody to give a file to.
        """
        self._refuse_symlinks(header)
        path, (uid, gid, mode) = self.path(header), (header.get(name) for name in ("uid", "gid", "mode"))
        if not self._identities.single and (uid is not None or gid is not None):
            os.chown(path, -1 if uid is None else uid, -1 if gid is None else gid, follow_symlinks=False)
        if mode is not None and not os.path.islink(path):
            os.chmod(path, mode)
        return _known(path)

    def _survey(self, header: dict, body: bytes):
        depth, since_ns = int(header.get("depth", 10)), int(header.get("since_ns") or 0)
        return tree.survey(self.path(header), depth, json.loads(body or b"{}"), since_ns)

    def _guard(self, header: dict, _: bytes):
        return {"missing": tree.guard(self.path(header), header["paths"], self._identities.single)}


def _read_up_to(fd: int, size: int) -> bytes:
    pieces, left = [], size
    while left > 0:
        piece = os.read(fd, left)
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _walk(path: str, depth: int) -> list | None:
    """What lies below `path`, each directory before what is in it; None if that is more than can be listed."""
    waiting = [(entry, depth) for entry in _entries(path)]
    found: list = []
    while waiting:
        if len(found) + len(waiting) > MAX_LISTED:
            return None
        entry, left = waiting.pop()
        found.append(entry.path)
        if left > 1 and entry.is_dir(follow_symlinks=False):
            waiting += [(inner, left - 1) for inner in _inner_entries(entry.path)]
    return found


def _entries(path: str) -> list:
    """The last name first. One more than can be listed is enough to know that they are too many."""
    with os.scandir(path) as entries:
        return sorted(islice(entries, MAX_LISTED + 1), key=lambda each: each.name, reverse=True)


def _inner_entries(path: str) -> list:
    try:
        return _entries(path)
    except OSError as error:
        if error.errno not in _UNSEEN:
            raise
        return []


def _listing(paths: list) -> bytes | None:
    """The body of an answer; None if it is too long for one."""
    pieces, size = [], 0
    for path in paths:
        described = _json_of(path)
        size += len(described) + 1
        if size > MAX_LISTING_BYTES:
            return None
        pieces.append(described)
    return b'{"files":[' + b",".join(piece for piece in pieces if piece) + b"]}"


def _json_of(path: str) -> bytes:
    """Nothing for what is gone by now. Names that are no text are written as the host would."""
    try:
        described = info(path)
    except OSError:
        return b""
    if described is None:
        return b""
    try:
        return json.dumps(described, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(_text(described), ensure_ascii=False).encode()


def _text(value):
    if isinstance(value, dict):
        return {_text(name): _text(each) for name, each in value.items()}
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def info(path: str) -> dict | None:
    """What the host's FileInfo says, or None if there is nothing (any more)."""
    try:
        about = os.lstat(path)
        target = os.readlink(path) if stat.S_ISLNK(about.st_mode) else None
    except FileNotFoundError:
        return None
    more = {"attributes": directories.read(path)} if target is None else {"leads_to": _end_of_link(path)}
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
        **more,
    }


def _end_of_link(path: str) -> dict:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return {"path": path, "kind": None, "mode": 0}
    return {"path": os.path.realpath(path), "kind": _kind(mode), "mode": stat.S_IMODE(mode)}


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
