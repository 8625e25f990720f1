"""POST /exec: a program, with the caller's files, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.http import unless_left
from cloche.api.librechat import outcome, programs
from cloche.api.librechat.context import Desk
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.inputs import Inputs
from cloche.api.librechat.limits import Share, Ticket, Turns
from cloche.api.librechat.outcome import Outcome
from cloche.api.librechat.outputs import Outputs
from cloche.api.librechat.program_sandbox import OwnPlace, Place
from cloche.api.librechat.programs import Available, Bounds, Language, language_of, missing, running
from cloche.api.librechat.replies import Json, Notes, json_reply, new_code_id
from cloche.api.librechat.request import Asked, decode
from cloche.api.librechat.sessions import SPARE_SECONDS, Sessions
from cloche.engine.commands.jobs import Capture
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec

# Makes places for programs, and runs programs in them.

OWN_NAME = "(cloche)"  # the owner of sandboxes that are nobody's: no key can have it


class Workshop:
    """Of this process: what all programs share, whatever way they came."""

    def __init__(self, desk: Desk):
        self._engine = desk.engine
        self._config = desk.config
        self._inputs = Inputs(desk.shelf.code_files, desk.config.max_files)
        self._outputs = Outputs(desk.shelf.code_files, desk.config)
        self._sessions = Sessions(desk, self._inputs, self._outputs)
        self._available = Available(self._untouched)
        self._ending: set[asyncio.Task[None]] = set()

    def place(
        self,
        caller: Caller,
        asked: Asked,
        storage: str | None = None,
        turn: contextlib.AbstractAsyncContextManager[None] | None = None,
    ) -> contextlib.AbstractAsyncContextManager[Place]:
        """With the program's inputs in it. Leaving ends the sandbox, unless it is a session's.

        `storage` is the storage session of what the program will make, where that has an id already. Whoever asks for a
        session waits until nobody else uses it, and then enters `turn`: who waits for a session takes no turn from
        others. Raises what the engine raises.
        """
        notes, storage, turn = Notes(asked.notes), storage or new_code_id(), turn or contextlib.nullcontext()
        if asked.hint is None:
            return self._own_place(caller, asked, storage, notes, turn)
        return self._sessions.place(caller, asked, self.bounds(asked).seconds, storage, notes, turn)

    async def carry_out(
        self, caller: Caller, asked: Asked, turn: contextlib.AbstractAsyncContextManager[None] | None = None
    ) -> Json:
        """Runs a program in a place for it. The answer to POST /exec. Raises what `place` and `run` raise."""
        async with self.place(caller, asked, turn=turn) as place:
            return place.answer(await self.run(place, asked), await place.collect())

    def bounds(self, asked: Asked) -> Bounds:
        seconds = min(asked.timeout_seconds or self._config.timeout_seconds, self._config.max_timeout_seconds)
        return Bounds(seconds=seconds, output_bytes=self._config.output_bytes)

    async def run(self, place: Place, asked: Asked) -> Outcome:
        """The program, to its end. A language that is not there is an outcome, too. Raises Gone."""
        language = await self._language(asked)
        if isinstance(language, Outcome):
            return language
        try:
            if language.name == "py" and place.keeps_variables:
                return await programs.run(place, asked, self.bounds(asked))
            return await self._run_once(place.sandbox, language, asked)
        except (errors.InvalidRequest, errors.FileError) as error:  # arguments that are too long, say, or a full disk
            return outcome.refused(str(error))

    async def _run_once(self, sandbox: Sandbox, language: Language, asked: Asked) -> Outcome:
        """A program that leaves nothing behind but files."""
        began_at, killed_before = time.monotonic(), sandbox.oom_kills()
        async with running(sandbox, language, asked, self.bounds(asked)) as program:
            await program.wait()
        ended = outcome_of(program, time.monotonic() - began_at)
        return outcome.out_of_memory(ended) if sandbox.oom_kills() > killed_before else ended

    async def _language(self, asked: Asked) -> Language | Outcome:
        language = language_of(asked.lang)
        if language is not None and not language.needs:
            return language
        available = await self._available.languages()
        if language is not None and language in available:
            return language
        return outcome.refused(missing(asked.lang, available))

    @contextlib.asynccontextmanager
    async def _own_place(
        self,
        caller: Caller,
        asked: Asked,
        storage: str,
        notes: Notes,
        turn: contextlib.AbstractAsyncContextManager[None],
    ) -> AsyncGenerator[Place, None]:
        async with turn:
            inputs = await self._inputs.find(caller, asked.files, notes)
            async with self._sandbox_of(caller.owner) as sandbox:
                written = await self._inputs.write(sandbox, inputs, notes)
                yield OwnPlace(sandbox, caller, storage, notes, inputs=written, outputs=self._outputs)

    def _untouched(self) -> contextlib.AbstractAsyncContextManager[Sandbox]:
        """A sandbox that no program of a caller's has seen."""
        return self._sandbox_of(OWN_NAME)

    @contextlib.asynccontextmanager
    async def _sandbox_of(self, owner: str) -> AsyncGenerator[Sandbox, None]:
        sandbox = await self._create(owner)
        try:
            yield sandbox
        finally:
            self._end(sandbox)

    async def _create(self, owner: str) -> Sandbox:
        """It lives for as long as any program may, and waits for its client."""
        seconds = self._config.max_timeout_seconds + self._config.tool_wait_seconds * 2 + SPARE_SECONDS
        lifetime = min(seconds, self._engine.config.lifetime.max_seconds)
        spec = SandboxSpec(template=self._config.template, owner=owner, lifetime_seconds=lifetime)
        return await self._engine.create(spec)

    def _end(self, sandbox: Sandbox) -> None:
        """Nobody waits for it: the answer is made."""
        ending = asyncio.create_task(sandbox.kill("its program has ended"))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


def outcome_of(program: Capture, wall_seconds: float) -> Outcome:
    """Of a program that has ended."""
    assert program.exited is not None
    usage = msgspec.structs.replace(program.usage, wall_seconds=wall_seconds)
    stdout, stderr = program.so_far("stdout"), program.so_far("stderr")
    return Outcome(exited=program.exited, stdout=stdout, stderr=stderr, usage=usage)


def routes(desk: Desk, workshop: Workshop) -> list[Route]:
    return [desk.route("POST", "/exec", Executions(desk, workshop).execute)]


class Executions:
    def __init__(self, desk: Desk, workshop: Workshop):
        self._desk = desk
        self._workshop = workshop
        self._turns = Turns()

    async def execute(self, request: Request) -> Response:
        caller = self._desk.starter(request)
        with self._turns.ticket(caller) as ticket, self._desk.room.share(caller) as share:
            return json_reply(await self._answer(request, caller, ticket, share))

    async def _answer(self, request: Request, caller: Caller, ticket: Ticket, share: Share) -> Json:
        asked = decode(await self._desk.body(request, share))
        share.settle(asked.bytes)
        return await unless_left(request, self._workshop.carry_out(caller, asked, ticket.turn()))
