"""One build, from its base to its snapshot. Names, queues and clients are handled elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from cloche import errors
from cloche.engine.pauses.pause import SandboxSource
from cloche.engine.sandboxes.endings import BUILD_ENDED
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Exited, Output
from cloche.model import (
    GIB,
    KIB,
    MAX_COMMAND_BYTES,
    MAX_STRING_BYTES,
    Launch,
    Limits,
    SandboxSpec,
    Snapshot,
    Struct,
    Template,
    User,
    check_environment,
    new_id,
)
from cloche.network_policy import NetworkPolicy
from cloche.store.base import SnapshotRecords as Store
from cloche.store.builds import BuildFiles, BuildLogEntry, BuildLogLevel, StoredBuilds, TemplateBuild
from cloche.store.retention_clock import retention_now
from cloche.telemetry import log

# Build layers: snapshots after the first steps of a build, so that the next build can skip those steps.

T = TypeVar("T")

MAX_LAYERS = 8  # of one owner, beside the results of whole builds; the oldest go first
MAX_LAYER_BYTES = 4 * GIB
LAYER_KEPT_SECONDS = 7 * 86400.0


class BuildLayers:
    """A layer is a snapshot with a digest of its base and steps. A whole build's snapshot serves as one, too."""

    def __init__(self, store: Store, discard: Callable[[str], Awaitable[None]]):
        self._store = store
        self._discard = discard

    async def longest_match(self, owner: str, digests: Sequence[str]) -> tuple[int, Snapshot] | None:
        """The layer of the last digest that has one, with that digest's position, counted from 1."""
        known = {each.layer: each.id for each in await self._store.list(owner) if each.layer is not None}
        for number in range(len(digests), 0, -1):
            id = known.get(digests[number - 1])
            if id is not None and (layer := await self._store.find(id, owner)) is not None:
                return number, layer
        return None

    async def keep(self, layer: Snapshot) -> None:
        """Stores a layer, which replaces another of the same digest. Raises Unavailable; its image is gone then."""
        await record_or_undo(self._store.add(layer), lambda: self._discard(layer.image))
        await self._prune_owner_layers(layer.owner)

    async def clean(self) -> None:
        """Removes layers that are too old, of all owners."""
        for owner in {each.owner for each in await self._store.list(None) if _is_layer(each)}:
            await self._prune_owner_layers(owner)

    async def _prune_owner_layers(self, owner: str) -> None:
        kept, size, seen = 0, 0, set()
        for layer in filter(_is_layer, await self._store.list(owner)):  # the newest first
            kept, size = kept + 1, size + layer.bytes
            old = layer.created_at < retention_now() - LAYER_KEPT_SECONDS
            if old or kept > MAX_LAYERS or size > MAX_LAYER_BYTES or layer.layer in seen:
                await self._store.remove(layer.id, owner)
                await self._discard(layer.image)
            seen.add(layer.layer)


