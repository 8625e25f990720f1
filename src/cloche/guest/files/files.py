"""File requests, executed inside with the caller's own rights.

A host that opened guest paths itself would be a confused deputy.
"""

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


class FileHandlers:
    def __init__(self, identities, defaults, watch_fd):
        self._identities = identities
        self._defaults = defaults
        self._uploads = write.Uploads(identities, watch_fd)

    def verb_handlers(self) -> dict:
        plain = {
            "file_read": self._read_file,
            "file_write": self._write_file,
            "file_list": self._list_files,
            "file_stat": self._stat_file,
            "file_make_dir": self._make_directory,
            "file_move": self._move_file,
            "file_remove": self._remove_file,
            "file_change": self._change_file,
            "tree_survey": self._survey_tree,
        }
        own = {"write_end": self._write_end, "tree_guard": self._guard_tree}
        return {**{name: self._as_user(work) for name, work in plain.items()}, **own}

    def _as_user(self, work):
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

    def _read_file(self, header: dict, _: bytes):
        fd = os.open(self.path(header), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        keep = False
        try:
            about = write.check_regular(fd)
            os.lseek(fd, header.get("offset", 0), os.SEEK_SET)
            limit = header.get("max_inline", wire.INLINE_BYTES)
            content = b"" if about.st_size > limit else _read_up_to(fd, limit + 1)
            if about.st_size <= limit and len(content) <= limit:
                return {"size": len(content), "modified_at": about.st_mtime}, content, ()
            keep = True
            return {"size": about.st_size, "modified_at": about.st_mtime}, b"", (fd,)
        finally:
            if not keep:
                os.close(fd)

    # --- writing

    def _write_file(self, header: dict, body: bytes):
        draft = self._open_draft(header)
        try:
            if header.get("stream"):
                user = header.get("user") or self._defaults.user
                self._uploads.start(header, draft, user)
                return {}
            draft.add(body)
            return _existing_info(draft.finish())
        except BaseException:
            draft.discard()
            raise

    def _open_draft(self, header: dict):
        self._refuse_symlinks(header)
        wishes = write.WriteOptions(header.get("mode"), self._requested_owner(header), header.get("attributes"))
        if header.get("in_place"):
            return write.InPlaceWrite(self.path(header), wishes, bool(header.get("stream")))
        return write.FileDraft(self.path(header), wishes)

    def _refuse_symlinks(self, header: dict) -> None:
        if header.get("below"):
            write.refuse_symlinks(self.path(header), self.path(header, "below"))

    def _requested_owner(self, header: dict) -> tuple | None:
        """The uid and gid of files that are made; None: the caller's, unchanged."""
        owner = header.get("owner")
        return None if owner is None else self._identities.ids(owner)

    def _write_end(self, header: dict, _: bytes):
        path = self._uploads.end(header["write"], bool(header.get("commit")), int(header.get("size") or 0))
        return {} if path is None else _existing_info(path)

    # --- the rest

    def _list_files(self, header: dict, _: bytes):
        found = _walk_tree(self.path(header), int(header.get("depth", 1)))
        listing = None if found is None else _encode_listing(found)
        return {"truncated": listing is None}, listing or b"", ()

    def _stat_file(self, header: dict, _: bytes):
        return _existing_info(self.path(header))

    def _make_directory(self, header: dict, _: bytes):
        path = self.path(header)
        created = directories.make_directories(path, self._requested_owner(header))
        return {**_existing_info(path), "created": created}

    def _move_file(self, header: dict, _: bytes):
        return _existing_info(move.move_path(self.path(header), self.path(header, "to"), self._requested_owner(header)))

    def _remove_file(self, header: dict, _: bytes):
        self._refuse_symlinks(header)
        move.remove_path(self.path(header))
        return {}

    def _change_file(self, header: dict, _: bytes):
        """Sets owner, group and mode, where they are given. Of a symlink the link itself is changed.

        With a single uid there is no other owner, and none is set.
        """
        self._refuse_symlinks(header)
        path, (uid, gid, mode) = self.path(header), (header.get(name) for name in ("uid", "gid", "mode"))
        if not self._identities.single and (uid is not None or gid is not None):
            os.chown(path, -1 if uid is None else uid, -1 if gid is None else gid, follow_symlinks=False)
        if mode is not None and not os.path.islink(path):
            os.chmod(path, mode)
        return _existing_info(path)

    def _survey_tree(self, header: dict, body: bytes):
        depth, since_ns = int(header.get("depth", 10)), int(header.get("since_ns") or 0)
        return tree.survey_tree(self.path(header), depth, json.loads(body or b"{}"), since_ns)

    def _guard_tree(self, header: dict, _: bytes):
        return {"missing": tree.guard_files(self.path(header), header["paths"], self._identities.single)}


def _read_up_to(fd: int, size: int) -> bytes:
    pieces, left = [], size
    while left > 0:
        piece = os.read(fd, left)
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _walk_tree(path: str, depth: int) -> list | None:
    """The paths below `path`, each directory before its contents; None if there are more than can be listed."""
    waiting = [(entry, depth) for entry in _list_entries(path)]
    found: list = []
    while waiting:
        if len(found) + len(waiting) > MAX_LISTED:
            return None
        entry, left = waiting.pop()
        found.append(entry.path)
        if left > 1 and entry.is_dir(follow_symlinks=False):
            waiting += [(inner, left - 1) for inner in _inner_entries(entry.path)]
    return found


def _list_entries(path: str) -> list:
    """The entries, the last name first. One more than can be listed is enough to know that they are too many."""
    with os.scandir(path) as entries:
        return sorted(islice(entries, MAX_LISTED + 1), key=lambda each: each.name, reverse=True)


def _inner_entries(path: str) -> list:
    try:
        return _list_entries(path)
    except OSError as error:
        if error.errno not in _UNSEEN:
            raise
        return []


def _encode_listing(paths: list) -> bytes | None:
    """The body of an answer; None if it is too long for one."""
    pieces, size = [], 0
    for path in paths:
        described = _encode_info(path)
        size += len(described) + 1
        if size > MAX_LISTING_BYTES:
            return None
        pieces.append(described)
    return b'{"files":[' + b",".join(piece for piece in pieces if piece) + b"]}"


def _encode_info(path: str) -> bytes:
    """The file's information as JSON; empty for a file that is gone.

    Names that are not text are escaped as the host would.
    """
    try:
        described = file_info(path)
    except OSError:
        return b""
    if described is None:
        return b""
    try:
        return json.dumps(described, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(_make_printable(described), ensure_ascii=False).encode()


def _make_printable(value):
    if isinstance(value, dict):
        return {_make_printable(name): _make_printable(each) for name, each in value.items()}
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def file_info(path: str) -> dict | None:
    """The fields of the host's FileInfo, or None if there is no such file (any more)."""
    try:
        about = os.lstat(path)
        target = os.readlink(path) if stat.S_ISLNK(about.st_mode) else None
    except FileNotFoundError:
        return None
    more = {"attributes": directories.read_attributes(path)} if target is None else {"leads_to": _resolve_link(path)}
    return {
        "path": path,
        "name": os.path.basename(path) or "/",
        "kind": _file_kind(about.st_mode),
        "size_bytes": about.st_size,
        "mode": stat.S_IMODE(about.st_mode),
        "owner": identity.user_name(about.st_uid),
        "group": identity.group_name(about.st_gid),
        "modified_at": about.st_mtime,
        "target": target,
        **more,
    }


def _resolve_link(path: str) -> dict:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return {"path": path, "kind": None, "mode": 0}
    return {"path": os.path.realpath(path), "kind": _file_kind(mode), "mode": stat.S_IMODE(mode)}


def _existing_info(path: str) -> dict:
    found = file_info(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such file or directory")
    return found


def _file_kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"
