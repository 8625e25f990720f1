"""Templates built by steps: each build runs its steps in a sandbox and takes a snapshot of it.

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
from cloche.engine.builds.build import BuildLayers, BuildLog, BuildPlan, BuildProgress, TemplateBuilder
from cloche.engine.builds.build import EngineFunctions as EngineFunctions
from cloche.engine.instance import Instance
from cloche.engine.operations.audit import AuditLog
from cloche.engine.principal import current_principal, set_current_principal
from cloche.engine.stores import Stores
from cloche.model import Limits, Principal, Template
from cloche.store.builds import DEFAULT_TAG, BuildLogEntry, BuiltTemplate, TemplateBuild, TemplateTag
from cloche.tasks import TaskSet
from cloche.telemetry import log

MAX_RUNNING_BUILDS = 4  # of one owner; others wait
MAX_WAITING_BUILDS = 32
BUILD_SECONDS = 1800.0
MAX_REASON = 8000  # characters of why one failed
MAX_KEPT_LOGS = 16  # of builds that have ended, in memory
MAX_TAGS_LISTED = 20  # existing tags, in the error for one that does not exist
SERVER_RESTARTED = "the server was restarted"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Builds:
    def __init__(
        self, site: EngineFunctions, stores: Stores, instance: Instance, aliases: Mapping[str, str], audit_log: AuditLog
    ):
        self._site = site
        self._audit_log = audit_log
        self._store = stores.builds
        self.files = stores.build_files
        self._layers = BuildLayers(stores.snapshots, site.discard)
        self._builder = TemplateBuilder(site, stores.builds, stores.build_files, self._layers, aliases)
        self._instance = instance
        self._aliases = aliases
        self._logs: dict[str, BuildLog] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._starting: Counter[str] = Counter()  # by owner
        self._failing = TaskSet()
        self._rooms: dict[str, asyncio.Semaphore] = {}

    async def open(self) -> None:
        await self.clean()

    async def clean(self) -> None:
        """Marks builds of killed processes as failed, and removes their leftovers and all that is too old."""
        failed = await self._store.clean(self._instance.is_live, SERVER_RESTARTED)
        await self.files.clean()
        await self._layers.clean()
        if failed:
            log.info("template_builds.failed", builds=failed, reason=SERVER_RESTARTED)

    async def aclose(self) -> None:
        """Cancels the running builds, which have then failed."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._failing, return_exceptions=True)

    async def stop(self, owner: str) -> None:
        """Cancels the running builds of that owner, which have then failed."""
        tasks = [task for task in self._running.values() if task.get_name() == owner]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- names and tags

    async def request(
        self, name: str, tags: Sequence[str], owner: str, limits: Limits
    ) -> tuple[BuiltTemplate, TemplateBuild]:
        """A build that waits to be started. `name` may carry a tag. Raises InvalidRequest."""
        bare, tag = split_template_tag(name)
        wanted = tuple(dict.fromkeys([*([tag] if tag else []), *map(check_tag, tags)])) or (DEFAULT_TAG,)
        await self._check_name(bare, owner)
        self._site.check_limits(limits)
        now = time.time()
        build = TemplateBuild(
            id=str(uuid.uuid4()), template="", owner=owner, tags=wanted, limits=limits, created_at=now, updated_at=now
        )
        template = await self._store.request(bare, build)
        self._audit_log.record("build.made", owner, id=build.id, about=template.id)
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
        """By id or name, with any tag. Raises TemplateNotFound."""
        found = await self._store.template(ref.partition(":")[0], owner)
        if found is None:
            raise errors.TemplateNotFound(f"there is no template {ref[:200]!r} that was built here")
        return found

    async def explain_not_found(self, ref: str, owner: str) -> errors.TemplateNotFound | None:
        """The error for a template that exists but has no such tag or no ready build; None if there is no template."""
        template = await self._store.template(ref.partition(":")[0], owner)
        if template is None:
            return None
        tags, wanted = await self._store.tag_names(template.id, MAX_TAGS_LISTED), ref.partition(":")[2] or DEFAULT_TAG
        if not tags:
            return errors.TemplateNotFound(f"no build of the template {template.name!r} is ready yet")
        told = f"the template {template.name!r} has no tag {wanted[:200]!r}: it has {', '.join(tags)}"
        return errors.TemplateNotFound(told)

    async def find_template_id(self, ref: str, owner: str) -> str | None:
        """The id of the template of that name or id; None if there is none."""
        found = await self._store.template(ref.partition(":")[0], owner)
        return None if found is None else found.id

    async def owner_of(self, id: str) -> str:
        """The owner of the template of that id. Raises TemplateNotFound."""
        found = await self._store.owner_of(id)
        if found is None:
            raise errors.TemplateNotFound(f"there is no template {id!r} any more")
        return found

    async def templates(self, owner: str | None) -> Sequence[BuiltTemplate]:
        """The templates of that owner, or with None all."""
        return await self._store.templates(owner)

    async def builds(self, template: BuiltTemplate) -> Sequence[TemplateBuild]:
        """The newest first."""
        return await self._store.builds(template.id)

    async def tags(self, template: BuiltTemplate) -> Sequence[TemplateTag]:
        """The newest first."""
        return await self._store.tags(template.id)

    async def has_tag(self, template: BuiltTemplate, tag: str) -> bool:
        return await self._store.meant(template.id, tag) is not None

    async def assign(self, target: str, tags: Sequence[str], owner: str) -> str:
        """Points those tags at the build of `target` ("name:tag"); returns the build's id.

        Raises TemplateNotFound, InvalidRequest.
        """
        template = await self.template(target, owner)
        bare = [check_tag(_strip_template_name(tag, template.name)) for tag in tags]
        build = await self._store.assign(template.id, bare, target.partition(":")[2] or DEFAULT_TAG)
        if build is None:
            raise await self.explain_not_found(target, owner) or errors.TemplateNotFound(
                f"{target[:200]!r} was deleted just now"
            )
        return build

    async def unassign(self, name: str, tags: Sequence[str], owner: str) -> None:
        """Raises TemplateNotFound."""
        template = await self.template(name, owner)
        await self._store.unassign(template.id, [_strip_template_name(tag, template.name) for tag in tags])

    async def remove(self, template: BuiltTemplate) -> None:
        """With all its builds; running ones end. Sandboxes that were made from it have their own files."""
        for build in await self.builds(template):
            if (task := self._running.get(build.id)) is not None:
                task.cancel()
        for image in await self._store.remove(template.id):
            await self._site.discard(image)
        self._audit_log.record("template.removed", template.owner, id=template.id)

    # -- building

    async def build(self, template: BuiltTemplate, id: str) -> TemplateBuild:
        """Raises NotFound."""
        found = await self._store.build(id, template.owner)
        if found is None or found.template != template.id:
            raise errors.NotFound(f"the template {template.name!r} has no build {id!r}")
        return found

    def logs(self, build: TemplateBuild) -> Sequence[BuildLogEntry]:
        """The whole log while it is in memory, else the stored part."""
        known = self._logs.get(build.id)
        return build.logs if known is None else known.entries

    async def start(self, build: TemplateBuild, plan: BuildPlan) -> None:
        """Raises InvalidRequest where it was started before, or too many wait."""
        running = sum(1 for task in self._running.values() if task.get_name() == build.owner)
        if running + self._starting[build.owner] >= MAX_WAITING_BUILDS:
            raise errors.InvalidRequest(f"{MAX_WAITING_BUILDS} builds wait already: try again when some have ended")
        self._starting[build.owner] += 1
        try:
            await self._start_build(build, plan)
        finally:
            self._starting[build.owner] -= 1

    async def _start_build(self, build: TemplateBuild, plan: BuildPlan) -> None:
        building = msgspec.structs.replace(
            build, state="building", instance=self._instance.name, updated_at=time.time(), recipe=None
        )
        if not await self._store.begin(building):
            raise errors.InvalidRequest("the build was started before: ask for a new one")
        self._audit_log.record("build.started", build.owner, id=build.id)
        self._drop_old_logs()
        said = self._logs[build.id] = BuildLog()
        task = self._running[build.id] = asyncio.create_task(self._run_build(building, plan, said), name=build.owner)
        task.add_done_callback(partial(self._on_build_ended, building, said))

    def _on_build_ended(self, build: TemplateBuild, said: BuildLog, task: asyncio.Task[None]) -> None:
        self._running.pop(build.id, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a mistake of ours: no client must wait for ever
            log.error("template_build.broke", build=build.id, error=repr(error))
            self._failing.start(
                self._record_failure(build, said, BuildProgress(), "the server made a mistake: see its log")
            )

    def _drop_old_logs(self) -> None:
        over = [id for id in self._logs if id not in self._running]
        for id in over[: max(len(over) - MAX_KEPT_LOGS, 0)]:
            del self._logs[id]

    async def _run_build(self, build: TemplateBuild, plan: BuildPlan, said: BuildLog) -> None:
        room = self._rooms.setdefault(build.owner, asyncio.Semaphore(MAX_RUNNING_BUILDS))
        progress = BuildProgress()
        if current_principal() is None:  # no key: the build is the owner's all the same, and is charged to it
            set_current_principal(Principal(owner=build.owner))
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                if room.locked():
                    said.say(f"waiting: {MAX_RUNNING_BUILDS} builds go on already")
                async with room:
                    await self._builder.make(build, plan, said, progress)
        except TimeoutError:
            await self._record_failure(build, said, progress, f"it took longer than {BUILD_SECONDS:.0f} s")
        except asyncio.CancelledError:
            await self._record_failure(build, said, progress, SERVER_RESTARTED)
            raise
        except (errors.ClocheError, sqlite3.Error, OSError) as error:
            await self._record_failure(build, said, progress, str(error))

    async def _record_failure(self, build: TemplateBuild, said: BuildLog, progress: BuildProgress, why: str) -> None:
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


def split_template_tag(name: str) -> tuple[str, str | None]:
    """A name and its tag, if it has one. Raises InvalidRequest."""
    bare, colon, tag = name.partition(":")
    return bare, check_tag(tag) if colon else None


def check_tag(tag: str) -> str:
    """Raises InvalidRequest unless it can be a tag."""
    if not _TAG.fullmatch(tag):
        raise errors.InvalidRequest(f"{tag[:100]!r} is not a tag: use letters, digits, '.', '_' and '-'")
    return tag


def _strip_template_name(tag: str, name: str) -> str:
    """The tag without the template's name before it. Raises InvalidRequest for another template's name."""
    before, colon, bare = tag.rpartition(":")
    if colon and before != name:
        raise errors.InvalidRequest(f"the tag {tag[:200]!r} is not one of the template {name!r}")
    return bare
