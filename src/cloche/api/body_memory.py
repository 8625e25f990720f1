"""The memory that bodies of requests take: one bound for all bodies that are held whole, from their first byte.

Small bodies are not counted, so requests with them go on while large ones wait. What a request has taken it gives back
at its end, as a handler holds what was decoded for as long as it likes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from cloche import errors
from cloche.api.auth import request_owner
from cloche.json_text import SMALL_BYTES
from cloche.model import MIB

HELD_BYTES = 256 * MIB  # of all bodies; one owner has half of it at most
WAIT_SECONDS = 5.0  # for others to end
BODY_MEMORY_STATE = "body_memory"  # in a request's state: the server's BodyMemory
_SHARE_STATE = "body_share"


class BodyMemory:
    """The bound of a whole server."""

    def __init__(self, bytes: int = HELD_BYTES, wait_seconds: float = WAIT_SECONDS):
        self.wait_seconds = wait_seconds
        self._bytes = bytes
        self._held: Counter[str] = Counter()  # by owner; "": by those whose owner is not known
        self._freed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    async def take(self, owner: str, more: int) -> None:
        """Waits until there is room for so many bytes more. Raises Busy if there is none for too long."""
        try:
            async with asyncio.timeout(self.wait_seconds):
                while self._held[owner] + more > self._bytes / 2 or self.held_bytes + more > self._bytes:
                    freed = self._freed
                    await freed.wait()
        except TimeoutError:
            reason = "the bodies of other requests take all the memory that there is for them"
            raise errors.Busy(f"{reason}: try again in a moment", retry_after_seconds=self.wait_seconds) from None
        finally:
            self._forget_empty(owner)
        self._held[owner] += more

    def give_back(self, owner: str, bytes: int) -> None:
        self._held[owner] -= bytes
        self._forget_empty(owner)
        self._freed.set()
        self._freed = asyncio.Event()

    def _forget_empty(self, owner: str) -> None:
        if not self._held[owner]:
            del self._held[owner]


class BodyShare:
    """The memory of one request's body."""

    def __init__(self, memory: BodyMemory, owner: str):
        self._memory = memory
        self._owner = owner
        self._bytes = 0

    async def hold(self, bytes: int) -> None:
        """Holds so many bytes in all: more than before, or fewer. Waits, and raises, as `BodyMemory.take`."""
        wanted = bytes if bytes > SMALL_BYTES else 0
        if wanted > self._bytes:
            await self._memory.take(self._owner, wanted - self._bytes)
        elif wanted < self._bytes:
            self._memory.give_back(self._owner, self._bytes - wanted)
        self._bytes = wanted

    def end(self) -> None:
        if self._bytes:
            self._memory.give_back(self._owner, self._bytes)
        self._bytes = 0


async def hold_body(state: MutableMapping[str, Any], bytes: int) -> None:
    """Counts the body of the request with this state. Does nothing for small ones, and where no memory is counted."""
    share = state.get(_SHARE_STATE)
    if share is None:
        if bytes <= SMALL_BYTES or (memory := state.get(BODY_MEMORY_STATE)) is None:
            return
        share = state[_SHARE_STATE] = BodyShare(memory, request_owner(state) or "")
    await share.hold(bytes)


def end_body(state: MutableMapping[str, Any]) -> None:
    """Gives back the memory of a request that has ended."""
    share = state.pop(_SHARE_STATE, None)
    if share is not None:
        share.end()
