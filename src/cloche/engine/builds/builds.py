"""Templates built by steps: each build is a sandbox in which the steps are done, and then a snapshot of it.

A build is whole or absent: its snapshot, its state and its tags are written at once, and only at its end.
"""

from __future__ import annotations

import asyncio
import fnmatch
import re
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from cloche import errors
from cloche.engine.builds.build import Builder, BuildLog, Layers, Plan, Progress
from cloche.engine.builds.build import Site as Site
from cloche.engine.instance import Instance
from cloche.engine.operations.audit import Trail
from cloche.engine.principal import act_for, acting
from cloche.engine.stores import Stores
from cloche.model import Limits, Principal, Template
from cloche.store.builds import DEFAULT_TAG, Build, BuiltTemplate, LogEntry, Tag
from cloche.telemetry import log

MAX_AT_ONCE = 4  # of one owner; others wait
MAX_WAITING = 32
BUILD_SECONDS = 1800.0
MAX_REASON = 8000  # characters of why one failed
MAX_LOGS = 16  # of builds that have ended, in memory
MAX_TOLD = 20  # tags that there are, where one is asked for that is not
RESTARTED = "the server was restarted"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Builds:
    def __init__(self, site: Site, stores: Stores, instance: Instance, aliases: Mapping[str, str], trail: Trail):
        self._site = site
        self._trail = trail
        self._store = stores.builds
        self.files = stores.build_files
        self._layers = Layers(stores.snapshots, site.discard)
        self._builder = Builder(site, stores.builds, stores.build_files, self._layers, aliases)
        self._instance = instance
        self._aliases = aliases
        self._logs: dict[str, BuildLog] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._starting: Counter[str] = Counter()  # by owner
        self._failing: set[asyncio.Task[None]] = set()
        self._rooms: dict[str, asyncio.Semaphore] = {}

    async def open(self) -> None:
        await self.clean()

    async def clean(self) -> None:
        """What a process left that was killed has failed, and nothing of it remains; nor what is too old."""
        failed = await self._store.clean(self._instance.is_live, RESTARTED)
        await self.files.clean()
        await self._layers.clean()
        if failed:
            log.info("template_builds.failed", builds=failed, reason=RESTARTED)

    async def aclose(self) -> None:
        """Those that go on have failed."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._failing, return_exceptions=True)

    async def stop(self, owner: str) -> None:
        """Those of that owner have failed."""
        tasks = [task for task in self._running.values() if task.get_name() == owner]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- names and tags

    async def request(self, name: str, tags: Sequence[str], owner: str, limits: Limits) -> tuple[BuiltTemplate, Build]:
        """A build that waits to be started. `name` may carry a tag. Raises InvalidRequest."""
        bare, tag = split(name)
        wanted = tuple(dict.fromkeys([*([tag] if tag else []), *map(checked_tag, tags)])) or (DEFAULT_TAG,)
        await self._check_name(bare, owner)
        self._site.check_limits(limits)
        now = time.time()
        build = Build(
            id=str(uuid.uuid4()), template="", owner=owner, tags=wanted, limits=limits, created_at=now, updated_at=now
        )
        template = await self._store.request(bare, build)
        self._trail.note("build.made", owner, id=build.id, about=template.id)
        return template, msgspec.structs.replace(build, template=template.id)

    async def _check_name(self, name: str, owner: str) -> None:
        if not _NAME.fullmatch(name):
            raise errors.InvalidRequest(
                f"name: {name[:100]!r} cannot name a template: use letters, digits, '.', '_', '-' and '/', and a tag "
                "after a colon"
            )
        if any(fnmatch.fnmatchcase(name, alias.partition(":")[0]) for alias in self._aliases):  # with any tag
            raise errors.InvalidRequest(f"name: {name!r} is the name of a template of this server: choose another")
        try:
            found = await self._site.found(name, owner)
        except errors.TemplateNotFound:
            return
        if isinstance(found, Template) or found.launch is None:
            raise errors.InvalidRequest(f"name: {name!r} is the name of a template or a snapshot: choose another")

    async def template(self, ref: str, owner: str) -> BuiltTemplate:
        """By id or name, whatever the tag. Raises TemplateNotFound."""
        found = await self._store.template(ref.partition(":")[0], owner)
        if found is None:
            raise errors.TemplateNotFound(f"there is no template {ref[:200]!r} that was built here")
        return found

    async def why_not(self, ref: str, owner: str) -> errors.TemplateNotFound | None:
        """Why no sandbox can be made from it though a template of that name was asked for; None: there is none."""
        template = await self._store.template(ref.partition(":")[0], owner)
        if template is None:
            return None
        tags, wanted = await self._store.tag_names(template.id, MAX_TOLD), ref.partition(":")[2] or DEFAULT_TAG
        if not tags:
            return errors.TemplateNotFound(f"no build of the template {template.name!r} is ready yet")
        told = f"the template {template.name!r} has no tag {wanted[:200]!r}: it has {', '.join(tags)}"
        return errors.TemplateNotFound(told)

    async def id_of(self, ref: str, owner: str) -> str | None:
        """That of the template which a name of it, or its id, means; None if it is none."""
        found = await self._store.template(ref.partition(":")[0], owner)
        return None if found is None else found.id

    async def owner_of(self, id: str) -> str:
        """Whose the template of that id is. Raises TemplateNotFound."""
        found = await self._store.owner_of(id)
        if found is None:
            raise errors.TemplateNotFound(f"there is no template {id!r} any more")
        return found

    async def templates(self, owner: str | None) -> Sequence[BuiltTemplate]:
        """Theirs, or with None everybody's."""
        return await self._store.templates(owner)

    async def builds(self, template: BuiltTemplate) -> Sequence[Build]:
        """The newest first."""
        return await self._store.builds(template.id)

    async def tags(self, template: BuiltTemplate) -> Sequence[Tag]:
        """The newest first."""
        return await self._store.tags(template.id)

    async def has_tag(self, template: BuiltTemplate, tag: str) -> bool:
        return await self._store.meant(template.id, tag) is not None

    async def assign(self, target: str, tags: Sequence[str], owner: str) -> str:
        """Those tags mean the build that `target` ("name:tag") means: its id.

        Raises TemplateNotFound, InvalidRequest.
        """
        template = await self.template(target, owner)
        bare = [checked_tag(_without_name(tag, template.name)) for tag in tags]
        build = await self._store.assign(template.id, bare, target.partition(":")[2] or DEFAULT_TAG)
        if build is None:
            raise await self.why_not(target, owner) or errors.TemplateNotFound(f"{target[:200]!r} was deleted just now")
        return build

    async def unassign(self, name: str, tags: Sequence[str], owner: str) -> None:
        """Raises TemplateNotFound."""
        template = await self.template(name, owner)
        await self._store.unassign(template.id, [_without_name(tag, template.name) for tag in tags])

    async def remove(self, template: BuiltTemplate) -> None:
        """With all its builds; those that go on end. Sandboxes that were made from it have their own files."""
        for build in await self.builds(template):
            if (task := self._running.get(build.id)) is not None:
                task.cancel()
        for image in await self._store.remove(template.id):
            await self._site.discard(image)
        self._trail.note("template.removed", template.owner, id=template.id)

    # -- building

    async def build(self, template: BuiltTemplate, id: str) -> Build:
        """Raises NotFound."""
        found = await self._store.build(id, template.owner)
        if found is None or found.template != template.id:
            raise errors.NotFound(f"the template {template.name!r} has no build {id!r}")
        return found

    def logs(self, build: Build) -> Sequence[LogEntry]:
        """All that was said while it is remembered, else what was kept of it."""
        known = self._logs.get(build.id)
        return build.logs if known is None else known.entries

    async def start(self, build: Build, plan: Plan) -> None:
        """Raises InvalidRequest where it was started before, or too many wait."""
        running = sum(1 for task in self._running.values() if task.get_name() == build.owner)
        if running + self._starting[build.owner] >= MAX_WAITING:
            raise errors.InvalidRequest(f"{MAX_WAITING} builds wait already: try again when some have ended")
        self._starting[build.owner] += 1
        try:
            await self._start(build, plan)
        finally:
            self._starting[build.owner] -= 1

    async def _start(self, build: Build, plan: Plan) -> None:
        building = msgspec.structs.replace(
            build, state="building", instance=self._instance.name, updated_at=time.time(), recipe=None
        )
        if not await self._store.begin(building):
            raise errors.InvalidRequest("the build was started before: ask for a new one")
        self._trail.note("build.started", build.owner, id=build.id)
        self._forget_logs()
        said = self._logs[build.id] = BuildLog()
        task = self._running[build.id] = asyncio.create_task(self._build(building, plan, said), name=build.owner)
        task.add_done_callback(partial(self._ended, building, said))

    def _ended(self, build: Build, said: BuildLog, task: asyncio.Task[None]) -> None:
        self._running.pop(build.id, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a mistake of ours: nobody must wait for ever
            log.error("template_build.broke", build=build.id, error=repr(error))
            failing = asyncio.create_task(self._fail(build, said, Progress(), "the server made a mistake: see its log"))
            self._failing.add(failing)
            failing.add_done_callback(self._failing.discard)

    def _forget_logs(self) -> None:
        over = [id for id in self._logs if id not in self._running]
        for id in over[: max(len(over) - MAX_LOGS, 0)]:
            del self._logs[id]

    async def _build(self, build: Build, plan: Plan, said: BuildLog) -> None:
        room = self._rooms.setdefault(build.owner, asyncio.Semaphore(MAX_AT_ONCE))
        progress = Progress()
        if acting() is None:  # nobody's key: it is the owner's all the same, who pays for it
            act_for(Principal(owner=build.owner))
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                if room.locked():
                    said.say(f"waiting: {MAX_AT_ONCE} builds go on already")
                async with room:
                    await self._builder.make(build, plan, said, progress)
        except TimeoutError:
            await self._fail(build, said, progress, f"it took longer than {BUILD_SECONDS:.0f} s")
        except asyncio.CancelledError:
            await self._fail(build, said, progress, RESTARTED)
            raise
        except (errors.ClocheError, sqlite3.Error, OSError) as error:
            await self._fail(build, said, progress, str(error))

    async def _fail(self, build: Build, said: BuildLog, progress: Progress, why: str) -> None:
        why = why[:MAX_REASON]
        said.say(why, "error", progress.step)
        failed = msgspec.structs.replace(
            build,
            state="error",
            reason=why,
            step=progress.step,
            logs=tuple(said.last()),
            updated_at=time.time(),
        )
        try:
            await asyncio.shield(self._store.put(failed))
        except sqlite3.Error as error:
            log.error("template_build.not_recorded", build=build.id, error=str(error))
        log.info("template_build.failed", build=build.id, owner=build.owner, step=progress.step)


def split(name: str) -> tuple[str, str | None]:
    """A name and its tag, if it has one. Raises InvalidRequest."""
    bare, colon, tag = name.partition(":")
    return bare, checked_tag(tag) if colon else None


def checked_tag(tag: str) -> str:
    """Raises InvalidRequest unless it can be a tag."""
    if not _TAG.fullmatch(tag):
        raise errors.InvalidRequest(f"{tag[:100]!r} is not a tag: use letters, digits, '.', '_' and '-'")
    return tag


def _without_name(tag: str, name: str) -> str:
    """Clients may write a tag with the name before it. Raises InvalidRequest for another one's."""
    before, colon, bare = tag.rpartition(":")
    if colon and before != name:
        raise errors.InvalidRequest(f"the tag {tag[:200]!r} is not one of the template {name!r}")
    return bare
