"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from cloche import errors
from cloche.api.dialect import encode_sse, json_reply
from cloche.api.http import (
    StreamResponse,
    log_internal_error,
    read_decoded,
    request_id,
    run_unless_disconnected,
)
from cloche.api.openai.chat_request import ChatRequest, chat_turn_request, decode_chat, forwarded_body, request_messages
from cloche.api.openai.chat_stream import ChatCompletion, Chunk, error_chunk
from cloche.api.openai.context import FailedAfterCode, OpenAiContext, OpenAiNotFound, turn_stream
from cloche.api.openai.responses_stream import open_stream
from cloche.gateway import history
from cloche.gateway.events import AnswerFinished, TokenUsage
from cloche.gateway.gateway import Gateway, TurnLimiter
from cloche.gateway.request import TurnRequest
from cloche.gateway.trace import RequestTrace, StepInProgress
from cloche.gateway.upstream.chat import ChatUpstream, read_chunks
from cloche.gateway.upstream.http import UpstreamResponse, to_upstream_failure
from cloche.store.gateway import StoredChatTurn

# A chat completion in progress: one turn, streamed in chunks, and remembered for later requests.


class CompletionTurn:
    """`told` can be used once. Until `begun`, failures are raised; from then on a failure is a chunk."""

    def __init__(self, gateway: Gateway, trace: RequestTrace, request: ChatRequest, message: TurnRequest):
        self._gateway = gateway
        self._trace = trace
        self._wanted = request
        self._request = message
        self.turn = gateway.turn(message, trace)
        self.completion = ChatCompletion(request)
        self.begun = False

    @property
    def container(self) -> str | None:
        """The container of the code, as far as it is known."""
        named = self._request.code.container if self._request.code is not None else None
        return self.completion.container or named

    async def told(self) -> AsyncGenerator[list[Chunk], None]:
        """The chunks, in batches; the first batch before the model is called, when all that it needs is there."""
        about = {"completion": self.completion.id, "model": self._wanted.model, "stream": self._wanted.stream}
        with self._gateway.crowd.enter(self._trace.owner), self._trace.step("request", **about) as step:
            try:
                await self.turn.prepare()
                yield self.completion.begin()
                async with aclosing(self._stream_chunks()) as chunks:
                    async for batch in chunks:
                        yield batch
            except errors.ClocheError as error:
                step.failed(error)
                yield self._fail_completion(error)
            except Exception as error:  # noqa: BLE001 - the dialect's edge, of a stream
                step.failed(error)
                yield self._fail_completion(log_internal_error(error, self._trace.request))

    async def _stream_chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """The first batch marks the model's first output, which may have no chunk: the start of code, say."""
        has_spoken = False
        async with aclosing(self.turn.stream_events()) as turn_events:
            async for turn_event in turn_events:
                batch = self.completion.feed(turn_event)
                if isinstance(turn_event, AnswerFinished) and self.completion.calls:
                    self._remember_turn()  # before the chunk is sent: its reader may continue at once
                if batch or not has_spoken:
                    has_spoken = True
                    yield batch

    def _fail_completion(self, error: errors.ClocheError) -> list[Chunk]:
        """Raises the error unless the client has received something."""
        if not self.begun:
            raise error
        return self.completion.fail_with(error)

    def _remember_turn(self) -> None:
        """Remembers the turn, which waits for the client: the client will send only its own calls back."""
        completion = self.completion
        turn = StoredChatTurn(
            items=history.to_stored_transcript(self.turn.transcript[len(self._request.items) :], self._request.tools),
            calls=completion.calls,
            container=completion.container or self._request.known_container,
        )
        self._gateway.gateway_store.chat_calls.put(self._trace.owner, completion.turn_key, turn)


async def complete_chat(answer: CompletionTurn) -> dict[str, Any]:
    """Returns the ended completion. Raises its error: FailedAfterCode if a retry would run code again."""
    try:
        async with aclosing(answer.told()) as told:
            async for _ in told:
                pass
    except errors.ClocheError as error:
        raise FailedAfterCode(error) if answer.turn.ran_code else error from None
    return answer.completion.whole


# Chat completions without code, forwarded unchanged to an upstream of the same protocol.


