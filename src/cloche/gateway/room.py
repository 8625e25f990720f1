"""How much is kept of containers' files: of one file, one container, one owner."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator

from cloche import errors
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import GIB, MIB
from cloche.store.files import StoredContainerFiles

MAX_KEPT_FILE_BYTES = 128 * MIB
MAX_KEPT_BYTES = 512 * MIB  # of one container
MAX_OWNER_BYTES = 32 * GIB


class Room:
    """What is being copied counts like what is kept: many copies at once find no more room than one after another."""

    def __init__(self, rows: StoredContainerFiles):
        self._rows = rows
        self._of_owner: Counter[str] = Counter()  # bytes that are being copied
        self._of_sandbox: Counter[str] = Counter()

    async def take(self, sandbox: Sandbox, size: int, *, instead_of: str | None = None) -> bool:
        """Whether there is room; then it is taken until `release`. `instead_of` is the id of what is replaced."""
        if not 0 <= size <= MAX_KEPT_FILE_BYTES:  # a sandbox says what it likes
            return False
        with contextlib.ExitStack() as taken:
            self._add(sandbox, size)  # before looking: somebody else may ask meanwhile
            taken.callback(self.release, sandbox, size)
            owner = sandbox.spec.owner
            of_owner, of_sandbox = await self._rows.kept_bytes(owner, sandbox.id, without=instead_of)
            if of_owner + self._of_owner[owner] > MAX_OWNER_BYTES or not await self._may(owner, size):
                return False
            if of_sandbox + self._of_sandbox[sandbox.id] > MAX_KEPT_BYTES:
                return False
            taken.pop_all()
        return True

    def release(self, sandbox: Sandbox, size: int) -> None:
        self._add(sandbox, -size)

    @contextlib.asynccontextmanager
    async def taking(self, sandbox: Sandbox, size: int) -> AsyncGenerator[bool, None]:
        """Whether there is room; it is taken within the block."""
        fits = await self.take(sandbox, size)
        try:
            yield fits
        finally:
            if fits:
                self.release(sandbox, size)

    async def has_for_link(self, sandbox: Sandbox, size: int) -> bool:
        """A link takes no room, until the file is deleted that it is of."""
        of_owner, _ = await self._rows.kept_bytes(sandbox.spec.owner, sandbox.id)
        return of_owner + size <= MAX_OWNER_BYTES

    async def _may(self, owner: str, size: int) -> bool:
        try:
            await self._rows.allow(owner, size)
        except errors.QuotaExceeded:
            return False
        return True

    def _add(self, sandbox: Sandbox, size: int) -> None:
        for counter, key in ((self._of_owner, sandbox.spec.owner), (self._of_sandbox, sandbox.id)):
            counter[key] += size
            if not counter[key]:
                del counter[key]
