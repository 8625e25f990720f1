"""What is behind the public classes: an engine in this process, or a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from cloche import errors
from cloche.model import SandboxInfo, SandboxSpec
from cloche.sdk.seam import Runs, Sandbox, Snapshots, Volumes

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]

URL_VARIABLE = "CLOCHE_URL"
KEY_VARIABLE = "CLOCHE_API_KEY"


class Transport(Protocol):
    """Runs work where the sandboxes are. Safe from any thread; every method raises UsedAfterFork in a forked child."""

    @property
    def usable(self) -> bool:
        """Whether this process may use it: it was not inherited by a fork, and not closed."""

    def call(self, work: Work[T]) -> T:
        """Does the work and waits for it. KeyboardInterrupt cancels it."""

    async def acall(self, work: Work[T]) -> T:
        """The same from a task of any event loop; cancelling the task cancels the work."""

    def spawn(self, work: Work[object]) -> None:
        """Does the work, some time; nobody waits for it."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """As `Engine.create`. To be called within work."""

    async def connect(self, id: str, timeout_seconds: float | None = None) -> Sandbox:
        """As `Engine.resume`. To be called within work."""

    async def list(self) -> list[SandboxInfo]:
        """Those that run, and those that are paused. To be called within work."""

    @property
    def runs(self) -> Runs:
        """To be used within work."""

    @property
    def snapshots(self) -> Snapshots:
        """To be used within work."""

    @property
    def volumes(self) -> Volumes:
        """To be used within work."""


chosen: Transport | None = None
"""Wins over the environment: see `cloche.sdk.embedded.using`."""


def transport_to(url: str | None, api_key: str | None) -> Transport:
    """The server at `url`, or at CLOCHE_URL; without either, the engine of this process, which is started if need be.

    Raises InvalidRequest for what is no address, and for a key without a server: quietly running here what was meant
    for a server would be worse.
    """
    if chosen is not None and chosen.usable and not url:
        return chosen
    address = url or os.environ.get(URL_VARIABLE)
    if address:
        from cloche.sdk.remote import remote

        return remote(address, api_key or os.environ.get(KEY_VARIABLE) or "")
    if api_key:
        raise errors.InvalidRequest(f"api_key is for a server: say which with url, or {URL_VARIABLE}")
    from cloche.sdk.embedded import embedded

    return embedded()
