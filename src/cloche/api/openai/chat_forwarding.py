"""Chat completions without code, for an upstream of the same protocol: request and answer are passed on as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any

from cloche import errors
from cloche.api.openai.chat_decoding import ChatWanted, forwarded
from cloche.api.openai.chat_encoding import Chunk, error_chunk
from cloche.gateway.events import Finished, Tokens
from cloche.gateway.gateway import Crowd
from cloche.gateway.trace import StepInProgress, Trace
from cloche.gateway.upstream.chat import ChatUpstream, chunks
from cloche.gateway.upstream.http import Answer, failure_of


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
