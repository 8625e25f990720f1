"""Processes that init has started, as it keeps track of them."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from typing import Any

from cloche.guest.zygote import enclosure
from cloche.linux import syscalls

_MAX_SHOWN = 4096


class ChildProcess:
    """A process started by init, known to the host by a name of the host's choice."""

    def __init__(self, name: str, pid: int, command: str, user: str, cwd: str):
        self.name = name
        self.pid = pid
        self.command = command
        self.user = user
        self.cwd = cwd
        self.started_at = time.time()
        self.cpu_seconds = 0.0  # of programs that init has forked for it
        self.peak_bytes = 0

    def info(self) -> dict:
        return {
            "id": self.name,
            "pid": self.pid,
            "command": self.command[:_MAX_SHOWN],
            "user": self.user,
            "cwd": self.cwd,
            "started_at": self.started_at,
        }


# The start of a process by init: its arguments, its descriptors, its way behind the walls.

_BASH = "/bin/bash"
KERNEL_FDS, _DOOR = (3, 4, 5), 6  # see `take_descriptors`


class ProgramStart:
    """The start of a command: the function of a fork of init, or the order to a fork with everything imported."""

    def __init__(self, work, warm: dict | None, body: bytes):
        self.work = work
        self.warm = warm
        self.body = body


def command_words(header: dict) -> list:
    order = header.get("script")
    if order:
        return ["python3", order["name"], *order.get("argv", ())]
    words = header.get("argv") or [_BASH, "-c", header["command"]]
    if words[0] == _BASH and not os.path.exists(_BASH):  # in many an image, and clients start their commands with it
        return ["/bin/sh", *words[1:]]
    return words


def take_descriptors(outputs: tuple, stdin: int | None) -> None:
    """Puts descriptors in place: 0, 1, 2 of a command.

    A kernel (more outputs) gets /dev/null, 1, 2, its channel as 3, its pipes as 4, 5. The first kernel of all
    gets as 6 the socket on which it waits to be admitted.
    """
    source = os.open("/dev/null", os.O_RDONLY) if stdin is None else stdin
    wanted = [source, *outputs] if len(outputs) == 2 else [source, *outputs[1:3], *outputs]
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 32) for fd in wanted]  # out of the way of the numbers that they will get
    for target, fd in enumerate(high):
        os.dup2(fd, target, target < 3)
    syscalls.close_from(len(wanted))


def enter_enclosure(kernel: Any, token: str, enter):
    """In the first kernel: gets ready while init raises the walls, and then goes behind them.

    Returns its channel.
    """
    channel = kernel.get_ready(*KERNEL_FDS, token)
    with socket.socket(fileno=_DOOR) as door:
        doors = enclosure.wait_for_admission(door)
    enter(doors)
    syscalls.close_from(_DOOR)
    return channel
