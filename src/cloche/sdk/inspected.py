"""Looking into a sandbox: variables, what ran in it, and that as a notebook. Parts of the public classes."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Generic, TypeVar

from cloche.model import Variables
from cloche.notebook import History
from cloche.sdk import seam
from cloche.sdk.transport import Transport

PathLike = str | os.PathLike[str]


class InspectedContext:
    """Part of Context."""

    _transport: Transport
    _core: seam.Context

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
    _core: seam.Context

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


C = TypeVar("C", bound=InspectedContext, contravariant=True)
A = TypeVar("A", bound=AsyncInspectedContext, contravariant=True)


class InspectedSandbox(Generic[C]):
    """Part of Sandbox, whose contexts are C."""

    _transport: Transport
    _core: seam.Sandbox

    def _context(self, context: C | str | None) -> InspectedContext:
        raise NotImplementedError

    def variables(self, *, context: C | str | None = None) -> Variables:
        """What a context's names are bound to, the default one's without; see `Context.variables`."""
        return self._context(context).variables()

    def history(self, *, context: C | str | None = None) -> History:
        """The cells that ran in it, or in one context, with their outputs. What is kept is bounded: see `dropped`."""
        return self._transport.call(self._core.history) if context is None else self._context(context).history()

    def export_notebook(self, path: PathLike, *, context: C | str | None = None) -> None:
        """Writes what ran in a context, the default one without, to a file that Jupyter opens."""
        self._context(context).export_notebook(path)


class AsyncInspectedSandbox(Generic[A]):
    """Part of AsyncSandbox, whose contexts are A."""

    _transport: Transport

    @property
    def _core(self) -> seam.Sandbox:
        raise NotImplementedError

    def _context(self, context: A | str | None) -> AsyncInspectedContext:
        raise NotImplementedError

    async def variables(self, *, context: A | str | None = None) -> Variables:
        """What a context's names are bound to, the default one's without; see `Context.variables`."""
        return await self._context(context).variables()

    async def history(self, *, context: A | str | None = None) -> History:
        """The cells that ran in it, or in one context, with their outputs. What is kept is bounded: see `dropped`."""
        if context is not None:
            return await self._context(context).history()
        return await self._transport.acall(self._core.history)

    async def export_notebook(self, path: PathLike, *, context: A | str | None = None) -> None:
        """Writes what ran in a context, the default one without, to a file that Jupyter opens."""
        await self._context(context).export_notebook(path)
