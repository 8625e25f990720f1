"""A program that calls tools, and the client that runs them: one program, which waits, and round after round of calls.

A round is what a client sends (results of calls) and what it is told then (more calls, or how the program ended). What
was told is kept for a while: whoever sends the same again is told the same again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from cloche import errors
from cloche.api.http import where_of
from cloche.api.librechat.continuation import Continuation, Tokens, expired, not_found
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Json, Refusal, new_code_id
from cloche.api.librechat.request import Given, missing_and_unknown
from cloche.model import ToolCall, ToolResult
from cloche.telemetry import log

MAX_RESULT_BYTES = 5_000_000
MAX_RESULTS_BYTES = 40_000_000  # of all rounds of one program
KEPT_ROUNDS_BYTES = 4 << 20  # of what was told in earlier rounds
DIALOGUE_BYTES = 4 << 10  # that a dialogue takes beside what was told

# What a client is told, as the JSON that it gets: as objects it can be much larger. An exception is for the handler to
# raise.
Said = bytes | BaseException


class Round:
    """What a client is to send, has sent, and is told then. The first is the program itself, and has no calls."""

    def __init__(self, calls: Sequence[ToolCall] = ()):
        loop = asyncio.get_running_loop()
        self.calls = tuple(call.id for call in calls)
        self.digests: dict[str, str] | None = None if calls else {}
        self.results: asyncio.Future[tuple[ToolResult, ...]] = loop.create_future()
        self.results_bytes = 0  # of results that came, and that the program does not have yet
        self.told: asyncio.Future[Said] = loop.create_future()
        self.bytes = 0  # of what was told

    def take(self) -> tuple[ToolResult, ...]:
        """The results, once they have come. They are the program's from here on, and can be large."""
        self.results_bytes = 0
        taken, self.results = self.results, asyncio.get_running_loop().create_future()
        return taken.result()


