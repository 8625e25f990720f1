"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cloche import errors
from cloche.api.http import Edge, Stream, request_id, unforeseen, unless_left, whole_body
from cloche.api.openai.chat_request import ChatWanted, asked_of, conversation, decode, forwarded
from cloche.api.openai.chat_stream import Chunk, Completion, error_chunk
from cloche.api.openai.context import AfterCode, Door, NotThere, OpenAiErrors, json_reply
from cloche.api.openai.responses_stream import opened
from cloche.gateway import history
from cloche.gateway.events import Finished, Tokens
from cloche.gateway.gateway import Crowd, Gateway
from cloche.gateway.request import Asked
from cloche.gateway.trace import StepInProgress, Trace
from cloche.gateway.upstream.chat import ChatUpstream, chunks
from cloche.gateway.upstream.http import Answer, failure_of
from cloche.store.gateway import ChatTurn

# A chat completion in the making: one turn, told in chunks. What later requests need of it is remembered.


class ChatAnswer:
    """`told` is to be used once. Until `begun`, what fails is raised; from then on it is a chunk."""

    def __init__(self, gateway: Gateway, trace: Trace, wanted: ChatWanted, asked: Asked):
        self._gateway = gateway
        self._trace = trace
        self._wanted = wanted
        self._asked = asked
        self.turn = gateway.turn(asked, trace)
        self.completion = Completion(wanted)
        self.begun = False

    @property
    def container(self) -> str | None:
        """Where code runs, as far as it is known."""
        named = self._asked.code.container if self._asked.code is not None else None
        return self.completion.container or named

    async def told(self) -> AsyncGenerator[list[Chunk], None]:
        """The chunks, some at a time; the first time before the model is asked, when all that it needs is there."""
        about = {"completion": self.completion.id, "model": self._wanted.model, "stream": self._wanted.stream}
        with self._gateway.crowd.enter(self._trace.owner), self._trace.step("request", **about) as step:
            try:
                await self.turn.prepare()
                yield self.completion.begin()
                async with aclosing(self._chunks()) as chunks:
                    async for batch in chunks:
                        yield batch
            except errors.ClocheError as error:
                step.failed(error)
                yield self._failed(error)
            except Exception as error:  # noqa: BLE001 - the dialect's edge, of a stream
                step.failed(error)
                yield self._failed(unforeseen(error, self._trace.request))

    async def _chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """The first time at the model's first word, though chats may have no chunk for that: code begins, say."""
        has_spoken = False
        async with aclosing(self.turn.happenings()) as happenings:
            async for happening in happenings:
                batch = self.completion.feed(happening)
                if isinstance(happening, Finished) and self.completion.calls:
                    self._remember()  # before it is told: who reads that may go on at once
                if batch or not has_spoken:
                    has_spoken = True
                    yield batch

    def _failed(self, error: errors.ClocheError) -> list[Chunk]:
        """Raises the error unless the client has heard something."""
        if not self.begun:
            raise error
        return self.completion.fail(error)

    def _remember(self) -> None:
        """The turn waits for the client, who will give back only its own calls."""
        completion = self.completion
        turn = ChatTurn(
            items=history.kept(self.turn.transcript[len(self._asked.items) :], self._asked.tools),
            calls=completion.calls,
            container=completion.container or self._asked.known_container,
        )
        self._gateway.shelf.chat_calls.put(self._trace.owner, completion.turn_key, turn)


async def completed(answer: ChatAnswer) -> dict[str, Any]:
    """The completion, when it has ended. Raises what fails: AfterCode if trying again would run code again."""
    try:
        async with aclosing(answer.told()) as told:
            async for _ in told:
                pass
    except errors.ClocheError as error:
        raise AfterCode(error) if answer.turn.ran_code else error from None
    return answer.completion.whole


# Chat completions without code, for an upstream of the same protocol: request and answer are passed on as they are.


class Forwarded:
    """`told` or `whole` is to be used once. Until `begun`, what fails is raised; from then on it is a chunk."""

    def __init__(self, upstream: ChatUpstream, trace: Trace, wanted: ChatWanted, crowd: Crowd):
        self._upstream = upstream
        self._crowd = crowd
        self._trace = trace
        self._wanted = wanted
        self.begun = False

    async def whole(self) -> dict[str, Any]:
        """The upstream's own completion. Raises UpstreamFailed, TooManyTurns."""
        with self._crowd.enter(self._trace.owner), self._request(), self._model_call() as step:
            async with self._upstream.forward(forwarded(self._wanted), self._trace.request) as answer:
                body = self._checked(await self._upstream.waiting().whole(answer.whole()))
            _note_usage(step, body)
            return body

    async def told(self) -> AsyncGenerator[list[Chunk], None]:
        """The upstream's own chunks, once it has accepted the request. The first time there is none yet."""
        yield []
        with self._crowd.enter(self._trace.owner), self._request() as request, self._model_call() as step:
            try:
                async with (
                    self._upstream.forward(forwarded(self._wanted), self._trace.request) as answer,
                    aclosing(self._chunks(answer)) as coming,
                ):
                    async for chunk in coming:
                        step.first()
                        _note_usage(step, chunk)
                        yield [chunk]
            except errors.UpstreamFailed as error:
                if not self.begun:
                    raise
                step.failed(error)
                request.failed(error)
                yield [error_chunk(error)]

    # -- inside

    def _request(self) -> AbstractContextManager[StepInProgress]:
        return self._trace.step("request", model=self._wanted.model, stream=self._wanted.stream)

    @contextmanager
    def _model_call(self) -> Iterator[StepInProgress]:
        with self._trace.step("model_call", model=self._wanted.model, leg=1) as step:
            self._trace.capture_prompt(step, self._wanted.raw["messages"])
            yield step

    async def _chunks(self, answer: Answer) -> AsyncGenerator[Chunk, None]:
        """Raises UpstreamFailed, also if there is no end."""
        waiting = self._upstream.waiting()
        if not answer.is_stream:
            yield as_chunk(self._checked(await waiting.whole(answer.whole())))
            return
        choices = self._wanted.raw.get("n")
        async with aclosing(chunks(answer, waiting, choices if isinstance(choices, int) else 1)) as coming:
            async for chunk in coming:
                yield self._checked(chunk)

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        """Raises UpstreamFailed for an error that came as if it were an answer."""
        error = body.get("error")
        if error:
            said = error if isinstance(error, dict) else {"message": error}
            raise failure_of(said, secret=self._upstream.server.secret)
        return body


def as_chunk(body: dict[str, Any]) -> Chunk:
    """A whole answer of a server that was asked to stream."""
    choices = body.get("choices")
    told = [
        {**{name: value for name, value in each.items() if name != "message"}, "delta": _indexed(each.get("message"))}
        for each in (choices if isinstance(choices, list) else ())
        if isinstance(each, dict)
    ]
    return {**body, "object": "chat.completion.chunk", "choices": told}


def _indexed(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        return {}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [{"index": at, **each} for at, each in enumerate(calls) if isinstance(each, dict)]}


def _note_usage(step: StepInProgress, body: dict[str, Any]) -> None:
    usage = body.get("usage")
    if isinstance(usage, dict):
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        read, written = (each if isinstance(each, int) else 0 for each in counts)
        step.finished(Finished(tokens=Tokens(input=read, output=written)))


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
