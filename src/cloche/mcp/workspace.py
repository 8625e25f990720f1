"""The workspace of one MCP session: its sandbox, made at its first use, and its processes.

All ends with the session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

from cloche import errors
from cloche.events import Exited, Output
from cloche.mcp.backend import SandboxBackend
from cloche.mcp.uris import uri_to_path
from cloche.sdk import backend
from cloche.telemetry import log

# Background processes of a session: their output is kept, within bounds, until it is read.

MAX_UNREAD_CHARS = 200_000  # unread output of one process: the oldest is removed first
MAX_PROCESSES = 32  # of one session


class BackgroundProcess:
    """A process, and its output since the last read."""

    def __init__(self, process: backend.BackendProcess, command: str):
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
        self._reading = asyncio.create_task(self._read_events())

    @property
    def runs(self) -> bool:
        return self.exited is None and not self.lost

    async def _read_events(self) -> None:
        try:
            while events := await self._process.next_events():
                for event in events:
                    self._take_event(event)
        except errors.ClocheError as error:
            self.lost = str(error)
        if self.runs:
            self.exited = self._process.exited or Exited(exit_code=-1, outcome="died")
        self._news.set()

    def _take_event(self, event: object) -> None:
        if isinstance(event, Exited):
            self.exited = event
        elif isinstance(event, Output):
            self._chunks.append(event.text)
            self._chars += len(event.text)
            while self._chars > MAX_UNREAD_CHARS and len(self._chunks) > 1:
                gone = len(self._chunks.popleft())
                self._chars -= gone
                self._dropped += gone
        self._news.set()

    async def output(self, wait_seconds: float) -> tuple[str, int]:
        """Returns the new output, both streams in order, and how many characters before it were dropped.

        Waits up to `wait_seconds` for any output, or for its end.
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
        """Waits for its end, up to so many seconds."""
        await asyncio.wait((self._reading,), timeout=seconds)

    def forget(self) -> None:
        """Stops reading: there will be no more reads."""
        self._reading.cancel()


class BackgroundProcesses:
    """The processes of one session, by their ids."""

    def __init__(self) -> None:
        self._all: dict[str, BackgroundProcess] = {}

    def check_room(self) -> None:
        """Removes the oldest ended process if necessary. Raises InvalidRequest where too many run."""
        if len(self._all) >= MAX_PROCESSES:
            ended = next((id for id, each in self._all.items() if not each.runs), None)
            if ended is None:
                raise errors.InvalidRequest(
                    f"{MAX_PROCESSES} processes run in the background: kill one with kill_process"
                )
            self._all.pop(ended).forget()

    def add(self, process: backend.BackendProcess, command: str) -> BackgroundProcess:
        found = self._all[process.id] = BackgroundProcess(process, command)
        return found

    def get(self, id: str) -> BackgroundProcess:
        """Raises ProcessNotFound."""
        try:
            return self._all[id]
        except KeyError:
            known = ", ".join(self._all) or "none"
            raise errors.ProcessNotFound(f"no process {id[:100]!r} was started here; there are: {known}") from None

    def list(self) -> list[BackgroundProcess]:
        return [*self._all.values()]

    def clear(self) -> None:
        for each in self._all.values():
            each.forget()
        self._all.clear()


# Watches on a sandbox's files: the client is notified of their changes.

MAX_WATCHED = 32

OnResourceChange = Callable[[str], Awaitable[None]]  # of a URI with a changed file


