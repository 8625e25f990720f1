"""Sandboxes that clients name: each is made at the first use of its name, and found again by later ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from cloche.engine.engine import Engine
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.sandbox import Sandbox


class NamedSandboxes:
    """Those of one dialect. The name of a sandbox is its note `note_key`, which lasts as long as it is known."""

    def __init__(self, engine: Engine, note_key: str):
        self._engine = engine
        self._note_key = note_key
        self._creating: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def find(self, owner: str, name: str) -> SandboxHandle | None:
        """The owner's sandbox of that name, running or paused. Raises Gone if it ends meanwhile."""
        known = (each for each in self._engine.known(owner) if each.spec.notes.get(self._note_key) == name)
        record = next((each for each in known if each.state in ("running", "paused")), None)
        return None if record is None else await self._engine.handle(record.id, owner)

    async def find_or_create(self, owner: str, name: str, create: Callable[[], Awaitable[Sandbox]]) -> SandboxHandle:
        """As `find`. `create` makes the sandbox, with its note, once for all requests that come meanwhile."""
        lock = self._creating.setdefault((owner, name), asyncio.Lock())
        async with lock:
            return await self.find(owner, name) or (await create()).handle
