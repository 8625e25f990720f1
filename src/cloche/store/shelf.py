"""What the gateway keeps: files, responses, conversations, and records of what requests did."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from types import TracebackType

from cloche.store import code_files, container_files, files
from cloche.store.allowance import Allow
from cloche.store.blobs import Blobs
from cloche.store.chat_calls import ChatCalls
from cloche.store.code_sessions import StoredCodeSessions
from cloche.store.conversations import Conversations
from cloche.store.database import Database
from cloche.store.past import surely_past
from cloche.store.responses import Responses
from cloche.store.steps import Steps
from cloche.telemetry import log

PRUNE_SECONDS = 3600.0
CODE_HOURS = 24.0


class Shelf:
    """Use as `async with Shelf(data_dir, days) as shelf`. What is older than so many days is removed, every hour.

    Files of LibreChat's code API go after so many hours without use.
    """

    def __init__(self, data_dir: Path, days: float, code_hours: float = CODE_HOURS):
        self._kept_seconds = days * 86400.0
        self.database = self._database = Database(data_dir / "store.sqlite3")
        self._pruning: asyncio.Task[None] | None = None
        self.blobs = Blobs(data_dir / "blobs")
        self.files = files.StoredFiles(self._database, self.blobs, self._kept_seconds)
        self.container_files = container_files.StoredContainerFiles(self._database, self.blobs)
        self.code_files = code_files.StoredCodeFiles(self._database, self.blobs, code_hours * 3600.0)
        self.code_sessions = StoredCodeSessions(self._database, code_hours * 3600.0)
        self.steps = Steps(self._database)
        self.responses = Responses(self._database)
        self.conversations = Conversations(self._database)
        self.chat_calls = ChatCalls(self._database)

    def guard(self, allow: Allow) -> None:
        """From now on it is asked before anything of an owner's is kept."""
        for each in (self.files, self.container_files, self.code_files, self.responses, self.conversations):
            each.allow = allow

    async def __aenter__(self) -> Shelf:
        await self._database.open()
        self._pruning = asyncio.create_task(self._prune())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pruning is not None:
            self._pruning.cancel()
        self.steps.flush()
        self.responses.flush()
        await self._database.aclose()

    async def _prune(self) -> None:
        while True:
            self.steps.prune()
            self.responses.prune(surely_past() - self._kept_seconds)
            self.conversations.prune(surely_past() - self._kept_seconds)
            self.chat_calls.prune()
            await self.prune_files()
            self._database.scrub()
            await asyncio.sleep(PRUNE_SECONDS)

    async def prune_files(self) -> None:
        """Removes files whose time is over, and contents that no file has."""
        try:
            await self.files.prune()
            await self.container_files.prune(surely_past() - self._kept_seconds)
            await self.code_files.prune()
            prefixes = (files.PREFIX, container_files.PREFIX, code_files.PREFIX)
            await self.blobs.remove_orphans(prefixes, self._known_contents)
        except (OSError, sqlite3.Error) as error:
            log.error("files.not_pruned", error=type(error).__name__)

    async def _known_contents(self, ids: list[str]) -> set[str]:
        return await self._database.do(lambda db: _known(db, ids))


def _known(db: sqlite3.Connection, ids: list[str]) -> set[str]:
    query = """SELECT 1 FROM files WHERE id = ? UNION ALL SELECT 1 FROM container_files WHERE id = ? AND kept
        UNION ALL SELECT 1 FROM code_files WHERE id = ? LIMIT 1"""
    asked = ((id, (id, id, id.removeprefix(code_files.PREFIX))) for id in ids)
    return {id for id, values in asked if db.execute(query, values).fetchone() is not None}
