"""How many programs may wait for their clients, how long they are known, and what is kept of them."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import pytest

from cloche.api.dialect import Json
from cloche.api.librechat import dialogue as dialogue_module
from cloche.api.librechat import dialogue as dialogues_module
from cloche.api.librechat import tool_calls as cancelling_module
from cloche.api.librechat.continuation import Continuation, ContinuationTokens
from cloche.api.librechat.dialogue import (
    MAX_DIALOGUES,
    MAX_DIALOGUES_OF_KEY,
    MAX_DIALOGUES_OF_USER,
    ClientAnswer,
    ToolDialogue,
    ToolDialogues,
)
from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.replies import LibreChatRefusal
from cloche.api.librechat.request import SubmittedResult, decode_program, decode_results
from cloche.api.librechat.tool_calls import RequestCancellations
from cloche.model import ToolCall
from cloche.telemetry import log

ANN, BOB = LibreChatCaller(owner="o", tenant="t", user="ann"), LibreChatCaller(owner="o", tenant="t", user="bob")
KEY = LibreChatCaller(owner="o")
TOKENS = ContinuationTokens(b"secret of this test")


def call(number: int, **input: object) -> ToolCall:
    return ToolCall(id=f"call_{number:03}", name="tool", input=input)


def calling(*numbers: int, text: str = "") -> Callable[[ToolDialogue], Awaitable[Json]]:
    """A program that makes one call after the other, and says in the end what it got."""

    async def play(dialogue: ToolDialogue) -> Json:
        got = []
        for number in numbers:
            round = dialogue.ask([call(number)], {"partial_stdout": text})
            assert await dialogue.is_answered(round, asyncio.Future())
            got += [each.error or each.result for each in round.take()]
        return {"status": "completed", "got": got}

    return play


def results(number: int, result: object = "r") -> dict[str, SubmittedResult]:
    return decode_results([{"call_id": f"call_{number:03}", "result": result}])


async def told(
    dialogues: ToolDialogues, before: Json, number: int, result: object = "r", caller: LibreChatCaller = ANN
) -> Json:
    dialogue, round = dialogues.find(before["continuation_token"], caller)
    return decoded(await dialogue.submit(round, results(number, result)))


async def first(dialogue: ToolDialogue) -> Json:
    return decoded(await dialogue.first)


def decoded(said: ClientAnswer) -> Json:
    if isinstance(said, BaseException):
        raise said
    return dict(json.loads(said))


def refused(error: pytest.ExceptionInfo[LibreChatRefusal]) -> int:
    return error.value.status


async def test_a_client_that_takes_too_long_finds_its_program_ended():
    dialogues = ToolDialogues(TOKENS, wait_seconds=0.05)
    dialogue = dialogues.begin(ANN, calling(1))
    before = await first(dialogue)
    while not dialogue.is_over:
        await asyncio.sleep(0.01)
    with pytest.raises(LibreChatRefusal) as error:
        decoded(await dialogue.submit(1, results(1)))
    assert (refused(error), "too late" in str(error.value)) == (404, True)
    await asyncio.sleep(0.1)
    with pytest.raises(LibreChatRefusal) as error:
        dialogues.find(before["continuation_token"], ANN)
    assert refused(error) == 404


async def test_a_user_can_have_so_many_programs_that_wait_and_all_together_too():
    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    mine = [dialogues.begin(ANN, calling(1)) for _ in range(MAX_DIALOGUES_OF_USER)]
    with pytest.raises(LibreChatRefusal) as error:
        dialogues.begin(ANN, calling(1))
    assert (refused(error), error.value.body["error"]) == (429, "rate_limited")
    dialogues.begin(BOB, calling(1))
    before = await first(mine[0])
    assert (await told(dialogues, before, 1))["status"] == "completed"
    await asyncio.sleep(0)
    dialogues.begin(ANN, calling(1))  # one has ended
    for _ in range(MAX_DIALOGUES_OF_KEY):  # a key may stand for many users
        dialogues.begin(KEY, calling(1))
    with pytest.raises(LibreChatRefusal) as error:
        dialogues.begin(KEY, calling(1))
    assert refused(error) == 429 and f"{MAX_DIALOGUES_OF_KEY} programs with tools that this key started" in str(
        error.value
    )
    for number in range(MAX_DIALOGUES - MAX_DIALOGUES_OF_KEY - MAX_DIALOGUES_OF_USER - 1):
        dialogues.begin(LibreChatCaller(owner="o", tenant="t", user=f"user {number}"), calling(1))
    with pytest.raises(LibreChatRefusal) as error:
        dialogues.begin(BOB, calling(1))
    assert refused(error) == 503


async def test_an_ended_program_answers_waiting_requests():
    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    dialogue = dialogues.begin(ANN, calling(1))
    before = await first(dialogue)
    dialogues.end(dialogue.id)
    last = await told(dialogues, before, 1)
    assert (last["status"], last["error"]) == ("error", "Programmatic execution request cancelled")
    dialogues.end(dialogue.id)  # harmless


async def test_a_program_that_ends_while_its_client_is_away_has_said_its_last_word():
    async def play(dialogue: ToolDialogue) -> Json:
        ended = asyncio.ensure_future(asyncio.sleep(0))
        assert not await dialogue.is_answered(dialogue.ask([call(1)], {}), ended)
        return {"status": "completed"}

    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    dialogue = dialogues.begin(ANN, play)
    before = await first(dialogue)
    while not dialogue.is_over:
        await asyncio.sleep(0)
    last = await told(dialogues, before, 1)
    assert last == await told(dialogues, before, 1) == {"status": "completed"}
    with pytest.raises(LibreChatRefusal) as error:
        await told(dialogues, before, 1, "other")
    assert refused(error) == 409


async def test_results_of_one_program_have_a_limit_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialogue_module, "MAX_RESULT_BYTES", 100)
    monkeypatch.setattr(dialogue_module, "MAX_RESULTS_BYTES", 200)

    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    said = await first(dialogues.begin(ANN, calling(1, 2, 3, 4)))
    for number, size in ((1, 80), (2, 120), (3, 10), (4, 10)):
        said = await told(dialogues, said, number, "x" * size)
    small, large, *more = said["got"]
    assert small == "x" * 80
    assert "100 are possible" in large
    assert all("together" in each for each in more)


async def test_old_answers_are_dropped_before_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialogue_module, "KEPT_ROUNDS_BYTES", 3000)

    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    dialogue = dialogues.begin(ANN, calling(*range(1, 21), text="x" * 1000))
    rounds = [await first(dialogue)]
    for number in range(1, 21):
        rounds.append(await told(dialogues, rounds[-1], number))
    assert dialogue.bytes < dialogue_module.DIALOGUE_BYTES + 6000
    assert await told(dialogues, rounds[-2], 20) == rounds[-1]
    with pytest.raises(LibreChatRefusal) as error:
        await told(dialogues, rounds[0], 1)
    assert refused(error) == 409
    with pytest.raises(LibreChatRefusal) as error:
        await told(dialogues, rounds[0], 1, "other")
    assert "call_001" in str(error.value.body)


async def test_waiting_programs_share_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialogues_module, "RUNNING_BYTES", 5 * dialogue_module.DIALOGUE_BYTES)
    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    waiting = await first(dialogues.begin(ANN, calling(1)))
    large = dialogues.begin(ANN, calling(1, text="x" * 4 * dialogue_module.DIALOGUE_BYTES))
    with pytest.raises(LibreChatRefusal) as error:
        decoded(await large.first)
    assert refused(error) == 503
    with pytest.raises(LibreChatRefusal) as error:
        dialogues.begin(ANN, calling(1), program_bytes=5 * dialogue_module.DIALOGUE_BYTES)
    assert refused(error) == 503
    assert (await told(dialogues, waiting, 1))["status"] == "completed"


async def test_ended_programs_are_forgotten_before_they_are_too_much(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialogues_module, "ENDED_BYTES", 3 * (1000 + dialogue_module.DIALOGUE_BYTES + 500))

    async def play(dialogue: ToolDialogue) -> Json:
        await dialogue.is_answered(dialogue.ask([call(1)], {}), asyncio.Future())
        return {"status": "completed", "stdout": "x" * 1000}

    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    waiting = await first(dialogues.begin(ANN, play))
    asked = []
    for _ in range(10):
        asked.append(await first(dialogues.begin(ANN, play)))
        await told(dialogues, asked[-1], 1)
    assert (await told(dialogues, asked[-1], 1))["status"] == "completed"
    with pytest.raises(LibreChatRefusal) as error:
        await told(dialogues, asked[0], 1)
    assert refused(error) == 404
    assert (await told(dialogues, waiting, 1))["status"] == "completed"  # one that waits is not forgotten


async def test_sent_answers_are_counted_and_stored_as_sent():
    """As objects, many small values are twenty times larger than as text."""
    many = [{"a": {}}] * 20_000
    released = asyncio.Event()

    async def play(dialogue: ToolDialogue) -> Json:
        round = dialogue.ask([call(1, many=many)], {})
        assert round.calls == ("call_001",)
        await released.wait()
        return {}

    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    dialogue = dialogues.begin(ANN, play)
    said = await dialogue.first
    assert isinstance(said, bytes) and json.loads(said)["tool_calls"][0]["input"] == {"many": many}
    assert dialogue.bytes == dialogue_module.DIALOGUE_BYTES + len(said)
    released.set()


def test_results_are_kept_as_text_until_the_program_has_them():
    given = results(1, {"b": [1, None, "ü"], "a": {}})["call_001"]
    assert isinstance(given.result.result, msgspec.Raw)
    assert json.loads(msgspec.json.encode(given.result.result)) == {"b": [1, None, "ü"], "a": {}}
    assert given.digest == results(1, {"a": {}, "b": [1, None, "ü"]})["call_001"].digest
    failed = decode_results([{"call_id": "call_001", "result": None, "is_error": True, "error_message": "x"}])
    other = decode_results([{"call_id": "call_001", "result": None, "is_error": True, "error_message": "y"}])
    assert len({failed["call_001"].digest, other["call_001"].digest, results(1, None)["call_001"].digest}) == 3


def test_tool_descriptions_have_a_limit():
    """It is kept for as long as the program runs, and of a schema only little is needed."""
    schema = {"properties": {"a": {}}, "more": [[]] * 1_400_000}
    with pytest.raises(LibreChatRefusal) as error:
        decode_program({"code": "1", "tools": [{"name": "tool", "parameters": schema}]}, 100)
    assert refused(error) == 413 and "tools have" in str(error.value)


async def test_unread_results_of_a_program_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialogues_module, "RUNNING_BYTES_OF_CALLER", 4 * dialogue_module.DIALOGUE_BYTES)
    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    dialogue = dialogues.begin(ANN, calling(1))
    before = await first(dialogue)
    dialogue.counts(lambda: 4 * dialogue_module.DIALOGUE_BYTES)
    with pytest.raises(LibreChatRefusal) as error:
        dialogues.begin(ANN, calling(1))
    assert (refused(error), error.value.body["error"]) == (503, "too_much_waits")
    dialogues.begin(BOB, calling(1))  # others have room of their own
    await told(dialogues, before, 1)
    await asyncio.sleep(0)
    dialogues.begin(ANN, calling(1))  # it has ended, and with it what it did not read


async def test_results_wait_for_room_too(monkeypatch: pytest.MonkeyPatch):
    """A program that does not take its results, or not yet, since another one is in its place."""
    monkeypatch.setattr(dialogues_module, "RUNNING_BYTES_OF_CALLER", 4 * dialogue_module.DIALOGUE_BYTES)
    taking = asyncio.Event()

    async def play(dialogue: ToolDialogue) -> Json:
        round = dialogue.ask([call(1)], {})
        assert await dialogue.is_answered(round, asyncio.Future())
        await taking.wait()
        return {"got": [each.result for each in round.take()]}

    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    one, other = dialogues.begin(ANN, play), dialogues.begin(ANN, play)
    before_one, before_other = await first(one), await first(other)
    text = "x" * dialogue_module.DIALOGUE_BYTES
    waiting = asyncio.ensure_future(told(dialogues, before_one, 1, text))
    await asyncio.sleep(0)
    assert one.held_bytes > 2 * dialogue_module.DIALOGUE_BYTES
    with pytest.raises(LibreChatRefusal) as error:
        await told(dialogues, before_other, 1, text)
    assert (refused(error), error.value.body["error"]) == (503, "too_much_waits")
    taking.set()
    assert (await waiting)["got"] == [text]
    assert (await told(dialogues, before_other, 1, text))["got"] == [text]  # the same again, and now there is room


async def test_a_request_whose_client_has_left_keeps_no_program(monkeypatch: pytest.MonkeyPatch):
    cancelling, dialogues = RequestCancellations(), ToolDialogues(TOKENS, wait_seconds=0.01)
    dialogue = dialogues.begin(ANN, calling(1))
    alive = weakref.ref(dialogue)
    with pytest.raises(asyncio.CancelledError), cancelling.track_request(ANN, "request") as request:
        request.on_cancel(partial(dialogues.end, dialogue.id))
        raise asyncio.CancelledError
    while dialogue.id in dialogues._known:
        await asyncio.sleep(0.01)
    del dialogue
    gc.collect()
    assert alive() is None
    cancelling.cancel(ANN, "request")  # harmless


async def test_a_request_whose_client_has_left_may_come_again():
    cancelling = RequestCancellations()
    with cancelling.track_request(ANN, "request"), pytest.raises(LibreChatRefusal) as error:
        cancelling._new_request(ANN, "request")
    assert refused(error) == 409
    ended: list[str] = []
    for _ in range(2):
        with pytest.raises(asyncio.CancelledError), cancelling.track_request(ANN, "request") as request:
            request.on_cancel(lambda: ended.append("left"))
            raise asyncio.CancelledError
    with cancelling.track_request(ANN, "request") as request:
        request.on_cancel(lambda: ended.append("here"))
        assert ended == []
        cancelling.cancel(ANN, "request")
    assert ended == ["here"]


async def test_an_unexpected_end_is_logged_without_its_text():
    async def play(dialogue: ToolDialogue) -> Json:
        raise KeyError("a secret")

    dialogues = ToolDialogues(TOKENS, wait_seconds=60)
    dialogue = dialogues.begin(ANN, play)
    said = await dialogue.first
    assert isinstance(said, KeyError) and said.__traceback__ is None  # which would keep what the program had
    entry = log.recent[-1]
    assert (entry.event, entry.fields["error"]) == ("program.failed", "KeyError")
    assert "test_dialogues.py" in entry.fields["where"] and "secret" not in str(entry)


async def test_one_users_early_cancels_are_not_at_the_expense_of_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cancelling_module, "MAX_REMEMBERED_OF_USER", 5)
    monkeypatch.setattr(cancelling_module, "REMEMBERED_SECONDS", 0.2)
    cancelling = RequestCancellations()

    def is_remembered(caller: LibreChatCaller, id: str) -> bool:
        ended: list[bool] = []
        with cancelling.track_request(caller, id) as request:
            request.on_cancel(lambda: ended.append(True))
        return bool(ended)

    for number in range(20):
        cancelling.cancel(ANN, f"request-{number}")
    cancelling.cancel(BOB, "request")
    assert len(cancelling._requests) == 6
    assert is_remembered(ANN, "request-4") and not is_remembered(ANN, "request-5") and is_remembered(BOB, "request")
    for number in range(20):  # those that their clients leave count, too
        with pytest.raises(asyncio.CancelledError), cancelling.track_request(ANN, f"left-{number}"):
            raise asyncio.CancelledError
    assert len(cancelling._requests) <= 6
    while cancelling._remembered_in_all:
        await asyncio.sleep(0.01)
    assert not cancelling._requests and not cancelling._remembered


def test_a_token_is_for_one_caller_and_a_while():
    said = Continuation(dialogue="d" * 21, round=3, expires_at=int(time.time()) + 60, whose=TOKENS.digest_caller(ANN))
    token = TOKENS.issue_token(said)
    assert TOKENS.read(token, ANN) == said
    for other in (BOB, KEY, LibreChatCaller(owner="o", tenant="tann"), LibreChatCaller(owner="ot", user="ann")):
        with pytest.raises(LibreChatRefusal) as error:
            TOKENS.read(token, other)
        assert refused(error) == 400
    for forged in (
        ContinuationTokens(b"another").issue_token(said),
        token.swapcase(),
        token.replace(".", ".."),
        f" {token}",
        None,
    ):
        with pytest.raises(LibreChatRefusal) as error:
            TOKENS.read(forged, ANN)
        assert refused(error) == 400
