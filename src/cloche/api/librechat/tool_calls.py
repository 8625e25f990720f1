"""POST /exec/programmatic: a program that calls tools, which its client runs.

The program runs once, and waits for each result. Its own time is limited as that of any program; the time that its
client takes is not its own. A client that leaves before it was told of any calls has no way back, so its program is
ended; one that leaves later can send the same results again, and finds its program where it would be.
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
from cloche.api.http import unless_left, whole_body
from cloche.api.librechat.context import Desk
from cloche.api.librechat.continuation import Tokens
from cloche.api.librechat.dialogue import Dialogue, Dialogues, Round, Said
from cloche.api.librechat.exec import Workshop, outcome_of
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.outcome import MEMORY, TIME, Outcome, out_of_memory
from cloche.api.librechat.program_sandbox import Place
from cloche.api.librechat.programs import language_of, running
from cloche.api.librechat.replies import Json, Refusal, json_reply
from cloche.api.librechat.request import Program, decode_object, decode_program, decode_results
from cloche.api.librechat.sessions import SPARE_SECONDS
from cloche.engine.commands.jobs import Capture, Kept
from cloche.engine.commands.program import Exited
from cloche.engine.executions.tools import Offer

# Requests that their client may cancel: it names them in a header, and says later that it wants no answer any more.
#
# It says so on another connection. That may come before the request itself, and mostly comes just after the request's
# own
# connection has ended: so both are remembered for a while.

HEADER = "x-librechat-code-request-id"
MAX_REMEMBERED_OF_USER = 100  # beyond those that are being answered
MAX_REMEMBERED_OF_KEY = 1000  # which may stand for many users
MAX_REMEMBERED = 10_000
REMEMBERED_SECONDS = 60.0
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Cancellable:
    """A request. Whoever answers it says what there is to end."""

    def __init__(self, is_cancelled: bool = False) -> None:
        self.is_cancelled = is_cancelled
        self.is_here = False  # not yet, or no more: its client may send it again
        self._end: Callable[[], None] | None = None

    def ends(self, end: Callable[[], None]) -> None:
        """`end()` is called when the request is cancelled, or now, if it was."""
        self._end = end
        if self.is_cancelled:
            end()

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._end is not None:
            self._end()


class Cancelling:
    """The requests that are being answered, those whose clients have left, and those that were cancelled too early."""

    def __init__(self) -> None:
        self._requests: dict[tuple[Caller, str], Cancellable] = {}
        self._remembered: Counter[Caller] = Counter()  # how many are forgotten later
        self._remembered_in_all = 0

    def cancel(self, caller: Caller, id: object) -> None:
        """Raises Refusal (400)."""
        if not isinstance(id, str) or not _ID.fullmatch(id):
            raise Refusal(400, "Invalid or missing request_id")
        request = self._requests.get((caller, id))
        if request is not None:
            request.cancel()
        else:
            self._requests[caller, id] = Cancellable(is_cancelled=True)
            self._forget_later((caller, id))

    @contextlib.contextmanager
    def cancellable(self, caller: Caller, id: str | None) -> Iterator[Cancellable]:
        """A request, until it is answered. Raises Refusal (400, 409)."""
        if id is None:
            yield Cancellable()
            return
        request = self._requests[caller, id] = self._new(caller, id)
        request.is_here = True
        try:
            yield request
        except (ClientDisconnect, asyncio.CancelledError):
            request.is_here = False
            self._forget_later((caller, id))
            raise
        except BaseException:
            self._forget((caller, id), request)
            raise
        self._forget((caller, id), request)

    def _new(self, caller: Caller, id: str) -> Cancellable:
        if not _ID.fullmatch(id):
            raise Refusal(400, "Invalid programmatic request ID")
        before = self._requests.get((caller, id))
        if before is not None and before.is_here:
            raise Refusal(409, "Programmatic request ID is already in use")
        return Cancellable(is_cancelled=before is not None and before.is_cancelled)

    def _forget_later(self, key: tuple[Caller, str]) -> None:
        """Or at once, if so many are remembered of this caller that it would be at others' expense."""
        caller, request = key[0], self._requests[key]
        most = MAX_REMEMBERED_OF_USER if caller.user else MAX_REMEMBERED_OF_KEY
        if self._remembered[caller] >= most or self._remembered_in_all >= MAX_REMEMBERED:
            self._forget(key, request)
            return
        self._remembered[caller] += 1
        self._remembered_in_all += 1
        asyncio.get_running_loop().call_later(REMEMBERED_SECONDS, self._let_go, key, request)

    def _let_go(self, key: tuple[Caller, str], request: Cancellable) -> None:
        self._remembered_in_all -= 1
        self._remembered[key[0]] -= 1
        if not self._remembered[key[0]]:
            del self._remembered[key[0]]
        self._forget(key, request)

    def _forget(self, key: tuple[Caller, str], request: Cancellable) -> None:
        if self._requests.get(key) is request:
            del self._requests[key]