async def record_or_undo(work: Coroutine[Any, Any, T], undo: Callable[[], Awaitable[None]]) -> T:
    """Returns the result of `work`, which completes even if the caller is cancelled. Calls `undo` if it fails."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except BaseException:
        await asyncio.wait([task])
        if task.exception() is not None:
            await undo()
        raise


def _is_layer(snapshot: Snapshot) -> bool:
    return snapshot.layer is not None and not snapshot.of_build


# The log of one build: bounded, numbered from its beginning.

MAX_LOG_ENTRIES = 10_000
MAX_LOG_BYTES = 1 << 20
MAX_LINE = 4096  # characters
ENTRY_BYTES = 100  # that an entry takes beside its message
KEPT_LOG_BYTES = 64 << 10  # of the last entries, with the build's record

# Colours and the like mean nothing where these lines are shown, and a line must not take over a terminal.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


class BuildLog:
    """Program output beyond the bound is left out, which is logged once. The builder's own messages always fit."""

    def __init__(self) -> None:
        self.entries: list[BuildLogEntry] = []
        self._bytes = 0
        self.is_full = False  # of output

    def say(self, message: str, level: BuildLogLevel = "info", step: str | None = None) -> None:
        """Adds a message of the builder."""
        self.entries.append(BuildLogEntry(at=time.time(), level=level, message=message[:MAX_LINE], step=step))

    def output(self, line: str, stream: str, step: str) -> None:
        """Adds a line that a program wrote."""
        text = _ESCAPES.sub("", line.rpartition("\r")[2] or line)[:MAX_LINE]
        self._bytes += len(text.encode("utf-8", "surrogatepass")) + ENTRY_BYTES
        if self._bytes > MAX_LOG_BYTES or len(self.entries) >= MAX_LOG_ENTRIES:
            if not self.is_full:
                self.say("the output is too long: the rest is left out", "warn", step)
            self.is_full = True
            return
        self.say(f"[{stream}]: {text}", "info" if stream == "stdout" else "warn", step)

    def last(self, max_bytes: int = KEPT_LOG_BYTES) -> Sequence[BuildLogEntry]:
        """The last entries that fit into so many bytes."""
        size, first = 0, len(self.entries)
        while first > 0:
            size += len(self.entries[first - 1].message.encode("utf-8", "surrogatepass")) + ENTRY_BYTES
            if size > max_bytes:
                break
            first -= 1
        return self.entries[first:]


class BuildOutputLines:
    """Splits output into lines as it comes, and logs each."""

    def __init__(self, log: BuildLog, step: str):
        self._log = log
        self._step = step
        self._rest = {"stdout": "", "stderr": ""}

    def add(self, stream: str, text: str) -> None:
        if self._log.is_full:  # a program that writes without end must not cost more than that it is read
            return
        *lines, rest = (self._rest[stream] + text).split("\n")
        for line in lines[:MAX_LOG_ENTRIES]:
            self._log.output(line, stream, self._step)
        if len(rest) > MAX_LINE:
            self._log.output(rest, stream, self._step)
            rest = ""
        self._rest[stream] = rest

    def end(self) -> None:
        for stream, rest in self._rest.items():
            if rest:
                self._log.output(rest, stream, self._step)


# The steps of a template's build, run inside a sandbox with no rights but those of its users.

StepKind = Literal["RUN", "COPY", "ENV", "WORKDIR", "USER"]

STEP_SECONDS = 1800.0
READ_VARIABLES_SECONDS = 60.0  # that a sandbox has to list its variables
MAX_PATH_BYTES = 4096
MAX_VARIABLES = 1000  # of a template
MAX_ENV_BYTES = 256 * KIB  # of their names and values: they are kept with each build
BUILD_SHELL = ("/bin/bash", "-l", "-c")
WRITABLE_PATHS = "/home/user, /mnt/data, /workspace, /app, /tmp, /var/tmp and /root"

# A program of the guest's, which every sandbox could run: by its text, as not every backend shows it by a path.
_COPYING = (Path(__file__).parents[2] / "guest" / "files" / "build_copy.py").read_text("utf-8")
_PLAIN_ENV = {
    "PATH": "/opt/cloche/front/bin:/opt/cloche/env/bin:/usr/local/bin:/usr/bin:/bin"
}  # whatever the steps set
_USERS: dict[str, User] = {"user": "user", "1000": "user", "root": "root", "0": "root"}
_IDS = {"user": 1000, "root": 0}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class BuildStep(Struct):
    kind: StepKind
    args: tuple[str, ...]
    files: str | None = None  # of a COPY: the client's digest of the copied files


