"""The seam between the public classes and what is behind them: an engine in this process or, later, a server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from cloche.engine.sandbox import Sandbox as Core
from cloche.model import SandboxSpec

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]


class Transport(Protocol):
    """Runs work where the sandboxes are. Safe from any thread; every method raises UsedAfterFork in a forked child."""

    def call(self, work: Work[T]) -> T:
        """Does the work and waits for it. KeyboardInterrupt cancels it."""

    async def acall(self, work: Work[T]) -> T:
        """The same from a task of any event loop; cancelling the task cancels the work."""

    def spawn(self, work: Work[object]) -> None:
        """Does the work, some time; nobody waits for it."""

    async def create(self, spec: SandboxSpec) -> Core:
        """As `Engine.create`. To be called within work."""

    async def connect(self, id: str, owner: str) -> Core:
        """As `Engine.get`. To be called within work."""
