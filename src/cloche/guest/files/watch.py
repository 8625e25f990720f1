"""Watching directories by inotify. One instance serves all watches of a sandbox."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from itertools import islice

_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO = 0x2, 0x4, 0x8, 0x40, 0x80
_CREATE, _DELETE, _ISDIR, _IGNORED, _OVERFLOW, _MASK_ADD = 0x100, 0x200, 0x40000000, 0x8000, 0x4000, 0x20000000
_MASK = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_KINDS = {
    _CREATE: "created",
    _MODIFY: "written",
    _ATTRIB: "attributes",
    _DELETE: "removed",
    _MOVED_FROM: "renamed",
    _MOVED_TO: "created",
}
_EVENT = struct.Struct("iIII")
_MAX_READS = 128  # more than the kernel keeps waiting for us
_MAX_FOUND = 10_000  # in a directory that appears with something in it
_MAX_CHANGES = 128  # in one frame: with the longest paths, escaped as JSON, they are below wire.MAX_HEADER
_DRAFT = ".cloche-"  # our own half-written files are nobody's business


class Watches:
    def __init__(self, identities, defaults, watch_fd, event):
        self._identities = identities
        self._defaults = defaults
        self._watch_fd = watch_fd
        self._event = event
        self._inotify = -1
        self._drafts: set = set()  # cookies of our own half-written files that are being renamed into place
        self._missed: set = set()  # watches that are to hear that they have not heard everything
        self._directories: dict = {}  # inotify's number -> {watch: (path as that watch calls it, recursive)}

    def verbs(self) -> dict:
        return {"watch_start": self._start, "watch_stop": self._stop, "watch_collect": self._collect}

    def _start(self, header: dict, _: bytes) -> dict:
        path = self._defaults.path(header["path"])
        if not os.path.isdir(path):
            number = errno.ENOTDIR if os.path.lexists(path) else errno.ENOENT
            raise OSError(number, os.strerror(number))
        self._identities.act_on_files_as(header.get("user") or self._defaults.user)
        try:
            self._add_tree(path, header["watch"], bool(header.get("recursive")))
        finally:
            self._identities.act_as_init()
        return {}

    def _stop(self, header: dict, _: bytes) -> dict:
        for number, watchers in list(self._directories.items()):
            watchers.pop(header["watch"], None)
            if not watchers:
                _libc().inotify_rm_watch(self._inotify, number)
                del self._directories[number]
        return {}

    def _collect(self, _header: dict, _: bytes) -> dict:
        """Whoever has our answer has heard of everything that was done before the question."""
        for _round in range(_MAX_READS if self._inotify >= 0 else 0):  # a program may make changes without an end
            if not self._read():
                break
        return {}

    def _add_tree(self, path: str, watch: str, recursive: bool) -> None:
        self._add(path, watch, recursive)
        waiting = [path] if recursive else []
        while waiting:  # not os.walk, which recurses: a program may have made a deep tree
            for directory in _directories(waiting.pop()):
                self._add(directory, watch, True)
                waiting.append(directory)

    def _add(self, path: str, watch: str, recursive: bool) -> None:
        number = _libc().inotify_add_watch(self._open(), os.fsencode(path), _MASK | _MASK_ADD)
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._directories.setdefault(number, {})[watch] = (path, recursive)

    def _open(self) -> int:
        if self._inotify < 0:
            self._inotify = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._inotify < 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            self._watch_fd(self._inotify, select.POLLIN, self._read)
        return self._inotify

    def _read(self) -> bool:
        """Tells what has happened; False if nothing has."""
        try:
            data = os.read(self._inotify, 1 << 16)
        except BlockingIOError:
            return False
        changes: dict = {}
        while data:
            number, mask, cookie, length = _EVENT.unpack_from(data)
            name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
            data = data[_EVENT.size + length :]
            if mask & _OVERFLOW:
                self._miss(watch for watchers in self._directories.values() for watch in watchers)
            self._note(number, self._seen_through_drafts(mask, cookie, name), os.fsdecode(name), changes)
        self._tell(changes)
        return True

    def _tell(self, changes: dict) -> None:
        for watch, seen in changes.items():
            for at in range(0, len(seen), _MAX_CHANGES):
                self._event({"ev": "changes", "watch": watch, "changes": seen[at : at + _MAX_CHANGES]})
        missed, self._missed = self._missed, set()
        for watch in missed:
            self._event({"ev": "changes", "watch": watch, "changes": [], "missed": True})

    def _miss(self, watches) -> None:
        """Something happened that these were not told, and will not be."""
        self._missed.update(watches)

    def _seen_through_drafts(self, mask: int, cookie: int, name: bytes) -> int:
        """A file that we wrote beside its target and renamed was, to everyone else, written."""
        if mask & _MOVED_FROM and name.startswith(_DRAFT.encode()):
            self._drafts.add(cookie)
        elif mask & _MOVED_TO and cookie in self._drafts:
            self._drafts.discard(cookie)
            return _MODIFY
        return mask

    def _note(self, number: int, mask: int, name: str, changes: dict) -> None:
        if mask & _IGNORED:
            self._directories.pop(number, None)  # it is gone, and its number will not come again
        if number not in self._directories or name.startswith(_DRAFT):
            return
        watchers = self._directories[number]
        kinds = [kind for bit, kind in _KINDS.items() if mask & bit]
        for watch, (directory, recursive) in list(watchers.items()):
            path = f"{directory}/{name}" if name else directory
            seen = changes.setdefault(watch, [])
            seen += [[kind, path] for kind in kinds]
            if recursive and mask & _ISDIR and mask & (_CREATE | _MOVED_TO):
                self._follow(path, watch)
                found = _found(path) if mask & _CREATE else []
                seen += found
                if len(found) >= _MAX_FOUND:
                    self._miss([watch])

    def _follow(self, path: str, watch: str) -> None:
        try:
            self._add_tree(path, watch, True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):  # over this sandbox's number of watches; else gone again
                self._miss([watch])


def _found(path: str) -> list:
    """What was made in a new directory before it was watched. Some of it may be told of twice, but none of it never."""
    found: list = []
    waiting = [path]
    while waiting and len(found) < _MAX_FOUND:
        try:
            with os.scandir(waiting.pop()) as listed:
                entries = sorted(islice(listed, _MAX_FOUND), key=lambda each: each.name)
        except OSError:
            continue
        found += [["created", entry.path] for entry in entries if not entry.name.startswith(_DRAFT)]
        waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


def _directories(path: str) -> list:
    """Those in `path`, without symlinks; none if it cannot be read, or is gone by now."""
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _libc():
    return ctypes.CDLL(None, use_errno=True)
