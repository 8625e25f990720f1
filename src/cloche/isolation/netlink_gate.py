"""The gate of netlink: opens the netlink sockets of sandboxes, a few at a time for each network namespace.

The kernel charges what a netlink socket holds to no cgroup, so the number of sockets is the only bound on it. The
nursery's filter hands every `socket(AF_NETLINK)` over to `launch`'s outermost process, which opens the socket in the
caller's network namespace and gives it to the caller. It costs nothing while no program asks for one.

Where no cgroup is charged for anything, all other sockets come here as well, to be counted.

Of each socket that it has opened the gate keeps a watch in an epoll set, which the kernel removes when the last
descriptor of the socket is closed, wherever that is: by that the gate counts those alive, in flight ones too.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from pathlib import Path

from cloche.linux import namespaces, syscalls
from cloche.linux.seccomp_listener import (
    WaitingCall,
    answer_with_descriptor,
    is_waiting,
    let_call_go,
    receive_call,
    refuse_call,
)

_KEPT_BYTES = 50 << 20  # in all sockets of one network namespace
_SKB_BYTES = 72 << 10  # a queue is full when it has exceeded its size
_MOST_SOCKETS = 32
_LARGEST_BUFFER = 4 << 20  # where the host does not tell
_PERIOD_SECONDS = 0.05
_CALLS_PER_PERIOD = 50  # of one network namespace: beyond, its callers wait, and not the CPU of the host
_PATIENCE_SECONDS = 1.0  # with all sockets taken: most are closed again after a millisecond
_ANSWER_AT_LIMIT = errno.ENOBUFS
_MOST_UNCHARGED = 256  # sockets of all kinds in one network namespace, where no cgroup is charged for them


def count_allowed_sockets() -> int:
    """The sockets of a network namespace. A queue, and a request that waits, are each twice a buffer's largest size."""
    most = sum(_read_maximum(name) for name in ("rmem_max", "wmem_max"))
    return max(2, min(_MOST_SOCKETS, _KEPT_BYTES // (2 * most + _SKB_BYTES)))


def _read_maximum(name: str) -> int:
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except OSError:
        return _LARGEST_BUFFER


class _NamespaceSockets:
    """The sockets of one network namespace that are alive, and its calls in this period."""

    def __init__(self) -> None:
        self.calls = 0
        self._watch = select.epoll()

    def add(self, sock: socket.socket) -> None:
        self._watch.register(sock.fileno(), 0)

    def count(self) -> int:
        with open(f"/proc/self/fdinfo/{self._watch.fileno()}") as file:
            return sum(line.startswith("tfd:") for line in file)

    def close(self) -> None:
        self._watch.close()


class NetlinkGate:
    """Made by a process with CAP_SYS_ADMIN over the callers' network namespaces."""

    def __init__(self, listener: int) -> None:
        self._listener = listener
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._allowed = count_allowed_sockets()
        self._spaces: dict[tuple[int, int], _NamespaceSockets] = {}
        self._waiting: list[tuple[WaitingCall, float]] = []

    def serve(self, life: int) -> None:
        """Answers until the pidfd `life` is readable, or no process is behind the filter any more."""
        poll = select.poll()
        poll.register(life, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        period_end = 0.0
        while True:
            ready = dict(poll.poll(_PERIOD_SECONDS * 1000 if self._waiting else None))
            if life in ready or ready.get(self._listener, 0) & ~select.POLLIN:
                return
            if (now := time.monotonic()) >= period_end:
                period_end = now + _PERIOD_SECONDS
                self._begin_period(now)
            if self._listener in ready and (call := receive_call(self._listener)):
                self._admit(call, now + _PATIENCE_SECONDS)

    def _begin_period(self, now: float) -> None:
        """Tries those that wait again, in their order."""
        for key in [key for key, space in self._spaces.items() if not space.count()]:
            self._spaces.pop(key).close()
        for space in self._spaces.values():
            space.calls = 0
        waiting, self._waiting = self._waiting, []
        for call, until in waiting:
            if now > until:
                refuse_call(self._listener, call, _ANSWER_AT_LIMIT)
            else:
                self._admit(call, until)

    def _admit(self, call: WaitingCall, until: float) -> None:
        """Answers a call, or keeps it for the next period."""
        if call.arguments[0] & 0xFFFFFFFF != socket.AF_NETLINK:
            self._admit_uncharged(call)
            return
        try:
            home = os.open(f"/proc/{call.thread}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            refuse_call(self._listener, call, errno.EAFNOSUPPORT)
            return
        try:
            if is_waiting(self._listener, call) and not self._open_in(home, call):
                self._waiting.append((call, until))
        finally:
            os.close(home)

    def _admit_uncharged(self, call: WaitingCall) -> None:
        """Lets a socket of another kind be made if there are not too many.

        Others may be on their way, no more than the sandbox has threads; and each that connects makes one more.
        """
        try:
            with open(f"/proc/{call.thread}/net/sockstat") as file:
                used = int(file.readline().split()[2])
        except (OSError, ValueError, IndexError):
            refuse_call(self._listener, call, _ANSWER_AT_LIMIT)
            return
        if used < _MOST_UNCHARGED:
            let_call_go(self._listener, call)
        else:
            refuse_call(self._listener, call, _ANSWER_AT_LIMIT)

    def _open_in(self, namespace: int, call: WaitingCall) -> bool:
        """Opens a socket in that network namespace for the caller; false if it has to wait."""
        status = os.fstat(namespace)
        key = status.st_dev, status.st_ino
        space = self._spaces[key] = self._spaces.get(key) or _NamespaceSockets()
        space.calls += 1
        if space.calls > _CALLS_PER_PERIOD or space.count() >= self._allowed:
            return False
        _, kind, protocol, *_ = call.arguments
        try:
            with self._make_socket(namespace, kind & 0xFFFFFFFF, protocol & 0xFFFFFFFF) as sock:
                space.add(sock)
                cloexec = bool(kind & socket.SOCK_CLOEXEC)
                answer_with_descriptor(self._listener, call, sock.fileno(), close_on_exec=cloexec)
        except OSError as error:
            refuse_call(self._listener, call, error.errno or errno.ENOBUFS)
        return True

    def _make_socket(self, namespace: int, kind: int, protocol: int) -> socket.socket:
        syscalls.setns(namespace, namespaces.NEWNET)
        try:
            return socket.socket(socket.AF_NETLINK, kind, protocol)
        finally:
            syscalls.setns(self._home, namespaces.NEWNET)
