"""How long an upstream is waited for."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from cloche import errors
from cloche.gateway.upstream import chat
from cloche.gateway.upstream.http import MIN_ANSWER_SECONDS, AnswerDeadline, max_answer_seconds
from cloche.gateway.upstream.sse import ServerEvent

FINISH = '{"choices": [{"index": %d, "delta": {}, "finish_reason": "stop"}]}'
USAGE = '{"choices": [], "usage": {"prompt_tokens": 1}}'
WORD = '{"choices": [{"index": 0, "delta": {"content": "x"}}]}'


class Said:
    """An upstream's stream: it says these, and then nothing, without an end."""

    def __init__(self, *said, then=None):
        self._said = said
        self._then = then

    async def events(self):
        for each in self._said:
            yield ServerEvent(name="", data=each.encode())
        if self._then is not None:
            raise self._then
        await asyncio.Event().wait()


async def read(said, **options):
    return [chunk async for chunk in chat.read_chunks(said, AnswerDeadline(60), **options)]


async def test_an_answer_that_is_whole_needs_neither_a_last_word_nor_a_hang_up():
    async with asyncio.timeout(30):
        assert len(await read(Said(WORD, FINISH % 0, USAGE))) == 3


async def test_usage_need_not_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat, "USAGE_SECONDS", 0.01)
    assert len(await read(Said(WORD, FINISH % 0))) == 2


async def test_a_failure_after_the_end_is_harmless():
    assert len(await read(Said(FINISH % 0, USAGE, then=httpx2.ReadError("gone")))) == 2
    assert len(await read(Said(FINISH % 0, then=errors.UpstreamFailed("too much")))) == 1


async def test_all_choices_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    async def slow():
        for each in (FINISH % 1, WORD, FINISH % 0, "[DONE]"):
            await asyncio.sleep(0.05)
            yield ServerEvent(name="", data=each.encode())

    monkeypatch.setattr(chat, "USAGE_SECONDS", 0.0)
    said = Said()
    said.events = slow
    assert len(await read(said, choices=2)) == 3


async def test_before_its_end_a_stream_is_broken_off():
    with pytest.raises(httpx2.ReadError):
        await read(Said(WORD, then=httpx2.ReadError("gone")))

    async def over():
        yield ServerEvent(name="", data=WORD.encode())

    said = Said()
    said.events = over
    with pytest.raises(errors.UpstreamFailed, match="broke off"):
        await read(said)


async def test_a_server_that_never_comes_to_an_end_is_left():
    with pytest.raises(errors.UpstreamFailed, match="too long") as raised:
        await AnswerDeadline(0.01).next(Said().events())
    assert raised.value.status == 504


async def test_all_waiting_counts_and_only_that():
    async def slow():
        while True:
            await asyncio.sleep(0.02)
            yield ServerEvent(name="", data=b"{}")

    waiting, events = AnswerDeadline(0.1), slow()
    await asyncio.sleep(0.15)  # longer than the deadline, which counts only while an event is awaited
    with pytest.raises(errors.UpstreamFailed, match="too long"):
        for _ in range(1000):
            await waiting.next(events)


def test_a_patient_operator_is_waited_for_longer():
    assert max_answer_seconds(600) == MIN_ANSWER_SECONDS
    assert max_answer_seconds(1) == MIN_ANSWER_SECONDS
    assert max_answer_seconds(6000) == 36000
