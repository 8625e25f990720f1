"""Listeners on the sandbox's loopback, on which the host itself accepts: its network's (see `cloche.egress`), and that
of the tools that programs may call (see `cloche.guest.tools`)."""

from __future__ import annotations

import socket

_BACKLOG = 512


def open_door(header: dict, _: bytes) -> tuple:
    """Init keeps nothing of it: what is accepted goes past it. Port 0 is one that is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", header["port"]))
        listener.listen(_BACKLOG)
        return {}, b"", (listener.detach(),)