class Dialogue:
    """`id` is the program's in tokens, and `session_id` says where its files are. `token_of(round)` makes the client's
    next token.

    `afford(bytes)` raises if so much more cannot be kept.
    """

    def __init__(
        self,
        id: str,
        session_id: str,
        wait_seconds: float,
        *,
        token_of: Callable[[int], str],
        afford: Callable[[int], None],
    ):
        self.id = id
        self.session_id = session_id
        self.is_over = False
        self.bytes = DIALOGUE_BYTES  # that are kept of it, about
        self._elsewhere: Callable[[], int] = int
        self._wait_seconds = wait_seconds
        self._token_of = token_of
        self._afford = afford
        self._rounds = [Round()]
        self._results_bytes = 0

    # -- as the client has it

    @property
    def first(self) -> asyncio.Future[Said]:
        """What whoever began the program is told."""
        return self._rounds[0].told

    def submit(self, number: int, given: Mapping[str, Given]) -> asyncio.Future[Said]:
        """What whoever sends these results for that round is told.

        Raises Refusal (400) for results of other calls, or not of all; (409) for others than were sent before; and what
        `afford` raises, after which they may come again.
        """
        round = self._rounds[number]
        problem = missing_and_unknown(round.calls, given)
        if problem:
            raise Refusal(400, problem, "send exactly one result for each of the tool_calls that came with the token")
        digests = {id: each.digest for id, each in given.items()}
        if round.digests is None:
            self._accept(round, given)
            round.digests = digests
        elif round.digests != digests:
            raise _altered([id for id in digests if digests[id] != round.digests[id]])
        if round.told.cancelled():
            raise Refusal(
                409, "these results were submitted before", "the program is rounds ahead: send its last calls'"
            )
        return round.told

    def _accept(self, round: Round, given: Mapping[str, Given]) -> None:
        if not self.is_over:
            size = sum(each.bytes for each in given.values())
            if size > DIALOGUE_BYTES:  # small ones always pass: programs that go on are what makes room
                self._afford(size)
            round.results_bytes = size
            round.results.set_result(tuple(self._bounded(each) for each in given.values()))

    def _bounded(self, given: Given) -> ToolResult:
        """A result that is too large is one that the program can handle: an error of the tool's."""
        self._results_bytes += given.bytes
        call_id = given.result.call_id
        if given.bytes > MAX_RESULT_BYTES:
            why = f"the tool's result has {given.bytes} bytes, and {MAX_RESULT_BYTES} are possible: ask it for less"
            return ToolResult(call_id=call_id, error=why)
        if self._results_bytes > MAX_RESULTS_BYTES:
            why = f"the results of one program's calls can have {MAX_RESULTS_BYTES} bytes together, and these have more"
            return ToolResult(call_id=call_id, error=why)
        return given.result

    # -- as the program has it

    @property
    def held_bytes(self) -> int:
        """All that is kept for it."""
        return self.bytes + self._rounds[-1].results_bytes + self._elsewhere()

    def counts(self, elsewhere: Callable[[], int]) -> None:
        """So many bytes are kept for it elsewhere, whenever somebody asks. None, once it has ended."""
        self._elsewhere = elsewhere

    def no_room(self) -> str | None:
        """Why not even what is held now can be kept, or None."""
        try:
            self._afford(0)
        except Refusal as refusal:
            return str(refusal)
        return None

    def ask(self, calls: Sequence[ToolCall], so_far: Json) -> Round:
        """Tells the client of calls. `so_far` is what the program has written. Raises what `afford` raises.

        Nothing of the calls but their ids is kept: whoever waits for their results does not keep them either.
        """
        number = len(self._rounds)
        told = self._encoded(calls, so_far, number)
        self._afford(len(told))
        self._rounds.append(Round(calls))
        self._tell(self._rounds[number - 1], told)
        return self._rounds[number]

    def _encoded(self, calls: Sequence[ToolCall], so_far: Json, number: int) -> bytes:
        told = {
            "status": "tool_call_required",
            "continuation_token": self._token_of(number),
            "tool_calls": [{"id": call.id, "name": call.name, "input": call.input} for call in calls],
            **so_far,
            "session_id": self.session_id,
        }
        return msgspec.json.encode(told)

    async def is_answered(self, round: Round, ending: asyncio.Future[Any]) -> bool:
        """Waits for the results of a round's calls, which it has then. False if the program ends meanwhile.

        `ending` is that end. Raises Refusal (404) when the client takes too long.
        """
        coming: list[asyncio.Future[Any]] = [round.results, ending]
        done, _ = await asyncio.wait(coming, timeout=self._wait_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise expired()
        return round.results in done

    def conclude(self, said: Said) -> None:
        """The program has ended. Whatever results still come, this is the answer."""
        self.is_over = True
        self._elsewhere = int
        last = self._rounds[-1]
        if last.results.done():
            last.take()  # nobody else does
        self._tell(last, said)

    @property
    def has_tokens(self) -> bool:
        """Whether anybody can come back to it."""
        return len(self._rounds) > 1

    def _tell(self, round: Round, said: Said) -> None:
        round.told.set_result(said)
        round.bytes = len(said) if isinstance(said, bytes) else 0
        self.bytes += round.bytes
        for old in self._rounds[: self._rounds.index(round)]:
            if self.bytes - round.bytes > DIALOGUE_BYTES + KEPT_ROUNDS_BYTES:
                self._forget(old)

    def _forget(self, round: Round) -> None:
        round.told = asyncio.get_running_loop().create_future()
        round.told.cancel()
        self.bytes -= round.bytes
        round.bytes = 0


def _altered(ids: Sequence[str]) -> Refusal:
    return Refusal(
        409,
        f"tool_results differ from those that were submitted before, for {', '.join(ids[:10])}",
        "what a program was told cannot be changed: send the same results again, or run the program anew",
    )


# The programs that call tools, by the ids in clients' tokens: how many there can be, and how long they are known.

MAX_OF_USER = 32
MAX_OF_KEY = 64  # which may stand for many users, and still is one caller of several
MAX_IN_ALL = 256
PLAYING_BYTES = 256 << 20  # of programs that run or wait, of what was told of them, and of what they have not read
PLAYING_BYTES_OF_CALLER = 128 << 20
KEPT_BYTES = 64 << 20  # of what those were told whose programs have ended
CANCELLED = "Programmatic execution request cancelled"

Play = Callable[[Dialogue], Awaitable[Json]]


class _Playing(NamedTuple):
    caller: Caller
    dialogue: Dialogue
    program_bytes: int
    task: asyncio.Task[Json]


class Dialogues:
    """Each is known for `wait_seconds` after its last word."""

    def __init__(self, tokens: Tokens, wait_seconds: float):
        self._tokens = tokens
        self._wait_seconds = wait_seconds
        self._known: dict[str, Dialogue] = {}
        self._playing: dict[str, _Playing] = {}
        self._over: dict[str, int] = {}  # their bytes; the one that ended first is the first
        self._over_bytes = 0

    def begin(self, caller: Caller, play: Play, program_bytes: int = 0) -> Dialogue:
        """Starts `play(dialogue)`, whose result is the last word. Raises Refusal (429, 503) if there are too many."""
        self._check_room(caller)
        self._check_bytes(caller, program_bytes)
        whose, id = self._tokens.whose(caller), new_code_id()

        def token_of(round: int) -> str:
            until = int(time.time() + self._wait_seconds) + 1
            return self._tokens.issue(Continuation(dialogue=id, round=round, expires_at=until, whose=whose))

        afford = partial(self._check_bytes, caller)
        dialogue = Dialogue(id, new_code_id(), self._wait_seconds, token_of=token_of, afford=afford)
        task = asyncio.ensure_future(_played(play, dialogue))
        self._known[id], self._playing[id] = dialogue, _Playing(caller, dialogue, program_bytes, task)
        task.add_done_callback(lambda _: self._on_end(id))
        return dialogue

    def find(self, token: object, caller: Caller) -> tuple[Dialogue, int]:
        """And the round. Raises Refusal (400, 404)."""
        continuation = self._tokens.read(token, caller)
        dialogue = self._known.get(continuation.dialogue)
        if dialogue is None:
            raise not_found()
        return dialogue, continuation.round

    def end(self, id: str) -> None:
        """Begins to end that program, if it has not ended: whoever waits for it is told soon."""
        playing = self._playing.get(id)
        if playing is not None:
            playing.task.cancel()

    async def end_all(self, owner: str) -> None:
        """Those of that owner have ended."""
        theirs = [each.task for each in self._playing.values() if each.caller.owner == owner]
        for task in theirs:
            task.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)

    def _check_room(self, caller: Caller) -> None:
        own = sum(1 for each in self._playing.values() if each.caller == caller)
        if own >= (MAX_OF_USER if caller.user else MAX_OF_KEY):
            raise _too_many_of(caller)
        if len(self._playing) >= MAX_IN_ALL:
            raise Refusal(503, "too_many_programs", f"{MAX_IN_ALL} programs with tools run already; try again later")

    def _check_bytes(self, caller: Caller, more: int) -> None:
        taken = {id: each.dialogue.held_bytes + each.program_bytes for id, each in self._playing.items()}
        own = sum(taken[id] for id, each in self._playing.items() if each.caller == caller)
        if own + more > PLAYING_BYTES_OF_CALLER or sum(taken.values()) + more > PLAYING_BYTES:
            what = "the programs that wait for their clients, and the arguments of their calls, take too much memory"
            raise Refusal(503, "too_much_waits", f"{what}; answer those that wait, or try again later")

    def _on_end(self, id: str) -> None:
        playing = self._playing.pop(id)
        dialogue = playing.dialogue
        dialogue.conclude(_last_word(dialogue, playing.task))
        if not dialogue.has_tokens:
            del self._known[id]
            return
        self._over[id] = dialogue.bytes
        self._over_bytes += dialogue.bytes
        asyncio.get_running_loop().call_later(self._wait_seconds, self._forget, id)
        while self._over_bytes > KEPT_BYTES and len(self._over) > 1:  # the last one was told to nobody yet
            self._forget(next(iter(self._over)))

    def _forget(self, id: str) -> None:
        """Harmless when it has been called before."""
        self._known.pop(id, None)
        self._over_bytes -= self._over.pop(id, 0)


def _too_many_of(caller: Caller) -> Refusal:
    what = f"{MAX_OF_USER} of your programs with tools run or wait already: answer or cancel them, or wait"
    if not caller.user:
        what = (
            f"{MAX_OF_KEY} programs with tools that this key started run or wait already: answer or cancel them, or "
            f"wait. A key is one caller; where LibreChat signs tokens, each of its users can have {MAX_OF_USER}"
        )
    return Refusal(429, "rate_limited", what, {"retry-after": "10"}, retry_after_seconds=10)


async def _played(play: Play, dialogue: Dialogue) -> Json:
    return await play(dialogue)


def _last_word(dialogue: Dialogue, task: asyncio.Task[Json]) -> Said:
    if task.cancelled():
        said = {"status": "error", "error": CANCELLED, "stdout": "", "stderr": "", "session_id": dialogue.session_id}
        return msgspec.json.encode(said)
    error = task.exception()
    if error is None:
        return msgspec.json.encode(task.result())
    if not isinstance(error, errors.ClocheError):  # it may be that nobody is told of it
        log.error("program.failed", session=dialogue.session_id, error=type(error).__name__, where=where_of(error))
    return error.with_traceback(None)  # which would keep all that the program had
