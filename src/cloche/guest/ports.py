"""Connections from the host to programs that listen inside."""

from __future__ import annotations

import errno
import os
import socket

_ON_ITS_WAY = (0, errno.EINPROGRESS)


def connect(header: dict, _: bytes) -> tuple:
    """A TCP connection to `port` on the sandbox's own loopback, handed over as a descriptor.

    It may be on its way still: the host waits for it. Init never does, since a program that listens and does not
    accept could keep it.
    """
    port, six = header["port"], header.get("six", False)
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"{port!r} is not a port: use 1 to 65535")
    family, address = (socket.AF_INET6, "::1") if six else (socket.AF_INET, "127.0.0.1")
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
        error = connection.connect_ex((address, port))
        if error not in _ON_ITS_WAY:
            raise OSError(error, os.strerror(error))
        return {}, b"", (connection.detach(),)
