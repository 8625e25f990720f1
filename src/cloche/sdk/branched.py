"""Going back to a checkpoint, and copying a context. Parts of the public classes."""

from __future__ import annotations

from typing import TypeVar

from cloche import errors
from cloche.model import Mark
from cloche.sdk import seam
from cloche.sdk.transport import Transport

C = TypeVar("C", bound="BranchedContext")
A = TypeVar("A", bound="AsyncBranchedContext")


class BranchedContext:
    """Part of Context."""

    def __init__(self, transport: Transport, core: seam.Context):
        self._transport = transport
        self._core = core

    def checkpoint(self) -> Mark:
        """Keeps its state (variables, imports, everything in memory) as it is when what runs has ended.

        Raises NotCopyable for a program with threads, connections or child processes, and InvalidRequest where there
        are 32 already. Files are no part of it.
        """
        return self._transport.call(self._core.checkpoint)

    def rollback(self, mark: Mark | str) -> None:
        """Takes its state back to a checkpoint, which stays. What it has started since is killed.

        Files stay as they are. Raises CheckpointNotFound.
        """
        id = id_of(mark)
        self._transport.call(lambda: self._core.rollback(id))

    def fork(self: C, count: int = 1) -> list[C]:
        """New contexts of its sandbox that have its state; from then on each has its own. Raises as `checkpoint`."""
        made = self._transport.call(lambda: self._core.fork(count))
        return [type(self)(self._transport, core) for core in made]

    def checkpoints(self) -> list[Mark]:
        """Those that it can be taken back to, the oldest first."""
        return self._transport.call(self._core.checkpoints)

    def forget(self, mark: Mark | str) -> None:
        """Lets go of a checkpoint, and of the memory that it holds. Raises CheckpointNotFound."""
        id = id_of(mark)
        self._transport.call(lambda: self._core.forget(id))


class AsyncBranchedContext:
    """Part of AsyncContext."""

    def __init__(self, transport: Transport, core: seam.Context):
        self._transport = transport
        self._core = core

    async def checkpoint(self) -> Mark:
        """Keeps its state as it is when what runs has ended; see `Context.checkpoint`."""
        return await self._transport.acall(self._core.checkpoint)

    async def rollback(self, mark: Mark | str) -> None:
        """Takes its state back to a checkpoint; see `Context.rollback`."""
        id = id_of(mark)
        await self._transport.acall(lambda: self._core.rollback(id))

    async def fork(self: A, count: int = 1) -> list[A]:
        """New contexts of its sandbox that have its state; see `Context.fork`."""
        made = await self._transport.acall(lambda: self._core.fork(count))
        return [type(self)(self._transport, core) for core in made]

    async def checkpoints(self) -> list[Mark]:
        """Those that it can be taken back to, the oldest first."""
        return await self._transport.acall(self._core.checkpoints)

    async def forget(self, mark: Mark | str) -> None:
        """Lets go of a checkpoint, and of the memory that it holds. Raises CheckpointNotFound."""
        id = id_of(mark)
        await self._transport.acall(lambda: self._core.forget(id))


def id_of(mark: Mark | str) -> str:
    """Raises InvalidRequest for what can name none."""
    id = mark.id if isinstance(mark, Mark) else mark
    if not isinstance(id, str) or not id:
        raise errors.InvalidRequest(f"a checkpoint, or its id, is wanted here, not {mark!r}")
    return id
