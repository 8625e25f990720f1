"""Sessions: a sandbox that lasts from program to program, for requests with the same hint.

After each answered program, all of /mnt/data is in the store. So a sandbox that was idle for too long can
end, and one that died is no loss: the next program finds its files in a new one. The files of a program that
ran for a disconnected client are stored after the next program: until then, only the sandbox has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

import msgspec

from cloche import errors
from cloche.api.librechat.context import LibreChatContext
from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.inputs import ProgramInput, ProgramInputs
from cloche.api.librechat.outputs import CollectedOutputs, ProgramOutputs
from cloche.api.librechat.program_sandbox import ProgramSandbox
from cloche.api.librechat.replies import ProgramNotes, quote_name
from cloche.api.librechat.request import DATA_DIRECTORY, ExecRequest
from cloche.api.programs import is_python
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec
from cloche.store.librechat import CodeFile, TenantScope, WorkspaceEntry

SPARE_SECONDS = 300.0  # beside a program's own time: for its files
SWEEP_SECONDS = 60.0
MAX_RUNNING_SESSIONS = 256  # sandboxes that wait for the next program of their session, about
MAX_SESSIONS_OF_USER = 1000  # sessions that are remembered of one user with a token
MAX_SESSIONS_OF_KEY = 20_000


class CodeSession:
    """One lasting /mnt/data. One program at a time uses it; others wait in the order in which they came."""

    def __init__(self, key: str, owner: str):
        self.key = key
        self.owner = owner
        self.turn = asyncio.Lock()
        self.users = 0  # that run in it, or wait
        self.used_at = 0.0
        self.handle: SandboxHandle | None = None  # of its sandbox
        self.cell: weakref.ref[Sandbox] | None = None  # the sandbox in the cell that has its variables
        self.files: dict[str, CodeFile] = {}  # that are in /mnt/data, and in the store
        self.empty: tuple[str, ...] = ()  # directories
        self.not_kept: dict[str, int] = {}  # files that cannot be in the store, with their sizes
        self.collected_ns = 0  # when that was so, by the sandbox's clock
        self.remembered: list[WorkspaceEntry] | None = None  # what the store has; None if that is not known
        self.lost_variables = False

    @property
    def running(self) -> Sandbox | None:
        here = None if self.handle is None else self.handle.here
        return here if here is not None and here.record.state == "running" else None

    @property
    def paused(self) -> SandboxHandle | None:
        """The handle of its sandbox if that is paused, by a client of another dialect."""
        if self.handle is None:
            return None
        here = self.handle.here
        return self.handle if here is None or here.record.state == "paused" else None

    @property
    def is_lost(self) -> bool:
        """Whether its sandbox has died."""
        here = None if self.handle is None else self.handle.here
        return here is not None and here.record.state == "lost"

    def is_used(self, since: float) -> bool:
        """Whether it runs, or is paused and was used `since` then."""
        return bool(self.users) or self.running is not None or (self.paused is not None and self.used_at >= since)

    @property
    def inputs(self) -> list[ProgramInput]:
        return [ProgramInput(path=path, file=file) for path, file in self.files.items()]

    def add(self, one: ProgramInput) -> None:
        self.files[one.path] = one.file

    @property
    def entries(self) -> list[WorkspaceEntry]:
        """The files and empty directories as the store has them: ordered by path."""
        files = [WorkspaceEntry(path=path, session=file.session, file=file.id) for path, file in self.files.items()]
        return sorted(files + [WorkspaceEntry(path=path) for path in self.empty], key=lambda entry: entry.path)


class SessionTurn:
    """One program's turn in a session, until the block is left. It can be released for a while."""

    def __init__(self, lock: asyncio.Lock):
        self._lock = lock
        self._is_ours = False

    async def __aenter__(self) -> SessionTurn:
        await self.take()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release_turn()

    async def take(self) -> None:
        await self._lock.acquire()
        self._is_ours = True

    def release_turn(self) -> None:
        if self._is_ours:
            self._is_ours = False
            self._lock.release()


