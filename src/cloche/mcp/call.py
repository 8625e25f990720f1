"""One call of a tool: its context, its progress reports, and its result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from cloche.mcp.content import ContentBlock, escape_surrogates
from cloche.mcp.schemas import StructuredOutput, ToolArguments, to_json_values
from cloche.mcp.workspace import McpWorkspace

PROGRESS_INTERVAL_SECONDS = 0.1  # between two notifications of progress
MAX_MESSAGE_CHARS = 2_000  # of one
MAX_ANSWER_BYTES = 16 << 20  # of one answer, half of it for pictures and documents


class ClientChannel(Protocol):
    """The channel to the client while its call is answered."""

    @property
    def wants_progress(self) -> bool: ...
    @property
    def knows_links(self) -> bool:
        """Whether the client's protocol version has links to resources."""

    @property
    def most_bytes(self) -> int:
        """The maximum size of a response over the current transport."""

    async def progress(self, count: int, message: str) -> None: ...
    async def resources_changed(self) -> None: ...


class McpToolResult:
    """The result of a tool."""

    def __init__(self, *content: ContentBlock, given: StructuredOutput | None = None, failed: bool = False):
        self.content = [*content]
        self.given = given
        self.failed = failed

    def encode(self) -> dict[str, Any]:
        found: dict[str, Any] = {"content": self.content}
        if self.given is not None:
            found["structuredContent"] = to_json_values(self.given)
        if self.failed:
            found["isError"] = True
        return found


class McpToolCall(NamedTuple):
    workspace: McpWorkspace
    told: ClientChannel

    @contextlib.asynccontextmanager
    async def progress_report(self) -> AsyncIterator[ProgressReport]:
        """A report; its text is sent to the client in pieces, all of it before this ends."""
        report = ProgressReport(self.told)
        try:
            yield report
            await report.finish()
        finally:
            report.close()


class ProgressReport:
    """Output on its way to the client. Output faster than the interval is sent in fewer pieces, and cut."""

    def __init__(self, told: ClientChannel):
        self._told = told
        self._wanted = told.wants_progress
        self._waiting = ""
        self._count = 0
        self._news = asyncio.Event()
        self._sending = asyncio.create_task(self._send_all())

    def put(self, text: str) -> None:
        if not self._wanted:
            return
        self._waiting = (self._waiting + escape_surrogates(text[-MAX_MESSAGE_CHARS:]))[-MAX_MESSAGE_CHARS:]
        self._news.set()

    async def _send_all(self) -> None:
        while True:
            await self._news.wait()
            await self._send_pending()
            await asyncio.sleep(PROGRESS_INTERVAL_SECONDS)

    async def _send_pending(self) -> None:
        self._news.clear()
        text, self._waiting = self._waiting, ""
        if text:
            self._count += 1
            await self._told.progress(self._count, text)

    async def finish(self) -> None:
        """Sends the remaining text."""
        self.close()
        await asyncio.gather(self._sending, return_exceptions=True)
        await self._send_pending()

    def close(self) -> None:
        self._sending.cancel()


class McpTool(NamedTuple):
    name: str
    title: str
    description: str  # for a model
    takes: type[ToolArguments]
    call: Callable[[McpToolCall, Any], Awaitable[McpToolResult]]
    gives: type[StructuredOutput] | None = None
    reads_only: bool = False
    destroys: bool = False
    repeats: bool = False  # whether doing it twice is the same as once
