"""Mounts by descriptor: a tree is cloned, made read-only, and only then attached where it will be seen."""

from __future__ import annotations

import ctypes
import os

from cloche.linux import syscalls

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4

ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
_ATTR_IDMAP = 0x100000
SEALED_ATTRIBUTES = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV


class _MountAttr(ctypes.Structure):
    _fields_ = [
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


def clone_tree(path: str, attributes: int, *, recursive: bool = True) -> int:
    """A detached copy of the mount tree at `path` with `attributes` set on all of it; returns its descriptor."""
    deep = _AT_RECURSIVE if recursive else 0
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | deep
    tree = syscalls.syscall(syscalls.OPEN_TREE, _AT_FDCWD, path.encode(), flags, name=f"open_tree {path}")
    set_attributes(tree, "", attributes, recursive=recursive)
    return tree


def clone_directory(directory: int, attributes: int) -> int:
    """As `clone_tree`, of the one mount at an open directory."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH
    tree = syscalls.syscall(syscalls.OPEN_TREE, directory, b"", flags, name="open_tree")
    set_attributes(tree, "", attributes, recursive=False)
    return tree


def set_attributes(fd: int, path: str, attributes: int, *, recursive: bool) -> None:
    _set_mount_attr(fd, path, _MountAttr(set=attributes), recursive=recursive)


def map_ids(tree: int, user_namespace: int) -> None:
    """Ids of files below a detached tree are as that user namespace maps them: inside is the file's, outside is ours.

    Raises OSError with EINVAL where the file system cannot: tmpfs from Linux 6.3 on.
    """
    _set_mount_attr(tree, "", _MountAttr(set=_ATTR_IDMAP, userns_fd=user_namespace), recursive=False)


def _set_mount_attr(fd: int, path: str, attr: _MountAttr, *, recursive: bool) -> None:
    flags = (_AT_RECURSIVE if recursive else 0) | (0 if path else _AT_EMPTY_PATH)
    raw = ctypes.string_at(ctypes.addressof(attr), ctypes.sizeof(attr))
    syscalls.syscall(syscalls.MOUNT_SETATTR, fd, path.encode(), flags, raw, len(raw), name="mount_setattr")


def attach_tree(tree: int, target: str) -> None:
    """Attaches a detached tree at `target` and closes its descriptor."""
    name = f"move_mount {target}"
    syscalls.syscall(syscalls.MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH, name=name)
    os.close(tree)


def bind_mount(source: str, target: str, attributes: int = SEALED_ATTRIBUTES, *, recursive: bool = True) -> None:
    """A bind of `source` at `target` that never is writable, not even for a moment, when `attributes` say so."""
    attach_tree(clone_tree(source, attributes, recursive=recursive), target)


def make_private() -> None:
    """Nothing that is mounted from here on reaches another mount namespace, and nothing comes in."""
    syscalls.mount("none", "/", "", MS_REC | MS_PRIVATE)


def seal_mount(path: str) -> None:
    """Makes the one mount at `path` read-only."""
    set_attributes(_AT_FDCWD, path, SEALED_ATTRIBUTES, recursive=False)


def enter_root(root: str) -> None:
    """Makes `root`, a mount, the root of this mount namespace and lets go of the old one."""
    os.chdir(root)
    syscalls.pivot_root(".", ".")
    syscalls.umount(".", MNT_DETACH)
    os.chdir("/")
