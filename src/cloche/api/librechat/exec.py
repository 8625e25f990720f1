"""POST /exec: runs a program with the caller's files, and returns its outcome."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.dialect import Json, json_reply
from cloche.api.http import decode_apart, run_unless_disconnected
from cloche.api.librechat import cells, outcome
from cloche.api.librechat.context import LibreChatContext
from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.inputs import ProgramInputs
from cloche.api.librechat.limits import ProgramQueue, ProgramTicket, RequestMemoryShare
from cloche.api.librechat.outcome import ProgramOutcome
from cloche.api.librechat.outputs import ProgramOutputs
from cloche.api.librechat.program_sandbox import ProgramSandbox, SingleProgramSandbox
from cloche.api.librechat.replies import ProgramNotes, new_code_id
from cloche.api.librechat.request import ExecRequest, decode_exec
from cloche.api.librechat.sessions import SPARE_SECONDS, CodeSessions
from cloche.api.programs import (
    AvailableLanguages,
    ProgramLanguage,
    ProgramLimits,
    language_of,
    missing_language,
    running_program,
)
from cloche.engine.commands.jobs import OutputCapture
from cloche.engine.sandboxes.endings import PROGRAM_ENDED
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec
from cloche.tasks import TaskSet

# Runs programs in sandboxes: new ones, or those of sessions.

PROBE_OWNER = "(cloche)"  # the owner of the server's own sandboxes: no key can have it


class ProgramRunner:
    """Shared by all programs of this process, of both routes."""

    def __init__(self, api: LibreChatContext):
        self._engine = api.engine
        self._config = api.settings
        self._inputs = ProgramInputs(api.store.code_files, api.settings.max_files)
        self._outputs = ProgramOutputs(api.store.code_files, api.settings)
        self._sessions = CodeSessions(api, self._inputs, self._outputs)
        self._available = AvailableLanguages(self._probe_sandbox)
        self._ending = TaskSet()

    def place(
        self,
        caller: LibreChatCaller,
        request: ExecRequest,
        storage: str | None = None,
        turn: contextlib.AbstractAsyncContextManager[None] | None = None,
    ) -> contextlib.AbstractAsyncContextManager[ProgramSandbox]:
        """A sandbox with the program's inputs. Leaving the block ends it, unless it belongs to a session.

        `storage` is the storage session of the outputs, if it has an id already. A request with a session waits until
        no other uses it, and then enters `turn`: waiting for a session takes no turn from others. Raises the engine's
        errors.
        """
        notes, storage, turn = ProgramNotes(request.notes), storage or new_code_id(), turn or contextlib.nullcontext()
        if request.hint is None:
            return self._single_program_sandbox(caller, request, storage, notes, turn)
        return self._sessions.place(caller, request, self.bounds(request).seconds, storage, notes, turn)

    async def run_request(
        self,
        caller: LibreChatCaller,
        request: ExecRequest,
        turn: contextlib.AbstractAsyncContextManager[None] | None = None,
    ) -> Json:
        """Runs a program in a sandbox. Returns the answer to POST /exec. Raises the errors of `place` and `run`."""
        async with self.place(caller, request, turn=turn) as place:
            return place.answer(await self.run(place, request), await place.collect())

    def bounds(self, request: ExecRequest) -> ProgramLimits:
        seconds = min(request.timeout_seconds or self._config.timeout_seconds, self._config.max_timeout_seconds)
        return ProgramLimits(seconds=seconds, output_bytes=self._config.output_bytes)

    async def run(self, place: ProgramSandbox, request: ExecRequest) -> ProgramOutcome:
        """Runs the program to its end. A missing language is an outcome, too. Raises Gone."""
        language = await self._find_language(request)
        if isinstance(language, ProgramOutcome):
            return language
        try:
            if language.name == "py" and place.keeps_variables:
                return await cells.run_cell(place, request, self.bounds(request))
            return await self._run_once(place.sandbox, language, request)
        except (errors.InvalidRequest, errors.FileError) as error:  # arguments that are too long, say, or a full disk
            return outcome.refused_outcome(str(error))

    async def _run_once(self, sandbox: Sandbox, language: ProgramLanguage, request: ExecRequest) -> ProgramOutcome:
        """Runs a program that leaves only files behind."""
        began_at, killed_before = time.monotonic(), sandbox.oom_kills()
        async with running_program(sandbox, language, request.code, request.args, self.bounds(request)) as program:
            await program.wait()
        ended = program_outcome(program, time.monotonic() - began_at)
        return outcome.mark_out_of_memory(ended) if sandbox.oom_kills() > killed_before else ended

    async def _find_language(self, request: ExecRequest) -> ProgramLanguage | ProgramOutcome:
        language = language_of(request.lang)
        if language is not None and not language.needs:
            return language
        available = await self._available.languages()
        if language is not None and language in available:
            return language
        return outcome.refused_outcome(missing_language(request.lang, available))

    @contextlib.asynccontextmanager
    async def _single_program_sandbox(
        self,
        caller: LibreChatCaller,
        request: ExecRequest,
        storage: str,
        notes: ProgramNotes,
        turn: contextlib.AbstractAsyncContextManager[None],
    ) -> AsyncGenerator[ProgramSandbox, None]:
        async with turn:
            inputs = await self._inputs.find(caller, request.files, notes)
            async with self._temporary_sandbox(caller.owner) as sandbox:
                written = await self._inputs.write(sandbox, inputs, notes)
                yield SingleProgramSandbox(sandbox, caller, storage, notes, inputs=written, outputs=self._outputs)

    def _probe_sandbox(self) -> contextlib.AbstractAsyncContextManager[Sandbox]:
        """A sandbox that no caller's program has run in."""
        return self._temporary_sandbox(PROBE_OWNER)

    @contextlib.asynccontextmanager
    async def _temporary_sandbox(self, owner: str) -> AsyncGenerator[Sandbox, None]:
        sandbox = await self._create_sandbox(owner)
        try:
            yield sandbox
        finally:
            self._end_sandbox(sandbox)

    async def _create_sandbox(self, owner: str) -> Sandbox:
        """Creates a sandbox that lives as long as any program may run, and wait for its client."""
        seconds = self._config.max_timeout_seconds + self._config.tool_wait_seconds * 2 + SPARE_SECONDS
        lifetime = min(seconds, self._engine.config.lifetime.max_seconds)
        spec = SandboxSpec(template=self._config.template, owner=owner, lifetime_seconds=lifetime)
        return await self._engine.create(spec)

    def _end_sandbox(self, sandbox: Sandbox) -> None:
        """Ends the sandbox in the background: the answer is complete."""
        self._ending.start(sandbox.kill(PROGRAM_ENDED))


