"""Piston: `/api/v2/execute` and `/api/v2/runtimes`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import signal
import time
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.dialect import Json, json_reply
from cloche.api.programs import SYSTEM_PATH, ProgramLanguage
from cloche.api.run_apis.runner import PROBE_OWNER, RunApiContext, RunOutcome, RunRequest, StageOutcome, run_api_status
from cloche.model import SandboxSpec, Struct

VERSION_CACHE_SECONDS = 600.0
VERSION_SECONDS = 20.0

# The name of a language, and the program that says its version.
RUNTIMES = {
    "bash": ("bash", "bash"),
    "py": ("python", "python3"),
    "js": ("javascript", "node"),
    "ts": ("typescript", "node"),
    "c": ("c", "gcc"),
    "cpp": ("c++", "g++"),
    "java": ("java", "java"),
    "go": ("go", "go"),
    "rs": ("rust", "rustc"),
    "php": ("php", "php"),
    "r": ("rscript", "Rscript"),
    "d": ("d", "dmd"),
    "f90": ("fortran", "gfortran"),
}
_FIND_VERSIONS = (
    'for name in "$@"; do type -P "$name" > /dev/null || continue; '
    "case $name in go) set -- version;; *) set -- --version;; esac; "
    'echo "$name $("$name" "$1" 2>&1 | head -n 1)"; done'
)
_VERSION = re.compile(r"\d+(?:\.\d+)+")

Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class PistonFile(Struct):
    content: str
    name: str = ""
    encoding: Literal["utf8", "base64", "hex"] = "utf8"


class PistonRun(Struct):
    """`version` selects nothing: a template has one version of each language, which the reply names."""

    language: str
    version: str
    files: tuple[PistonFile, ...]
    stdin: str | None = None
    args: tuple[str, ...] | None = None
    compile_timeout: Milliseconds | None = None
    run_timeout: Milliseconds | None = None
    compile_cpu_time: Milliseconds | None = None
    run_cpu_time: Milliseconds | None = None
    compile_memory_limit: int | None = None
    run_memory_limit: int | None = None


class PistonApi(RunApiContext):
    prefix = "piston"

    def routes(self) -> list[Route]:
        self._turn, self._versions, self._until = asyncio.Lock(), dict[str, str](), 0.0
        no_packages = self.unsupported("packages belong to the template")
        return [
            self.route("POST", "/api/v2/execute", self.execute),
            self.route("GET", "/api/v2/runtimes", self.list_runtimes),
            self.route(["GET", "POST", "DELETE"], "/api/v2/packages", no_packages),
        ]

    async def execute(self, request: Request) -> Response:
        self.admit(request)
        message = await self.json_body(request, PistonRun)
        language = await self.runs.find_language(message.language)
        program = decode_run(message, language)
        versions = await self._find_versions()
        outcome = await self.run(request, program)
        name, teller = RUNTIMES[language.name]
        return json_reply({**encode_run(outcome), "language": name, "version": versions.get(teller, "0.0.0")})

    async def list_runtimes(self, request: Request) -> Response:
        self.admit(request)
        versions = await self._find_versions()
        return json_reply([_encode_runtime(each, versions) for each in await self.runs.languages()])

    async def _find_versions(self) -> dict[str, str]:
        """The version of each program that a sandbox has, found out in a sandbox of its own now and then."""
        async with self._turn:
            if time.monotonic() >= self._until:
                tellers = sorted({teller for _, teller in RUNTIMES.values()})
                words = ["/bin/bash", "-c", _FIND_VERSIONS, "bash", *tellers]
                async with self.runs.sandbox(SandboxSpec(owner=PROBE_OWNER)) as sandbox:
                    told = await sandbox.commands.run(words, env={"PATH": SYSTEM_PATH}, timeout_seconds=VERSION_SECONDS)
                lines = (line.partition(" ") for line in told.stdout.splitlines())
                found = ((name, _VERSION.search(rest)) for name, _, rest in lines)
                self._versions = {name: match.group() for name, match in found if match is not None}
                self._until = time.monotonic() + VERSION_CACHE_SECONDS
        return self._versions

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return json_reply({"message": str(error)}, run_api_status(error))

    def missing_reply(self, status: int, message: str) -> Response:
        return json_reply({"message": message}, status)


def _encode_runtime(language: ProgramLanguage, versions: dict[str, str]) -> Json:
    name, teller = RUNTIMES[language.name]
    aliases = [each for each in language.names if each != name]
    return {"language": name, "version": versions.get(teller, "0.0.0"), "aliases": aliases}


def decode_run(message: PistonRun, language: ProgramLanguage) -> RunRequest:
    """The first text file is the program. Raises InvalidRequest."""
    main = next((each for each in message.files if each.encoding == "utf8"), None)
    if main is None:
        raise errors.InvalidRequest("files must include at least one utf8 encoded file")
    others = [each for each in message.files if each is not main]
    names = [each.name or f"file{number}.code" for number, each in enumerate(others)]
    return RunRequest(
        language=language,
        code=main.content,
        name=main.name,
        args=message.args or (),
        stdin=(message.stdin or "").encode("utf-8", "replace"),
        files=tuple((name, _decode_file(each)) for name, each in zip(names, others, strict=True)),
        compile_seconds=(message.compile_timeout or 0) / 1000,
        run_seconds=(message.run_timeout or 0) / 1000,
        memory_bytes=message.run_memory_limit,
    )


def _decode_file(file: PistonFile) -> bytes:
    try:
        match file.encoding:
            case "base64":
                return base64.b64decode(file.content)
            case "hex":
                return bytes.fromhex(file.content)
        return file.content.encode("utf-8", "replace")
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest(f"{file.name[:200]!r} is not {file.encoding}") from None


def encode_run(outcome: RunOutcome) -> Json:
    """Where the compilation failed, it is also the run: clients look there."""
    compiled = {} if outcome.compile is None else {"compile": _encode_stage(outcome.compile)}
    return {**compiled, "run": _encode_stage(outcome.last)}


def _encode_stage(stage: StageOutcome) -> Json:
    """`output` is stdout, then stderr: their order among each other is not known."""
    number = stage.exited.signal
    status = "TO" if stage.timed_out else "SG" if number else "RE" if stage.exited.exit_code else None
    message = "Time limit exceeded (wall clock)" if stage.timed_out else stage.exited.reason
    return {
        "stdout": stage.stdout,
        "stderr": stage.stderr,
        "output": stage.stdout + stage.stderr,
        "code": None if number else stage.exited.exit_code,
        "signal": "SIGKILL" if stage.timed_out else _signal_name(number) if number else None,
        "message": message,
        "status": status,
        "cpu_time": round(stage.usage.cpu_seconds * 1000),
        "wall_time": round(stage.usage.wall_seconds * 1000),
        "memory": stage.usage.memory_peak_bytes,
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"
