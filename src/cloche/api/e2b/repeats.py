"""`Idempotency-Key`: a creation that is sent twice makes one sandbox."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from cloche import errors
from cloche.api.e2b.replies import Conflict
from cloche.api.e2b.residents import Resident

MAX_KEY = 255


class _Made(NamedTuple):
    digest: bytes
    creation: asyncio.Task[Resident]

    @property
    def counts(self) -> bool:
        """Whether a repetition gets this one: while it is being made, and as long as it has its cell."""
        if not self.creation.done():
            return True
        return (
            not self.creation.cancelled()
            and self.creation.exception() is None
            and self.creation.result().sandbox.ending is None
        )


class Repeats:
    """The creations of this process that carried a key, as long as their sandboxes live."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], _Made] = {}

    async def once(self, owner: str, key: str, asked: bytes, make: Callable[[], Awaitable[Resident]]) -> Resident:
        """What `make` gives, or gave before for that key. One that is under way is waited for, also if it fails.

        Raises Conflict where something else was asked for under that key, and what `make` raises.
        """
        _check(key)
        self._forget_ended()
        digest = hashlib.sha256(asked).digest()
        made = self._made.get((owner, key))
        if made is None:
            made = self._made[owner, key] = _Made(digest, asyncio.ensure_future(_run(make)))
        elif made.digest != digest:
            raise Conflict("Idempotency-Key: it was used for another request; choose a new key for each sandbox")
        return await asyncio.shield(made.creation)  # the client that leaves does not take it from the others

    async def end(self, owner: str) -> None:
        """What is being made for that owner is not, and nothing is known of what was."""
        theirs = [self._made.pop(each).creation for each in list(self._made) if each[0] == owner]
        for creation in theirs:
            creation.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)

    def _forget_ended(self) -> None:
        for each in [each for each, made in self._made.items() if not made.counts]:
            del self._made[each]


async def _run(make: Callable[[], Awaitable[Resident]]) -> Resident:
    return await make()


def _check(key: str) -> None:
    if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        raise errors.InvalidRequest(f"Idempotency-Key: it must have 1 to {MAX_KEY} characters of ASCII")
