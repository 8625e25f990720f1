"""A sandbox's network: its policy, its door, and the log of what went through it or did not."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from cloche import errors
from cloche.engine.descriptors import only_fd
from cloche.engine.guest import Guest
from cloche.network_policy import NetworkEntry, NetworkPolicy

if TYPE_CHECKING:  # loaded where a sandbox has a network: most have none
    from cloche.egress.door import Door
    from cloche.egress.egress import Egress

DOOR_PORT = 49980
PROXY = f"http://127.0.0.1:{DOOR_PORT}"
NO_PROXY = "localhost,127.0.0.1,::1"
PROXY_ENV = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), PROXY),
    **dict.fromkeys(("ALL_PROXY", "all_proxy"), f"socks5h://127.0.0.1:{DOOR_PORT}"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), NO_PROXY),
    "NODE_USE_ENV_PROXY": "1",  # so that Node's own fetch heeds them
}


class SandboxNetwork:
    """`reach` is a policy's way to say what it may: None, and there is no door and nothing to pay for."""

    def __init__(self, guest: Guest, policy: NetworkPolicy):
        self._guest = guest
        self._policy = policy
        self._door: Door | None = None

    @property
    def policy(self) -> NetworkPolicy:
        return self._policy

    @property
    def log(self) -> list[NetworkEntry]:
        """What programs have tried, the oldest first."""
        return [] if self._door is None else self._door.journal.entries

    @property
    def is_open(self) -> bool:
        return self._door is not None

    async def open(self, egress: Egress, *, sandbox: str, owner: str) -> None:
        """Raises InvalidRequest where a program inside has the door's port, Gone."""
        if self._door is not None:
            return
        try:
            reply = await self._guest.request("door_open", port=DOOR_PORT)
        except errors.FileError:
            raise errors.InvalidRequest(
                f"a program in the sandbox listens on port {DOOR_PORT}, which its network needs: end it first"
            ) from None
        self._door = egress.open(_listener(only_fd(reply)), self._policy, sandbox=sandbox, owner=owner)

    def replace(self, policy: NetworkPolicy) -> None:
        self._policy = policy
        if self._door is not None:
            self._door.replace(policy)

    def close(self) -> None:
        if self._door is not None:
            self._door.close()


def _listener(fd: int) -> socket.socket:
    """What a guest passed must be what it says: a TCP socket that listens."""
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
