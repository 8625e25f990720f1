"""The zygote's part of named volumes: each is a tmpfs in a mount namespace of its own, without processes.

So no sandbox has a volume in its mount namespace but those that were forked with it, and nothing is ever
mounted into one that stands. A sandbox gets a detached copy of the mount, on which ids are mapped to its own.
"""

from __future__ import annotations

import errno
import os
import socket

from cloche.linux import mounts, namespaces, syscalls

_PLACE = "/tmp"  # in the volume's own namespace
_QUIET = mounts.MS_NOSUID | mounts.MS_NODEV
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class VolumeMounts:
    """`own_pids`: the zygote's pid namespace, into which children are forked here."""

    def __init__(self, single: bool, own_pids: int):
        self._single = single
        self._own_pids = own_pids
        self._known: dict = {}  # the host's name for it -> its mount namespace

    def do(self, header: dict) -> int | None:
        """Executes a request; a returned descriptor is for the host. Raises OSError, LookupError."""
        return {"make": self._make_volume, "tree": self._clone_tree, "drop": self._drop_volume}[header["act"]](header)

    def _make_volume(self, header: dict) -> None:
        options = f"size={header['bytes']},nr_inodes={header['inodes']},mode=755"
        with _VolumeChild(self._own_pids, lambda sync: _hold_tmpfs(options, header["owner"], sync)) as child:
            child.hear()
            self._known[header["volume"]] = os.open(f"/proc/{child.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def _clone_tree(self, header: dict) -> int:
        """A detached mount of it, or of a directory in it. The volume's ids 0, 1 .. are those of one sandbox there."""
        space, below = self._known[header["volume"]], header["subpath"]
        attributes = mounts.ATTR_NOSUID | mounts.ATTR_NODEV | (mounts.ATTR_RDONLY if header["read_only"] else 0)
        with _VolumeChild(
            self._own_pids, lambda sync: _send_clone(space, below, attributes, self._single, sync)
        ) as child:
            tree = child.take_descriptor()
            try:
                if not self._single:
                    self._map_ids(tree, child, header)
            except BaseException:
                os.close(tree)
                raise
        return tree

    def _map_ids(self, tree: int, child: _VolumeChild, header: dict) -> None:
        """Maps ids by the new user namespace of the child, which waits meanwhile."""
        child.hear()
        namespaces.write_maps(child.pid, header["uids"], header["gids"])
        user_namespace = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mounts.map_ids(tree, user_namespace)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise OSError(errno.EINVAL, "this kernel cannot map ids on a tmpfs: that takes Linux 6.3") from None
        finally:
            os.close(user_namespace)

    def _drop_volume(self, header: dict) -> None:
        space = self._known.pop(header["volume"], None)
        if space is not None:
            os.close(space)


def _hold_tmpfs(options: str, owner: int, sync: socket.socket) -> None:
    syscalls.unshare(namespaces.NEWNS)
    syscalls.mount("volume", _PLACE, "tmpfs", _QUIET, options)
    os.chown(_PLACE, owner, owner)
    sync.send(b"m")
    sync.recv(1)


def _send_clone(space: int, below: str, attributes: int, single: bool, sync: socket.socket) -> None:
    syscalls.setns(space, namespaces.NEWNS)
    tree = mounts.clone_directory(_open_directory(below), attributes)
    socket.send_fds(sync, [b"t"], [tree])
    if not single:
        syscalls.unshare(namespaces.NEWUSER)
        sync.send(b"u")
    sync.recv(1)


def _open_directory(below: str) -> int:
    """A directory of the volume. Its files are a stranger's: no symlink is followed, which could lead out of it."""
    found = os.open(_PLACE, _DIRECTORY)
    for part in filter(None, below.split("/")):
        if part == "..":
            raise OSError(errno.EXDEV, "a directory above the volume")
        found = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=found)  # the fork ends soon, with all of these
    return found


class _VolumeChild:
    """A fork that does one thing, reports its failure, and is gone when the block is left."""

    def __init__(self, pids: int, work):
        syscalls.setns(pids, namespaces.NEWPID)
        self._sync, theirs = socket.socketpair()
        with theirs:
            self.pid = syscalls.fork_bare()
            if self.pid == 0:
                self._sync.close()
                _run_work(work, theirs)

    def hear(self) -> None:
        _raise_failure(self._sync.recv(64))

    def take_descriptor(self) -> int:
        message, fds, _, _ = socket.recv_fds(self._sync, 1, 1)
        if not fds:
            _raise_failure(message + self._sync.recv(64))
            raise OSError(errno.EIO, "no mount came")
        return int(fds[0])

    def __enter__(self) -> _VolumeChild:
        return self

    def __exit__(self, *_) -> None:
        self._sync.close()
        os.waitpid(self.pid, 0)


def _run_work(work, sync: socket.socket) -> None:
    """Runs `work` in the fork. Never returns. A failure is reported as `!` and the error's number."""
    try:
        work(sync)
    except OSError as error:
        sync.send(b"!%d" % (error.errno or errno.EIO))
    finally:  # a fork must never run on into its parent's code
        os._exit(0)


def _raise_failure(message: bytes) -> None:
    if message.startswith(b"!"):
        raise OSError(int(message[1:]), os.strerror(int(message[1:])))
    if not message:
        raise OSError(errno.EIO, "the process that was to make a volume ended")
