"""One program in a sandbox of its own, and the context that all run APIs share."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable
from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectContext, DialectRouter, NotSupported
from cloche.api.http import run_unless_disconnected, status_of, strip_prefix
from cloche.api.programs import (
    MAX_ARGUMENT_BYTES,
    SHELL,
    AvailableLanguages,
    ProgramLanguage,
    ProgramLimits,
    language_of,
    missing_language,
    start_capture,
)
from cloche.config import Config
from cloche.engine.commands.jobs import CapturedStream
from cloche.engine.commands.program import PythonScript
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.endings import PROGRAM_ENDED
from cloche.engine.sandboxes.pool import default_limits
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Exited
from cloche.model import MIB, SandboxSpec, Struct, Template, Usage
from cloche.network_policy import NetworkPolicy
from cloche.tasks import TaskSet

DIRECTORY = "/mnt/data/"  # where programs run, and where relative names of files lead
PROBE_OWNER = "(cloche)"  # of the server's own sandboxes: no key can have it
SPARE_SECONDS = 60.0  # of a sandbox, beside its program's time: for files
MIN_MEMORY_BYTES = 128 * MIB  # of a sandbox: requests have that of the program alone in mind
MAX_FILES = 1000
MAX_FETCHED_BYTES = 32 * MIB  # of all files of one reply
MAX_LISTED_FILES = 10  # of a directory whose files are returned
MAX_LISTED_BYTES = 10 * MIB  # of one of them


class RunRequest(Struct):
    """One program to run. Limits of None are the server's."""

    language: ProgramLanguage
    code: str
    name: str = ""  # of the file with the code; empty: what is usual
    args: tuple[str, ...] = ()
    stdin: bytes = b""
    files: tuple[tuple[str, bytes], ...] = ()  # name and content
    fetch: tuple[str, ...] = ()  # files to be returned
    fetch_below: str = ""  # a directory with more of them
    compile_seconds: float | None = None
    run_seconds: float | None = None
    memory_bytes: int | None = None
    network: bool = True  # as far as the server allows it


class StageOutcome(Struct):
    """A compilation, or a program, that has ended."""

    exited: Exited
    stdout: str
    stderr: str
    usage: Usage

    @property
    def timed_out(self) -> bool:
        return self.exited.outcome == "timed_out"

    @property
    def out_of_memory(self) -> bool:
        return self.exited.outcome == "out_of_memory"


class RunOutcome(Struct):
    """`compile` is None in languages without a compilation, `run` is None after one that failed."""

    compile: StageOutcome | None
    run: StageOutcome | None
    files: dict[str, bytes] = {}

    @property
    def last(self) -> StageOutcome:
        stage = self.run or self.compile
        assert stage is not None
        return stage


