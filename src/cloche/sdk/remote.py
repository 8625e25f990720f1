"""The transports to servers, all on one thread, which is started at first use."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

from cloche import errors
from cloche.model import SandboxInfo, SandboxSpec
from cloche.sdk import remote_sandbox
from cloche.sdk.backend import T, Work
from cloche.sdk.loop_thread import LoopThread
from cloche.sdk.remote_sandbox import RemoteRuns, RemoteSandbox, RemoteSnapshots, RemoteVolumes
from cloche.sdk.remote_server import ServerClient

KEPT_SERVERS = 16  # servers to which connections stay open without a sandbox in use

_CLOSED = "the connection to the server was closed"


class RemoteTransport:
    """One server, used with one key. Implements Transport. Connections are closed when no reference to it is
    left.
    """

    def __init__(self, url: str, api_key: str):
        """Raises InvalidRequest for an invalid address."""
        self._server = ServerClient(url, api_key)
        self._thread = _shared_thread()
        self._closing = weakref.finalize(self, self._thread.spawn, self._server.aclose)
        self._closing.atexit = False

    @property
    def usable(self) -> bool:
        return self._thread.usable and self._closing.alive

    def call(self, work: Work[T]) -> T:
        self._check_open()
        return self._thread.call(work)

    async def acall(self, work: Work[T]) -> T:
        self._check_open()
        return await self._thread.acall(work)

    def spawn(self, work: Work[object]) -> None:
        if self.usable:
            self._thread.spawn(work)

    async def create(self, spec: SandboxSpec) -> RemoteSandbox:
        return await remote_sandbox.create_sandbox(self._server, spec)

    async def connect(self, id: str, timeout_seconds: float | None = None) -> RemoteSandbox:
        return await remote_sandbox.connect_sandbox(self._server, id, timeout_seconds)

    async def list(self) -> list[SandboxInfo]:
        found: list[SandboxInfo] = await self._server.ask("GET", "/sandboxes", list[SandboxInfo])
        return found

    @property
    def runs(self) -> RemoteRuns:
        return RemoteRuns(self._server)

    @property
    def snapshots(self) -> RemoteSnapshots:
        return RemoteSnapshots(self._server)

    @property
    def volumes(self) -> RemoteVolumes:
        return RemoteVolumes(self._server)

    def close(self) -> None:
        """Closes all connections. Sandboxes live on. Harmless when closed."""
        if self.usable:
            self._closing.detach()
            self._thread.call(self._server.aclose)

    def _check_open(self) -> None:
        if not self._closing.alive and self._thread.usable:
            raise errors.ShuttingDown(_CLOSED)


_lock = threading.RLock()
_thread: LoopThread | None = None
_remotes: weakref.WeakValueDictionary[tuple[str, str], RemoteTransport] = weakref.WeakValueDictionary()
_recent: deque[RemoteTransport] = deque(maxlen=KEPT_SERVERS)
_inherited: list[RemoteTransport] = []


def remote_transport(url: str, api_key: str) -> RemoteTransport:
    """This process's connection to that server. Raises InvalidRequest for an invalid address."""
    with _lock:
        known = _remotes.get((url, api_key))
        if known is None or not known.usable:
            known = _remotes[url, api_key] = RemoteTransport(url, api_key)
        if known in _recent:
            _recent.remove(known)
        _recent.append(known)
        return known


def _shared_thread() -> LoopThread:
    global _thread
    with _lock:
        if _thread is None or not _thread.usable:
            _thread = LoopThread("cloche-remote", _CLOSED)
        return _thread


def _after_fork_in_child() -> None:
    """The parent's connections stay the parent's: not even closed, for the descriptor that polls them is shared."""
    global _lock
    _lock = threading.RLock()
    _inherited.extend(_remotes.values())
    _remotes.clear()
    _recent.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
