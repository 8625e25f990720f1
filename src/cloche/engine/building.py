"""One build, from its base to the snapshot that it makes. There is nothing of names, queues or clients in it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cloche import errors
from cloche.engine.build_layers import Layers, recorded
from cloche.engine.build_log import BuildLog
from cloche.engine.build_steps import Step, Workshop, check_template_env
from cloche.engine.lasting import Source
from cloche.engine.sandbox import Sandbox
from cloche.model import Launch, Limits, SandboxSpec, Snapshot, Struct, Template, new_id
from cloche.network_policy import NetworkPolicy
from cloche.store.builds import Build, BuildFiles, StoredBuilds
from cloche.telemetry import log

LAYER_SECONDS = 2.0  # of work, after which what was made is kept for the next build


class Plan(Struct):
    """What a template is built from."""

    base: str  # a template's name, an alias of one, or a snapshot or built template of the owner's
    steps: tuple[Step, ...] = ()
    start_command: str | None = None
    ready_command: str | None = None
    network: NetworkPolicy | None = None  # of the steps
    force: bool = False  # build it though the same was built before
    fresh_from: int | None = None  # the index of the first step that must be done anew; None: all may be taken


class Site(NamedTuple):
    """What builds need of the engine."""

    found: Callable[[str, str], Awaitable[Template | Snapshot]]  # what a name means to an owner
    create: Callable[[SandboxSpec], Awaitable[Sandbox]]
    restore: Callable[[SandboxSpec, str], Awaitable[Sandbox]]  # a sandbox with the files of an image
    source_of: Callable[[Sandbox], Awaitable[Source]]  # its files as an image, to be kept or discarded
    discard: Callable[[str], Awaitable[None]]
    check_room: Callable[[str], Awaitable[None]]  # raises InvalidRequest where an owner keeps too much already
    check_limits: Callable[[Limits], None]  # raises InvalidRequest that says what is allowed


class Progress:
    """Where a build is, for whoever says why it failed."""

    step = "base"


class Builder:
    def __init__(self, site: Site, store: StoredBuilds, files: BuildFiles, layers: Layers, aliases: Mapping[str, str]):
        self._site = site
        self._store = store
        self._files = files
        self._layers = layers
        self._aliases = aliases

    async def make(self, build: Build, plan: Plan, said: BuildLog, progress: Progress) -> None:
        """Raises TemplateBuildFailed and other errors of ours, which say why; nothing of it is left then."""
        base = await self._base(plan.base, build.owner)
        said.say(_on_what(plan.base, base), step=progress.step)
        digests = _digests(base, plan.steps)
        build = msgspec.structs.replace(build, recipe=_recipe(digests, plan, build.limits))
        if not plan.force and (same := await self._store.same(build.owner, build.recipe or "")) is not None:
            said.say("all steps are cached: the same was built before", step=progress.step)
            await self._finish(build, said, None, same)
            return
        await self._site.check_room(build.owner)
        work = _Work(build, plan, said, progress, digests, base, *await self._layer(build.owner, plan, digests))
        snapshot = await self._work(work)
        await self._finish(build, said, snapshot, snapshot.id)

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

    async def _layer(self, owner: str, plan: Plan, digests: Sequence[str]) -> tuple[int, Snapshot | None]:
        """How many steps were done before, and what they made."""
        found = await self._layers.longest(owner, digests[1:][: plan.fresh_from])
        return found or (0, None)

    async def _work(self, work: _Work) -> Snapshot:
        sandbox = await self._sandbox(work.layer or work.base, work.plan, work.build.limits)
        snapshot: Snapshot | None = None
        try:
            snapshot = await self._do(sandbox, work)
        finally:
            await self._end(sandbox, snapshot)
        return snapshot

    async def _end(self, sandbox: Sandbox, snapshot: Snapshot | None) -> None:
        try:
            await sandbox.kill("the build has ended")
        except BaseException:
            await self._discard(snapshot)  # nobody will know of it
            raise

    async def _sandbox(self, base: Template | Snapshot, plan: Plan, limits: Limits) -> Sandbox:
        """Nobody's: it is on no list and leaves no record."""
        spec = SandboxSpec(limits=limits, network=plan.network, sudo=True, cwd="/home/user", owner="")
        if isinstance(base, Template):
            return await self._site.create(msgspec.structs.replace(spec, template=base.ref))
        spec = msgspec.structs.replace(spec, template=base.template, env=base.env)
        return await self._site.restore(spec, base.image)

    async def _do(self, sandbox: Sandbox, work: _Work) -> Snapshot:
        steps, said = work.plan.steps, work.said
        workshop = Workshop(sandbox, work.build.owner, self._files, said, work.begin)
        kept_at = time.monotonic()
        for number, step in enumerate(steps, 1):
            work.progress.step = str(number)
            cached = " (cached)" if number <= work.done else ""
            said.say(f"[{number}/{len(steps)}] {step.kind} {_words(step)}{cached}", step=work.progress.step)
            if not cached:
                await workshop.do(step, work.progress.step)
                if number < len(steps) and time.monotonic() - kept_at > LAYER_SECONDS:
                    await self._keep(sandbox, workshop, work, number)
                    kept_at = time.monotonic()
        work.progress.step = "finalize"
        snapshot = await self._snapshot(sandbox, workshop, work, len(steps))
        return msgspec.structs.replace(snapshot, of_build=True, limits=work.build.limits, launch=work.launch(workshop))

    async def _keep(self, sandbox: Sandbox, workshop: Workshop, work: _Work, number: int) -> None:
        """The next build begins here, if all before is the same. The build goes on where it cannot be kept."""
        try:
            await self._layers.keep(await self._snapshot(sandbox, workshop, work, number))
        except (errors.Unavailable, errors.TooLarge) as error:
            work.said.say(f"this step is not kept for the next build: {error}", "warn", work.progress.step)

    async def _snapshot(self, sandbox: Sandbox, workshop: Workshop, work: _Work, number: int) -> Snapshot:
        env = {**work.env, **workshop.env}
        check_template_env(env)  # the base's are among it now
        source = await self._site.source_of(sandbox)
        return Snapshot(
            id=new_id("s"),
            owner=work.build.owner,
            sandbox=sandbox.id,
            template=source.record.template,
            image=source.image,
            bytes=source.bytes,
            created_at=time.time(),
            env=env,
            launch=Launch(user=workshop.user, cwd=workshop.cwd),
            layer=work.digests[number],
        )

    async def _finish(self, build: Build, said: BuildLog, snapshot: Snapshot | None, id: str) -> None:
        if snapshot is not None and snapshot.launch is not None and snapshot.launch.start_command is not None:
            said.say("the start command runs whenever a sandbox is made from it", step="finalize")
        said.say("the template is ready", step="finalize")
        ready = msgspec.structs.replace(
            build, state="ready", snapshot=id, logs=tuple(said.last()), updated_at=time.time()
        )
        superseded = await recorded(self._store.finish(ready, snapshot), lambda: self._discard(snapshot))
        log.info("template_build.ready", build=build.id, owner=build.owner, bytes=snapshot.bytes if snapshot else 0)
        for image in superseded:
            await self._site.discard(image)

    async def _discard(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            await self._site.discard(snapshot.image)


class _Work(NamedTuple):
    """What one build has to go by."""

    build: Build
    plan: Plan
    said: BuildLog
    progress: Progress
    digests: Sequence[str]  # of the base with no step, with one, ..
    base: Template | Snapshot
    done: int  # steps that were done before
    layer: Snapshot | None  # what they made

    @property
    def inherited(self) -> Launch:
        return (self.base.launch if isinstance(self.base, Snapshot) else None) or Launch()

    @property
    def begin(self) -> Launch:
        return (self.layer.launch if self.layer is not None else None) or self.inherited

    @property
    def env(self) -> Mapping[str, str]:
        before = self.layer or self.base
        return before.env if isinstance(before, Snapshot) else {}

    def launch(self, workshop: Workshop) -> Launch:
        """A command that the plan does not have is the base's."""
        start, ready = self.plan.start_command, self.plan.ready_command
        return Launch(
            user=workshop.user,
            cwd=workshop.cwd,
            start_command=self.inherited.start_command if start is None else start,
            ready_command=self.inherited.ready_command if ready is None else ready,
        )


def _on_what(asked: str, base: Template | Snapshot) -> str:
    if isinstance(base, Template):
        alias = "" if asked.partition("@")[0] == base.name else f", which {asked} stands for on this server"
        return f"[base] FROM {base.ref} (Python {base.python_version}){alias}"
    return f"[base] FROM {asked} ({base.id})"


def _words(step: Step) -> str:
    if step.kind == "RUN":
        return step.args[0][:1000] + (f" (as {step.args[1]})" if step.args[1:] else "")
    return " ".join(step.args[::2] if step.kind == "ENV" else step.args[:2])[:1000]  # never a variable's value


def _digests(base: Template | Snapshot, steps: Sequence[Step]) -> list[str]:
    """Each is of all that decides what those first steps make."""
    digest = hashlib.sha256((base.ref if isinstance(base, Template) else base.id).encode())
    found = [digest.hexdigest()]
    for step in steps:
        digest.update(msgspec.json.encode(step))
        found.append(digest.hexdigest())
    return found


def _recipe(digests: Sequence[str], plan: Plan, limits: Limits) -> str:
    """Of all that decides what comes out."""
    parts = (digests[-1], limits, plan.start_command, plan.ready_command)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
