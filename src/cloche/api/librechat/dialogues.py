"""The programs that call tools, by the ids in clients' tokens: how many there can be, and how long they are known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import msgspec

from cloche import errors
from cloche.api.http import where_of
from cloche.api.librechat.continuation import Continuation, Tokens, not_found
from cloche.api.librechat.dialogue import Dialogue, Said
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Json, Refusal, new_code_id
from cloche.telemetry import log

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
