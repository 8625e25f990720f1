"""execd's commands: run, follow, interrupt; in the background with a log."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import Json, format_timestamp, json_reply
from cloche.api.opensandbox.execd import ExecdPlane, require_query_parameter
from cloche.api.opensandbox.registry import ENVIRONMENT_FILE_VARIABLE, ExecdCommand, SandboxState
from cloche.api.opensandbox.stream import (
    LineFrames,
    complete_fields,
    describe_exit,
    encode_exit_frame,
    encode_frame,
    encode_init_frame,
    execd_stream,
)
from cloche.engine.commands.jobs import OutputChunk
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Stream, Struct, User, new_id

# The wire format of commands: decodes requests, encodes states. Pure.

INTERPRETER_PROBE = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/${JUPYTER_PORT:-44771}' && exit 0 || exit 1"
"""The command by which CodeInterpreter asks whether Jupyter listens in the sandbox. Kernels are always ready here."""

SHELL = "/bin/bash"
LARGEST_ID = 65534
_INTO_LOG = 'log=$1; shift; exec "$@" >"$log" 2>&1 </dev/null'


class ExecdCommandBody(Struct):
    command: str | None = None
    argv: list[str] | None = None
    cwd: str | None = None
    background: bool | None = None
    timeout: int | None = None  # milliseconds
    uid: int | None = None
    gid: int | None = None
    envs: dict[str, str] | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The program with its arguments, as the requested identity. Raises InvalidRequest."""
        if (self.command is None) == (self.argv is None):
            raise errors.InvalidRequest("give either `command`, for the shell, or `argv`")
        if (self.command is not None and not self.command.strip()) or self.argv == []:
            raise errors.InvalidRequest("there is no program to start: `command` or `argv` is empty")
        words = tuple(self.argv) if self.argv else (SHELL, "-c", self.command or "")
        return (*identity_words(self.uid, self.gid), *words)

    @property
    def shown(self) -> str:
        return self.command if self.command is not None else " ".join(self.argv or ())

    @property
    def user(self) -> User | None:
        """The user that starts it: root, if it runs as a certain one."""
        return None if self.uid is None else "root"

    @property
    def timeout_seconds(self) -> float | None:
        if self.timeout is not None and self.timeout < 0:
            raise errors.InvalidRequest("timeout: it must be a number of milliseconds")
        return self.timeout / 1000 if self.timeout else None


def identity_words(uid: int | None, gid: int | None) -> tuple[str, ...]:
    """The words in front of a program that root starts as that user. Raises InvalidRequest."""
    if uid is None:
        if gid is not None:
            raise errors.InvalidRequest("gid: it needs a uid")
        return ()
    group = uid if gid is None else gid
    if not (0 <= uid <= LARGEST_ID and 0 <= group <= LARGEST_ID):
        raise errors.InvalidRequest(f"uid and gid: they are from 0 to {LARGEST_ID}")
    if (uid, group) == (0, 0):
        return ()
    return ("setpriv", f"--reuid={uid}", f"--regid={group}", "--clear-groups", "--")


def encode_command_status(command: ExecdCommand) -> Json:
    exited = command.job.exited
    reply: Json = {
        "id": command.id,
        "content": command.shown,
        "running": exited is None,
        "started_at": format_timestamp(command.started_at),
    }
    if exited is not None:
        reply["exit_code"] = exited.exit_code
        reply["finished_at"] = format_timestamp(command.finished_at or time.time())
        if exited.exit_code:
            reply["error"] = describe_exit(exited)
    return reply


INTERRUPT_SECONDS = 3.0  # between the signals TERM and KILL
MAX_LOG_BYTES = 8 << 20  # of one answer; its cursor leads to the rest
LOG_CURSOR_HEADER = "EXECD-COMMANDS-TAIL-CURSOR"


class CommandPlane:
    def __init__(self, plane: ExecdPlane):
        self._plane = plane

    @property
    def routes(self) -> list[BaseRoute]:
        route = self._plane.route
        return [
            route("POST", "/command", self.run),
            route("DELETE", "/command", self.interrupt),
            route("GET", "/command/status/{command}", self.show_status),
            route("GET", "/command/{command}/logs", self.read_log),
        ]

    async def run(self, request: Request) -> Response:
        """Runs a command. One in the foreground ends with the connection."""
        sandbox, state = await self._plane.enter(request)
        asked = await self._plane.json_body(request, ExecdCommandBody)
        if asked.command == INTERPRETER_PROBE:
            return execd_stream(_encode_immediate_success(), sandbox)
        follow = _stream_background_frames if asked.background else _stream_command_frames
        frames = follow(sandbox, state, asked)
        begun = await anext(frames)  # errors before the first frame have a status of their own
        return execd_stream(_continue_frames(begun, frames), sandbox)

    async def interrupt(self, request: Request) -> Response:
        """Ends a command, or interrupts what runs in a bash session."""
        sandbox, state = await self._plane.enter(request)
        id = require_query_parameter(request, "id")
        if id in state.sessions:
            state.interrupt(sandbox.context(id))
            return Response()
        job = state.commands.find(id).job
        job.kill(signal.SIGTERM)
        asyncio.get_running_loop().call_later(INTERRUPT_SECONDS, job.kill)
        return Response()

    async def show_status(self, request: Request) -> Response:
        _, state = await self._plane.enter(request)
        return json_reply(encode_command_status(state.commands.find(request.path_params["command"])))

    async def read_log(self, request: Request) -> Response:
        """The output since `cursor`, at most 8 MiB of it."""
        sandbox, state = await self._plane.enter(request)
        command = state.commands.find(request.path_params["command"])
        if command.log is None:
            raise errors.InvalidRequest(f"command {command.id} is not running in background")
        cursor = _parse_cursor(request.query_params.get("cursor"))
        try:
            content = await read_file_part(sandbox, command.log, cursor, MAX_LOG_BYTES)
        except errors.FileNotFound:  # the command has just begun
            content = b""
        response = Response(content, media_type="text/plain; charset=utf-8")
        response.headers[LOG_CURSOR_HEADER] = str(cursor + len(content))
        return response


