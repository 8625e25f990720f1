"""Files on their way into the store: they take room before they are known there, also where many come at once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator

from cloche import errors
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Refusal
from cloche.store.librechat import StoredCodeFiles

CHECK_BYTES = 4 << 20  # what one request brings is looked at whenever so much more of it has come
NO_ROOM = "storage_limit_exceeded"

_Who = tuple[str, ...]


class Arriving:
    """What all requests are bringing just now."""

    def __init__(self, files: StoredCodeFiles):
        self._files = files
        self._bytes: Counter[_Who] = Counter()
        self._count: Counter[_Who] = Counter()

    def reservation(self, caller: Caller) -> Reservation:
        return Reservation(self, caller)

    def add(self, caller: Caller, *, files: int = 0, bytes: int = 0) -> None:
        """They can be negative."""
        for who in (_owner(caller), _user(caller)):
            self._bytes[who] += bytes
            self._count[who] += files
            if not self._bytes[who] and not self._count[who]:
                del self._bytes[who], self._count[who]

    async def check(self, caller: Caller) -> None:
        """Raises Refusal (413) if there is no room for all that the owner, or this user of theirs, is bringing."""
        owner, user = _owner(caller), _user(caller)
        try:
            await self._files.check_room(caller.owner, files=max(1, self._count[owner]), bytes=self._bytes[owner])
            if caller.user:
                count, size = max(1, self._count[user]), self._bytes[user]
                await self._files.check_room(caller.owner, caller.tenant, caller.user, files=count, bytes=size)
        except errors.TooLarge as error:
            raise Refusal(413, NO_ROOM, str(error)) from None


class Reservation:
    """The room of one request's files."""

    def __init__(self, arriving: Arriving, caller: Caller):
        self._arriving = arriving
        self._caller = caller
        self._files = 0
        self._bytes = 0
        self._checked_bytes = 0

    async def check(self) -> None:
        """Raises Refusal (413)."""
        self._checked_bytes = self._bytes
        await self._arriving.check(self._caller)

    @contextlib.contextmanager
    def file(self) -> Iterator[None]:
        """One file, as long as it comes. Of one that fails nothing is kept."""
        before = self._bytes
        self._take(files=1)
        try:
            yield
        except BaseException:
            self._take(files=-1, bytes=before - self._bytes)
            raise

    async def taking(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Those for which there is room. Raises Refusal (413) where that ends."""
        async for chunk in chunks:
            self._take(bytes=len(chunk))
            if self._bytes - self._checked_bytes >= CHECK_BYTES:
                await self.check()
            yield chunk

    def release(self) -> None:
        """Its files are known to the store by now, or were dropped."""
        self._take(files=-self._files, bytes=-self._bytes)

    def _take(self, *, files: int = 0, bytes: int = 0) -> None:
        self._files += files
        self._bytes += bytes
        self._checked_bytes = min(self._checked_bytes, self._bytes)
        self._arriving.add(self._caller, files=files, bytes=bytes)


def _owner(caller: Caller) -> _Who:
    return (caller.owner,)


def _user(caller: Caller) -> _Who:
    return caller.owner, caller.tenant, caller.user