class SessionSandbox(ProgramSandbox):
    """The sandbox of a session. `named_paths` are the paths of the files that the caller named."""

    def __init__(
        self,
        sessions: CodeSessions,
        session: CodeSession,
        sandbox: Sandbox,
        caller: LibreChatCaller,
        storage: str,
        notes: ProgramNotes,
        *,
        named_paths: frozenset[str],
    ):
        super().__init__(sandbox, caller, storage, notes)
        self.session = session
        self.turn: SessionTurn | None = None
        self._sessions = sessions
        self._named_paths = named_paths

    def release_turn(self) -> None:
        if self.turn is not None:
            self.turn.release_turn()

    async def reacquire_turn(self) -> None:
        if self.turn is not None:
            await self.turn.take()

    async def _collect_outputs(self) -> CollectedOutputs:
        collected = await self._sessions.collect(self.session, self)
        return msgspec.structs.replace(collected, inherited=self._named_inputs(collected.inherited))

    def _lost_outputs(self) -> CollectedOutputs:
        return CollectedOutputs(inherited=self._named_inputs(self.session.inputs))

    def _named_inputs(self, inherited: Sequence[ProgramInput]) -> tuple[ProgramInput, ...]:
        """The inputs that the caller named: it does not follow other files."""
        return tuple(one for one in inherited if one.path in self._named_paths)


