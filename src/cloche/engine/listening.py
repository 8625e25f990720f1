"""Listeners on a sandbox's loopback, on which the host itself accepts: what comes in goes past the sandbox's init."""

from __future__ import annotations

import os
import socket

from cloche import errors
from cloche.engine.descriptors import only_fd
from cloche.engine.guest import Guest


async def open_listener(guest: Guest, port: int) -> socket.socket:
    """Raises FileError where a program has that port (0: any that is free), ProtocolViolation, Gone."""
    fd = only_fd(await guest.request("door_open", port=port))
    try:
        listener = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise errors.ProtocolViolation("the guest's init passed something else than a socket") from None
    is_tcp = listener.family == socket.AF_INET and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise errors.ProtocolViolation("the guest's init passed a socket that does not listen")
    listener.setblocking(False)
    return listener