MAX_CANCEL_BYTES = 64 << 10
PARTIAL_BYTES = 32 << 10  # of each stream that a client is told in a round; all of it comes at the end
_PLAIN = ("code", "signal", "message", "status")  # what /exec says, and is said in other words here


def routes(desk: Desk, workshop: Workshop) -> list[Route]:
    programs = Programs(desk, workshop)
    return [
        desk.route("POST", "/exec/programmatic", programs.execute),
        desk.route("POST", "/exec/programmatic/cancel", programs.cancel),
    ]


class Programs:
    def __init__(self, desk: Desk, workshop: Workshop):
        self._desk = desk
        self._workshop = workshop
        self._dialogues = Dialogues(Tokens(desk.secret), desk.config.tool_wait_seconds)
        desk.engine.housing.admission.shut_out.hear(self._dialogues.end_all)
        self._cancelling = Cancelling()

    async def execute(self, request: Request) -> Response:
        caller = self._desk.caller(request)
        with self._cancelling.cancellable(caller, request.headers.get(HEADER)) as cancellable:
            with self._desk.room.share(caller) as share:
                # What was sent is not kept while the client waits: it can be large.
                dialogue, told = self._take(request, caller, await self._desk.body(request, share))
            cancellable.ends(partial(self._dialogues.end, dialogue.id))
            try:
                said = await unless_left(request, _when_told(told))
            finally:
                if not dialogue.first.done():
                    self._dialogues.end(dialogue.id)
        if isinstance(said, BaseException):
            raise said.with_traceback(None)  # others are told the same, and each time would add to it
        return Response(said, media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """For a client whose user wants no answer any more: the connection's end alone may mean a bad network."""
        caller = self._desk.caller(request)
        given = decode_object(await whole_body(request, MAX_CANCEL_BYTES))
        self._cancelling.cancel(caller, given.get("request_id"))
        return json_reply({"status": "cancellation_requested"}, 202)

    def _take(self, request: Request, caller: Caller, body: bytes) -> tuple[Dialogue, asyncio.Future[Said]]:
        """Begins a program, or hands results to one. Raises Refusal, InvalidRequest."""
        given = decode_object(body)
        token = given.get("continuation_token")
        if token:
            results = decode_results(given.get("tool_results"))
            dialogue, round = self._dialogues.find(token, caller)
            return dialogue, dialogue.submit(round, results)
        self._desk.starter(request)
        program = decode_program(given, self._desk.config.max_tools)
        size = max(len(body), sys.getsizeof(program.asked.code))
        dialogue = self._dialogues.begin(caller, partial(self._play, caller, program), size)
        return dialogue, dialogue.first

    # -- the program

    async def _play(self, caller: Caller, program: Program, dialogue: Dialogue) -> Json:
        """All of a program's life. Returns the last word of its dialogue."""
        async with self._workshop.place(caller, program.asked, dialogue.session_id) as place:
            killed_before = place.sandbox.oom_kills()
            outcome = await self._perform(place, program, dialogue)
            if place.sandbox.oom_kills() > killed_before:
                outcome = out_of_memory(outcome)
            return last_word(place.answer(outcome, await place.collect()), outcome)

    async def _perform(self, place: Place, program: Program, dialogue: Dialogue) -> Outcome:
        language, bounds = language_of(program.asked.lang), self._workshop.bounds(program.asked)
        assert language is not None
        began_at, tools, max_calls = time.monotonic(), place.sandbox.tools, self._desk.config.max_tool_calls
        patience = self._desk.config.tool_wait_seconds + bounds.seconds + SPARE_SECONDS
        async with (
            tools.offer(
                program.tools, language=program.language, max_calls=max_calls, raw=True, no_room=dialogue.no_room
            ) as offer,
            running(place.sandbox, language, program.asked, bounds, offer) as process,
        ):
            offer.runs(process)
            dialogue.counts(lambda: offer.held_bytes)
            await Conversation(place, process, offer, dialogue, patience).hold()
            await process.wait()
        return outcome_of(process, time.monotonic() - began_at)


async def _when_told(told: asyncio.Future[Said]) -> Said:
    """Whoever is cancelled here does not cancel what others wait for, too."""
    await asyncio.wait((told,))
    return told.result()


class Conversation:
    """Takes a program's calls to its client, and the results back."""

    def __init__(self, place: Place, process: Capture, offer: Offer, dialogue: Dialogue, patience_seconds: float):
        self._place = place
        self._process = process
        self._offer = offer
        self._dialogue = dialogue
        self._patience_seconds = patience_seconds

    async def hold(self) -> None:
        """Until the program ends, or its sandbox. Raises Refusal when the client takes too long."""
        ending = asyncio.ensure_future(self._process.wait())
        ending.add_done_callback(lambda _: self._offer.close())
        try:
            with contextlib.suppress(errors.Gone):
                while round := await self._next_round():
                    await self._answer(round, ending)
        finally:
            ending.cancel()

    async def _next_round(self) -> Round | None:
        """Its calls are with the client: they are not kept here, where they can be large."""
        calls = await self._offer.next_round()
        if not calls:
            return None
        self._place.sandbox.extend(self._patience_seconds)
        return self._dialogue.ask(calls, _so_far(self._process))

    async def _answer(self, round: Round, ending: asyncio.Future[Exited]) -> None:
        """While the client has the calls, others may use the place: a tool may well be a program that runs there."""
        self._place.step_aside()
        is_answered = await self._dialogue.is_answered(round, ending)
        await self._place.step_back()
        if is_answered:
            self._offer.answer(round.take())


def _so_far(process: Capture) -> Json:
    return {
        "partial_stdout": _beginning(process.so_far("stdout")),
        "partial_stderr": _beginning(process.so_far("stderr")),
    }


def _beginning(kept: Kept) -> str:
    return (kept.head + kept.tail)[:PARTIAL_BYTES].decode(errors="replace")


def last_word(answer: Json, outcome: Outcome) -> Json:
    """How a program ended: what /exec would answer, in the words that clients of this one know."""
    fields = {name: value for name, value in answer.items() if name not in _PLAIN}
    error = _failure(outcome)
    return {"status": "completed", **fields} if error is None else {"status": "error", "error": error, **fields}


def _failure(outcome: Outcome) -> str | None:
    """Clients pass on to the model no other words than these."""
    exited = outcome.exited
    match exited.outcome:
        case "timed_out":
            return TIME
        case "out_of_memory":
            return MEMORY
    if exited.outcome != "ok" and exited.signal is None:  # its sandbox has ended
        return "Execution failed or timed out"
    return f"Sandbox exited with code {exited.exit_code}" if exited.exit_code else None
