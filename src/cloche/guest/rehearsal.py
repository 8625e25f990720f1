"""What every sandbox does first, done in the zygote beforehand, as far as it has no effect there.

The first calls of a function look up symbols, build wrappers and specialise bytecode: writes, each of which would be a
page copied in every sandbox. After some rounds these have settled.
"""

from __future__ import annotations

import os
import socket

from cloche.guest import kernel, wire
from cloche.linux import landlock, namespaces, syscalls

_ROUNDS = 20  # CPython looks again at code that has run eight times
_UNUSED_FD = 1 << 20


def rehearse(writable: tuple) -> None:
    """Run in a nursery, whose network and host name are its own."""
    idle = syscalls.Prepared()
    idle.prctl(syscalls.PR_GET_DUMPABLE)
    for _ in range(_ROUNDS):
        idle.make()
        namespaces.raise_loopback()
        syscalls.set_hostname("nursery")
        syscalls.close_range(_UNUSED_FD, _UNUSED_FD)
        syscalls.prctl(syscalls.PR_GET_DUMPABLE)
        _pass_descriptors()
        kernel.diverge()
        if landlock.abi():
            _build_ruleset(writable)


def _pass_descriptors() -> None:
    ours, theirs = socket.socketpair()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.write(null, b"0")
    socket.send_fds(ours, [b"d"], [null])
    _, received, _, _ = socket.recv_fds(theirs, 1, 16)
    wire.send(ours, {"ev": "ready"})
    wire.Reader(theirs).next()
    for fd in (null, *received):
        os.close(fd)
    ours.close()
    theirs.close()


def _build_ruleset(paths: tuple) -> None:
    with landlock.Ruleset() as ruleset:
        for path in paths:
            ruleset.allow(path, landlock.READ)
