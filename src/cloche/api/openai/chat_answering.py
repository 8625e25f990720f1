"""A chat completion in the making: one turn, told in chunks. What later requests need of it is remembered."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from cloche import errors
from cloche.api.http import unforeseen
from cloche.api.openai.chat_decoding import ChatWanted
from cloche.api.openai.chat_encoding import Chunk, Completion
from cloche.api.openai.dialect import AfterCode
from cloche.gateway import history
from cloche.gateway.events import Finished
from cloche.gateway.gateway import Gateway
from cloche.gateway.request import Asked
from cloche.gateway.trace import Trace
from cloche.store.gateway import ChatTurn


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
