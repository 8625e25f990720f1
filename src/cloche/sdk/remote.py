"""Servers that this process uses, on a thread of its own: started at first use."""

from __future__ import annotations

import os
import threading

from cloche.model import SandboxSpec
from cloche.sdk import remote_sandbox
from cloche.sdk.loop_thread import LoopThread
from cloche.sdk.remote_sandbox import RemoteSandbox
from cloche.sdk.remote_server import Server


class Remote(LoopThread):
    """One server, asked with one key. Implements Transport."""

    def __init__(self, url: str, api_key: str):
        """Raises InvalidRequest for what is no address."""
        self._server = Server(url, api_key)
        super().__init__("cloche-remote", "the connection to the server was closed")

    async def create(self, spec: SandboxSpec) -> RemoteSandbox:
        return await remote_sandbox.create(self._server, spec)

    async def connect(self, id: str) -> RemoteSandbox:
        return await remote_sandbox.connect(self._server, id)

    def close(self) -> None:
        """Closes all connections and ends the thread. Sandboxes live on. Harmless when closed."""
        if self.usable:
            self.call(self._server.aclose)
            self.stop()


_lock = threading.Lock()
_remotes: dict[tuple[str, str], Remote] = {}


def remote(url: str, api_key: str) -> Remote:
    """The connection of this process to that server. Raises InvalidRequest for what is no address."""
    with _lock:
        known = _remotes.get((url, api_key))
        if known is None or not known.usable:
            known = _remotes[url, api_key] = Remote(url, api_key)
        return known


def _after_fork_in_child() -> None:
    """The parent's connections stay the parent's."""
    global _lock
    _lock = threading.Lock()
    _remotes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