class ResourceWatches:
    """The watched files of a session."""

    def __init__(self) -> None:
        self._watching: dict[str, asyncio.Task[None]] = {}

    async def add(self, box: backend.BackendSandbox, uri: str, on_change: OnResourceChange) -> None:
        """Watches a file. Raises FileNotFound for an invalid URI, InvalidRequest where there are too many."""
        path = uri_to_path(uri)
        if uri in self._watching:
            return
        if len(self._watching) >= MAX_WATCHED:
            raise errors.InvalidRequest(f"{MAX_WATCHED} resources are watched already: unsubscribe from one")
        ready = asyncio.Event()
        task = self._watching[uri] = asyncio.create_task(_watch_file(box, path, uri, on_change, ready))
        task.add_done_callback(lambda _: self._watching.pop(uri, None) if self._watching.get(uri) is task else None)
        begun = asyncio.create_task(ready.wait())
        await asyncio.wait((task, begun), return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if task.done() and not ready.is_set():
            task.result()

    def remove(self, uri: str) -> None:
        task = self._watching.pop(uri, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for uri in list(self._watching):
            self.remove(uri)


async def _watch_file(
    box: backend.BackendSandbox, path: str, uri: str, on_change: OnResourceChange, ready: asyncio.Event
) -> None:
    """Watches the file's directory, so that the file may come, go, and be replaced."""
    watch = box.files.watch(path.rpartition("/")[0] or "/")
    try:
        await watch.__aenter__()
        ready.set()
        async for change in watch:
            if change.path == path:
                await on_change(uri)
    except (errors.Gone, errors.NotFound):
        if not ready.is_set():
            raise  # else it is over, with its sandbox
    finally:
        watch.close()


MAX_SANDBOXES = 8  # that one session may have at once


class McpWorkspace:
    def __init__(
        self, place: SandboxBackend, template: str = "python", attached: str = "", tools: frozenset[str] = frozenset()
    ):
        """`attached`: the id of an existing sandbox, which stays. `tools`: the names of the allowed tools."""
        self.place = place
        self.tools = tools
        self.processes = BackgroundProcesses()
        self.watches = ResourceWatches()
        self._template = template
        self._attached = attached
        self._box: backend.BackendSandbox | None = None
        self._made: dict[str, backend.BackendSandbox] = {}  # those that end with the session
        self._languages: dict[str, str] = {}  # the context of each language that was made here
        self._lock = asyncio.Lock()
        self._closed = False

    @property
    def current_sandbox(self) -> backend.BackendSandbox | None:
        """The current sandbox, if one was used already."""
        return self._box

    @property
    def made(self) -> list[str]:
        """The ids of the sandboxes that end with the session."""
        return list(self._made)

    async def box(self) -> backend.BackendSandbox:
        """The session's sandbox, made if necessary. Raises the errors of making it."""
        if self._box is not None:
            return self._box
        async with self._lock:
            if self._box is None:
                self._use_sandbox(await self._open_first())
            assert self._box is not None
            return self._box

    async def _open_first(self) -> backend.BackendSandbox:
        if self._attached:
            return await self.place.find(self._attached)
        return await self._create_sandbox(self._template)

    async def _create_sandbox(self, template: str) -> backend.BackendSandbox:
        self._check_room()
        return await self._keep_sandbox(await self.place.create(template))

    async def _keep_sandbox(self, box: backend.BackendSandbox) -> backend.BackendSandbox:
        if self._closed:  # the client left while it was made
            await self.place.end(box)
            raise errors.SandboxKilled("the session has ended")
        self._made[box.id] = box
        return box

    def _check_room(self) -> None:
        if len(self._made) >= MAX_SANDBOXES:
            raise errors.InvalidRequest(f"this session has {MAX_SANDBOXES} sandboxes already: end one with end_sandbox")

    def _use_sandbox(self, box: backend.BackendSandbox) -> None:
        self._box = box
        self._languages.clear()
        self.processes.clear()
        self.watches.close()

    def lost(self, id: str) -> None:
        """Drops a sandbox that has ended: the next call makes a new one."""
        self._made.pop(id, None)
        if self._box is not None and self._box.id == id:
            self._box = None
            self._attached = ""
            self._languages.clear()
            self.processes.clear()
            self.watches.close()

    async def drop_ended_sandbox(self) -> bool:
        """Whether the current sandbox has ended; if so, it is dropped, and the next call makes a new one."""
        box = self._box
        if box is None:
            return False
        try:
            ended = box.ended or (await box.describe()).state == "ended"
        except (errors.Gone, errors.NotFound):
            ended = True
        if ended:
            self.lost(box.id)
        return ended

    async def find(self, id: str) -> backend.BackendSandbox:
        """Finds any sandbox of the same owner. Raises SandboxNotFound, Gone."""
        if self._box is not None and id in (self._box.id, "current"):
            return self._box
        if id == "current":
            raise errors.SandboxNotFound("this session has no sandbox yet: run something first")
        return self._made.get(id) or await self.place.find(id)

    async def switch_sandbox(self, id: str) -> backend.BackendSandbox:
        """Makes that sandbox the current one. Raises as `find` does."""
        async with self._lock:
            box = await self.find(id)
            if box is not self._box:
                self._use_sandbox(box)
            return box

    async def replace(self, template: str | None = None) -> backend.BackendSandbox:
        """Makes a new current sandbox; the old one ends if it was made here. Raises the errors of making it."""
        async with self._lock:
            before = self._box
            box = await self._create_sandbox(template or self._template)
            self._attached = ""
            self._use_sandbox(box)
            if before is not None and before.id in self._made:
                await self._end_sandbox(before)
            return box

    async def fork(self) -> backend.BackendSandbox:
        """A new sandbox with the files of the current one, which stays the current one."""
        box = await self.box()
        async with self._lock:
            self._check_room()
            return await self._keep_sandbox(await self.place.fork(box))

    async def end(self, id: str) -> None:
        """Ends a sandbox. Raises SandboxNotFound for one that was not made here."""
        async with self._lock:
            if id == "current" and self._box is not None:
                id = self._box.id
            if id not in self._made:
                known = ", ".join(self._made) or "none"
                raise errors.SandboxNotFound(f"no sandbox {id[:100]!r} was made by this session; there are: {known}")
            await self._end_sandbox(self._made[id])

    async def _end_sandbox(self, box: backend.BackendSandbox) -> None:
        self.lost(box.id)
        await self.place.end(box)

    async def context(
        self, box: backend.BackendSandbox, language: str | None, id: str | None
    ) -> backend.BackendContext:
        """The requested context; without an id, the one of that language. Raises ContextNotFound."""
        if id is not None and id != "default":
            found = await box.find_context(id)
            if language not in (None, found.language):
                raise errors.InvalidRequest(f"context {id} speaks {found.language}, not {language}")
            return found
        if language in (None, "python"):
            return box.context()
        assert language is not None
        known = self._languages.get(language)
        if known is not None:
            with contextlib.suppress(errors.ContextNotFound):
                return await box.find_context(known)
        made = await box.create_context(language=language)
        self._languages[language] = made.id
        return made

    async def watch(self, uri: str, on_change: OnResourceChange) -> None:
        """Watches a file. Raises as `ResourceWatches.add` does."""
        await self.watches.add(await self.box(), uri, on_change)

    async def aclose(self) -> None:
        """Ends the sandboxes made here. Harmless when closed."""
        self._closed = True
        self.processes.clear()
        self.watches.close()
        made, self._made, self._box = [*self._made.values()], {}, None
        for done in await asyncio.gather(*map(self.place.end, made), return_exceptions=True):
            if isinstance(done, BaseException):
                log.warning("mcp.not_ended", error=type(done).__name__)
