"""Rehearsals of a sandbox's first steps in the process it is forked from, as far as they do nothing there.

The first calls of a function look up symbols, build wrappers and specialise bytecode: writes, each of which
would be a page copied in every sandbox. After some rounds these have settled.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import os
import resource
import socket

from cloche.guest import wire
from cloche.guest.init import init
from cloche.guest.kernel.channel import Interrupts, KernelChannel
from cloche.guest.zygote.enclosure import WRITABLE, Enclosure
from cloche.linux import landlock, namespaces, syscalls

_ROUNDS = 20  # CPython looks again at code that has run eight times
_UNUSED_FD = 1 << 20
_TOKEN = "0" * 16
_SPEC = {"user": "user", "space_bytes": 0, "inodes": 0}


def rehearse_init(env: dict) -> None:
    """Runs in an init factory, which has a network and host name of its own."""
    idle, walls = syscalls.PreparedCalls(), Enclosure.for_rehearsal()
    idle.prctl(syscalls.PR_GET_DUMPABLE)
    rules = landlock.LandlockWall(WRITABLE) if landlock.abi_version() else None
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    spec = {**_SPEC, "open_files": files[1]}
    served = init.Init(True, b"", env, walls=True)
    served.adopt_environment()
    for _ in range(_ROUNDS):
        idle.make()
        namespaces.raise_loopback()
        for fd in walls.raise_walls(spec, lambda: None):
            os.close(fd)
        syscalls.set_hostname("nursery")
        syscalls.close_range(_UNUSED_FD, _UNUSED_FD)
        syscalls.prctl(syscalls.PR_GET_DUMPABLE)
        _pass_descriptors()
        _start_init_channel(served, spec)
        if rules:
            rules.build().close()
    resource.setrlimit(resource.RLIMIT_NOFILE, files)


def rehearse_kernel() -> None:
    """Runs in a zygote."""
    from cloche.guest.kernel.reseed import reseed_after_fork

    for _ in range(_ROUNDS):
        syscalls.close_range(_UNUSED_FD, _UNUSED_FD)
        syscalls.prctl(syscalls.PR_GET_DUMPABLE)
        _pass_descriptors()
        _start_kernel_channel()
        reseed_after_fork()


def _start_init_channel(served: init.Init, spec: dict) -> None:
    """The start of init's channel."""
    ours, theirs = socket.socketpair()
    numbers = (_signal.SIGCHLD, _signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGPIPE)
    saved = [_signal.getsignal(number) for number in numbers]
    served.take(spec, True)
    served.processes.register_first_kernel(1)
    served.listen(ours)
    served.undo_listen()
    for number, handler in zip(numbers, saved, strict=True):
        _signal.signal(number, handler)
    ours.close()
    theirs.close()


def _start_kernel_channel() -> None:
    """The start of a kernel's channel."""
    ours, theirs = socket.socketpair()
    out, err = os.pipe2(os.O_CLOEXEC)
    channel = KernelChannel(theirs.detach(), out, err, _TOKEN, Interrupts())
    channel.send({"ev": "ready"})
    channel.close()
    ours.close()


def _pass_descriptors() -> None:
    ours, theirs = socket.socketpair()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.write(null, b"0")
    socket.send_fds(ours, [b"d"], [null])
    _, received, _, _ = socket.recv_fds(theirs, 1, 16)
    wire.send_frame(ours, {"ev": "ready"})
    wire.FrameReader(theirs).next()
    for fd in (null, *received):
        os.close(fd)
    ours.close()
    theirs.close()
