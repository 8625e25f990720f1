"""How many programs may wait for their clients, how long they are known, and what is kept of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from cloche.api.librechat import dialogue as dialogue_module
from cloche.api.librechat import dialogues as dialogues_module
from cloche.api.librechat.continuation import Continuation, Tokens
from cloche.api.librechat.dialogue import Dialogue
from cloche.api.librechat.dialogues import MAX_IN_ALL, MAX_OF_USER, Dialogues
from cloche.api.librechat.identity import Caller
from cloche.api.librechat.programmatic_request import Given, decode_results
from cloche.api.librechat.replies import Json, Refusal
from cloche.tools import ToolCall

ANN, BOB = Caller(owner="o", tenant="t", user="ann"), Caller(owner="o", tenant="t", user="bob")
KEY = Caller(owner="o")
TOKENS = Tokens(b"secret of this test")


def call(number: int, **input: object) -> ToolCall:
    return ToolCall(id=f"call_{number:03}", name="tool", input=input)


def calling(*numbers: int, text: str = "") -> Callable[[Dialogue], Awaitable[Json]]:
    """A program that makes one call after the other, and says in the end what it got."""

    async def play(dialogue: Dialogue) -> Json:
        got = []
        for number in numbers:
            results = await dialogue.ask([call(number)], {"partial_stdout": text}, asyncio.Future())
            assert results is not None
            got += [each.error or each.result for each in results]
        return {"status": "completed", "got": got}

    return play


def results(number: int, result: object = "r") -> dict[str, Given]:
    return decode_results([{"call_id": f"call_{number:03}", "result": result}])


async def told(dialogues: Dialogues, before: Json, number: int, result: object = "r", caller: Caller = ANN) -> Json:
    dialogue, round = dialogues.find(before["continuation_token"], caller)
    said = await dialogue.submit(round, results(number, result))
    assert isinstance(said, dict)
    return said


async def first(dialogue: Dialogue) -> Json:
    said = await dialogue.first
    assert isinstance(said, dict)
    return said


def refused(error: pytest.ExceptionInfo[Refusal]) -> int:
    return error.value.status


async def test_a_client_that_takes_too_long_finds_its_program_ended():
    dialogues = Dialogues(TOKENS, wait_seconds=0.05)
    dialogue = dialogues.begin(ANN, calling(1))
    before = await first(dialogue)
    while not dialogue.is_over:
        await asyncio.sleep(0.01)
    with pytest.raises(Refusal) as error:
        raise await dialogue.submit(1, results(1))
    assert (refused(error), "too late" in str(error.value)) == (404, True)
    await asyncio.sleep(0.1)
    with pytest.raises(Refusal) as error:
        dialogues.find(before["continuation_token"], ANN)
    assert refused(error) == 404


async def test_a_user_can_have_so_many_programs_that_wait_and_all_together_too():
    dialogues = Dialogues(TOKENS, wait_seconds=60)
    mine = [dialogues.begin(ANN, calling(1)) for _ in range(MAX_OF_USER)]
    with pytest.raises(Refusal) as error:
        dialogues.begin(ANN, calling(1))
    assert (refused(error), error.value.body["error"]) == (429, "rate_limited")
    dialogues.begin(BOB, calling(1))
    before = await first(mine[0])
    assert (await told(dialogues, before, 1))["status"] == "completed"
    await asyncio.sleep(0)
    dialogues.begin(ANN, calling(1))  # one has ended
    for _ in range(MAX_IN_ALL - MAX_OF_USER - 1):  # a key stands for many users
        dialogues.begin(KEY, calling(1))
    with pytest.raises(Refusal) as error:
        dialogues.begin(KEY, calling(1))
    assert refused(error) == 503


async def test_a_program_that_is_ended_answers_whoever_waits():
    dialogues = Dialogues(TOKENS, wait_seconds=60)
    dialogue = dialogues.begin(ANN, calling(1))
    before = await first(dialogue)
    dialogues.end(dialogue)
    last = await told(dialogues, before, 1)
    assert (last["status"], last["error"]) == ("error", "Programmatic execution request cancelled")
    dialogues.end(dialogue)  # harmless


async def test_a_program_that_ends_while_its_client_is_away_has_said_its_last_word():
    async def play(dialogue: Dialogue) -> Json:
        ended = asyncio.ensure_future(asyncio.sleep(0))
        assert await dialogue.ask([call(1)], {}, ended) is None
        return {"status": "completed"}

    dialogues = Dialogues(TOKENS, wait_seconds=60)
    dialogue = dialogues.begin(ANN, play)
    before = await first(dialogue)
    while not dialogue.is_over:
        await asyncio.sleep(0)
    last = await told(dialogues, before, 1)
    assert last == await told(dialogues, before, 1) == {"status": "completed"}
    with pytest.raises(Refusal) as error:
        await told(dialogues, before, 1, "other")
    assert refused(error) == 409


async def test_results_of_one_program_have_a_limit_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialogue_module, "MAX_RESULT_BYTES", 100)
    monkeypatch.setattr(dialogue_module, "MAX_RESULTS_BYTES", 200)

    dialogues = Dialogues(TOKENS, wait_seconds=60)
    said = await first(dialogues.begin(ANN, calling(1, 2, 3, 4)))
    for number, size in ((1, 80), (2, 120), (3, 10), (4, 10)):
        said = await told(dialogues, said, number, "x" * size)
    small, large, *more = said["got"]
    assert small == "x" * 80
    assert "100 are possible" in large
    assert all("together" in each for each in more)


async def test_what_was_told_long_ago_is_forgotten_before_it_is_too_much(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialogue_module, "KEPT_ROUNDS_BYTES", 3000)

    dialogues = Dialogues(TOKENS, wait_seconds=60)
    dialogue = dialogues.begin(ANN, calling(*range(1, 21), text="x" * 1000))
    rounds = [await first(dialogue)]
    for number in range(1, 21):
        rounds.append(await told(dialogues, rounds[-1], number))
    assert dialogue.bytes < dialogue_module.DIALOGUE_BYTES + 6000
    assert await told(dialogues, rounds[-2], 20) == rounds[-1]
    with pytest.raises(Refusal) as error:
        await told(dialogues, rounds[0], 1)
    assert refused(error) == 409
    with pytest.raises(Refusal) as error:
        await told(dialogues, rounds[0], 1, "other")
    assert "call_001" in str(error.value.body)


async def test_what_waits_has_a_limit_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialogues_module, "PLAYING_BYTES", 5 * dialogue_module.DIALOGUE_BYTES)
    dialogues = Dialogues(TOKENS, wait_seconds=60)
    waiting = await first(dialogues.begin(ANN, calling(1)))
    large = dialogues.begin(ANN, calling(1, text="x" * 4 * dialogue_module.DIALOGUE_BYTES))
    with pytest.raises(Refusal) as error:
        raise await large.first
    assert refused(error) == 503
    with pytest.raises(Refusal) as error:
        dialogues.begin(ANN, calling(1), program_bytes=5 * dialogue_module.DIALOGUE_BYTES)
    assert refused(error) == 503
    assert (await told(dialogues, waiting, 1))["status"] == "completed"


async def test_ended_programs_are_forgotten_before_they_are_too_much(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialogues_module, "KEPT_BYTES", 3 * (1000 + dialogue_module.DIALOGUE_BYTES + 500))

    async def play(dialogue: Dialogue) -> Json:
        await dialogue.ask([call(1)], {}, asyncio.Future())
        return {"status": "completed", "stdout": "x" * 1000}

    dialogues = Dialogues(TOKENS, wait_seconds=60)
    waiting = await first(dialogues.begin(ANN, play))
    asked = []
    for _ in range(10):
        asked.append(await first(dialogues.begin(ANN, play)))
        await told(dialogues, asked[-1], 1)
    assert (await told(dialogues, asked[-1], 1))["status"] == "completed"
    with pytest.raises(Refusal) as error:
        await told(dialogues, asked[0], 1)
    assert refused(error) == 404
    assert (await told(dialogues, waiting, 1))["status"] == "completed"  # one that waits is not forgotten


def test_a_token_is_for_one_caller_and_a_while():
    said = Continuation(dialogue="d" * 21, round=3, expires_at=int(time.time()) + 60, whose=TOKENS.whose(ANN))
    token = TOKENS.issue(said)
    assert TOKENS.read(token, ANN) == said
    for other in (BOB, KEY, Caller(owner="o", tenant="tann"), Caller(owner="ot", user="ann")):
        with pytest.raises(Refusal) as error:
            TOKENS.read(token, other)
        assert refused(error) == 404
    for forged in (Tokens(b"another").issue(said), token.swapcase(), token.replace(".", ".."), f" {token}", None):
        with pytest.raises(Refusal) as error:
            TOKENS.read(forged, ANN)
        assert refused(error) == 400
