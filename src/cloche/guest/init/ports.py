"""TCP ports of a sandbox: the listening ones, and connections from the host to them."""

from __future__ import annotations

import errno
import os
import socket

MAX_LISTENING = 256
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS = "0A"
_ON_ITS_WAY = (0, errno.EINPROGRESS)


def connect_port(header: dict, _: bytes) -> tuple:
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


def list_listening(header: dict, _: bytes) -> dict:
    """The TCP ports with a listener, the lowest first. A kernel without IPv6 has one table only."""
    found = set()
    for table in _TABLES:
        if os.path.exists(table):
            with open(table, encoding="ascii") as lines:
                rows = [line.split() for line in lines]
            found |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS}
    return {"ports": sorted(found)[:MAX_LISTENING]}


# Listeners on the sandbox's loopback, on which the host itself accepts: its network's (see `cloche.egress`), and that
# of the tools that programs may call (see `cloche.guest.kernel.tools`).

_BACKLOG = 512


def open_listener(header: dict, _: bytes) -> tuple:
    """Opens a listener and hands it over; init keeps nothing of it. Port 0 is one that is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", header["port"]))
        listener.listen(_BACKLOG)
        return {"port": listener.getsockname()[1]}, b"", (listener.detach(),)
