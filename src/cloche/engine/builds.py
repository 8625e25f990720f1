"""Templates built by steps: each build is a sandbox in which the steps are done, and then a snapshot of it.

A build is whole or absent: its snapshot, its state and its tags are written at once, and only at its end.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import re
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cloche import errors
from cloche.engine.build_log import BuildLog
from cloche.engine.build_steps import Step, Workshop
from cloche.engine.instance import Instance
from cloche.engine.lasting import Source
from cloche.engine.sandbox import Sandbox
from cloche.model import Launch, Limits, SandboxSpec, Snapshot, Struct, Template, new_id
from cloche.network_policy import NetworkPolicy
from cloche.store.build_files import BuildFiles
from cloche.store.template_builds import DEFAULT_TAG, Build, BuiltTemplate, LogEntry, StoredBuilds, Tag
from cloche.telemetry import log

MAX_AT_ONCE = 4  # of one owner; others wait
MAX_WAITING = 32
MAX_BUILDS = 2000  # of one owner, that are known
BUILD_SECONDS = 1800.0
MAX_LOGS = 16  # of builds that have ended, in memory
RESTARTED = "the server was restarted"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Plan(Struct):
    """What a template is built from."""

    base: str  # a template's name, an alias of one, or a snapshot or built template of the owner's
    steps: tuple[Step, ...] = ()
    start_command: str | None = None
    ready_command: str | None = None
    network: NetworkPolicy | None = None  # of the steps
    force: bool = False  # build it though the same was built before


class Site(NamedTuple):
    """What builds need of the engine."""

    found: Callable[[str, str], Awaitable[Template | Snapshot]]  # what a name means to an owner
    create: Callable[[SandboxSpec], Awaitable[Sandbox]]
    restore: Callable[[SandboxSpec, str], Awaitable[Sandbox]]  # a sandbox with the files of an image
    source_of: Callable[[Sandbox], Awaitable[Source]]  # its files as an image, to be kept or discarded
    discard: Callable[[str], Awaitable[None]]
    check_room: Callable[[str], Awaitable[None]]  # raises InvalidRequest where an owner keeps too much already
    check_limits: Callable[[Limits], None]  # raises InvalidRequest that says what is allowed


class Builds:
    def __init__(
        self, site: Site, store: StoredBuilds, files: BuildFiles, instance: Instance, aliases: Mapping[str, str]
    ):
        self._site = site
        self._store = store
        self.files = files
        self._instance = instance
        self._aliases = aliases
        self._logs: dict[str, BuildLog] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._rooms: dict[str, asyncio.Semaphore] = {}

    async def open(self) -> None:
        """What a process left that was killed has failed, and nothing of it remains."""
        failed = await self._store.clean(self._instance.is_live, RESTARTED)
        await self.files.clean()
        if failed:
            log.info("template_builds.failed", builds=failed, reason=RESTARTED)

    async def aclose(self) -> None:
        """Those that go on have failed."""
        tasks = list(self._running.values())
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
        if await self._store.count(owner) >= MAX_BUILDS:
            raise errors.InvalidRequest(f"{MAX_BUILDS} builds are known already: delete templates that you do not need")
        now = time.time()
        build = Build(
            id=str(uuid.uuid4()), template="", owner=owner, tags=wanted, limits=limits, created_at=now, updated_at=now
        )
        template = await self._store.request(bare, build)
        return template, msgspec.structs.replace(build, template=template.id)

    async def _check_name(self, name: str, owner: str) -> None:
        if not _NAME.fullmatch(name):
            raise errors.InvalidRequest(
                f"name: {name[:100]!r} cannot name a template: use letters, digits, '.', '_', '-' and '/', and a tag "
                "after a colon"
            )
        if any(fnmatch.fnmatchcase(name, alias) for alias in self._aliases):
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
            raise errors.TemplateNotFound(f"there is no template {ref!r} that was built here")
        return found

    async def owner_of(self, id: str) -> str:
        """Whose the template of that id is. Raises TemplateNotFound."""
        found = await self._store.owner_of(id)
        if found is None:
            raise errors.TemplateNotFound(f"there is no template {id!r} any more")
        return found

    async def templates(self, owner: str) -> Sequence[BuiltTemplate]:
        return await self._store.templates(owner)

    async def builds(self, template: BuiltTemplate) -> Sequence[Build]:
        """The newest first."""
        return await self._store.builds(template.id)

    async def tags(self, template: BuiltTemplate) -> Sequence[Tag]:
        """The newest first."""
        return await self._store.tags(template.id)

    async def assign(self, target: str, tags: Sequence[str], owner: str) -> str:
        """Those tags mean the build that `target` ("name:tag") means: its id.

        Raises TemplateNotFound, InvalidRequest.
        """
        template = await self.template(target, owner)
        bare = [checked_tag(_without_name(tag, template.name)) for tag in tags]
        wanted = target.partition(":")[2] or DEFAULT_TAG
        found = {each.tag: each.build for each in await self.tags(template)}
        if wanted not in found:
            raise errors.TemplateNotFound(
                f"the template {template.name!r} has no tag {wanted!r}: it has {_said(found)}"
            )
        await self._store.assign(template.id, bare, found[wanted])
        return found[wanted]

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
        if sum(1 for task in self._running.values() if task.get_name() == build.owner) >= MAX_WAITING:
            raise errors.InvalidRequest(f"{MAX_WAITING} builds wait already: try again when some have ended")
        building = msgspec.structs.replace(
            build, state="building", instance=self._instance.name, updated_at=time.time(), recipe=None
        )
        if not await self._store.begin(building):
            raise errors.InvalidRequest("the build was started before: ask for a new one")
        self._forget_logs()
        said = self._logs[build.id] = BuildLog()
        task = self._running[build.id] = asyncio.create_task(self._build(building, plan, said), name=build.owner)
        task.add_done_callback(lambda _: self._running.pop(build.id, None))

    def _forget_logs(self) -> None:
        over = [id for id in self._logs if id not in self._running]
        for id in over[: max(len(over) - MAX_LOGS, 0)]:
            del self._logs[id]

    async def _build(self, build: Build, plan: Plan, said: BuildLog) -> None:
        room = self._rooms.setdefault(build.owner, asyncio.Semaphore(MAX_AT_ONCE))
        progress = Progress()
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                if room.locked():
                    said.say(f"waiting: {MAX_AT_ONCE} builds go on already")
                async with room:
                    await self._make(build, plan, said, progress)
        except TimeoutError:
            await self._fail(build, said, progress, f"it took longer than {BUILD_SECONDS:.0f} s")
        except asyncio.CancelledError:
            await self._fail(build, said, progress, RESTARTED)
            raise
        except (errors.ClocheError, sqlite3.Error, OSError) as error:
            await self._fail(build, said, progress, str(error))

    async def _fail(self, build: Build, said: BuildLog, progress: Progress, why: str) -> None:
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

    async def _make(self, build: Build, plan: Plan, said: BuildLog, progress: Progress) -> None:
        base = await self._base(plan.base, build.owner)
        ref = base.ref if isinstance(base, Template) else base.id
        said.say(_on_what(plan.base, base), step=progress.step)
        build = msgspec.structs.replace(build, recipe=_digest(plan, ref, build.limits))
        if not plan.force and (same := await self._store.same(build.owner, build.recipe or "")) is not None:
            said.say("all steps are cached: the same was built before", step=progress.step)
            await self._finish(build, said, None, same)
            return
        await self._site.check_room(build.owner)
        sandbox = await self._sandbox(base, plan, build.limits)
        try:
            snapshot = await self._do(sandbox, base, build, plan, said, progress)
        finally:
            await sandbox.kill("the build has ended")
        try:
            await self._finish(build, said, snapshot, snapshot.id)
        except BaseException:
            await asyncio.shield(self._site.discard(snapshot.image))
            raise

    async def _base(self, ref: str, owner: str) -> Template | Snapshot:
        """Raises TemplateNotFound that says what there is: most who meet it wanted a Docker image."""
        try:
            return await self._site.found(ref, owner)
        except errors.TemplateNotFound:
            aliases = ", ".join(self._aliases)
            raise errors.TemplateNotFound(
                f"there is no template {ref!r}, and images are not pulled from registries here. Build from a template "
                f"of this server or of your own; these names of images stand for one: {aliases}"
            ) from None

    async def _sandbox(self, base: Template | Snapshot, plan: Plan, limits: Limits) -> Sandbox:
        """Nobody's: it is on no list and leaves no record."""
        spec = SandboxSpec(limits=limits, network=plan.network, sudo=True, cwd="/home/user", owner="")
        if isinstance(base, Template):
            return await self._site.create(msgspec.structs.replace(spec, template=base.ref))
        spec = msgspec.structs.replace(spec, template=base.template, env=base.env)
        return await self._site.restore(spec, base.image)

    async def _do(
        self,
        sandbox: Sandbox,
        base: Template | Snapshot,
        build: Build,
        plan: Plan,
        said: BuildLog,
        progress: Progress,
    ) -> Snapshot:
        begin = (base.launch if isinstance(base, Snapshot) else None) or Launch()
        workshop = Workshop(sandbox, build.owner, self.files, said, begin)
        for number, step in enumerate(plan.steps, 1):
            progress.step = str(number)
            said.say(f"[{number}/{len(plan.steps)}] {step.kind} {_words(step)}", step=progress.step)
            await workshop.do(step, progress.step)
        progress.step = "finalize"
        source = await self._site.source_of(sandbox)
        return Snapshot(
            id=new_id("s"),
            owner=build.owner,
            sandbox=sandbox.id,
            template=source.record.template,
            image=source.image,
            bytes=source.bytes,
            created_at=time.time(),
            env={**(base.env if isinstance(base, Snapshot) else {}), **workshop.env},
            limits=build.limits,
            launch=Launch(
                user=workshop.user,
                cwd=workshop.cwd,
                start_command=plan.start_command if plan.start_command is not None else begin.start_command,
                ready_command=plan.ready_command if plan.ready_command is not None else begin.ready_command,
            ),
        )

    async def _finish(self, build: Build, said: BuildLog, snapshot: Snapshot | None, id: str) -> None:
        if snapshot is not None and snapshot.launch is not None and snapshot.launch.start_command is not None:
            said.say("the start command runs whenever a sandbox is made from it", step="finalize")
        said.say("the template is ready", step="finalize")
        ready = msgspec.structs.replace(
            build, state="ready", snapshot=id, logs=tuple(said.last()), updated_at=time.time()
        )
        superseded = await self._store.finish(ready, snapshot)
        log.info("template_build.ready", build=build.id, owner=build.owner, bytes=snapshot.bytes if snapshot else 0)
        for image in superseded:
            await self._site.discard(image)


class Progress:
    """Where a build is, for whoever says why it failed."""

    step = "base"


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


def _said(tags: Mapping[str, Any]) -> str:
    return ", ".join(tags) or "none"


def _on_what(asked: str, base: Template | Snapshot) -> str:
    if isinstance(base, Template):
        alias = "" if asked.partition("@")[0] == base.name else f", which {asked} stands for on this server"
        return f"[base] FROM {base.ref} (Python {base.python_version}){alias}"
    return f"[base] FROM {asked} ({base.id})"


def _words(step: Step) -> str:
    if step.kind == "RUN":
        return step.args[0][:1000] + (f" (as {step.args[1]})" if step.args[1:] else "")
    return " ".join(step.args[::2] if step.kind == "ENV" else step.args[:2])[:1000]  # never a variable's value


def _digest(plan: Plan, base: str, limits: Limits) -> str:
    """Of all that decides what comes out."""
    parts = (base, limits, plan.steps, plan.start_command, plan.ready_command)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
