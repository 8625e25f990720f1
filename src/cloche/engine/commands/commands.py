"""A sandbox's commands and terminals."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence

import msgspec

from cloche import errors
from cloche.engine.commands.jobs import CommandJob, CommandJobs, OutputCapture
from cloche.engine.commands.process import SandboxProcess
from cloche.engine.commands.program import ProgramSpec, PythonScript, SandboxProgram
from cloche.engine.sandboxes.init_client import InitClient
from cloche.events import Exited, ProcessResult
from cloche.isolation.channel import clean_text
from cloche.model import (
    Limits,
    ProcessInfo,
    User,
    check_command_size,
    check_command_words,
    check_environment,
    check_seconds,
    check_terminal_size,
    check_user,
    sandbox_path,
)


class SandboxCommands:
    def __init__(
        self,
        guest: InitClient,
        *,
        user: User,
        cwd: str,
        limits: Limits,
        oom_kills: Callable[[], int],
        count: Callable[[], None],
    ):
        """`count` is called for each start. It may raise QuotaExceeded."""
        self._guest = guest
        self._user = user
        self._cwd = cwd
        self._limits = limits
        self._oom_kills = oom_kills
        self._count = count
        self.jobs = CommandJobs()
        self._running: dict[str, SandboxProgram] = {}

    async def start(
        self,
        command: str | Sequence[str] = (),
        *,
        script: PythonScript | None = None,
        user: User | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        background: bool = False,
        counted: bool = True,
    ) -> SandboxProcess:
        """Starts a shell command (a string), a program with arguments (a list), or a `script`.

        It is one of the owner's executions if `counted`. Raises InvalidRequest for invalid arguments,
        QuotaExceeded. A program that does not exist has exit code 127. In the background, unread output never
        blocks it.
        """
        check_seconds("timeout", timeout_seconds)
        ask = self._make_program_spec(script or command, user, env, cwd, stdin, pty)
        process = SandboxProcess(
            self._guest,
            _new_process_id(),
            output_bytes=self._limits.output_bytes,
            oom_kills=self._oom_kills,
            on_end=self._on_program_end,
            patient=not background,
        )
        process.detached = background
        await self._start_program(process, ask, timeout_seconds, counted=counted)
        return process

    async def launch(
        self,
        argv: Sequence[str],
        *,
        user: User | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        tag: str | None = None,
        counted: bool = True,
    ) -> CommandJob:
        """Starts a program that does not depend on listeners; `jobs` finds it again.

        Raises InvalidRequest for invalid arguments, FileNotFound or NotADirectory for the working directory,
        QuotaExceeded. A program that does not exist has exit code 127.
        """
        check_seconds("timeout", timeout_seconds)
        ask = msgspec.structs.replace(self._make_program_spec(list(argv), user, env, cwd, stdin, pty), make_cwd=False)
        job = CommandJob(
            self._guest, _new_process_id(), ask, tag=tag, oom_kills=self._oom_kills, on_end=self._on_program_end
        )
        await self._start_program(job, ask, timeout_seconds, counted=counted)
        if job.exited is None:
            self.jobs.add(job)
        return job

    async def capture(
        self,
        command: str | Sequence[str] = (),
        *,
        script: PythonScript | None = None,
        keep_bytes: int,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        stdin: bool = False,
        counted: bool = True,
    ) -> OutputCapture:
        """As `start`, with the output as bytes at the end: `keep_bytes` of each stream, head and tail."""
        check_seconds("timeout", timeout_seconds)
        ask = self._make_program_spec(script or command, None, env, cwd, stdin, None)
        program = OutputCapture(
            self._guest,
            _new_process_id(),
            keep_bytes=keep_bytes,
            oom_kills=self._oom_kills,
            on_end=self._on_program_end,
        )
        await self._start_program(program, ask, timeout_seconds, counted=counted)
        return program

    async def _start_program(
        self, program: SandboxProgram, ask: ProgramSpec, timeout_seconds: float | None, *, counted: bool = True
    ) -> None:
        if counted:
            self._count()
        self._running[program.id] = program
        self._guest.noted("command.started" if ask.pty is None else "terminal.opened", id=program.id)
        try:
            await program.start(ask, timeout_seconds)
        except BaseException:
            self._running.pop(program.id, None)
            raise

    async def run(
        self,
        command: str | Sequence[str],
        *,
        user: User | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ProcessResult:
        """Runs a command to its end (by default at most as long as an execution). Never raises for an exit code."""
        check_seconds("timeout", timeout_seconds)
        process = await self.start(
            command,
            user=user,
            env=env,
            cwd=cwd,
            timeout_seconds=timeout_seconds or self._limits.execution_seconds,
            stdin=stdin is not None,
        )
        async with process:
            feeding = asyncio.create_task(_feed_stdin(process, stdin)) if stdin is not None else None
            try:
                return await process.result()
            finally:
                if feeding is not None:
                    feeding.cancel()

    async def list(self) -> list[ProcessInfo]:
        """The commands and terminals that run now."""
        found = (await self._guest.request("process_list")).ok.get("processes")
        try:
            processes = msgspec.convert(found, list[ProcessInfo])
        except msgspec.ValidationError as error:
            raise errors.ProtocolViolation(f"the guest's init sent no list of processes: {error}") from None
        return [msgspec.structs.replace(each, command=clean_text(each.command, 4096)) for each in processes]

    def get(self, id: str) -> SandboxProgram:
        """A process or job that runs. Raises ProcessNotFound."""
        try:
            return self._running[id]
        except KeyError:
            raise errors.ProcessNotFound(f"no process {id!r} runs in this sandbox") from None

    def kill(self, id: str) -> None:
        """Kills a process with its session. Raises ProcessNotFound."""
        self.get(id).kill()

    def end_all(self, reason: str) -> None:
        """The sandbox ends: every process has ended with it."""
        for process in list(self._running.values()):
            process.finish(Exited(exit_code=137, outcome="died", reason=reason))

    def _on_program_end(self, program: SandboxProgram) -> None:
        self._running.pop(program.id, None)
        if isinstance(program, CommandJob):
            self.jobs.end(program)

    def _make_program_spec(
        self,
        command: str | Sequence[str] | PythonScript,
        user: User | None,
        env: dict[str, str] | None,
        cwd: str | None,
        stdin: bool,
        pty: tuple[int, int] | None,
    ) -> ProgramSpec:
        check_environment(env or {})
        check_user(user)
        if pty is not None:
            check_terminal_size(pty)
        script = command if isinstance(command, PythonScript) else None
        words = _command_words(command)
        check_command_words(words)
        check_command_size(words, env or {})
        return ProgramSpec(
            command=command if isinstance(command, str) else None,
            argv=None if isinstance(command, str) or script else words,
            script=script,
            user=user or self._user,
            env=env or {},
            cwd=self._cwd if cwd is None else sandbox_path(cwd, self._cwd),
            stdin=stdin,
            pty=pty,
        )


def _new_process_id() -> str:
    return "p" + secrets.token_hex(8)


def _command_words(command: str | Sequence[str] | PythonScript) -> tuple[str, ...]:
    if isinstance(command, PythonScript):
        return (command.name, *command.argv)
    return (command,) if isinstance(command, str) else tuple(command)


async def _feed_stdin(process: SandboxProcess, stdin: str | bytes) -> None:
    # A command need not read all of its input: `head -1` does not.
    with contextlib.suppress(errors.InvalidRequest):
        await process.send_stdin(stdin.encode() if isinstance(stdin, str) else stdin)
    process.close_stdin()