class ForwardedCompletion:
    """`told` or `whole` can be used once. Until `begun`, failures are raised; then a failure is a chunk."""

    def __init__(self, upstream: ChatUpstream, trace: RequestTrace, request: ChatRequest, crowd: TurnLimiter):
        self._upstream = upstream
        self._crowd = crowd
        self._trace = trace
        self._wanted = request
        self.begun = False

    async def whole(self) -> dict[str, Any]:
        """The upstream's own completion. Raises UpstreamFailed, TooManyTurns."""
        with self._crowd.enter(self._trace.owner), self._request_step(), self._model_call_step() as step:
            async with self._upstream.forward_request(forwarded_body(self._wanted), self._trace.request) as answer:
                body = self._check_error(await self._upstream.waiting().whole(answer.whole()))
            _record_usage(step, body)
            return body

    async def told(self) -> AsyncGenerator[list[Chunk], None]:
        """The upstream's own chunks, once it has accepted the request. The first batch is empty."""
        yield []
        with self._crowd.enter(self._trace.owner), self._request_step() as request, self._model_call_step() as step:
            try:
                async with (
                    self._upstream.forward_request(forwarded_body(self._wanted), self._trace.request) as answer,
                    aclosing(self._upstream_chunks(answer)) as coming,
                ):
                    async for chunk in coming:
                        step.first()
                        _record_usage(step, chunk)
                        yield [chunk]
            except errors.UpstreamFailed as error:
                if not self.begun:
                    raise
                step.failed(error)
                request.failed(error)
                yield [error_chunk(error)]

    # -- inside

    def _request_step(self) -> AbstractContextManager[StepInProgress]:
        return self._trace.step("request", model=self._wanted.model, stream=self._wanted.stream)

    @contextmanager
    def _model_call_step(self) -> Iterator[StepInProgress]:
        with self._trace.step("model_call", model=self._wanted.model, leg=1) as step:
            self._trace.capture_prompt(step, self._wanted.raw["messages"])
            yield step

    async def _upstream_chunks(self, answer: UpstreamResponse) -> AsyncGenerator[Chunk, None]:
        """Raises UpstreamFailed, also if there is no end."""
        waiting = self._upstream.waiting()
        if not answer.is_stream:
            yield as_chunk(self._check_error(await waiting.whole(answer.whole())))
            return
        choices = self._wanted.raw.get("n")
        async with aclosing(read_chunks(answer, waiting, choices if isinstance(choices, int) else 1)) as coming:
            async for chunk in coming:
                yield self._check_error(chunk)

    def _check_error(self, body: dict[str, Any]) -> dict[str, Any]:
        """Raises UpstreamFailed for an error that was sent as an answer."""
        error = body.get("error")
        if error:
            said = error if isinstance(error, dict) else {"message": error}
            raise to_upstream_failure(said, secret=self._upstream.server.secret)
        return body


def as_chunk(body: dict[str, Any]) -> Chunk:
    """Converts a whole answer of a server that was asked to stream."""
    choices = body.get("choices")
    told = [
        {
            **{name: value for name, value in each.items() if name != "message"},
            "delta": _index_calls(each.get("message")),
        }
        for each in (choices if isinstance(choices, list) else ())
        if isinstance(each, dict)
    ]
    return {**body, "object": "chat.completion.chunk", "choices": told}


def _index_calls(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        return {}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [{"index": at, **each} for at, each in enumerate(calls) if isinstance(each, dict)]}


def _record_usage(step: StepInProgress, body: dict[str, Any]) -> None:
    usage = body.get("usage")
    if isinstance(usage, dict):
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        read, written = (each if isinstance(each, int) else 0 for each in counts)
        step.finished(AnswerFinished(tokens=TokenUsage(input=read, output=written)))


DONE_FRAME = encode_sse(b"[DONE]")
CONTAINER_HEADER = "x-container-id"


class ChatRoutes:
    def __init__(self, api: OpenAiContext):
        self._api = api
        self._gateway = api.gateway
        self.routes = [
            api.route("POST", "/v1/chat/completions", self.create),
            api.route("GET", "/v1/chat/completions", _not_stored),
            api.route(("GET", "POST", "DELETE"), "/v1/chat/completions/{rest:path}", _not_stored),
        ]

    async def create(self, request: Request) -> ASGIApp:
        owner = self._api.owner(request)
        message = await read_decoded(request, decode_chat)
        trace = self._gateway.trace(request_id(request), owner)
        upstream = self._gateway.upstreams.find(message.model)
        if message.code is None and isinstance(upstream, ChatUpstream) and (upstream.streams or not message.stream):
            passed = ForwardedCompletion(upstream, trace, message, self._gateway.crowd)
            return await _forward_reply(request, passed, stream=message.stream)
        answer = CompletionTurn(self._gateway, trace, message, await self._turn_request(owner, message))
        if message.stream:
            batches = await run_unless_disconnected(request, open_stream(answer))
            return _with_container(stream_chunks(batches), answer.container)
        body = await run_unless_disconnected(request, complete_chat(answer))
        return _with_container(json_reply(body), answer.container)

    async def _turn_request(self, owner: str, request: ChatRequest) -> TurnRequest:
        """The turn's request, with the remembered parts of the conversation."""
        messages = request_messages(request)
        calls = [call for message in messages for call in message.calls]
        turns = await self._gateway.gateway_store.chat_calls.find(owner, calls)
        return chat_turn_request(request, messages, turns, self._gateway.config.gateway.model_output_bytes)


async def _forward_reply(request: Request, answer: ForwardedCompletion, *, stream: bool) -> ASGIApp:
    if stream:
        return stream_chunks(await run_unless_disconnected(request, open_stream(answer)))
    return json_reply(await run_unless_disconnected(request, answer.whole()))


def stream_chunks(batches: AsyncGenerator[list[Chunk], None]) -> StreamResponse:
    return turn_stream(_encode_chunks(batches))


def _with_container(response: Response, container: str | None) -> Response:
    if container is not None:
        response.headers[CONTAINER_HEADER] = container
    return response


async def _encode_chunks(batches: AsyncGenerator[list[Chunk], None]) -> AsyncGenerator[bytes, None]:
    """The chunks, and `[DONE]` unless an error ended them."""
    failed = False
    async with aclosing(batches):
        async for batch in batches:
            failed = any(chunk.get("error") for chunk in batch)
            if batch:
                yield b"".join(encode_sse(msgspec.json.encode(chunk)) for chunk in batch)
    if not failed:
        yield DONE_FRAME


async def _not_stored(request: Request) -> Response:
    raise OpenAiNotFound("Chat completions are not stored here: POST /v1/chat/completions is all there is of them")
