"""A program that calls tools, and the client that runs them: one waiting program, and rounds of calls.

In a round the client sends results of calls, and receives more calls or the program's end. The answer is kept
for a while: a client that sends the same results again receives the same answer again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from cloche import errors
from cloche.api.dialect import Json
from cloche.api.http import raise_location_of
from cloche.api.librechat.continuation import Continuation, ContinuationTokens, program_not_found, results_expired
from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.replies import LibreChatRefusal, new_code_id
from cloche.api.librechat.request import SubmittedResult, results_problem
from cloche.model import ToolCall, ToolResult
from cloche.telemetry import log

MAX_RESULT_BYTES = 5_000_000
MAX_RESULTS_BYTES = 40_000_000  # of all rounds of one program
KEPT_ROUNDS_BYTES = 4 << 20  # of the replies of earlier rounds
DIALOGUE_BYTES = 4 << 10  # that a dialogue takes beside its replies

# The reply to a client, as the JSON that it gets: as objects it can be much larger. An exception is for the handler to
# raise.
ClientAnswer = bytes | BaseException


class ToolCallRound:
    """One round: the expected calls, the results, and the answer. The first is the program, without calls."""

    def __init__(self, calls: Sequence[ToolCall] = ()):
        loop = asyncio.get_running_loop()
        self.calls = tuple(call.id for call in calls)
        self.digests: dict[str, str] | None = None if calls else {}
        self.results: asyncio.Future[tuple[ToolResult, ...]] = loop.create_future()
        self.results_bytes = 0  # of results that came, and that the program does not have yet
        self.told: asyncio.Future[ClientAnswer] = loop.create_future()
        self.bytes = 0  # of its replies

    def take(self) -> tuple[ToolResult, ...]:
        """Returns the results that have come, and drops them here: the program owns them, and they can be large."""
        self.results_bytes = 0
        taken, self.results = self.results, asyncio.get_running_loop().create_future()
        return taken.result()


class ToolDialogue:
    """`id` names the program in tokens; `session_id` is the storage session of its files.

    `token_of(round)` issues the client's next token. `afford(bytes)` raises if so much more cannot be kept.
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
        self._rounds = [ToolCallRound()]
        self._results_bytes = 0

    # -- as the client has it

    @property
    def first(self) -> asyncio.Future[ClientAnswer]:
        """The answer to the request that began the program."""
        return self._rounds[0].told

    def submit(self, number: int, given: Mapping[str, SubmittedResult]) -> asyncio.Future[ClientAnswer]:
        """Returns the future answer to these results of that round.

        Raises LibreChatRefusal: 400 for results of other calls, or not of all; 409 for results that differ from those
        sent before. Also raises the errors of `afford`, after which the results may come again.
        """
        round = self._rounds[number]
        problem = results_problem(round.calls, given)
        if problem:
            raise LibreChatRefusal(
                400, problem, "send exactly one result for each of the tool_calls that came with the token"
            )
        digests = {id: each.digest for id, each in given.items()}
        if round.digests is None:
            self._accept_results(round, given)
            round.digests = digests
        elif round.digests != digests:
            raise _altered_results([id for id in digests if digests[id] != round.digests[id]])
        if round.told.cancelled():
            raise LibreChatRefusal(
                409, "these results were submitted before", "the program is rounds ahead: send its last calls'"
            )
        return round.told

    def _accept_results(self, round: ToolCallRound, given: Mapping[str, SubmittedResult]) -> None:
        if not self.is_over:
            size = sum(each.bytes for each in given.values())
            if size > DIALOGUE_BYTES:  # small ones always pass: programs that go on are what makes room
                self._afford(size)
            round.results_bytes = size
            round.results.set_result(tuple(self._bounded_result(each) for each in given.values()))

    def _bounded_result(self, given: SubmittedResult) -> ToolResult:
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
        """All bytes kept for it."""
        return self.bytes + self._rounds[-1].results_bytes + self._elsewhere()

    def counts(self, elsewhere: Callable[[], int]) -> None:
        """Registers a function that returns the bytes kept elsewhere for the program, until the program ends."""
        self._elsewhere = elsewhere

    def no_room(self) -> str | None:
        """The reason why the bytes held now cannot be kept, or None."""
        try:
            self._afford(0)
        except LibreChatRefusal as refusal:
            return str(refusal)
        return None

    def ask(self, calls: Sequence[ToolCall], so_far: Json) -> ToolCallRound:
        """Sends calls to the client. `so_far` is the program's output until now. Raises the errors of `afford`.

        Only the ids of the calls are kept.
        """
        number = len(self._rounds)
        told = self._encode_calls(calls, so_far, number)
        self._afford(len(told))
        self._rounds.append(ToolCallRound(calls))
        self._answer_round(self._rounds[number - 1], told)
        return self._rounds[number]

    def _encode_calls(self, calls: Sequence[ToolCall], so_far: Json, number: int) -> bytes:
        told = {
            "status": "tool_call_required",
            "continuation_token": self._token_of(number),
            "tool_calls": [{"id": call.id, "name": call.name, "input": call.input} for call in calls],
            **so_far,
            "session_id": self.session_id,
        }
        return msgspec.json.encode(told)

    async def is_answered(self, round: ToolCallRound, ending: asyncio.Future[Any]) -> bool:
        """Waits for the results of a round's calls. False if the program ends first; `ending` is that end.

        Raises LibreChatRefusal (404) when the client takes too long.
        """
        coming: list[asyncio.Future[Any]] = [round.results, ending]
        done, _ = await asyncio.wait(coming, timeout=self._wait_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise results_expired()
        return round.results in done

    def conclude(self, said: ClientAnswer) -> None:
        """Records the program's end as the final answer, even if more results arrive."""
        self.is_over = True
        self._elsewhere = int
        last = self._rounds[-1]
        if last.results.done():
            last.take()  # no request will
        self._answer_round(last, said)

    @property
    def has_tokens(self) -> bool:
        """Whether a client holds a token for it."""
        return len(self._rounds) > 1

    def _answer_round(self, round: ToolCallRound, said: ClientAnswer) -> None:
        round.told.set_result(said)
        round.bytes = len(said) if isinstance(said, bytes) else 0
        self.bytes += round.bytes
        for old in self._rounds[: self._rounds.index(round)]:
            if self.bytes - round.bytes > DIALOGUE_BYTES + KEPT_ROUNDS_BYTES:
                self._drop_answer(old)

    def _drop_answer(self, round: ToolCallRound) -> None:
        round.told = asyncio.get_running_loop().create_future()
        round.told.cancel()
        self.bytes -= round.bytes
        round.bytes = 0


def _altered_results(ids: Sequence[str]) -> LibreChatRefusal:
    return LibreChatRefusal(
        409,
        f"tool_results differ from those that were submitted before, for {', '.join(ids[:10])}",
        "what a program was told cannot be changed: send the same results again, or run the program anew",
    )


# The programs that call tools, by the ids in clients' tokens: their limits, and how long they are known.

MAX_DIALOGUES_OF_USER = 32
MAX_DIALOGUES_OF_KEY = 64  # which may stand for many users, and still is one caller of several
MAX_DIALOGUES = 256
RUNNING_BYTES = 256 << 20  # of programs that run or wait, of replies about them, and of their unread input
RUNNING_BYTES_OF_CALLER = 128 << 20
ENDED_BYTES = 64 << 20  # of the last responses of dialogues that have ended
CANCELLED_ERROR = "Programmatic execution request cancelled"

RunProgram = Callable[[ToolDialogue], Awaitable[Json]]


class _RunningDialogue(NamedTuple):
    caller: LibreChatCaller
    dialogue: ToolDialogue
    program_bytes: int
    task: asyncio.Task[Json]


class ToolDialogues:
    """All dialogues of this process. Each is known for `wait_seconds` after its final answer."""

    def __init__(self, tokens: ContinuationTokens, wait_seconds: float):
        self._tokens = tokens
        self._wait_seconds = wait_seconds
        self._known: dict[str, ToolDialogue] = {}
        self._playing: dict[str, _RunningDialogue] = {}
        self._over: dict[str, int] = {}  # their bytes; the one that ended first is the first
        self._over_bytes = 0

    def begin(self, caller: LibreChatCaller, play: RunProgram, program_bytes: int = 0) -> ToolDialogue:
        """Starts `play(dialogue)`, which returns the final answer. Raises LibreChatRefusal (429, 503) over a limit."""
        self._check_count(caller)
        self._check_bytes(caller, program_bytes)
        digest, id = self._tokens.digest_caller(caller), new_code_id()

        def token_of(round: int) -> str:
            until = int(time.time() + self._wait_seconds) + 1
            return self._tokens.issue_token(Continuation(dialogue=id, round=round, expires_at=until, whose=digest))

        afford = partial(self._check_bytes, caller)
        dialogue = ToolDialogue(id, new_code_id(), self._wait_seconds, token_of=token_of, afford=afford)
        task = asyncio.ensure_future(_run_program(play, dialogue))
        self._known[id], self._playing[id] = dialogue, _RunningDialogue(caller, dialogue, program_bytes, task)
        task.add_done_callback(lambda _: self._on_program_end(id))
        return dialogue

    def find(self, token: object, caller: LibreChatCaller) -> tuple[ToolDialogue, int]:
        """Returns the dialogue and the round of a token. Raises LibreChatRefusal (400, 404)."""
        continuation = self._tokens.read(token, caller)
        dialogue = self._known.get(continuation.dialogue)
        if dialogue is None:
            raise program_not_found()
        return dialogue, continuation.round

    def end(self, id: str) -> None:
        """Cancels that program if it has not ended: waiting clients receive an answer soon."""
        playing = self._playing.get(id)
        if playing is not None:
            playing.task.cancel()

    async def end_all(self, owner: str) -> None:
        """Ends all programs of that owner, and returns when they have ended."""
        theirs = [each.task for each in self._playing.values() if each.caller.owner == owner]
        for task in theirs:
            task.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)

    def _check_count(self, caller: LibreChatCaller) -> None:
        own = sum(1 for each in self._playing.values() if each.caller == caller)
        if own >= (MAX_DIALOGUES_OF_USER if caller.user else MAX_DIALOGUES_OF_KEY):
            raise _too_many_dialogues(caller)
        if len(self._playing) >= MAX_DIALOGUES:
            raise LibreChatRefusal(
                503, "too_many_programs", f"{MAX_DIALOGUES} programs with tools run already; try again later"
            )

    def _check_bytes(self, caller: LibreChatCaller, more: int) -> None:
        taken = {id: each.dialogue.held_bytes + each.program_bytes for id, each in self._playing.items()}
        own = sum(taken[id] for id, each in self._playing.items() if each.caller == caller)
        if own + more > RUNNING_BYTES_OF_CALLER or sum(taken.values()) + more > RUNNING_BYTES:
            what = "the programs that wait for their clients, and the arguments of their calls, take too much memory"
            raise LibreChatRefusal(503, "too_much_waits", f"{what}; answer those that wait, or try again later")

    def _on_program_end(self, id: str) -> None:
        playing = self._playing.pop(id)
        dialogue = playing.dialogue
        dialogue.conclude(_outcome_answer(dialogue, playing.task))
        if not dialogue.has_tokens:
            del self._known[id]
            return
        self._over[id] = dialogue.bytes
        self._over_bytes += dialogue.bytes
        asyncio.get_running_loop().call_later(self._wait_seconds, self._remove_dialogue, id)
        while self._over_bytes > ENDED_BYTES and len(self._over) > 1:  # the last response was not sent yet
            self._remove_dialogue(next(iter(self._over)))

    def _remove_dialogue(self, id: str) -> None:
        """Removes an ended dialogue. Harmless when called twice."""
        self._known.pop(id, None)
        self._over_bytes -= self._over.pop(id, 0)