class BuildSandbox:
    """A sandbox in which steps run one after the other; each sees the user, cwd and env that earlier ones set."""

    def __init__(self, sandbox: Sandbox, owner: str, files: BuildFiles, log: BuildLog, begin: Launch):
        self._sandbox = sandbox
        self._owner = owner
        self._files = files
        self._log = log
        self.user = begin.user
        self.cwd = begin.cwd
        self.env: dict[str, str] = {}  # that steps have set

    async def do(self, step: BuildStep, name: str) -> None:
        """Raises TemplateBuildFailed; Gone where the sandbox has ended; QuotaExceeded where nothing more may run."""
        match step.kind:
            case "RUN":
                await self._run_command(
                    step.args[0], _parse_step_user(step.args[1], step.args[0]) if step.args[1:] else self.user, name
                )
            case "COPY":
                await self._copy_uploaded_files(step, name)
            case "ENV":
                await self._set_env(step.args)
            case "WORKDIR":
                await self._set_cwd(step.args[0])
            case "USER":
                self.user = _parse_step_user(step.args[0])

    async def _run_command(self, command: str, user: User, name: str) -> None:
        exited = await self._run_and_log((*BUILD_SHELL, command), user, self.env, name, counted=True)
        if exited.outcome != "ok" or exited.exit_code != 0:
            raise errors.TemplateBuildFailed(f"failed to run command '{command[:2000]}': {_describe_exit(exited)}")

    async def _run_and_log(
        self, argv: tuple[str, ...], user: User, env: dict[str, str], name: str, *, counted: bool = False
    ) -> Exited:
        process = await self._sandbox.commands.start(
            argv, user=user, env=env, cwd=self.cwd, timeout_seconds=STEP_SECONDS, counted=counted
        )
        lines = BuildOutputLines(self._log, name)
        async with process:
            async for event in process:
                if isinstance(event, Output):
                    lines.add(event.stream, event.text)
        lines.end()
        return process.exited or Exited(exit_code=-1, outcome="died")

    async def _copy_uploaded_files(self, step: BuildStep, name: str) -> None:
        source, target = step.args[0], self._absolute_path(step.args[1])
        user, _, _group = (step.args[2] if step.args[2:] else "").partition(":")
        mode = step.args[3] if step.args[3:] else ""
        assert step.files is not None
        archive = f"/tmp/.cloche-copy-{secrets.token_hex(8)}"
        try:
            await self._sandbox.files.write(
                archive, await self._files.chunks(self._owner, step.files), user="root", mode=0o600
            )
            uid = str(_IDS[_parse_step_user(user) if user else self.user])
            program = ("python3", "-I", "-c", _COPYING)
            exited = await self._run_and_log((*program, archive, source, target, uid, mode), "root", _PLAIN_ENV, name)
        except errors.FileNotFound:
            said = f"the files of COPY {source} were not uploaded, or are no longer kept: build again"
            raise errors.TemplateBuildFailed(said) from None
        finally:
            await self._remove_archive(archive)
        if exited.exit_code != 0:
            raise errors.TemplateBuildFailed(
                f"failed to copy '{source}' to '{target}': {_describe_exit(exited)}; {WRITABLE_PATHS} can be written"
            )

    async def _remove_archive(self, archive: str) -> None:
        try:
            await self._sandbox.files.remove(archive, user="root")
        except (errors.NotFound, errors.FileError, errors.Gone):
            pass  # it never came, or the sandbox is gone with it

    async def _set_env(self, args: tuple[str, ...]) -> None:
        known = await self._read_variables(args[1::2])
        env = dict(self.env)
        for name, value in zip(args[::2], args[1::2], strict=True):
            env[name] = known[name] = expand_variables(value, known, MAX_STRING_BYTES)
            check_environment({name: env[name]})
            await asyncio.sleep(0)  # there can be many, and long ones
        check_template_env(env)
        self.env = env

    async def _set_cwd(self, path: str) -> None:
        target = self._absolute_path(expand_variables(path, await self._read_variables([path]), MAX_PATH_BYTES))
        try:
            await self._sandbox.files.make_dir(target, user="root", owner=self.user)
        except errors.FileError as error:
            raise errors.TemplateBuildFailed(
                f"failed to create workdir: {error}; {WRITABLE_PATHS} can be written"
            ) from None
        self.cwd = target

    async def _read_variables(self, texts: Sequence[str]) -> dict[str, str]:
        """The environment of programs, if one of these texts may name a variable; else empty."""
        if not any("$" in text for text in texts):
            return {}
        process = await self._sandbox.commands.start(
            ["/usr/bin/env", "-0"],
            user=self.user,
            env=self.env,
            cwd=self.cwd,
            timeout_seconds=READ_VARIABLES_SECONDS,
            counted=False,
        )
        said, size = [], 0
        async with process:
            async for event in process:
                if isinstance(event, Output) and event.stream == "stdout":
                    said.append(event.text)
                    size += len(event.text)
                    if size > 2 * MAX_COMMAND_BYTES:  # steps can change the output of any program
                        raise errors.TemplateBuildFailed("failed to read the variables: there is no end of them")
        return dict(pair.partition("=")[::2] for pair in "".join(said).split("\0") if pair)

    def _absolute_path(self, path: str) -> str:
        """Keeps a trailing slash: for a copy it means a directory. Raises TemplateBuildFailed."""
        home = "/root" if self.user == "root" else "/home/user"
        if path == "~" or path.startswith("~/"):
            path = home + path[1:]
        joined = posixpath.normpath(posixpath.join(self.cwd, path))
        if len(joined.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
            raise errors.TemplateBuildFailed(f"the path {joined[:100]}... has more than {MAX_PATH_BYTES} bytes")
        return joined + "/" if path.endswith("/") and joined != "/" else joined


def expand_variables(text: str, known: Mapping[str, str], max_chars: int) -> str:
    """Replaces known variables by their values; unknown ones stay as they are.

    Raises TemplateBuildFailed as soon as it is too long: a short text can name a long value many times.
    """
    parts: list[str] = []
    size = end = 0
    for match in _VARIABLE.finditer(text):
        parts += (text[end : match.start()], known.get(match[1] or match[2], match[0]))
        size += len(parts[-2]) + len(parts[-1])
        end = match.end()
        if size > max_chars:
            break
    parts.append(text[end:])
    if size + len(parts[-1]) > max_chars:
        raise errors.TemplateBuildFailed(
            f"{text[:100]!r} has more than {max_chars} bytes once its variables have their values: put it into a file"
        )
    return "".join(parts)


def check_template_env(env: Mapping[str, str]) -> None:
    """Raises TemplateBuildFailed where these are more variables than a template can have."""
    if len(env) > MAX_VARIABLES:
        raise errors.TemplateBuildFailed(f"a template can have {MAX_VARIABLES} variables, not {len(env)}")
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in (*env, *env.values()))
    if size > MAX_ENV_BYTES:
        raise errors.TemplateBuildFailed(
            f"a template can have variables of {MAX_ENV_BYTES} bytes together, not {size}: put long values into a file"
        )


