"""Connections from the host to programs that listen inside."""

from __future__ import annotations

import socket


def connect(header: dict, _: bytes) -> tuple:
    """A TCP connection to `port` on the sandbox's own loopback, handed over as a descriptor."""
    port = header["port"]
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"{port!r} is not a port: use 1 to 65535")
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=2)
    except ConnectionRefusedError:
        connection = socket.create_connection(("::1", port), timeout=2)
    connection.setblocking(False)
    return {}, b"", (connection.detach(),)
