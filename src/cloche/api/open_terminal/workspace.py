"""Workspaces: one sandbox for each user of an owner, and policy. It is paused when it was idle, and found again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import posixpath
from importlib.resources import files as resource_files
from typing import Any

import msgspec

from cloche import errors
from cloche.api.named_sandboxes import NamedSandboxes
from cloche.api.open_terminal.processes import NotebookSession, TerminalProcess, TerminalSession
from cloche.config import Config
from cloche.engine.commands.program import PythonScript
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB, SandboxSpec, Struct
from cloche.network_policy import NetworkPolicy

HOME = "/home/user"
NOTE_KEY = "open_terminal"
MAX_CHATS = 1024  # whose working directories are remembered
MAX_REPLY_BYTES = 32 * MIB
PROGRAM_SECONDS = 60.0
MAX_USER = 256  # letters


class WorkspaceKey(Struct, frozen=True):
    """Whose workspace it is: of one user of one owner, under one policy."""

    owner: str
    policy: str
    user: str

    @property
    def note(self) -> str:
        return msgspec.json.encode((self.policy, self.user)).decode()


class Refusal(errors.ClocheError):
    """An answer with that status: what the program inside refused, or what the wire has a status for."""

    code = "refused"

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status


class Workspace:
    """A sandbox, with what the server keeps of it: processes, terminals, notebooks, and each chat's directory."""

    def __init__(self, handle: SandboxHandle, idle_seconds: float):
        self.handle = handle
        self.processes: dict[str, TerminalProcess] = {}
        self.terminals: dict[str, TerminalSession] = {}
        self.notebooks: dict[str, NotebookSession] = {}
        self._idle_seconds = idle_seconds
        self._directories: dict[str, str] = {}  # by chat, the latest last

    async def sandbox(self) -> Sandbox:
        """Its sandbox, resumed if necessary, with its idle time begun anew."""
        sandbox = await self.handle.running()
        sandbox.extend(min(self._idle_seconds, sandbox.spec.lifetime_seconds or self._idle_seconds))
        return sandbox

    def directory(self, chat: str) -> str:
        """The working directory of a chat."""
        return self._directories.get(chat, HOME)

    def enter_directory(self, chat: str, path: str) -> None:
        """Without a chat nothing is remembered."""
        if chat:
            self._directories.pop(chat, None)
            self._directories[chat] = path
            if len(self._directories) > MAX_CHATS:
                del self._directories[next(iter(self._directories))]

    async def perform(self, operation: str, **arguments: Any) -> bytes:
        """The reply of the program inside, as JSON. Raises Refusal, Gone, QuotaExceeded."""
        sandbox = await self.sandbox()
        program = await sandbox.commands.capture(
            script=_workspace_script(),
            keep_bytes=MAX_REPLY_BYTES,
            timeout_seconds=PROGRAM_SECONDS,
            cwd=HOME,
            stdin=True,
            counted=False,
        )
        async with program:
            order = msgspec.json.encode({"operation": operation, **arguments})
            feeding = asyncio.ensure_future(program.send_stdin(order))
            feeding.add_done_callback(lambda _: program.close_stdin())
            try:
                exited = await program.wait()
            finally:
                feeding.cancel()
                with contextlib.suppress(asyncio.CancelledError, errors.ClocheError):
                    await feeding
            sandbox.check_running()
            kept, failure = program.output_so_far("stdout"), program.output_so_far("stderr")
        if exited.outcome == "timed_out":
            raise Refusal(408, f"this took more than {PROGRAM_SECONDS:g} s: ask for less")
        status, _, reply = (kept.head + kept.tail).partition(b"\n")
        if kept.dropped_bytes:
            raise Refusal(413, f"the answer has more than {MAX_REPLY_BYTES} bytes: ask for less")
        if not (status.isdigit() and len(status) == 3):
            raise Refusal(422, _describe_failure(failure.head + failure.tail))
        if status != b"200":
            raise Refusal(int(status), _detail_of(reply))
        return reply


@functools.cache
def _workspace_script() -> PythonScript:
    source = resource_files("cloche.api.open_terminal").joinpath("workspace_program.py").read_text("utf-8")
    return PythonScript(source=source, name="workspace.py")


def _describe_failure(errors_written: bytes) -> str:
    """The last line of the traceback: a parser raised it, for a file that is not of its kind."""
    last = errors_written[-1000:].decode("utf-8", "replace").strip().rpartition("\n")[2]
    return f"the workspace could not do it: {last[:300] or 'it gave no answer'}"


def _detail_of(reply: bytes) -> str:
    try:
        return str(msgspec.json.decode(reply, type=dict[str, str])["detail"])
    except (msgspec.DecodeError, KeyError):
        return "the workspace gave no answer that can be read"


def resolve_path(path: str, directory: str) -> str:
    """The absolute path, without `.` and `..`. Raises InvalidRequest."""
    if "\0" in path or (not path.isprintable() and any(0xD800 <= ord(each) < 0xE000 for each in path)):
        raise errors.InvalidPath("a path has no zero byte and no lone surrogate")
    return "/" + posixpath.normpath(posixpath.join(directory, path)).lstrip("/")


class Workspaces:
    def __init__(self, engine: Engine, config: Config):
        self._engine = engine
        self._config = config
        self._known: dict[WorkspaceKey, Workspace] = {}
        self._named = NamedSandboxes(engine, NOTE_KEY)

    def find(self, key: WorkspaceKey) -> Workspace | None:
        """The workspace, if this process has used it."""
        found = self._known.get(key)
        return None if found is None or found.handle.ended else found

    async def open(self, key: WorkspaceKey) -> Workspace:
        """The workspace, made at its first use. Raises as `Engine.create`."""
        if (found := self.find(key)) is not None:
            return found
        handle = await self._named.find_or_create(key.owner, key.note, functools.partial(self._create, key))
        if (found := self.find(key)) is not None:  # of a request that came meanwhile
            return found
        self._known = {each: place for each, place in self._known.items() if not place.handle.ended}
        made = self._known[key] = Workspace(handle, self._idle_seconds)
        return made

    def policy_of(self, name: str) -> tuple[str, NetworkPolicy | None]:
        """Template and network of a policy; the empty name stands for the default. Raises NotFound."""
        settings = self._config.open_terminal
        if not name:
            return settings.template, None
        if (policy := settings.policies.get(name)) is None:
            raise errors.NotFound(f"no policy {name[:80]!r}: the key open_terminal.policies of this server names them")
        network = None if policy.allow is None else NetworkPolicy(allow=policy.allow)
        return policy.template or settings.template, network

    @property
    def _idle_seconds(self) -> float:
        return min(self._config.open_terminal.idle_minutes * 60, self._config.lifetime.max_seconds)

    async def _create(self, key: WorkspaceKey) -> Sandbox:
        template, network = self.policy_of(key.policy)
        spec = SandboxSpec(
            owner=key.owner,
            template=template,
            network=network,
            cwd=HOME,
            metadata={"open_terminal": key.user[:64] or "workspace"},
            notes={NOTE_KEY: key.note},
            lifetime_seconds=self._idle_seconds,
            on_deadline="pause",
            auto_resume=True,
        )
        return await self._engine.create(spec)