def _too_many_dialogues(caller: LibreChatCaller) -> LibreChatRefusal:
    what = f"{MAX_DIALOGUES_OF_USER} of your programs with tools run or wait already: answer or cancel them, or wait"
    if not caller.user:
        what = (
            f"{MAX_DIALOGUES_OF_KEY} programs with tools that this key started run or wait already: answer or cancel "
            "them, or "
            "wait. A key is one caller; where LibreChat signs tokens, each of its users can have "
            f"{MAX_DIALOGUES_OF_USER}"
        )
    return LibreChatRefusal(429, "rate_limited", what, {"retry-after": "10"}, retry_after_seconds=10)


async def _run_program(play: RunProgram, dialogue: ToolDialogue) -> Json:
    return await play(dialogue)


def _outcome_answer(dialogue: ToolDialogue, task: asyncio.Task[Json]) -> ClientAnswer:
    if task.cancelled():
        said = {
            "status": "error",
            "error": CANCELLED_ERROR,
            "stdout": "",
            "stderr": "",
            "session_id": dialogue.session_id,
        }
        return msgspec.json.encode(said)
    error = task.exception()
    if error is None:
        return msgspec.json.encode(task.result())
    if not isinstance(error, errors.ClocheError):  # there may be no request to report it to
        log.error(
            "program.failed", session=dialogue.session_id, error=type(error).__name__, where=raise_location_of(error)
        )
    return error.with_traceback(None)  # which would keep all that the program had
