"""The mounted cgroup hierarchies, and reading and writing of their control files."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

HOST_LEAF = "cloche-host"  # a group of servers themselves (in a container of all its processes), beside the sandboxes'


class Hierarchy(NamedTuple):
    """One mounted hierarchy, as the calling process sees it."""

    version: int
    controllers: frozenset[str]  # of a v1 hierarchy; v2 lists them in each directory
    mount: str
    own: str | None  # the directory of the calling process's cgroup; None if it lies outside what is mounted


def mounted_hierarchies() -> list[Hierarchy]:
    """The hierarchies that the calling process sees."""
    with open("/proc/self/mountinfo") as mountinfo, open("/proc/self/cgroup") as membership:
        return parse_hierarchies(mountinfo.read(), membership.read())


def above_leaf(group: str) -> str:
    """The group in which a process of that group makes others: beside the leaf that it may be in, not below it."""
    return os.path.dirname(group) if os.path.basename(group) == HOST_LEAF else group


def parse_hierarchies(mountinfo: str, membership: str) -> list[Hierarchy]:
    """The hierarchies in the texts of /proc/self/mountinfo and /proc/self/cgroup, each once."""
    found: dict[tuple[int, frozenset[str]], Hierarchy] = {}
    paths = _parse_membership(membership)
    for line in mountinfo.splitlines():
        mount = _parse_mount(line, paths)
        if mount is None:
            continue
        key = (mount.version, mount.controllers)
        if key not in found or found[key].own is None:
            found[key] = mount
    return list(found.values())


def _parse_membership(text: str) -> dict[frozenset[str], str]:
    """The path of the process in each hierarchy, by the hierarchy's controllers; v2 has none here."""
    lines = (line.split(":", 2) for line in text.splitlines())
    return {frozenset(controllers.split(",")) - {""}: path for _, controllers, path in lines}


def _parse_mount(line: str, paths: dict[frozenset[str], str]) -> Hierarchy | None:
    """The hierarchy of a line `36 31 0:33 ROOT MOUNT OPTIONS ... - TYPE SOURCE OPTIONS`, if it is one of cgroups."""
    before, _, after = line.partition(" - ")
    kind, _, options = after.split(" ", 2)
    if kind not in ("cgroup", "cgroup2"):
        return None
    words = frozenset(options.split(","))
    controllers = next((c for c in paths if c and c <= words), None) if kind == "cgroup" else frozenset[str]()
    if controllers is None or controllers not in paths:
        return None
    root, mount = (_unescape_word(word) for word in before.split(" ")[3:5])
    return Hierarchy(1 if kind == "cgroup" else 2, controllers, mount, _path_beneath(mount, root, paths[controllers]))


def _unescape_word(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _path_beneath(mount: str, root: str, path: str) -> str | None:
    """The path of the cgroup `path` if `root` is mounted at `mount`."""
    if path.startswith("/..") or root.startswith("/.."):
        return None  # seen from a cgroup namespace that does not contain it
    relative = os.path.relpath(path, root)
    return None if relative.startswith("..") else os.path.normpath(os.path.join(mount, relative))


def read_control(path: bytes) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, 65536), b""))
    finally:
        os.close(fd)


def write_control(path: bytes, text: bytes) -> None:
    """One write, as the kernel takes a value whole or not at all. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def read_field(path: bytes, key: bytes) -> int:
    """The value of `key` in a file of `key value` lines; 0 if it has no such line."""
    return _line_value(b"\n" + read_control(path), key)


class FileBytes(NamedTuple):
    """Pages of files that a group is charged for: all of them, and those of tmpfs and shared memory among them."""

    all: int
    shared: int


def file_bytes(path: bytes, all_key: bytes) -> FileBytes:
    """From a group's memory.stat, where version 1 calls them `cache` and version 2 `file`."""
    text = b"\n" + read_control(path)
    return FileBytes(_line_value(text, all_key), _line_value(text, b"shmem"))


def _line_value(text: bytes, key: bytes) -> int:
    """The value of a line `key value`, each behind a line's end; 0 if there is none."""
    at = text.find(b"\n%s " % key)
    return int(text[at + len(key) + 2 :].split(None, 1)[0]) if at >= 0 else 0


def read_numbers(path: bytes) -> list[int]:
    return [int(word) for word in read_control(path).split()]
