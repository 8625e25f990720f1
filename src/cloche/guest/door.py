"""The sandbox's one door: a listener on its loopback, on which the host itself accepts. See `cloche.egress`."""

from __future__ import annotations

import socket

_BACKLOG = 512


def open_door(header: dict, _: bytes) -> tuple:
    """Init keeps nothing of it: what is accepted goes past it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", header["port"]))
        listener.listen(_BACKLOG)
        return {}, b"", (listener.detach(),)
