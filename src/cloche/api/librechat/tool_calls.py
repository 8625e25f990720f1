"""POST /exec/programmatic: a program that calls tools, which its client runs.

The program runs once, and waits for each result. Its own time is limited as that of any program; the time
that its client takes does not count. A client that disconnects before it received any calls cannot come back,
so its program is ended; one that disconnects later can send the same results again, and resumes its program.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.dialect import Json, encoded_json_reply, json_reply
from cloche.api.http import decode_apart, read_decoded, run_unless_disconnected
from cloche.api.librechat.context import LibreChatContext
from cloche.api.librechat.continuation import ContinuationTokens
from cloche.api.librechat.dialogue import ClientAnswer, ToolCallRound, ToolDialogue, ToolDialogues
from cloche.api.librechat.exec import ProgramRunner, program_outcome
from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.outcome import MEMORY, TIME, ProgramOutcome, mark_out_of_memory
from cloche.api.librechat.program_sandbox import ProgramSandbox
from cloche.api.librechat.replies import LibreChatRefusal
from cloche.api.librechat.request import ToolProgram, decode_object, decode_program, decode_results
from cloche.api.librechat.sessions import SPARE_SECONDS
from cloche.api.programs import language_of, running_program
from cloche.engine.commands.jobs import CapturedStream, OutputCapture
from cloche.engine.executions.tools import ToolOffer
from cloche.events import Exited

# Requests that the client may cancel: it names them in a header and cancels them on another connection.
#
# The cancellation may arrive before the request itself, and mostly arrives just after the request's own
# connection has ended: so both are remembered for a while.

REQUEST_ID_HEADER = "x-librechat-code-request-id"
MAX_REMEMBERED_OF_USER = 100  # beyond those that are being answered
MAX_REMEMBERED_OF_KEY = 1000  # which may stand for many users
MAX_REMEMBERED_REQUESTS = 10_000
REMEMBERED_SECONDS = 60.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class CancellableRequest:
    """A request that can be cancelled. The handler registers the function that ends it."""

    def __init__(self, is_cancelled: bool = False) -> None:
        self.is_cancelled = is_cancelled
        self.is_here = False  # not yet, or no more: its client may send it again
        self._end: Callable[[], None] | None = None

    def on_cancel(self, end: Callable[[], None]) -> None:
        """Registers `end()`, called when the request is cancelled, or at once if it was."""
        self._end = end
        if self.is_cancelled:
            end()

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._end is not None:
            self._end()


class RequestCancellations:
    """The requests in progress, the disconnected ones, and the ones cancelled before they arrived."""

    def __init__(self) -> None:
        self._requests: dict[tuple[LibreChatCaller, str], CancellableRequest] = {}
        self._remembered: Counter[LibreChatCaller] = Counter()  # how many are forgotten later
        self._remembered_in_all = 0

    def cancel(self, caller: LibreChatCaller, id: object) -> None:
        """Raises LibreChatRefusal (400)."""
        if not isinstance(id, str) or not _REQUEST_ID.fullmatch(id):
            raise LibreChatRefusal(400, "Invalid or missing request_id")
        request = self._requests.get((caller, id))
        if request is not None:
            request.cancel()
        else:
            self._requests[caller, id] = CancellableRequest(is_cancelled=True)
            self._remove_later((caller, id))

    @contextlib.contextmanager
    def track_request(self, caller: LibreChatCaller, id: str | None) -> Iterator[CancellableRequest]:
        """Holds a request until it is answered. Raises LibreChatRefusal (400, 409)."""
        if id is None:
            yield CancellableRequest()
            return
        request = self._requests[caller, id] = self._new_request(caller, id)
        request.is_here = True
        try:
            yield request
        except (ClientDisconnect, asyncio.CancelledError):
            request.is_here = False
            self._remove_later((caller, id))
            raise
        except BaseException:
            self._remove_request((caller, id), request)
            raise
        self._remove_request((caller, id), request)

    def _new_request(self, caller: LibreChatCaller, id: str) -> CancellableRequest:
        if not _REQUEST_ID.fullmatch(id):
            raise LibreChatRefusal(400, "Invalid programmatic request ID")
        before = self._requests.get((caller, id))
        if before is not None and before.is_here:
            raise LibreChatRefusal(409, "Programmatic request ID is already in use")
        return CancellableRequest(is_cancelled=before is not None and before.is_cancelled)

    def _remove_later(self, key: tuple[LibreChatCaller, str]) -> None:
        """Removes the request after a while, or at once if the caller has too many remembered ones."""
        caller, request = key[0], self._requests[key]
        most = MAX_REMEMBERED_OF_USER if caller.user else MAX_REMEMBERED_OF_KEY
        if self._remembered[caller] >= most or self._remembered_in_all >= MAX_REMEMBERED_REQUESTS:
            self._remove_request(key, request)
            return
        self._remembered[caller] += 1
        self._remembered_in_all += 1
        asyncio.get_running_loop().call_later(REMEMBERED_SECONDS, self._remove_remembered, key, request)

    def _remove_remembered(self, key: tuple[LibreChatCaller, str], request: CancellableRequest) -> None:
        self._remembered_in_all -= 1
        self._remembered[key[0]] -= 1
        if not self._remembered[key[0]]:
            del self._remembered[key[0]]
        self._remove_request(key, request)

    def _remove_request(self, key: tuple[LibreChatCaller, str], request: CancellableRequest) -> None:
        if self._requests.get(key) is request:
            del self._requests[key]


MAX_CANCEL_BYTES = 64 << 10
PARTIAL_BYTES = 32 << 10  # of each stream in the reply of a round; all of it comes at the end
_EXEC_FIELDS = ("code", "signal", "message", "status")  # what /exec says, and is said in other words here


def programmatic_routes(api: LibreChatContext, runner: ProgramRunner) -> list[Route]:
    programs = ProgrammaticHandler(api, runner)
    return [
        api.route("POST", "/exec/programmatic", programs.execute),
        api.route("POST", "/exec/programmatic/cancel", programs.cancel),
    ]


class ProgrammaticHandler:
    def __init__(self, api: LibreChatContext, runner: ProgramRunner):
        self._api = api
        self._runner = runner
        self._dialogues = ToolDialogues(ContinuationTokens(api.secret), api.settings.tool_wait_seconds)
        api.engine.cell_supply.admission.lockout.add_listener(self._dialogues.end_all)
        self._cancelling = RequestCancellations()

    async def execute(self, request: Request) -> Response:
        caller = self._api.caller(request)
        with self._cancelling.track_request(caller, request.headers.get(REQUEST_ID_HEADER)) as cancellable:
            with self._api.room.share(caller) as share:
                # What was sent is not kept while the client waits: it can be large.
                body = await self._api.counted_body(request, share)
                given = await decode_apart(decode_object, body)
                dialogue, told = self._accept_request(request, caller, given, len(body))
                del body, given
            cancellable.on_cancel(partial(self._dialogues.end, dialogue.id))
            try:
                said = await run_unless_disconnected(request, _wait_for_answer(told))
            finally:
                if not dialogue.first.done():
                    self._dialogues.end(dialogue.id)
        if isinstance(said, BaseException):
            raise said.with_traceback(None)  # others get the same error, and each raise would add to it
        return encoded_json_reply(said)

    async def cancel(self, request: Request) -> Response:
        """For a client that wants no answer any more: the end of the connection alone may mean a bad network."""
        caller = self._api.caller(request)
        given = await read_decoded(request, decode_object, MAX_CANCEL_BYTES)
        self._cancelling.cancel(caller, given.get("request_id"))
        return json_reply({"status": "cancellation_requested"}, 202)

    def _accept_request(
        self, request: Request, caller: LibreChatCaller, given: Json, body_bytes: int
    ) -> tuple[ToolDialogue, asyncio.Future[ClientAnswer]]:
        """Begins a program, or hands results to one. Raises LibreChatRefusal, InvalidRequest."""
        token = given.get("continuation_token")
        if token:
            results = decode_results(given.get("tool_results"))
            dialogue, round = self._dialogues.find(token, caller)
            return dialogue, dialogue.submit(round, results)
        self._api.starter(request)
        program = decode_program(given, self._api.settings.max_tools)
        size = max(body_bytes, sys.getsizeof(program.request.code))
        dialogue = self._dialogues.begin(caller, partial(self._run_dialogue, caller, program), size)
        return dialogue, dialogue.first

    # -- the program

    async def _run_dialogue(self, caller: LibreChatCaller, program: ToolProgram, dialogue: ToolDialogue) -> Json:
        """Runs a program from start to end. Returns the final answer of its dialogue."""
        async with self._runner.place(caller, program.request, dialogue.session_id) as place:
            killed_before = place.sandbox.oom_kills()
            outcome = await self._run_program(place, program, dialogue)
            if place.sandbox.oom_kills() > killed_before:
                outcome = mark_out_of_memory(outcome)
            return final_answer(place.answer(outcome, await place.collect()), outcome)

    async def _run_program(self, place: ProgramSandbox, program: ToolProgram, dialogue: ToolDialogue) -> ProgramOutcome:
        request = program.request
        language, bounds = language_of(request.lang), self._runner.bounds(request)
        assert language is not None
        began_at, tools, max_calls = time.monotonic(), place.sandbox.tools, self._api.settings.max_tool_calls
        patience = self._api.settings.tool_wait_seconds + bounds.seconds + SPARE_SECONDS
        async with (
            tools.make_offer(
                program.tools, language=program.language, max_calls=max_calls, raw=True, no_room=dialogue.no_room
            ) as offer,
            running_program(place.sandbox, language, request.code, request.args, bounds, offer) as process,
        ):
            offer.runs(process)
            dialogue.counts(lambda: offer.held_bytes)
            await ToolCallLoop(place, process, offer, dialogue, patience).hold()
            await process.wait()
        return program_outcome(process, time.monotonic() - began_at)


async def _wait_for_answer(told: asyncio.Future[ClientAnswer]) -> ClientAnswer:
    """Waits for an answer. A cancelled caller does not cancel it for others."""
    await asyncio.wait((told,))
    return told.result()


class ToolCallLoop:
    """Passes a program's calls to its client, and the results back."""

    def __init__(
        self,
        place: ProgramSandbox,
        process: OutputCapture,
        offer: ToolOffer,
        dialogue: ToolDialogue,
        patience_seconds: float,
    ):
        self._place = place
        self._process = process
        self._offer = offer
        self._dialogue = dialogue
        self._patience_seconds = patience_seconds

    async def hold(self) -> None:
        """Loops until the program or its sandbox ends. Raises LibreChatRefusal when the client takes too long."""
        ending = asyncio.ensure_future(self._process.wait())
        ending.add_done_callback(lambda _: self._offer.close())
        try:
            with contextlib.suppress(errors.Gone):
                while round := await self._next_round():
                    await self._answer_round(round, ending)
        finally:
            ending.cancel()

    async def _next_round(self) -> ToolCallRound | None:
        """Sends the next calls to the client. They are not kept here, where they can be large."""
        calls = await self._offer.next_round()
        if not calls:
            return None
        self._place.sandbox.extend(self._patience_seconds)
        return self._dialogue.ask(calls, _partial_output(self._process))

    async def _answer_round(self, round: ToolCallRound, ending: asyncio.Future[Exited]) -> None:
        """While the client runs the calls, others may use the sandbox: a tool may be a program that runs there."""
        self._place.release_turn()
        is_answered = await self._dialogue.is_answered(round, ending)
        await self._place.reacquire_turn()
        if is_answered:
            self._offer.answer(round.take())


def _partial_output(process: OutputCapture) -> Json:
    return {
        "partial_stdout": _stream_beginning(process.output_so_far("stdout")),
        "partial_stderr": _stream_beginning(process.output_so_far("stderr")),
    }


def _stream_beginning(kept: CapturedStream) -> str:
    return (kept.head + kept.tail)[:PARTIAL_BYTES].decode(errors="replace")


def final_answer(answer: Json, outcome: ProgramOutcome) -> Json:
    """The program's final answer: that of /exec, with the fields that clients of this route know."""
    fields = {name: value for name, value in answer.items() if name not in _EXEC_FIELDS}
    error = _failure_message(outcome)
    return {"status": "completed", **fields} if error is None else {"status": "error", "error": error, **fields}


def _failure_message(outcome: ProgramOutcome) -> str | None:
    """The error message. Clients pass only these texts on to the model."""
    exited = outcome.exited
    match exited.outcome:
        case "timed_out":
            return TIME
        case "out_of_memory":
            return MEMORY
    if exited.outcome != "ok" and exited.signal is None:  # its sandbox has ended
        return "Execution failed or timed out"
    return f"Sandbox exited with code {exited.exit_code}" if exited.exit_code else None
