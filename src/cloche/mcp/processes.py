"""Programs that run beside the calls of a client: what they write is kept, within bounds, until it is read."""

from __future__ import annotations

import asyncio
from collections import deque

from cloche import errors
from cloche.engine.commands.program import Exited
from cloche.events import Output
from cloche.sdk import seam

KEPT_CHARS = 200_000  # of one process's output that nobody has read: the oldest makes room
MOST = 32  # of one session


class Background:
    """A process, and what it wrote since somebody last asked."""

    def __init__(self, process: seam.Process, command: str):
        self.id = process.id
        self.pid = process.pid
        self.command = command
        self.exited: Exited | None = None
        self.lost = ""  # why nothing more will be known of it, where that is not its end
        self._process = process
        self._chunks: deque[str] = deque()
        self._chars = 0
        self._dropped = 0
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def runs(self) -> bool:
        return self.exited is None and not self.lost

    async def _read(self) -> None:
        try:
            while events := await self._process.next_events():
                for event in events:
                    self._take(event)
        except errors.ClocheError as error:
            self.lost = str(error)
        if self.runs:
            self.exited = self._process.exited or Exited(exit_code=-1, outcome="died")
        self._news.set()

    def _take(self, event: object) -> None:
        if isinstance(event, Exited):
            self.exited = event
        elif isinstance(event, Output):
            self._chunks.append(event.text)
            self._chars += len(event.text)
            while self._chars > KEPT_CHARS and len(self._chunks) > 1:
                gone = len(self._chunks.popleft())
                self._chars -= gone
                self._dropped += gone
        self._news.set()

    async def output(self, wait_seconds: float) -> tuple[str, int]:
        """What it wrote since the last time, both streams as they came, and how many characters were dropped before.

        Waits so long for anything at all, or its end.
        """
        if not self._chunks and self.runs and wait_seconds > 0:
            self._news.clear()
            try:
                async with asyncio.timeout(wait_seconds):
                    await self._news.wait()
            except TimeoutError:
                pass
        text, dropped = "".join(self._chunks), self._dropped
        self._chunks.clear()
        self._chars = self._dropped = 0
        return text, dropped

    async def send(self, text: str, *, close: bool) -> None:
        """Raises InvalidRequest where it does not read its stdin any more."""
        if text:
            await self._process.send_stdin(text.encode("utf-8", "surrogateescape"))
        if close:
            self._process.close_stdin()

    def kill(self) -> None:
        if self.runs:
            self._process.kill()

    async def wait(self, seconds: float) -> None:
        """For its end, so long."""
        await asyncio.wait((self._reading,), timeout=seconds)

    def forget(self) -> None:
        """Nobody will ask any more."""
        self._reading.cancel()


class Backgrounds:
    """Those of one session, by their ids."""

    def __init__(self) -> None:
        self._all: dict[str, Background] = {}

    def check_room(self) -> None:
        """Those that ended first make room. Raises InvalidRequest where too many run."""
        if len(self._all) >= MOST:
            ended = next((id for id, each in self._all.items() if not each.runs), None)
            if ended is None:
                raise errors.InvalidRequest(f"{MOST} processes run in the background: kill one with kill_process")
            self._all.pop(ended).forget()

    def add(self, process: seam.Process, command: str) -> Background:
        found = self._all[process.id] = Background(process, command)
        return found

    def get(self, id: str) -> Background:
        """Raises ProcessNotFound."""
        try:
            return self._all[id]
        except KeyError:
            known = ", ".join(self._all) or "none"
            raise errors.ProcessNotFound(f"no process {id[:100]!r} was started here; there are: {known}") from None

    def list(self) -> list[Background]:
        return [*self._all.values()]

    def clear(self) -> None:
        for each in self._all.values():
            each.forget()
        self._all.clear()