async def _launch_command(
    sandbox: Sandbox, state: SandboxState, message: ExecdCommandBody, words: Sequence[str], log: str | None
) -> ExecdCommand:
    # The file is in the hands of programs, which must not choose the environment of a command that root starts.
    kept = await read_environment_file(sandbox) if message.user is None else {}
    env = {**kept, **(message.envs or {})}
    job = await sandbox.commands.launch(
        words, user=message.user, env=env, cwd=message.cwd or None, timeout_seconds=message.timeout_seconds
    )
    command = ExecdCommand(job, message.shown, log)
    state.commands.add(command)
    return command


async def _stream_command_frames(
    sandbox: Sandbox, state: SandboxState, message: ExecdCommandBody
) -> AsyncGenerator[bytes, None]:
    """The frames of a command in the foreground. Closing the generator kills it."""
    command = await _launch_command(sandbox, state, message, message.words, None)
    streams: dict[Stream, LineFrames] = {"stdout": LineFrames("stdout"), "stderr": LineFrames("stderr")}
    try:
        async with command.job.listen() as listener:
            yield encode_init_frame(command.id)
            while events := await listener.next_events():
                for event in events:
                    if isinstance(event, OutputChunk):
                        if encoded := streams[event.stream].feed(event.data):
                            yield encoded
                        continue
                    yield b"".join(each.finish() for each in streams.values())
                    yield encode_exit_frame(event, time.time() - command.started_at)
    finally:
        command.job.kill()


async def _stream_background_frames(
    sandbox: Sandbox, state: SandboxState, message: ExecdCommandBody
) -> AsyncGenerator[bytes, None]:
    log = f"/tmp/.execd-{new_id('l')}.log"
    words = (SHELL, "-c", _INTO_LOG, SHELL, log, *message.words)
    command = await _launch_command(sandbox, state, message, words, log)
    yield encode_init_frame(command.id)
    yield encode_frame(complete_fields(time.time() - command.started_at))


async def _continue_frames(begun: bytes, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(frames):
        yield begun
        async for frame in frames:
            if frame:
                yield frame


async def _encode_immediate_success() -> AsyncGenerator[bytes, None]:
    yield encode_init_frame(new_id("p")) + encode_frame(complete_fields(0))


def _parse_cursor(given: str | None) -> int:
    if not given:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise errors.InvalidRequest(f"cursor: it must be a number of bytes, not {given[:80]!r}")
    return int(given)


# `commands.set_env` adds lines to a file in the sandbox, which execd reads before each command.

MAX_ENVIRONMENT_BYTES = 64 << 10
_VALUE = r"""'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<plain>[^\n]*)"""
_ASSIGNMENT = re.compile(rf"^[ \t]*(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?:{_VALUE})", re.MULTILINE | re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


async def read_environment_file(sandbox: Sandbox) -> dict[str, str]:
    """The variables in the sandbox's environment file; none if there is no such file."""
    path = sandbox.spec.env.get(ENVIRONMENT_FILE_VARIABLE)
    if path is None:
        return {}
    try:
        content = await read_file_part(sandbox, path, 0, MAX_ENVIRONMENT_BYTES)
    except (errors.FileNotFound, errors.FileError):
        return {}
    return parse_environment_lines(content.decode("utf-8", "replace"))


def parse_environment_lines(text: str) -> dict[str, str]:
    """`NAME=value` lines, with or without quotes; others are skipped. The last one of a name counts."""
    return {match["name"]: _unquote_value(match) for match in _ASSIGNMENT.finditer(text.replace("\0", ""))}


def _unquote_value(match: re.Match[str]) -> str:
    if match["double"] is not None:
        return _ESCAPE.sub(lambda escape: _ESCAPED_LETTERS.get(escape[1], escape[1]), match["double"])
    return match["single"] if match["single"] is not None else match["plain"].strip()


async def read_file_part(sandbox: Sandbox, path: str, start: int, most: int) -> bytes:
    """At most `most` bytes from there on. Raises FileNotFound, FileError."""
    async with await sandbox.files.open(path, user="root") as file:
        end = min(file.size_bytes, start + most)
        if start >= end:
            return b""
        async with contextlib.aclosing(file.chunks(start, end)) as chunks:
            return b"".join([chunk async for chunk in chunks])
