"""A response in the making: one turn, told as events, and kept when it has ended, however it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Protocol

import msgspec

from cloche import errors
from cloche.api.http import unforeseen
from cloche.api.openai.decoding import OUTPUTS, Wanted
from cloche.api.openai.dialect import AfterCode
from cloche.api.openai.input_items import minted, with_ids
from cloche.api.openai.streaming import Event, ResponseEvents
from cloche.gateway import history
from cloche.gateway.gateway import Gateway
from cloche.gateway.items import Item, new_item_id
from cloche.gateway.request import Asked
from cloche.gateway.trace import Trace
from cloche.store.responses import StoredResponse

FIRST_WORD_SECONDS = 10.0


class Answer:
    """`told` is to be used once.

    Until `begun`, nobody knows of the response: what fails is raised, and nothing is kept. From then on a failure is
    an event, and whoever closes `told` before its end has cancelled the response.
    """

    def __init__(self, gateway: Gateway, trace: Trace, wanted: Wanted, asked: Asked):
        self._gateway = gateway
        self._trace = trace
        self.wanted = wanted
        self._asked = asked
        self.until_end = ExitStack()  # left when it has ended, before that is told
        self._input = with_ids(wanted.input)
        self._minted = minted(wanted.input, self._input)  # ids of items that they got here
        self.turn = gateway.turn(asked, trace)
        self.events = ResponseEvents(_whole(wanted) if wanted.background else wanted)
        self.begun = False
        self._error: errors.ClocheError | None = None  # that it ended with, after it had begun
        self.last_words: list[Event] = []  # those that could not be told, since `told` was closed

    @property
    def owner(self) -> str:
        return self._trace.owner

    async def told(self) -> AsyncGenerator[list[Event], None]:
        """The events, some at a time; the first time before the model is asked, when all that it needs is there."""
        wanted, events = self.wanted, self.events
        about = {"response": events.id, "model": wanted.model, "stream": wanted.stream}
        with self._until_end(), self._trace.step("request", **about) as step:
            try:
                async with aclosing(self._told()) as told:
                    async for batch in told:
                        yield batch
            finally:
                step.fields["status"] = events.response["status"]
                if self._error is not None:
                    step.failed(self._error)
                elif wanted.background and events.response["status"] == "cancelled":
                    step.outcome = "cancelled"  # by somebody's request; elsewhere it was the client that left

    def keep(self, *, instance: str | None = None) -> None:
        """Keeps it as it is now. `instance` is the process that goes on working on it."""
        response, stored = self.events.whole, self._gateway.shelf.responses
        keep = stored.change if self.wanted.background and instance is None else stored.put
        keep(
            StoredResponse(
                id=self.events.id,
                owner=self.owner,
                created_at=response["created_at"],
                status=response["status"],
                body=response,
                input=self._input,
                transcript=history.kept(self.turn.transcript, self._asked.tools),
                previous=self.wanted.previous_response_id,
                container=self._container,
                instance=instance,
                include=list(self.wanted.include),
            ),
            self._all_minted,
        )

    # -- inside

    @contextmanager
    def _until_end(self) -> Iterator[None]:
        """Until then it is one of its owner's turns. Raises TooManyTurns."""
        with self.until_end:
            if not self.wanted.background:  # those have a limit of their own
                self.until_end.enter_context(self._gateway.crowd.enter(self.owner))
            yield

    async def _told(self) -> AsyncGenerator[list[Event], None]:
        try:
            await self.turn.prepare()
            yield self.events.begin()
            async with aclosing(self.turn.happenings()) as happenings:
                async for happening in happenings:
                    self._check_stopping()
                    batch = self.events.feed(happening)
                    if self.events.ended:
                        self._ended()  # before it is told: who reads that may ask for it, or go on, at once
                    if batch:
                        yield batch
        except errors.ClocheError as error:
            yield self._failed(error)
        except (asyncio.CancelledError, GeneratorExit):
            self._left()
            raise
        except Exception as error:  # noqa: BLE001 - the dialect's edge, of a stream
            yield self._failed(unforeseen(error, self._trace.request))

    def _failed(self, error: errors.ClocheError) -> list[Event]:
        """Raises the error unless the client knows of the response."""
        error = _stopped() if self._gateway.errands.closing else error  # all else is because of that
        events = self.events.fail(error, self.turn.tokens)
        if not self.begun:
            raise error
        self._error = error
        self._ended()
        return events

    def _check_stopping(self) -> None:
        """Raises ShuttingDown. A model that is told of a sandbox's end would make an answer of it."""
        if self._gateway.errands.closing:
            raise _stopped()

    def _left(self) -> None:
        if self.events.ended:
            return
        if self._gateway.errands.closing:
            self._error = _stopped()
            self.last_words = self.events.fail(self._error, self.turn.tokens)
        else:
            self.last_words = self.events.cancel(self.turn.tokens)
        if self.begun:
            self._ended()

    def _ended(self) -> None:
        if self.wanted.store:
            self.keep()
        if self.wanted.conversation and self.events.response["status"] in ("completed", "incomplete"):
            items: list[Item] = [*self._input, *self.events.output]
            self._gateway.shelf.conversations.add_turn(
                self.wanted.conversation, items, self._all_minted, new_item_id, self._container
            )
        self.until_end.close()

    @property
    def _all_minted(self) -> set[str]:
        return self._minted.union(item["id"] for item in self.events.output)

    @property
    def _container(self) -> str | None:
        """Where code ran last in the conversation."""
        return history.container_of(self.events.output) or self._asked.known_container


async def answered(answer: Answer) -> Event:
    """The response, when it has ended. Raises what fails: AfterCode if trying again would run code again."""
    try:
        async with aclosing(answer.told()) as told:
            async for _ in told:
                pass
    except errors.ClocheError as error:
        raise AfterCode(error) if answer.turn.ran_code else error from None
    return answer.events.response


class Telling(Protocol):
    """An answer that can be told as it comes: of Responses and of Chat."""

    begun: bool

    def told(self) -> AsyncGenerator[list[Event], None]: ...


async def opened(answer: Telling, seconds: float = FIRST_WORD_SECONDS) -> AsyncGenerator[list[Event], None]:
    """The events, once the model has said its first word, or after so many seconds. Raises what fails until then."""
    told = answer.told()
    begin = await anext(told)
    coming = asyncio.ensure_future(anext(told, None))
    try:
        await asyncio.wait((coming,), timeout=seconds)
        if coming.done():
            coming.result()
        answer.begun = True
    except BaseException:
        await _closed(told, coming)
        raise
    return _opened(begin, coming, told)


async def _opened(
    begin: list[Event], coming: asyncio.Future[list[Event] | None], told: AsyncGenerator[list[Event], None]
) -> AsyncGenerator[list[Event], None]:
    try:
        yield begin
        batch = await coming
        while batch is not None:
            yield batch
            batch = await anext(told, None)
    finally:
        await _closed(told, coming)


async def _closed(told: AsyncGenerator[list[Event], None], coming: asyncio.Future[list[Event] | None]) -> None:
    if not coming.done():
        coming.cancel()
        await asyncio.wait((coming,))
    await told.aclose()


def _stopped() -> errors.ShuttingDown:
    return errors.ShuttingDown("The server was stopped.")


def _whole(wanted: Wanted) -> Wanted:
    """In the background all events have the outputs of code: who reads them may ask for them later."""
    return msgspec.structs.replace(wanted, include=(*wanted.include, OUTPUTS))
