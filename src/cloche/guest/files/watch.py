"""Watches of directories by inotify. One instance serves all watches of a sandbox."""

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


class WatchHandlers:
    def __init__(self, identities, defaults, watch_fd, event):
        self._identities = identities
        self._defaults = defaults
        self._watch_fd = watch_fd
        self._event = event
        self._inotify = -1
        self._drafts: set = set()  # cookies of our own half-written files that are being renamed into place
        self._missed: set = set()  # watches that are to hear that they have not heard everything
        self._directories: dict = {}  # inotify's number -> {watch: (path as that watch calls it, recursive)}

    def verb_handlers(self) -> dict:
        return {
            "watch_start": self._start_watch,
            "watch_stop": self._stop_watch,
            "watch_collect": self._collect_changes,
        }

    def _start_watch(self, header: dict, _: bytes) -> dict:
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

    def _stop_watch(self, header: dict, _: bytes) -> dict:
        for number, watchers in list(self._directories.items()):
            watchers.pop(header["watch"], None)
            if not watchers:
                _load_libc().inotify_rm_watch(self._inotify, number)
                del self._directories[number]
        return {}

    def _collect_changes(self, _header: dict, _: bytes) -> dict:
        """Reads all pending events: the answer comes after the events of everything done before the request."""
        for _round in range(_MAX_READS if self._inotify >= 0 else 0):  # a program may make changes without an end
            if not self._read_events():
                break
        return {}

    def _add_tree(self, path: str, watch: str, recursive: bool) -> None:
        self._add_directory(path, watch, recursive)
        waiting = [path] if recursive else []
        while waiting:  # not os.walk, which recurses: a program may have made a deep tree
            for directory in _list_directories(waiting.pop()):
                self._add_directory(directory, watch, True)
                waiting.append(directory)

    def _add_directory(self, path: str, watch: str, recursive: bool) -> None:
        number = _load_libc().inotify_add_watch(self._open_inotify(), os.fsencode(path), _MASK | _MASK_ADD)
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._directories.setdefault(number, {})[watch] = (path, recursive)

    def _open_inotify(self) -> int:
        if self._inotify < 0:
            self._inotify = _load_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._inotify < 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            self._watch_fd(self._inotify, select.POLLIN, self._read_events)
        return self._inotify

    def _read_events(self) -> bool:
        """Reports new events; False if there are none."""
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
                self._mark_missed(watch for watchers in self._directories.values() for watch in watchers)
            self._record_event(number, self._seen_through_drafts(mask, cookie, name), os.fsdecode(name), changes)
        self._send_changes(changes)
        return True

    def _send_changes(self, changes: dict) -> None:
        for watch, seen in changes.items():
            for at in range(0, len(seen), _MAX_CHANGES):
                self._event({"ev": "changes", "watch": watch, "changes": seen[at : at + _MAX_CHANGES]})
        missed, self._missed = self._missed, set()
        for watch in missed:
            self._event({"ev": "changes", "watch": watch, "changes": [], "missed": True})

    def _mark_missed(self, watches) -> None:
        """Marks these watches as having missed an event for good."""
        self._missed.update(watches)

    def _seen_through_drafts(self, mask: int, cookie: int, name: bytes) -> int:
        """A file that init wrote beside its target and renamed counts as written."""
        if mask & _MOVED_FROM and name.startswith(_DRAFT.encode()):
            self._drafts.add(cookie)
        elif mask & _MOVED_TO and cookie in self._drafts:
            self._drafts.discard(cookie)
            return _MODIFY
        return mask

    def _record_event(self, number: int, mask: int, name: str, changes: dict) -> None:
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
                self._follow_directory(path, watch)
                found = _list_created(path) if mask & _CREATE else []
                seen += found
                if len(found) >= _MAX_FOUND:
                    self._mark_missed([watch])

    def _follow_directory(self, path: str, watch: str) -> None:
        try:
            self._add_tree(path, watch, True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):  # over this sandbox's number of watches; else gone again
                self._mark_missed([watch])


def _list_created(path: str) -> list:
    """Entries made in a new directory before it was watched. Some may be reported twice, but none never."""
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


def _list_directories(path: str) -> list:
    """The directories in `path`, without symlinks; none if it cannot be read, or is gone by now."""
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _load_libc():
    return ctypes.CDLL(None, use_errno=True)