class ProgramRuns:
    """Runs programs, for all run APIs of this process."""

    def __init__(self, engine: Engine, config: Config):
        self._engine = engine
        self._config = config
        self._available = AvailableLanguages(lambda: self.sandbox(SandboxSpec(owner=PROBE_OWNER)))
        self._ending = TaskSet()

    async def find_language(self, name: str) -> ProgramLanguage:
        """Raises InvalidRequest if the template does not have it, and as `Engine.create`."""
        language = language_of(name)
        if language is not None and not language.needs:
            return language
        available = await self.languages()
        if language is None or language not in available:
            raise errors.InvalidRequest(missing_language(name, available))
        return language

    async def languages(self) -> list[ProgramLanguage]:
        """Those that the template has. Raises as `Engine.create`."""
        return await self._available.languages()

    async def template(self, owner: str) -> Template:
        return await self._engine.template(self._config.run_apis.template, owner)

    def bound_seconds(self, seconds: float | None) -> float:
        """The time limit of a program for which that many seconds are requested."""
        settings = self._config.run_apis
        asked = settings.timeout_seconds if seconds is None or not seconds > 0 else seconds
        return min(asked, settings.max_timeout_seconds)

    async def run(self, owner: str, program: RunRequest) -> RunOutcome:
        """Runs it to its end. Raises InvalidRequest, FileError, and as `Engine.create`."""
        stages = (program.compile_seconds, program.run_seconds)
        spec = await self.make_spec(owner, stages, program.memory_bytes, network=program.network)
        async with self.sandbox(spec) as sandbox:
            await write_files(sandbox, program.files)
            compiled, run = await self._run_stages(sandbox, program)
            names = (*program.fetch, *await list_files(sandbox, program.fetch_below))
            return RunOutcome(compile=compiled, run=run, files=await fetch_files(sandbox, names))

    @contextlib.asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox, None]:
        """A sandbox of the configured template, which ends in the background: the reply does not wait for that."""
        lifetime = spec.lifetime_seconds or self._config.run_apis.max_timeout_seconds + SPARE_SECONDS
        lifetime = min(lifetime, self._config.lifetime.max_seconds)
        template = self._config.run_apis.template
        sandbox = await self._engine.create(msgspec.structs.replace(spec, template=template, lifetime_seconds=lifetime))
        try:
            yield sandbox
        finally:
            self._ending.start(sandbox.kill(PROGRAM_ENDED))

    async def make_spec(
        self, owner: str, stages: Iterable[float | None], memory_bytes: int | None = None, *, network: bool = True
    ) -> SandboxSpec:
        """The spec of a sandbox in which stages with these time limits run one after another."""
        lifetime = sum(map(self.bound_seconds, stages)) + SPARE_SECONDS
        policy = None if network else NetworkPolicy()
        if memory_bytes is None or memory_bytes <= 0:
            return SandboxSpec(owner=owner, lifetime_seconds=lifetime, network=policy)
        usual = default_limits(self._config, await self.template(owner))
        most = min(max(memory_bytes, MIN_MEMORY_BYTES), self._config.limits.maximum.memory_bytes)
        limits = msgspec.structs.replace(usual, memory_bytes=most)
        return SandboxSpec(owner=owner, lifetime_seconds=lifetime, network=policy, limits=limits)

    async def _run_stages(
        self, sandbox: Sandbox, program: RunRequest
    ) -> tuple[StageOutcome | None, StageOutcome | None]:
        language, compiled = program.language, None
        bounds = self._limits(program.run_seconds)
        if language.name == "py":
            script = PythonScript(source=program.code, name=program.name or "main.py", argv=program.args)
            return None, await _run_stage(sandbox, bounds, script=script, stdin=program.stdin)
        if language.name == "bash" and len(program.code) <= MAX_ARGUMENT_BYTES // 4:
            words = (SHELL, "-c", program.code.replace("\0", ""), program.name or "bash", *program.args)
            return None, await _run_stage(sandbox, bounds, words, stdin=program.stdin)
        await sandbox.files.write(DIRECTORY + language.source, program.code.encode("utf-8", "replace"))
        if language.compile:
            words = (SHELL, "-c", f'cd "$0" && {{ {language.compile}; }}', DIRECTORY.rstrip("/"))
            compiled = await _run_stage(sandbox, self._limits(program.compile_seconds), words)
            if compiled.exited.exit_code != 0:
                return compiled, None
        words = (SHELL, "-c", language.run, DIRECTORY.rstrip("/"), *program.args)
        return compiled, await _run_stage(sandbox, bounds, words, stdin=program.stdin)

    def _limits(self, seconds: float | None) -> ProgramLimits:
        return ProgramLimits(seconds=self.bound_seconds(seconds), output_bytes=self._config.run_apis.output_bytes)


async def _run_stage(
    sandbox: Sandbox,
    bounds: ProgramLimits,
    words: tuple[str, ...] = (),
    *,
    script: PythonScript | None = None,
    stdin: bytes = b"",
) -> StageOutcome:
    began_at = time.monotonic()
    async with await start_capture(sandbox, bounds, words, script=script, stdin=stdin) as program:
        exited = await program.wait()
        usage = msgspec.structs.replace(program.usage, wall_seconds=time.monotonic() - began_at)
        return StageOutcome(
            exited=exited,
            stdout=_decode_stream(program.output_so_far("stdout")),
            stderr=_decode_stream(program.output_so_far("stderr")),
            usage=usage,
        )


