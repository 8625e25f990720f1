"""Going back to a checkpoint, and copying a context. Parts of the public classes."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Generic, TypeVar

from cloche import errors
from cloche.model import Mark, Variables
from cloche.notebook import History
from cloche.sdk import backend
from cloche.sdk.backend import Transport

BranchedT = TypeVar("BranchedT", bound="BranchedContext")
AsyncBranchedT = TypeVar("AsyncBranchedT", bound="AsyncBranchedContext")


class BranchedContext:
    """Part of Context."""

    def __init__(self, transport: Transport, core: backend.Context):
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

    def fork(self: BranchedT, count: int = 1) -> list[BranchedT]:
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

    def __init__(self, transport: Transport, core: backend.Context):
        self._transport = transport
        self._core = core

    async def checkpoint(self) -> Mark:
        """Keeps its state as it is when what runs has ended; see `Context.checkpoint`."""
        return await self._transport.acall(self._core.checkpoint)

    async def rollback(self, mark: Mark | str) -> None:
        """Takes its state back to a checkpoint; see `Context.rollback`."""
        id = id_of(mark)
        await self._transport.acall(lambda: self._core.rollback(id))

    async def fork(self: AsyncBranchedT, count: int = 1) -> list[AsyncBranchedT]:
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


# Looking into a sandbox: variables, what ran in it, and that as a notebook. Parts of the public classes.

PathLike = str | os.PathLike[str]


class InspectedContext:
    """Part of Context."""

    _transport: Transport
    _core: backend.Context

    def variables(self) -> Variables:
        """What its names are bound to, told between two executions, without running any code of the program's.

        A preview is there for what is Python's own, and for arrays and tables; of other objects it names the class.
        Raises InvalidRequest for a language that has none.
        """
        return self._transport.call(self._core.variables)

    def history(self) -> History:
        """The cells that ran in it with their outputs, in their order. What is kept is bounded: see `dropped`."""
        return self._transport.call(self._core.history)

    def export_notebook(self, path: PathLike) -> None:
        """Writes its history to a file that Jupyter opens. Raises OSError where it cannot be written."""
        place = _place(path)
        place.write_bytes(self._transport.call(self._core.notebook))


class AsyncInspectedContext:
    """Part of AsyncContext."""

    _transport: Transport
    _core: backend.Context

    async def variables(self) -> Variables:
        """What its names are bound to; see `Context.variables`."""
        return await self._transport.acall(self._core.variables)

    async def history(self) -> History:
        """The cells that ran in it with their outputs; see `Context.history`."""
        return await self._transport.acall(self._core.history)

    async def export_notebook(self, path: PathLike) -> None:
        """Writes its history to a file that Jupyter opens. Raises OSError where it cannot be written."""
        place = _place(path)
        content = await self._transport.acall(self._core.notebook)
        await asyncio.to_thread(place.write_bytes, content)


def _place(path: PathLike) -> Path:
    """Raises FileNotFoundError that names the directory which is missing."""
    place = Path(path)
    if not (directory := place.absolute().parent).is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(directory))
    return place


InspectedT = TypeVar("InspectedT", bound=InspectedContext, contravariant=True)
AsyncInspectedT = TypeVar("AsyncInspectedT", bound=AsyncInspectedContext, contravariant=True)


class InspectedSandbox(Generic[InspectedT]):
    """Part of Sandbox, whose contexts are C."""

    _transport: Transport
    _core: backend.Sandbox

    def _context(self, context: InspectedT | str | None) -> InspectedContext:
        raise NotImplementedError

    def variables(self, *, context: InspectedT | str | None = None) -> Variables:
        """What a context's names are bound to, the default one's without; see `Context.variables`."""
        return self._context(context).variables()

    def history(self, *, context: InspectedT | str | None = None) -> History:
        """The cells that ran in it, or in one context, with their outputs. What is kept is bounded: see `dropped`."""
        return self._transport.call(self._core.history) if context is None else self._context(context).history()

    def export_notebook(self, path: PathLike, *, context: InspectedT | str | None = None) -> None:
        """Writes what ran in a context, the default one without, to a file that Jupyter opens."""
        self._context(context).export_notebook(path)


class AsyncInspectedSandbox(Generic[AsyncInspectedT]):
    """Part of AsyncSandbox, whose contexts are A."""

    _transport: Transport

    @property
    def _core(self) -> backend.Sandbox:
        raise NotImplementedError

    def _context(self, context: AsyncInspectedT | str | None) -> AsyncInspectedContext:
        raise NotImplementedError

    async def variables(self, *, context: AsyncInspectedT | str | None = None) -> Variables:
        """What a context's names are bound to, the default one's without; see `Context.variables`."""
        return await self._context(context).variables()

    async def history(self, *, context: AsyncInspectedT | str | None = None) -> History:
        """The cells that ran in it, or in one context, with their outputs. What is kept is bounded: see `dropped`."""
        if context is not None:
            return await self._context(context).history()
        return await self._transport.acall(self._core.history)

    async def export_notebook(self, path: PathLike, *, context: AsyncInspectedT | str | None = None) -> None:
        """Writes what ran in a context, the default one without, to a file that Jupyter opens."""
        await self._context(context).export_notebook(path)
