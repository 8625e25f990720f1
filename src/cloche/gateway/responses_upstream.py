"""An upstream that has a Responses API of its own: `POST {base_url}/responses`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator

from msgspec.structs import replace

from cloche import errors
from cloche.config.sections import Upstream as Settings
from cloche.gateway.happenings import Happening
from cloche.gateway.items import Item
from cloche.gateway.recent import Recent
from cloche.gateway.responses_events import LegEvents
from cloche.gateway.responses_request import body_of, included
from cloche.gateway.upstream_http import Answer, UpstreamServer, json_object
from cloche.gateway.upstreams import Call
from cloche.gateway.waiting import END_SECONDS, Waiting, answer_seconds
from cloche.model import Struct

PATH = "/responses"
DONE = b"[DONE]"  # a word of the chat API, which some servers end these streams with too


class ResponsesUpstream:
    """See `Upstream`."""

    def __init__(self, settings: Settings, server: UpstreamServer):
        self.vision = settings.vision
        self.server = server
        self._settings = settings
        self._plain: Recent[bool] = Recent()  # whether a model cannot give its reasoning away

    async def leg(self, call: Call) -> AsyncGenerator[Happening, None]:
        model = self._settings.model or call.model
        way = _Way(model=model, encrypted=not self._plain.of(model))
        while True:
            silent = True
            try:
                async with contextlib.aclosing(self._ask(call, way)) as happenings:
                    async for happening in happenings:
                        if silent:
                            self._remember(call, way)
                        silent = False
                        yield happening
                return
            except errors.UpstreamFailed as error:
                other = _other_way(way, error) if silent else None
                if other is None:
                    raise
                way = other

    async def models(self) -> Item:
        return await self.server.models()

    async def aclose(self) -> None:
        await self.server.aclose()

    async def _ask(self, call: Call, way: _Way) -> AsyncGenerator[Happening, None]:
        body = body_of(
            call, model=way.model, stream=self._settings.stream, encrypted=way.encrypted, reasoning=way.reasoning
        )
        waiting = Waiting(answer_seconds(self._settings.timeout_seconds))
        async with (
            self.server.post(PATH, body, call.request_id) as answer,
            contextlib.aclosing(_happenings(answer, self.server.secret, waiting)) as happenings,
        ):
            async for happening in happenings:
                yield happening

    def _remember(self, call: Call, way: _Way) -> None:
        """Holds for all clients: so not if what one of them wanted included may be what was refused."""
        if not way.encrypted and not included(call):
            self._plain.keep(way.model, True)


class _Way(Struct):
    """How a model is asked: see `body_of`."""

    model: str
    encrypted: bool = True
    reasoning: bool = True


def _other_way(way: _Way, error: errors.UpstreamFailed) -> _Way | None:
    """Another way to ask that a refusal hints at."""
    if error.status not in (400, 422):
        return None
    if way.encrypted and _is_about_include(error):
        return replace(way, encrypted=False)  # a model that does not reason, or a server that does not know the word
    if way.reasoning and error.reason == "invalid_encrypted_content":
        return replace(way, reasoning=False)  # what another server's model has thought
    return None


def _is_about_include(error: errors.UpstreamFailed) -> bool:
    if error.param:
        return not {"include", "encrypted_content"}.isdisjoint(re.split(r"\W+", error.param))
    message = str(error)
    return ("ncrypted" in message and "support" in message) or "'include'" in message or '"include"' in message


async def _happenings(answer: Answer, secret: str, waiting: Waiting) -> AsyncGenerator[Happening, None]:
    """Raises UpstreamFailed, also for a stream that has no end."""
    events = LegEvents(secret)
    if not answer.is_stream:
        for happening in events.end(await waiting.whole(answer.whole())):
            yield happening
        return
    async with contextlib.aclosing(answer.events()) as said:
        while (event := await waiting.next(said)) is not None and event.data != DONE:
            happenings = list(events.feed({"type": event.name or None, **json_object(event.data)}))
            if events.finished:
                await waiting.last(said, END_SECONDS)  # the little that follows: its connection can be used again
            for happening in happenings:
                yield happening
            if events.finished:
                return
    raise errors.UpstreamFailed("The upstream of this model broke off in the middle of its answer")