def program_outcome(program: OutputCapture, wall_seconds: float) -> ProgramOutcome:
    """The outcome of a program that has ended."""
    assert program.exited is not None
    usage = msgspec.structs.replace(program.usage, wall_seconds=wall_seconds)
    stdout, stderr = program.output_so_far("stdout"), program.output_so_far("stderr")
    return ProgramOutcome(exited=program.exited, stdout=stdout, stderr=stderr, usage=usage)


def execution_routes(api: LibreChatContext, runner: ProgramRunner) -> list[Route]:
    return [api.route("POST", "/exec", ExecHandler(api, runner).execute)]


class ExecHandler:
    def __init__(self, api: LibreChatContext, runner: ProgramRunner):
        self._api = api
        self._runner = runner
        self._turns = ProgramQueue()

    async def execute(self, request: Request) -> Response:
        caller = self._api.starter(request)
        with self._turns.hold_ticket(caller) as ticket, self._api.room.share(caller) as share:
            return json_reply(await self._run_request(request, caller, ticket, share))

    async def _run_request(
        self, request: Request, caller: LibreChatCaller, ticket: ProgramTicket, share: RequestMemoryShare
    ) -> Json:
        asked = await decode_apart(decode_exec, await self._api.counted_body(request, share))
        share.settle(asked.bytes)
        return await run_unless_disconnected(request, self._runner.run_request(caller, asked, ticket.turn()))
