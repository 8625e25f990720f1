"""An upstream that speaks Chat Completions: `POST {base_url}/chat/completions`. Most servers of models do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from cloche import errors
from cloche.config.sections import Upstream as Settings
from cloche.gateway.chat_answer import ChatAnswer
from cloche.gateway.chat_habits import Habit, Habits
from cloche.gateway.chat_request import body_of, custom_tools
from cloche.gateway.happenings import Happening
from cloche.gateway.items import Item
from cloche.gateway.upstream_http import Answer, UpstreamServer, json_object
from cloche.gateway.upstreams import Call
from cloche.gateway.waiting import END_SECONDS, USAGE_SECONDS, Waiting, answer_seconds

PATH = "/chat/completions"
DONE = b"[DONE]"


class ChatUpstream:
    """See `Upstream`."""

    def __init__(self, settings: Settings, server: UpstreamServer):
        self.vision = settings.vision
        self.server = server
        self.streams = settings.stream
        self._settings = settings
        self._habits = Habits(settings.base_url)

    async def leg(self, call: Call) -> AsyncGenerator[Happening, None]:
        model = self._settings.model or call.model
        habit = self._habits.of(model)
        while True:
            silent = True
            try:
                async with contextlib.aclosing(self._ask(call, model, habit)) as happenings:
                    async for happening in happenings:
                        if silent:
                            self._habits.answered(model, habit)
                        silent = False
                        yield happening
                return
            except errors.UpstreamFailed as error:
                other = self._habits.other(habit, error) if silent else None
                if other is None:
                    raise
                habit = other

    async def _ask(self, call: Call, model: str, habit: Habit) -> AsyncGenerator[Happening, None]:
        body = body_of(call, habit, model=model, vision=self.vision, stream=self._settings.stream)
        said = ChatAnswer(custom_tools(call), self.server.secret)
        async with (
            self.server.post(PATH, body, call.request_id) as answer,
            contextlib.aclosing(_happenings(answer, said, self.waiting())) as happenings,
        ):
            async for happening in happenings:
                yield happening

    def waiting(self) -> Waiting:
        """The time that one answer may take."""
        return Waiting(answer_seconds(self._settings.timeout_seconds))

    def forward(self, body: dict[str, Any], request_id: str) -> contextlib.AbstractAsyncContextManager[Answer]:
        """A client's own request, passed on as it is; the model may have another name there.

        Raises UpstreamFailed, inside the block too.
        """
        return self.server.post(PATH, {**body, "model": self._settings.model or body.get("model")}, request_id)

    async def models(self) -> Item:
        return await self.server.models()

    async def aclose(self) -> None:
        await self.server.aclose()


async def _happenings(answer: Answer, said: ChatAnswer, waiting: Waiting) -> AsyncGenerator[Happening, None]:
    """Raises UpstreamFailed."""
    if answer.is_stream:
        async with contextlib.aclosing(chunks(answer, waiting)) as coming:
            async for chunk in coming:
                for happening in said.feed(chunk):
                    yield happening
    else:
        for happening in said.feed(await waiting.whole(answer.whole())):
            yield happening
    for happening in said.end():
        yield happening


async def chunks(answer: Answer, waiting: Waiting, choices: int = 1) -> AsyncGenerator[Item, None]:
    """The chunks of a stream, to its end: not all servers say so, or hang up. Raises UpstreamFailed.

    Once so many choices have finished, what may follow is not waited for any longer than it takes.
    """
    finished: set[int] = set()
    counted = False
    async with contextlib.aclosing(answer.events()) as events:
        while True:
            if len(finished) >= choices:
                event = await waiting.last(events, END_SECONDS if counted else USAGE_SECONDS)
            else:
                event = await waiting.next(events)
            if event is None and not finished:
                raise errors.UpstreamFailed("The upstream of this model broke off in the middle of its answer")
            if event is None:
                return
            if event.data.strip() == DONE:
                await waiting.last(events, END_SECONDS)  # the little that follows: its connection can be used again
                return
            chunk = json_object(event.data)
            finished |= _finished(chunk)
            counted = counted or isinstance(chunk.get("usage"), dict)
            yield chunk


def _finished(chunk: Item) -> set[int]:
    """The numbers of the choices that end with it."""
    choices = chunk.get("choices")
    ended = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    indexes = [each.get("index") for each in ended if each.get("finish_reason")]
    return {index if isinstance(index, int) else 0 for index in indexes}
