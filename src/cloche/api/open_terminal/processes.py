"""Commands, terminals and notebooks of a workspace, as the server remembers them."""

from __future__ import annotations

import asyncio
import codecs
import secrets
import signal
import time
from collections import deque
from typing import Any

from cloche import errors
from cloche.api.dialect import Json, format_timestamp
from cloche.engine.commands.jobs import CommandJob, JobListener, OutputChunk
from cloche.events import Exited

REMEMBERED_SECONDS = 300.0  # after its end
MAX_PROCESSES = 64  # of one workspace
MAX_LOG_BYTES = 1 << 20  # of one process: the oldest output makes room
ENTRY_BYTES = 64  # of memory, beside the text
MAX_TERMINALS = 16
MAX_NOTEBOOKS = 16
RECENT_BYTES = 1 << 16  # of a terminal that is connected
TERMINATE_SECONDS = 3.0  # for a process to end by itself
TERMINAL_SIZE = (24, 80)
_decoder = codecs.getincrementaldecoder("utf-8")


class TerminalProcess:
    """A command with its output, in entries that are numbered from 0."""

    def __init__(self, job: CommandJob, command: str, chat: str):
        self.id = time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(6)
        self.job = job
        self.command = command
        self.chat = chat
        self.killed = False
        self.ended_at: float | None = None
        self._entries: deque[str] = deque()
        self._kept_bytes = 0
        self._dropped = 0
        self.following = asyncio.ensure_future(self._follow(job.listen()))

    async def wait(self, seconds: float) -> None:
        """Returns at its end, and after that time at most."""
        await asyncio.wait((self.following,), timeout=seconds)

    async def kill(self, *, force: bool) -> None:
        """Ends it, and waits for a while."""
        if self.ended_at is None:
            self.killed = True
            self.job.kill(signal.SIGKILL if force else signal.SIGTERM)
            await self.wait(TERMINATE_SECONDS)

    def describe(self) -> Json:
        """Without the output."""
        exited = self.job.exited
        status = "killed" if self.killed else "running" if self.ended_at is None else "done"
        code = None if exited is None else -exited.signal if exited.signal else exited.exit_code
        return {"id": self.id, "command": self.command, "status": status, "exit_code": code, "log_path": None}

    def output_since(self, offset: int, tail: int | None) -> Json:
        """The entries from `offset` on, of them the last `tail`."""
        found = list(self._entries)[max(offset - self._dropped, 0) :]
        shown = found[-tail:] if tail else found
        return {
            "output": [{"type": "output", "data": each} for each in shown],
            "next_offset": self._dropped + len(self._entries),
            "truncated": offset < self._dropped or len(shown) < len(found),
        }

    async def _follow(self, listener: JobListener) -> None:
        decoder = _decoder("replace")
        async with listener:
            while events := await listener.next_events():
                for event in events:
                    last = isinstance(event, Exited)
                    self._keep(decoder.decode(event.data if isinstance(event, OutputChunk) else b"", final=last))
        self.ended_at = time.monotonic()

    def _keep(self, text: str) -> None:
        if not text:
            return
        self._entries.append(text)
        self._kept_bytes += len(text) + ENTRY_BYTES
        while self._kept_bytes > MAX_LOG_BYTES and len(self._entries) > 1:
            self._kept_bytes -= len(self._entries.popleft()) + ENTRY_BYTES
            self._dropped += 1


def forget_ended(processes: dict[str, TerminalProcess]) -> None:
    """Removes those that ended a while ago, and makes room for one. Raises Unavailable if too many run."""
    now = time.monotonic()
    for id, each in list(processes.items()):
        if each.ended_at is not None and now - each.ended_at > REMEMBERED_SECONDS:
            del processes[id]
    while len(processes) >= MAX_PROCESSES:
        ended = next((id for id, each in processes.items() if each.ended_at is not None), None)
        if ended is None:
            raise errors.QuotaExceeded(f"{MAX_PROCESSES} commands run in this workspace: end some of them")
        del processes[ended]


def decode_escapes(text: str) -> bytes:
    """The input, with `\\n` and the like as models write them. Raises InvalidRequest."""
    try:
        return text.encode("raw_unicode_escape").decode("unicode_escape").encode()
    except UnicodeError:
        raise errors.InvalidRequest("the input has an escape that is no character") from None


class TerminalSession:
    """A shell in a terminal. What it prints before its client comes is kept as a terminal keeps it."""

    def __init__(self, job: CommandJob, chat: str):
        self.id = secrets.token_hex(8)
        self.job = job
        self.chat = chat
        self.listener = job.listen()
        self.connected = False
        self.recent = bytearray()
        self._created_at = time.time()

    @property
    def alive(self) -> bool:
        return self.job.exited is None

    def describe(self) -> Json:
        return {"id": self.id, "created_at": format_timestamp(self._created_at), "pid": self.job.pid}

    def note_output(self, data: bytes) -> None:
        self.recent += data
        del self.recent[:-RECENT_BYTES]

    def end(self) -> None:
        self.listener.close()
        if self.alive:
            self.job.kill(signal.SIGHUP)
            asyncio.get_running_loop().call_later(TERMINATE_SECONDS, self.job.kill)


class NotebookSession:
    """A notebook's file, and the kernel that runs its cells."""

    def __init__(self, path: str, kernel: str, context: str):
        self.id = secrets.token_hex(8)
        self.path = path
        self.kernel = kernel
        self.context = context
        self.busy = False

    def describe(self) -> Json:
        status: Any = "busy" if self.busy else "ready"
        return {"id": self.id, "path": self.path, "kernel": self.kernel, "status": status}