def _parse_step_user(name: str, command: str | None = None) -> User:
    if name in _USERS:
        return _USERS[name]
    what = f"invalid username: '{name[:100]}'"
    if command is not None:  # in the words that E2B's clients know
        what = f"failed to run command '{command[:2000]}': command failed: unauthenticated: {what}"
    raise errors.TemplateBuildFailed(f"{what} (a sandbox has the users user and root)")


def _describe_exit(exited: Exited) -> str:
    if exited.outcome == "ok":
        return f"exit status {exited.exit_code}"
    return exited.outcome.replace("_", " ") + (f" ({exited.reason})" if exited.reason else "")


LAYER_SECONDS = 2.0  # of work, after which the result is kept for the next build


class BuildPlan(Struct):
    """The base, steps and commands that a template is built from."""

    base: str  # a template's name, an alias of one, or a snapshot or built template of the owner's
    steps: tuple[BuildStep, ...] = ()
    start_command: str | None = None
    ready_command: str | None = None
    network: NetworkPolicy | None = None  # of the steps
    force: bool = False  # build it though the same was built before
    fresh_from: int | None = None  # the index of the first step that must be done anew; None: all may be taken


class EngineFunctions(NamedTuple):
    """The functions of the engine that builds use."""

    found: Callable[[str, str], Awaitable[Template | Snapshot]]  # the meaning of a name for an owner
    create: Callable[[SandboxSpec], Awaitable[Sandbox]]
    restore: Callable[[SandboxSpec, str], Awaitable[Sandbox]]  # a sandbox with the files of an image
    source_of: Callable[[Sandbox], Awaitable[SandboxSource]]  # its files as an image, to be kept or discarded
    discard: Callable[[str], Awaitable[None]]
    check_room: Callable[[str], Awaitable[None]]  # raises InvalidRequest where an owner keeps too much already
    check_limits: Callable[[Limits], None]  # raises InvalidRequest that names the bounds