class CodeSessions:
    """All sessions of this process. Different callers have different sessions, even with equal hints."""

    def __init__(self, api: LibreChatContext, inputs: ProgramInputs, outputs: ProgramOutputs):
        self._engine = api.engine
        self._config = api.settings
        self._files = api.store.code_files
        self._workspaces = api.store.code_sessions
        self._inputs = inputs
        self._outputs = outputs
        self._sessions: dict[str, CodeSession] = {}
        self._swept_at = 0.0

    @contextlib.asynccontextmanager
    async def place(
        self,
        caller: LibreChatCaller,
        request: ExecRequest,
        seconds: float,
        storage: str,
        notes: ProgramNotes,
        start: contextlib.AbstractAsyncContextManager[None],
    ) -> AsyncGenerator[SessionSandbox, None]:
        """The sandbox of a session, with its files and those that `request` names. `seconds` limits the program.

        Waits for its turn in the session, and then enters `start`. Raises the engine's errors.
        """
        session = self._find_session(caller, request.hint or "")
        session.users += 1
        try:
            async with SessionTurn(session.turn) as turn, start:
                place = await self._enter_session(session, caller, request, seconds, storage, notes)
                place.turn = turn
                try:
                    yield place
                finally:
                    self._release_session(session)
        finally:
            session.users -= 1

    async def collect(self, session: CodeSession, place: ProgramSandbox) -> CollectedOutputs:
        """Stores the files that a program left as the session's workspace. Raises Gone."""
        collected = await self._outputs.collect(
            place.sandbox,
            place.caller,
            place.storage,
            session.inputs,
            place.notes,
            marks=False,
            ignored=session.not_kept,
            since_ns=session.collected_ns,
        )
        session.files = {one.path: one.file for one in collected.inherited}
        session.files |= {one.path: one.file for one in collected.outputs}
        session.empty, session.not_kept = collected.empty, collected.not_kept
        session.collected_ns = collected.at_ns
        await self._remember_workspace(session, MAX_SESSIONS_OF_USER if place.caller.user else MAX_SESSIONS_OF_KEY)
        return collected

    async def _remember_workspace(self, session: CodeSession, most: int) -> None:
        entries = session.entries
        if session.remembered == entries:
            self._workspaces.touch(session.key, session.owner)
            return
        session.remembered = None  # after a cancellation it is unknown what the store did
        await self._workspaces.save_workspace(session.key, session.owner, entries, most=most)
        session.remembered = entries

    async def _enter_session(
        self,
        session: CodeSession,
        caller: LibreChatCaller,
        request: ExecRequest,
        seconds: float,
        storage: str,
        notes: ProgramNotes,
    ) -> SessionSandbox:
        inputs = await self._inputs.find(caller, request.files, notes)
        sandbox, status = await self._prepare_sandbox(session, caller, inputs, seconds, notes)
        named_paths = frozenset(one.path for one in inputs)
        place = SessionSandbox(self, session, sandbox, caller, storage, notes, named_paths=named_paths)
        place.fields = {"runtime_session_id": session.key, "runtime_status": status}
        place.keeps_variables = self._config.python_state
        if session.lost_variables and is_python(request.lang):
            session.lost_variables = False
            notes.add("variables of earlier programs are gone, as the session had ended; its files are there again")
        return place

    async def _prepare_sandbox(
        self,
        session: CodeSession,
        caller: LibreChatCaller,
        inputs: Sequence[ProgramInput],
        seconds: float,
        notes: ProgramNotes,
    ) -> tuple[Sandbox, str]:
        """Returns a sandbox with these inputs that lives long enough for the program, and whether it is new."""
        lifetime = self._idle_seconds + seconds + SPARE_SECONDS
        await self._resume_sandbox(session)
        lasting = self._usable_sandbox(session, seconds)
        if lasting is not None:
            with contextlib.suppress(errors.Gone, errors.SandboxPaused):  # it may end at this very moment
                await self._write_inputs(session, lasting, inputs, notes)
                lasting.extend(lifetime)
                return lasting, "reused"
        sandbox = await self._create_sandbox(session, caller, notes)
        await self._write_inputs(session, sandbox, inputs, notes)
        sandbox.extend(lifetime)
        return sandbox, "new"

    async def _resume_sandbox(self, session: CodeSession) -> None:
        """Clients cannot resume. Without its memory, the session lost its variables, but not its files."""
        paused = session.paused
        if paused is not None:
            with contextlib.suppress(errors.Gone, errors.NotFound):  # it was killed: another is made
                await paused.resume()
        running = session.running
        if running is not None and session.cell is not None and session.cell() is not running:
            session.lost_variables = self._config.python_state  # it was paused without its memory meanwhile
            session.cell = weakref.ref(running)

    def _usable_sandbox(self, session: CodeSession, seconds: float) -> Sandbox | None:
        """The running sandbox, if it may run for as long as the program needs: sandboxes have a maximum lifetime."""
        sandbox = session.running
        if sandbox is None:
            return None
        oldest = sandbox.record.created_at + self._engine.config.lifetime.max_seconds
        if time.time() + seconds + SPARE_SECONDS < oldest:
            return sandbox
        sandbox.expire_now()
        return None

    async def _create_sandbox(self, session: CodeSession, caller: LibreChatCaller, notes: ProgramNotes) -> Sandbox:
        """Creates a sandbox with the session's files in /mnt/data."""
        if session.is_lost:
            notes.add("the session's sandbox had died: its files are as they were after the last program that ended")
        self._evict_idle()
        spec = SandboxSpec(
            template=self._config.template,
            owner=caller.owner,
            lifetime_seconds=self._limit_lifetime(self._idle_seconds),
        )
        sandbox = await self._engine.create(spec)
        try:
            await self._restore_workspace(session, sandbox, caller, notes)
        except BaseException:
            sandbox.expire_now()
            raise
        session.handle, session.cell = sandbox.handle, weakref.ref(sandbox)
        return sandbox

    async def _restore_workspace(
        self, session: CodeSession, sandbox: Sandbox, caller: LibreChatCaller, notes: ProgramNotes
    ) -> None:
        session.files, session.empty, session.not_kept, session.collected_ns = {}, (), {}, 0
        session.remembered = entries = await self._workspaces.workspace(session.key, session.owner)
        if entries is None:
            return
        session.lost_variables = self._config.python_state
        reach = TenantScope(owner=caller.owner, tenant=caller.tenant)  # what the session had, it may have again
        found = await self._files.find([(reach, (each.session, each.file)) for each in entries if each.file])
        there = [
            ProgramInput(path=each.path, file=file)
            for each in entries
            if (file := found.get((each.session, each.file)))
        ]
        for each in entries:
            if each.file and (each.session, each.file) not in found:
                notes.add(
                    f"{quote_name(each.path)} is not here any more: the session had ended, and the file has expired"
                )
        written = await self._inputs.write(sandbox, there, notes)
        session.files = {one.path: one.file for one in written}
        empty = [each.path for each in entries if not each.file]
        await asyncio.gather(*(_make_directory(sandbox, path) for path in empty))
        session.empty = tuple(empty)

    async def _write_inputs(
        self, session: CodeSession, sandbox: Sandbox, inputs: Sequence[ProgramInput], notes: ProgramNotes
    ) -> None:
        """Writes the inputs that the session does not have, or has in an older version."""
        new = [one for one in inputs if _is_newer(session.files.get(one.path), one.file)]
        for one in new:
            if one.path in session.not_kept:
                notes.add(
                    f"{quote_name(one.path)} is the session's own, not the file that was named: that one would "
                    "replace what "
                    "could not be kept, and would be lost. Rename or remove it to have the other"
                )
        new = [one for one in new if one.path not in session.not_kept]
        for one in new:
            old = session.files.get(one.path)
            if old is not None and old.sha256 != one.file.sha256:
                notes.add(f"{quote_name(one.path)} is now the newer file of that name; the session had another one")
            if old is not None and old.read_only:
                with contextlib.suppress(errors.FileNotFound):  # with a single uid, programs can remove it
                    await sandbox.files.remove(DATA_DIRECTORY + one.path, user="root", below=DATA_DIRECTORY)
        await self._inputs.write(sandbox, new, notes, session.add)

    def _evict_idle(self) -> None:
        """Ends the longest idle sandbox of the caller with the most, while there are too many.

        The store has its files.
        """
        running = [each for each in self._sessions.values() if each.running is not None]
        counts = Counter(each.owner for each in running)
        for _ in range(len(running) - MAX_RUNNING_SESSIONS + 1):
            idle = [each for each in running if each.running is not None and not each.users]
            if not idle:
                return
            chosen = min(idle, key=lambda each: (-counts[each.owner], each.used_at))
            counts[chosen.owner] -= 1
            running.remove(chosen)
            if chosen.running is not None:
                chosen.running.expire_now()

    def _release_session(self, session: CodeSession) -> None:
        session.used_at = time.monotonic()
        # Where a program of it waits for its client, that one needs the sandbox for longer than an idle one lives.
        if session.running is not None and session.users == 1:
            session.running.renew(self._idle_seconds)

    def _find_session(self, caller: LibreChatCaller, hint: str) -> CodeSession:
        self._sweep_sessions()
        key = session_key(caller, hint)
        return self._sessions.setdefault(key, CodeSession(key, session_owner(caller)))

    def _sweep_sessions(self) -> None:
        """Removes sessions with ended sandboxes: the store has their files."""
        now = time.monotonic()
        if now - self._swept_at > SWEEP_SECONDS:
            self._swept_at = now
            idle_since = now - self._idle_seconds
            self._sessions = {key: each for key, each in self._sessions.items() if each.is_used(idle_since)}

    @property
    def _idle_seconds(self) -> float:
        return self._config.session_idle_minutes * 60

    def _limit_lifetime(self, seconds: float) -> float:
        return min(seconds, self._engine.config.lifetime.max_seconds)


def session_owner(caller: LibreChatCaller) -> str:
    """The owner of a session, in the store."""
    return msgspec.json.encode((caller.owner, caller.tenant, caller.user)).decode()


def session_key(caller: LibreChatCaller, hint: str) -> str:
    """The id of a session, for its caller and in the store. Different callers never share one."""
    parts = msgspec.json.encode((caller.owner, caller.tenant, caller.user, hint))
    return "rt_" + hashlib.sha256(parts).hexdigest()[:40]


def _is_newer(had: CodeFile | None, file: CodeFile) -> bool:
    return had is None or (had.ref != file.ref and had.created_at < file.created_at)


async def _make_directory(sandbox: Sandbox, path: str) -> None:
    with contextlib.suppress(errors.FileError, errors.InvalidPath):
        await sandbox.files.make_dir(DATA_DIRECTORY + path)
