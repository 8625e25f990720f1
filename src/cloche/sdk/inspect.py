"""Checkpoints and forks of a context: mixins of the public classes."""

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

CheckpointsT = TypeVar("CheckpointsT", bound="ContextCheckpoints")
AsyncCheckpointsT = TypeVar("AsyncCheckpointsT", bound="AsyncContextCheckpoints")


class ContextCheckpoints:
    """The checkpoint methods of Context."""

    def __init__(self, transport: Transport, core: backend.BackendContext):
        self._transport = transport
        self._core = core

    def checkpoint(self) -> Mark:
        """Saves its state (variables, imports, everything in memory) as it is when the running execution has ended.

        Raises NotCopyable for a program with threads, connections or child processes, and InvalidRequest where there
        are 32 already. Files are not part of it.
        """
        return self._transport.call(self._core.checkpoint)

    def rollback(self, mark: Mark | str) -> None:
        """Takes its state back to a checkpoint, which stays. Processes that it has started since are killed.

        Files stay as they are. Raises CheckpointNotFound.
        """
        id = checkpoint_id(mark)
        self._transport.call(lambda: self._core.rollback(id))

    def fork(self: CheckpointsT, count: int = 1) -> list[CheckpointsT]:
        """New contexts of its sandbox that have its state; from then on each has its own. Raises as `checkpoint`."""
        made = self._transport.call(lambda: self._core.fork(count))
        return [type(self)(self._transport, core) for core in made]

    def checkpoints(self) -> list[Mark]:
        """Its checkpoints, the oldest first."""
        return self._transport.call(self._core.checkpoints)

    def forget(self, mark: Mark | str) -> None:
        """Lets go of a checkpoint, and of the memory that it holds. Raises CheckpointNotFound."""
        id = checkpoint_id(mark)
        self._transport.call(lambda: self._core.forget(id))


class AsyncContextCheckpoints:
    """The checkpoint methods of AsyncContext."""

    def __init__(self, transport: Transport, core: backend.BackendContext):
        self._transport = transport
        self._core = core

    async def checkpoint(self) -> Mark:
        """Saves its state as it is when the running execution has ended; see `Context.checkpoint`."""
        return await self._transport.acall(self._core.checkpoint)

    async def rollback(self, mark: Mark | str) -> None:
        """Takes its state back to a checkpoint; see `Context.rollback`."""
        id = checkpoint_id(mark)
        await self._transport.acall(lambda: self._core.rollback(id))

    async def fork(self: AsyncCheckpointsT, count: int = 1) -> list[AsyncCheckpointsT]:
        """New contexts of its sandbox that have its state; see `Context.fork`."""
        made = await self._transport.acall(lambda: self._core.fork(count))
        return [type(self)(self._transport, core) for core in made]

    async def checkpoints(self) -> list[Mark]:
        """Its checkpoints, the oldest first."""
        return await self._transport.acall(self._core.checkpoints)

    async def forget(self, mark: Mark | str) -> None:
        """Lets go of a checkpoint, and of the memory that it holds. Raises CheckpointNotFound."""
        id = checkpoint_id(mark)
        await self._transport.acall(lambda: self._core.forget(id))


def checkpoint_id(mark: Mark | str) -> str:
    """The id of a checkpoint. Raises InvalidRequest for a value that cannot name one."""
    id = mark.id if isinstance(mark, Mark) else mark
    if not isinstance(id, str) or not id:
        raise errors.InvalidRequest(f"expected a checkpoint or its id, not {mark!r}")
    return id


# Inspection of a sandbox: its variables, its history, and the history as a notebook. Mixins of the public
# classes.

PathLike = str | os.PathLike[str]


class ContextInspection:
    """The inspection methods of Context."""

    _transport: Transport
    _core: backend.BackendContext

    def variables(self) -> Variables:
        """The names in its namespace and their values, read between two executions, without running the program's
        code.

        Values of Python's own types, arrays and tables have a preview; other objects have the name of their class.
        Raises InvalidRequest for a language that has none.
        """
        return self._transport.call(self._core.variables)

    def history(self) -> History:
        """The cells that ran in it with their outputs, in their order. The history is bounded: see `dropped`."""
        return self._transport.call(self._core.history)

    def export_notebook(self, path: PathLike) -> None:
        """Writes its history to a file that Jupyter opens. Raises OSError where it cannot be written."""
        place = _writable_path(path)
        place.write_bytes(self._transport.call(self._core.notebook))


class AsyncContextInspection:
    """The inspection methods of AsyncContext."""

    _transport: Transport
    _core: backend.BackendContext

    async def variables(self) -> Variables:
        """The names in its namespace and their values; see `Context.variables`."""
        return await self._transport.acall(self._core.variables)

    async def history(self) -> History:
        """The cells that ran in it with their outputs; see `Context.history`."""
        return await self._transport.acall(self._core.history)

    async def export_notebook(self, path: PathLike) -> None:
        """Writes its history to a file that Jupyter opens. Raises OSError where it cannot be written."""
        place = _writable_path(path)
        content = await self._transport.acall(self._core.notebook)
        await asyncio.to_thread(place.write_bytes, content)


def _writable_path(path: PathLike) -> Path:
    """Raises FileNotFoundError that names the directory which is missing."""
    place = Path(path)
    if not (directory := place.absolute().parent).is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(directory))
    return place


InspectedT = TypeVar("InspectedT", bound=ContextInspection, contravariant=True)
AsyncInspectedT = TypeVar("AsyncInspectedT", bound=AsyncContextInspection, contravariant=True)


class SandboxInspection(Generic[InspectedT]):
    """The inspection methods of Sandbox; C is the class of its contexts."""

    _transport: Transport
    _core: backend.BackendSandbox

    def _choose_context(self, context: InspectedT | str | None) -> ContextInspection:
        raise NotImplementedError

    def variables(self, *, context: InspectedT | str | None = None) -> Variables:
        """The variables of a context, by default of the default one; see `Context.variables`."""
        return self._choose_context(context).variables()

    def history(self, *, context: InspectedT | str | None = None) -> History:
        """The cells that ran in it, or in one context, with their outputs. The history is bounded: see `dropped`."""
        return self._transport.call(self._core.history) if context is None else self._choose_context(context).history()

    def export_notebook(self, path: PathLike, *, context: InspectedT | str | None = None) -> None:
        """Writes the history of a context, by default of the default one, to a file that Jupyter opens."""
        self._choose_context(context).export_notebook(path)


class AsyncSandboxInspection(Generic[AsyncInspectedT]):
    """The inspection methods of AsyncSandbox; A is the class of its contexts."""

    _transport: Transport

    @property
    def _core(self) -> backend.BackendSandbox:
        raise NotImplementedError

    def _choose_context(self, context: AsyncInspectedT | str | None) -> AsyncContextInspection:
        raise NotImplementedError

    async def variables(self, *, context: AsyncInspectedT | str | None = None) -> Variables:
        """The variables of a context, by default of the default one; see `Context.variables`."""
        return await self._choose_context(context).variables()

    async def history(self, *, context: AsyncInspectedT | str | None = None) -> History:
        """The cells that ran in it, or in one context, with their outputs. The history is bounded: see `dropped`."""
        if context is not None:
            return await self._choose_context(context).history()
        return await self._transport.acall(self._core.history)

    async def export_notebook(self, path: PathLike, *, context: AsyncInspectedT | str | None = None) -> None:
        """Writes the history of a context, by default of the default one, to a file that Jupyter opens."""
        await self._choose_context(context).export_notebook(path)