class BuildProgress:
    """The step that a build is at, for its error message."""

    step = "base"


class TemplateBuilder:
    def __init__(
        self,
        site: EngineFunctions,
        store: StoredBuilds,
        files: BuildFiles,
        layers: BuildLayers,
        aliases: Mapping[str, str],
    ):
        self._site = site
        self._store = store
        self._files = files
        self._layers = layers
        self._aliases = aliases

    async def make(self, build: TemplateBuild, plan: BuildPlan, said: BuildLog, progress: BuildProgress) -> None:
        """Raises TemplateBuildFailed and other Cloche errors with the reason; nothing of the build is left then."""
        base = await self._find_base(plan.base, build.owner)
        said.say(_describe_base(plan.base, base), step=progress.step)
        digests = _step_digests(base, plan.steps)
        build = msgspec.structs.replace(build, recipe=_recipe_digest(digests, plan, build.limits))
        if not plan.force and (same := await self._store.same(build.owner, build.recipe or "")) is not None:
            said.say("all steps are cached: the same was built before", step=progress.step)
            await self._finish_build(build, said, None, same)
            return
        await self._site.check_room(build.owner)
        work = _BuildWork(
            build, plan, said, progress, digests, base, *await self._find_cached_layer(build.owner, plan, digests)
        )
        snapshot = await self._run_build(work)
        await self._finish_build(build, said, snapshot, snapshot.id)

    async def _find_base(self, ref: str, owner: str) -> Template | Snapshot:
        """Raises TemplateNotFound with a list of bases: most clients that get it asked for a Docker image."""
        try:
            return await self._site.found(ref, owner)
        except errors.TemplateNotFound:
            aliases = ", ".join(self._aliases)
            raise errors.TemplateNotFound(
                f"there is no template {ref!r}, and images are not pulled from registries here. Build from a template "
                f"of this server or of your own; these names of images stand for one: {aliases}"
            ) from None

    async def _find_cached_layer(
        self, owner: str, plan: BuildPlan, digests: Sequence[str]
    ) -> tuple[int, Snapshot | None]:
        """The number of steps that a cached layer covers, and the layer."""
        found = await self._layers.longest_match(owner, digests[1:][: plan.fresh_from])
        return found or (0, None)

    async def _run_build(self, work: _BuildWork) -> Snapshot:
        sandbox = await self._make_build_sandbox(work.layer or work.base, work.plan, work.build.limits)
        snapshot: Snapshot | None = None
        try:
            snapshot = await self._run_steps(sandbox, work)
        finally:
            await self._end_build_sandbox(sandbox, snapshot)
        return snapshot

    async def _end_build_sandbox(self, sandbox: Sandbox, snapshot: Snapshot | None) -> None:
        try:
            await sandbox.kill(BUILD_ENDED)
        except BaseException:
            await self._discard_snapshot(snapshot)  # no record refers to it
            raise

    async def _make_build_sandbox(self, base: Template | Snapshot, plan: BuildPlan, limits: Limits) -> Sandbox:
        """A sandbox without an owner: it is on no list and leaves no record."""
        spec = SandboxSpec(limits=limits, network=plan.network, sudo=True, cwd="/home/user", owner="")
        if isinstance(base, Template):
            return await self._site.create(msgspec.structs.replace(spec, template=base.ref))
        spec = msgspec.structs.replace(spec, template=base.template, env=base.env)
        return await self._site.restore(spec, base.image)

    async def _run_steps(self, sandbox: Sandbox, work: _BuildWork) -> Snapshot:
        steps, said = work.plan.steps, work.said
        workshop = BuildSandbox(sandbox, work.build.owner, self._files, said, work.begin)
        kept_at = time.monotonic()
        for number, step in enumerate(steps, 1):
            work.progress.step = str(number)
            cached = " (cached)" if number <= work.done else ""
            said.say(f"[{number}/{len(steps)}] {step.kind} {_describe_step(step)}{cached}", step=work.progress.step)
            if not cached:
                await workshop.do(step, work.progress.step)
                if number < len(steps) and time.monotonic() - kept_at > LAYER_SECONDS:
                    await self._keep_layer(sandbox, workshop, work, number)
                    kept_at = time.monotonic()
        work.progress.step = "finalize"
        snapshot = await self._take_snapshot(sandbox, workshop, work, len(steps))
        return msgspec.structs.replace(snapshot, of_build=True, limits=work.build.limits, launch=work.launch(workshop))

    async def _keep_layer(self, sandbox: Sandbox, workshop: BuildSandbox, work: _BuildWork, number: int) -> None:
        """Keeps a layer here for the next build with the same beginning. The build goes on where that fails."""
        try:
            await self._layers.keep(await self._take_snapshot(sandbox, workshop, work, number))
        except (errors.Unavailable, errors.TooLarge) as error:
            work.said.say(f"this step is not kept for the next build: {error}", "warn", work.progress.step)

    async def _take_snapshot(self, sandbox: Sandbox, workshop: BuildSandbox, work: _BuildWork, number: int) -> Snapshot:
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

    async def _finish_build(self, build: TemplateBuild, said: BuildLog, snapshot: Snapshot | None, id: str) -> None:
        if snapshot is not None and snapshot.launch is not None and snapshot.launch.start_command is not None:
            said.say("the start command runs whenever a sandbox is made from it", step="finalize")
        said.say("the template is ready", step="finalize")
        ready = msgspec.structs.replace(
            build, state="ready", snapshot=id, logs=tuple(said.last()), updated_at=time.time()
        )
        superseded = await record_or_undo(self._store.finish(ready, snapshot), lambda: self._discard_snapshot(snapshot))
        log.info("template_build.ready", build=build.id, owner=build.owner, bytes=snapshot.bytes if snapshot else 0)
        for image in superseded:
            await self._site.discard(image)

    async def _discard_snapshot(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            await self._site.discard(snapshot.image)


class _BuildWork(NamedTuple):
    """The inputs of one running build."""

    build: TemplateBuild
    plan: BuildPlan
    said: BuildLog
    progress: BuildProgress
    digests: Sequence[str]  # of the base with no step, with one, ..
    base: Template | Snapshot
    done: int  # steps that were done before
    layer: Snapshot | None  # their result

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

    def launch(self, workshop: BuildSandbox) -> Launch:
        """The launch commands of the plan; one that it does not have is the base's."""
        start, ready = self.plan.start_command, self.plan.ready_command
        return Launch(
            user=workshop.user,
            cwd=workshop.cwd,
            start_command=self.inherited.start_command if start is None else start,
            ready_command=self.inherited.ready_command if ready is None else ready,
        )


def _describe_base(asked: str, base: Template | Snapshot) -> str:
    if isinstance(base, Template):
        alias = "" if asked.partition("@")[0] == base.name else f", which {asked} stands for on this server"
        return f"[base] FROM {base.ref} (Python {base.python_version}){alias}"
    return f"[base] FROM {asked} ({base.id})"


def _describe_step(step: BuildStep) -> str:
    if step.kind == "RUN":
        return step.args[0][:1000] + (f" (as {step.args[1]})" if step.args[1:] else "")
    return " ".join(step.args[::2] if step.kind == "ENV" else step.args[:2])[:1000]  # never a variable's value


def _step_digests(base: Template | Snapshot, steps: Sequence[BuildStep]) -> list[str]:
    """Digests of the base with no step, with one, and so on: each covers all inputs of those steps."""
    digest = hashlib.sha256((base.ref if isinstance(base, Template) else base.id).encode())
    found = [digest.hexdigest()]
    for step in steps:
        digest.update(msgspec.json.encode(step))
        found.append(digest.hexdigest())
    return found


def _recipe_digest(digests: Sequence[str], plan: BuildPlan, limits: Limits) -> str:
    """The digest of all inputs of the build."""
    parts = (digests[-1], limits, plan.start_command, plan.ready_command)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
