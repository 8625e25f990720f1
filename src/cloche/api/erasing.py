"""Removing all that belongs to one owner, here and on the disk."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from cloche import errors
from cloche.api.traffic import Traffic
from cloche.engine.engine import Engine
from cloche.engine.operations.erase import end_all
from cloche.engine.principal import acting
from cloche.gateway.gateway import Gateway
from cloche.model import Struct
from cloche.store import audit, erasure
from cloche.store.keys import StoredKeys, check_owner
from cloche.telemetry import log

PASSES = 3  # until nothing is found any more
PAUSE_SECONDS = 0.2  # in which what was put a moment ago is written


class Erased(Struct):
    """What was removed of an owner."""

    owner: str
    sandboxes_ended: int
    removed: dict[str, int]  # rows, by table, and `file_bytes`
    left: dict[str, int]  # what other host processes work with: ask them, too
    audit_lines: int  # in which a pseudonym stands for the name now


class Erasing:
    """`end_sessions` ends what a dialect keeps for an owner between requests."""

    def __init__(
        self,
        engine: Engine,
        gateway: Gateway,
        keys: StoredKeys,
        traffic: Traffic,
        end_sessions: Callable[[str], Awaitable[None]],
    ):
        self._end_sessions = end_sessions
        self._engine = engine
        self._gateway = gateway
        self._keys = keys
        self._traffic = traffic

    def check(self, owner: str) -> None:
        """Raises InvalidRequest for what cannot be an owner, here."""
        if owner != self._engine.config.librechat.jwt.owner:
            check_owner(owner)

    async def erase(self, owner: str, *, forget: bool) -> Erased:
        """Their keys stop first. What cannot be removed can be asked for again. Raises Unavailable.

        With `forget` a pseudonym stands for their name in the audit log.
        """
        admission = self._engine.housing.admission
        admission.shut(owner)
        try:
            return await self._erase(owner, forget)
        except (OSError, sqlite3.Error) as error:
            raise errors.Unavailable(f"not all of {owner!r} could be removed: {error}; do it again") from None
        finally:
            admission.shut_out.end(owner)

    async def pseudonym(self, owner: str) -> str:
        """What stands for them in the audit log, once that has forgotten them. Raises Unavailable."""
        try:
            return audit.pseudonym(owner, await asyncio.to_thread(audit.salt_of, self._audit_directory))
        except OSError as error:
            raise errors.Unavailable(f"the audit log cannot be read: {error.strerror}") from None

    async def _erase(self, owner: str, forget: bool) -> Erased:
        await self._keys.revoke_all(owner)
        await self._traffic.cut_off(owner)
        await self._end_sessions(owner)
        await self._gateway.errands.cancel(owner)
        await self._engine.housing.admission.shut_out.end_work(owner)
        ended = await end_all(self._engine, owner)
        removed: Counter[str] = Counter()
        for _ in range(PASSES):
            await asyncio.sleep(PAUSE_SECONDS)
            found = await self._remove(owner)
            removed.update(found)
            if not found:
                break
        await self._keys.try_refresh()
        log.forget(owner)
        log.info("owner.erased", rows=sum(removed.values()) - removed["file_bytes"], bytes=removed["file_bytes"])
        lines = await self._rename(owner) if forget else 0
        left = await self._left(owner)
        told, who = owner, acting()
        if forget:
            told = await self.pseudonym(owner)
            who = msgspec.structs.replace(who, owner=told) if who is not None and who.owner == owner else who
        self._engine.trail.note("owner.erased", told, bytes=removed["file_bytes"], who=who)
        return Erased(owner=owner, sandboxes_ended=ended, removed=removed, left=left, audit_lines=lines)

    async def _remove(self, owner: str) -> dict[str, int]:
        shelf, data_dir = self._gateway.shelf, Path(self._engine.config.data_dir)
        shelf.steps.flush()
        shelf.responses.flush()
        await self._engine.records.list(owner)  # after all that was put
        others = await self._others(owner)
        removed = await shelf.database.do(lambda db: erasure.erase(db, data_dir, owner, others))
        shelf.database.scrub()
        return removed

    async def _left(self, owner: str) -> dict[str, int]:
        others = await self._others(owner)
        return await self._gateway.shelf.database.do(lambda db: erasure.left(db, owner, others))

    async def _others(self, owner: str) -> list[str]:
        """The other host processes that run, and have something of theirs."""
        instance = self._engine.instance
        known = await self._gateway.shelf.database.do(lambda db: erasure.instances(db, owner))
        return [name for name in known if name != instance.name and instance.is_live(name)]

    async def _rename(self, owner: str) -> int:
        await self._engine.trail.flushed()
        return await asyncio.to_thread(audit.forget, self._audit_directory, owner)

    @property
    def _audit_directory(self) -> Path:
        return Path(self._engine.config.data_dir, "audit")
