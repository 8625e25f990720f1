"""Sandboxes as OpenSandbox's clients see them: the stored create request, tokens and used contexts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

import msgspec

from cloche import errors
from cloche.api.auth import derive_sandbox_token
from cloche.api.opensandbox.credentials_schema import CredentialVault
from cloche.api.opensandbox.programs import ProgramContext
from cloche.engine.commands.jobs import CommandJob
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import DEFAULT_CONTEXT
from cloche.model import Struct
from cloche.tasks import TaskSet

TokenPlane = Literal["execd", "egress", "port"]

ENVIRONMENT_FILE_VARIABLE = "EXECD_ENVS"
ENVIRONMENT_FILE = "/home/user/.execd_envs"
IDLE_ENTRYPOINT = ("tail", "-f", "/dev/null")
NOTE_KEY = "opensandbox"


class StoredCreateRequest(Struct):
    """The create request, stored with the sandbox through pauses and restarts."""

    image: str = ""  # empty: its template's name
    snapshot: str = ""  # of which it was made, instead of an image
    entrypoint: tuple[str, ...] = IDLE_ENTRYPOINT
    extensions: dict[str, str] = {}
    renew_seconds: int = 0  # how long it lives, at least, after each use

    @property
    def notes(self) -> dict[str, str]:
        return {NOTE_KEY: msgspec.json.encode(self).decode()}


def stored_request_of(notes: Mapping[str, str]) -> StoredCreateRequest:
    """The stored request; defaults for a sandbox of another dialect."""
    return (
        msgspec.json.decode(notes[NOTE_KEY], type=StoredCreateRequest) if NOTE_KEY in notes else StoredCreateRequest()
    )


# The commands of a sandbox: execd tells their state after their end, too.

MAX_COMMANDS = 1024
MAX_SHOWN_COMMAND = 4096  # letters


class ExecdCommand:
    """A command that runs, or has ended. `log` is where the output of one in the background goes."""

    def __init__(self, job: CommandJob, shown: str, log: str | None):
        self.id = job.id
        self.job = job
        self.shown = shown[:MAX_SHOWN_COMMAND]
        self.log = log
        self.started_at = time.time()
        self.finished_at: float | None = None

    async def wait(self) -> None:
        """Waits for its end, and notes when that was."""
        await self.job.wait()
        self.finished_at = time.time()


class ExecdCommands:
    """The commands of one sandbox: all that run, and the latest that have ended."""

    def __init__(self) -> None:
        self._known: dict[str, ExecdCommand] = {}
        self._waiting = TaskSet()

    def add(self, command: ExecdCommand) -> None:
        self._known[command.id] = command
        self._waiting.start(command.wait())
        if len(self._known) > MAX_COMMANDS:
            ended = next((id for id, each in self._known.items() if each.finished_at is not None), None)
            if ended is not None:
                del self._known[ended]

    def find(self, id: str) -> ExecdCommand:
        """Raises ProcessNotFound."""
        if id not in self._known:
            raise errors.ProcessNotFound(f"command not found: {id[:80]}")
        return self._known[id]


class SandboxState:
    """The state of one sandbox, while it runs here."""

    def __init__(self) -> None:
        self.vault: CredentialVault | None = None
        self.commands = ExecdCommands()
        self.sessions: set[str] = set()  # the contexts that are bash sessions
        self.programs: dict[str, ProgramContext] = {}  # the contexts of languages without a kernel
        self._used: set[str] = set()  # default contexts
        self._waiting: dict[Execution, Context] = {}
        self._interrupted: set[Execution] = set()

    # -- contexts: default ones are there when they are first used, as in execd

    def use(self, context: Context) -> None:
        self._used.add(context.id)

    def lists(self, context: Context) -> bool:
        if context.id in self.sessions:
            return False
        return context.id in self._used or not context.id.startswith(DEFAULT_CONTEXT)

    def forget(self, context: Context) -> None:
        self._used.discard(context.id)

    # -- interrupts: one that comes while a program waits for its kernel is kept for it

    def wait(self, execution: Execution, context: Context) -> None:
        self._waiting[execution] = context

    def begin(self, execution: Execution) -> None:
        """The execution has its kernel: applies an interrupt that came before."""
        if execution in self._interrupted:
            execution.interrupt()
        self.leave(execution)

    def leave(self, execution: Execution) -> None:
        self._waiting.pop(execution, None)
        self._interrupted.discard(execution)

    def interrupt(self, context: Context) -> None:
        """Interrupts the running execution of the context; if none runs yet, the waiting ones."""
        if not context.interrupt():
            self._interrupted.update(each for each, where in self._waiting.items() if where is context)


class SandboxStates:
    """The states of all live sandboxes, also paused ones."""

    def __init__(self, engine: Engine, secret: bytes):
        self._engine = engine
        self._secret = secret
        self._known: dict[str, SandboxState] = {}

    def of(self, id: str) -> SandboxState:
        """The state of a used sandbox, created at its first use."""
        if id not in self._known:
            living = {each.id for each in self._engine.list(None)}
            self._known = {each: about for each, about in self._known.items() if each in living} | {id: SandboxState()}
        return self._known[id]

    def token(self, id: str, plane: TokenPlane = "execd") -> str:
        """The token for that plane of that sandbox."""
        return derive_sandbox_token(self._secret, f"opensandbox:{plane}", id)

    def signed_token(self, id: str, port: int, expires: int) -> str:
        """The token for that port alone, until that time."""
        return f"{expires}.{derive_sandbox_token(self._secret, f'opensandbox:port:{port}:{expires}', id)}"
