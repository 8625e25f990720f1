"""What one MCP session has: its sandbox, made at its first use, and what runs in it. All ends with the session."""

from __future__ import annotations

import asyncio
import contextlib

from cloche import errors
from cloche.mcp.place import Place
from cloche.mcp.processes import Backgrounds
from cloche.mcp.watches import Heard, Watches
from cloche.sdk import seam
from cloche.telemetry import log

MOST_SANDBOXES = 8  # that one session may have at once


class Workspace:
    def __init__(self, place: Place, template: str = "python", attached: str = "", tools: frozenset[str] = frozenset()):
        """`attached`: the id of a sandbox that is there already, and stays. `tools`: the names of those it may use."""
        self.place = place
        self.tools = tools
        self.processes = Backgrounds()
        self.watches = Watches()
        self._template = template
        self._attached = attached
        self._box: seam.Sandbox | None = None
        self._made: dict[str, seam.Sandbox] = {}  # those that end with the session
        self._languages: dict[str, str] = {}  # the context of each language that was made here
        self._lock = asyncio.Lock()
        self._closed = False

    @property
    def current(self) -> seam.Sandbox | None:
        """The sandbox, where one was used already."""
        return self._box

    @property
    def made(self) -> list[str]:
        """The ids of those that end with the session."""
        return list(self._made)

    async def box(self) -> seam.Sandbox:
        """The session's sandbox. Raises what making it does."""
        if self._box is not None:
            return self._box
        async with self._lock:
            if self._box is None:
                self._use(await self._first())
            assert self._box is not None
            return self._box

    async def _first(self) -> seam.Sandbox:
        if self._attached:
            return await self.place.find(self._attached)
        return await self._create(self._template)

    async def _create(self, template: str) -> seam.Sandbox:
        self._check_room()
        return await self._keep(await self.place.create(template))

    async def _keep(self, box: seam.Sandbox) -> seam.Sandbox:
        if self._closed:  # the client left while it was made
            await self.place.end(box)
            raise errors.SandboxKilled("the session has ended")
        self._made[box.id] = box
        return box

    def _check_room(self) -> None:
        if len(self._made) >= MOST_SANDBOXES:
            raise errors.InvalidRequest(
                f"this session has {MOST_SANDBOXES} sandboxes already: end one with end_sandbox"
            )

    def _use(self, box: seam.Sandbox) -> None:
        self._box = box
        self._languages.clear()
        self.processes.clear()
        self.watches.close()

    def lost(self, id: str) -> None:
        """That sandbox has ended: the next call makes a new one."""
        self._made.pop(id, None)
        if self._box is not None and self._box.id == id:
            self._box = None
            self._attached = ""
            self._languages.clear()
            self.processes.clear()
            self.watches.close()

    async def has_lost_its_sandbox(self) -> bool:
        """Whether the current one has ended. The next call makes a new one then."""
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

    async def find(self, id: str) -> seam.Sandbox:
        """Any sandbox of the same owner. Raises SandboxNotFound, Gone."""
        if self._box is not None and id in (self._box.id, "current"):
            return self._box
        if id == "current":
            raise errors.SandboxNotFound("this session has no sandbox yet: run something first")
        return self._made.get(id) or await self.place.find(id)

    async def switch(self, id: str) -> seam.Sandbox:
        """From now on, calls use that one. Raises as `find` does."""
        async with self._lock:
            box = await self.find(id)
            if box is not self._box:
                self._use(box)
            return box

    async def replace(self, template: str | None = None) -> seam.Sandbox:
        """A new sandbox instead of the current one, which ends if it was made here. Raises what making it does."""
        async with self._lock:
            before = self._box
            box = await self._create(template or self._template)
            self._attached = ""
            self._use(box)
            if before is not None and before.id in self._made:
                await self._end(before)
            return box

    async def fork(self) -> seam.Sandbox:
        """A new sandbox with the files of the current one, which stays the current one."""
        box = await self.box()
        async with self._lock:
            self._check_room()
            return await self._keep(await self.place.fork(box))

    async def end(self, id: str) -> None:
        """Raises SandboxNotFound for one that was not made here."""
        async with self._lock:
            if id == "current" and self._box is not None:
                id = self._box.id
            if id not in self._made:
                known = ", ".join(self._made) or "none"
                raise errors.SandboxNotFound(f"no sandbox {id[:100]!r} was made by this session; there are: {known}")
            await self._end(self._made[id])

    async def _end(self, box: seam.Sandbox) -> None:
        self.lost(box.id)
        await self.place.end(box)

    async def context(self, box: seam.Sandbox, language: str | None, id: str | None) -> seam.Context:
        """The context that was asked for; without an id, the one of that language. Raises ContextNotFound."""
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

    async def watch(self, uri: str, heard: Heard) -> None:
        """Raises as `Watches.add` does."""
        await self.watches.add(await self.box(), uri, heard)

    async def aclose(self) -> None:
        """Ends what was made here. Harmless when closed."""
        self._closed = True
        self.processes.clear()
        self.watches.close()
        made, self._made, self._box = [*self._made.values()], {}, None
        for done in await asyncio.gather(*map(self.place.end, made), return_exceptions=True):
            if isinstance(done, BaseException):
                log.warning("mcp.not_ended", error=type(done).__name__)
