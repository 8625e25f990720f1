"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cloche.api.http import Edge, Stream, request_id, unless_left, whole_body
from cloche.api.openai.answering import opened
from cloche.api.openai.chat_answering import ChatAnswer, completed
from cloche.api.openai.chat_decoding import ChatWanted, asked_of, conversation, decode
from cloche.api.openai.chat_encoding import Chunk
from cloche.api.openai.chat_forwarding import Forwarded
from cloche.api.openai.dialect import NotThere, OpenAiErrors
from cloche.api.openai.door import Door, json_reply
from cloche.gateway.request import Asked
from cloche.gateway.upstream.chat import ChatUpstream

QUIET_SECONDS = 10.0
KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
CONTAINER = "x-container-id"


class Chat:
    def __init__(self, door: Door, dialect: OpenAiErrors):
        self._door = door
        self._gateway = door.gateway
        stored = Edge(dialect, _not_stored)
        self.routes = [
            Route("/v1/chat/completions", Edge(dialect, self.create), methods=["POST"]),
            Route("/v1/chat/completions", stored, methods=["GET"]),
            Route("/v1/chat/completions/{rest:path}", stored, methods=["GET", "POST", "DELETE"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        owner = self._door.owner_of(request)
        wanted = decode(await whole_body(request))
        trace = self._gateway.trace(request_id(request), owner)
        upstream = self._gateway.upstreams.find(wanted.model)
        if wanted.code is None and isinstance(upstream, ChatUpstream) and (upstream.streams or not wanted.stream):
            passed = Forwarded(upstream, trace, wanted, self._gateway.crowd)
            return await _passed_on(request, passed, stream=wanted.stream)
        answer = ChatAnswer(self._gateway, trace, wanted, await self._asked(owner, wanted))
        if wanted.stream:
            batches = await unless_left(request, opened(answer))
            return _with_container(sse(batches), answer.container)
        body = await unless_left(request, completed(answer))
        return _with_container(json_reply(body), answer.container)

    async def _asked(self, owner: str, wanted: ChatWanted) -> Asked:
        """What the turn is asked, with what is remembered of the conversation."""
        messages = conversation(wanted)
        calls = [call for message in messages for call in message.calls]
        turns = await self._gateway.shelf.chat_calls.find(owner, calls)
        return asked_of(wanted, messages, turns, self._gateway.config.gateway.model_output_bytes)


async def _passed_on(request: Request, answer: Forwarded, *, stream: bool) -> ASGIApp:
    if stream:
        return sse(await unless_left(request, opened(answer)))
    return json_reply(await unless_left(request, answer.whole()))


def sse(batches: AsyncGenerator[list[Chunk], None]) -> Stream:
    return Stream(
        _frames(batches),
        headers={"cache-control": "no-cache"},
        media_type="text/event-stream; charset=utf-8",
        at_once=True,
        quiet_seconds=QUIET_SECONDS,
        keepalive=KEEPALIVE,
    )


def _with_container(response: Response, container: str | None) -> Response:
    if container is not None:
        response.headers[CONTAINER] = container
    return response


async def _frames(batches: AsyncGenerator[list[Chunk], None]) -> AsyncGenerator[bytes, None]:
    """The chunks, and a last word unless an error was it."""
    failed = False
    async with aclosing(batches):
        async for batch in batches:
            failed = any(chunk.get("error") for chunk in batch)
            if batch:
                yield b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in batch)
    if not failed:
        yield DONE


async def _not_stored(request: Request) -> Response:
    raise NotThere("Chat completions are not stored here: POST /v1/chat/completions is all there is of them")