def _decode_stream(stream: CapturedStream) -> str:
    if not stream.dropped_bytes:
        return (stream.head + stream.tail).decode("utf-8", "replace")
    left_out = f"\n[cloche] {stream.dropped_bytes} bytes were left out\n"
    return stream.head.decode("utf-8", "replace") + left_out + stream.tail.decode("utf-8", "replace")


async def write_files(sandbox: Sandbox, files: Iterable[tuple[str, bytes]]) -> None:
    """Writes files below the working directory. Raises InvalidRequest for other places, FileError."""
    for name, content in files:
        await sandbox.files.write(_file_path(name), content, below=DIRECTORY)


async def fetch_files(sandbox: Sandbox, names: Iterable[str]) -> dict[str, bytes]:
    """The files that are there, by name. Raises InvalidRequest for names outside of the working directory."""
    found: dict[str, bytes] = {}
    left = MAX_FETCHED_BYTES
    for name in names:
        with contextlib.suppress(errors.FileError, errors.FileNotFound):
            async with await sandbox.files.open_whole(_file_path(name)) as file:
                if file.size_bytes > left:
                    raise errors.TooLarge(f"the files to be fetched are over {MAX_FETCHED_BYTES} bytes")
                found[name] = b"".join([chunk async for chunk in file.chunks()])
                left -= len(found[name])
    return found


async def list_files(sandbox: Sandbox, directory: str) -> list[str]:
    """The names of the first regular files of a directory, if it is there; none for an empty name."""
    try:
        found = await sandbox.files.list(DIRECTORY + directory) if directory else []
    except (errors.FileError, errors.FileNotFound):
        return []
    fitting = (each for each in found if each.kind == "file" and each.size_bytes <= MAX_LISTED_BYTES)
    names = (each.path.rpartition("/")[2] for each in fitting)
    return [f"{directory}/{name}" for name in names if not name.startswith(".")][:MAX_LISTED_FILES]


def _file_path(name: str) -> str:
    relative = name.removeprefix(DIRECTORY).removeprefix("./")
    if not relative or relative.startswith("/") or ".." in relative.split("/"):
        raise errors.InvalidRequest(f"{name[:200]!r} is no file below the working directory")
    return DIRECTORY + relative


# The five dialects: a context each, with its routes.


def run_api_status(error: errors.ClocheError) -> int:
    """The HTTP status of an error. That a sandbox ended early is the server's affair: no client knows of it."""
    if isinstance(error, NotSupported):
        return 501
    return 503 if isinstance(error, errors.Gone) else status_of(error)


class RunApiContext(DialectContext):
    """The context of one run API, whose requests begin with `/PREFIX`."""

    prefix: ClassVar[str]
    max_body_bytes = 32 * MIB

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config, runs: ProgramRuns):
        super().__init__(engine, gatekeeper, config)
        self.runs = runs

    @abstractmethod
    def routes(self) -> list[Route]:
        """Its routes, without the prefix."""

    @abstractmethod
    def missing_reply(self, status: int, message: str) -> Response:
        """For an unknown path or method."""

    async def run(self, request: Request, program: RunRequest) -> RunOutcome:
        """Runs it, as long as the client is connected. Raises as `ProgramRuns.run`, and ClientDisconnect."""
        if len(program.files) > MAX_FILES or len(program.fetch) > MAX_FILES:
            raise errors.InvalidRequest(f"a program can have {MAX_FILES} files")
        return await run_unless_disconnected(request, self.runs.run(self.owner(request), program))


class RunApiApp:
    """A run API as an ASGI application."""

    def __init__(self, api: RunApiContext):
        self._prefix = "/" + api.prefix
        self._router = DialectRouter(api.routes(), api.missing_reply)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": "there is no WebSocket here"})
            return
        strip_prefix(scope, (self._prefix,))
        await self._router(scope, receive, send)
