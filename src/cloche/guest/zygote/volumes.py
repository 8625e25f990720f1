"""The zygote's part of named volumes: a tmpfs each, in a mount namespace of its own that nobody runs in.

So no sandbox has a volume in its mount namespace but those that were forked with it, and nothing is ever mounted into
one that stands. What a sandbox gets is a detached copy of the mount, on which ids are mapped to its own.
"""

from __future__ import annotations

import errno
import os
import socket

from cloche.linux import mounts, namespaces, syscalls

_PLACE = "/tmp"  # in the volume's own namespace
_QUIET = mounts.MS_NOSUID | mounts.MS_NODEV


class Volumes:
    """`own_pids`: the zygote's pid namespace, into which children are forked here."""

    def __init__(self, single: bool, own_pids: int):
        self._single = single
        self._own_pids = own_pids
        self._known: dict = {}  # the host's name for it -> its mount namespace

    def do(self, header: dict) -> int | None:
        """What the host asks for; a descriptor is for the host. Raises OSError, LookupError."""
        return {"make": self._make, "tree": self._tree, "drop": self._drop}[header["act"]](header)

    def _make(self, header: dict) -> None:
        options = f"size={header['bytes']},nr_inodes={header['inodes']},mode=755"
        with _Child(self._own_pids, lambda sync: _hold(options, header["owner"], sync)) as child:
            child.hear()
            self._known[header["volume"]] = os.open(f"/proc/{child.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def _tree(self, header: dict) -> int:
        """A detached mount of it, on which the volume's ids 0, 1 .. are those of one sandbox."""
        space = self._known[header["volume"]]
        with _Child(self._own_pids, lambda sync: _clone(space, self._single, sync)) as child:
            tree = child.take_descriptor()
            try:
                if not self._single:
                    self._map_ids(tree, child, header)
            except BaseException:
                os.close(tree)
                raise
        return tree

    def _map_ids(self, tree: int, child: _Child, header: dict) -> None:
        """The child has a new user namespace and waits: that one says which ids are which."""
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

    def _drop(self, header: dict) -> None:
        space = self._known.pop(header["volume"], None)
        if space is not None:
            os.close(space)


def _hold(options: str, owner: int, sync: socket.socket) -> None:
    syscalls.unshare(namespaces.NEWNS)
    syscalls.mount("volume", _PLACE, "tmpfs", _QUIET, options)
    os.chown(_PLACE, owner, owner)
    sync.send(b"m")
    sync.recv(1)


def _clone(space: int, single: bool, sync: socket.socket) -> None:
    syscalls.setns(space, namespaces.NEWNS)
    tree = mounts.clone(_PLACE, mounts.ATTR_NOSUID | mounts.ATTR_NODEV, recursive=False)
    socket.send_fds(sync, [b"t"], [tree])
    if not single:
        syscalls.unshare(namespaces.NEWUSER)
        sync.send(b"u")
    sync.recv(1)


class _Child:
    """A fork that does one thing, says what went wrong, and is gone when the block is left."""

    def __init__(self, pids: int, work):
        syscalls.setns(pids, namespaces.NEWPID)
        self._sync, theirs = socket.socketpair()
        with theirs:
            self.pid = syscalls.fork_bare()
            if self.pid == 0:
                self._sync.close()
                _work(work, theirs)

    def hear(self) -> None:
        _check(self._sync.recv(64))

    def take_descriptor(self) -> int:
        message, fds, _, _ = socket.recv_fds(self._sync, 1, 1)
        if not fds:
            _check(message + self._sync.recv(64))
            raise OSError(errno.EIO, "no mount came")
        return int(fds[0])

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_) -> None:
        self._sync.close()
        os.waitpid(self.pid, 0)


def _work(work, sync: socket.socket) -> None:
    """Never returns. What went wrong is told as `!` and the error's number."""
    try:
        work(sync)
    except OSError as error:
        sync.send(b"!%d" % (error.errno or errno.EIO))
    finally:  # a fork must never run on into its parent's code
        os._exit(0)


def _check(message: bytes) -> None:
    if message.startswith(b"!"):
        raise OSError(int(message[1:]), os.strerror(int(message[1:])))
    if not message:
        raise OSError(errno.EIO, "the process that was to make a volume ended")
