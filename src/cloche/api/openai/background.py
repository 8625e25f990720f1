"""Responses made in the background: they survive disconnects, and their owner's clients can follow them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from cloche.api.openai.context import BadParameter
from cloche.api.openai.response_object import without_outputs
from cloche.api.openai.responses_stream import Event, ResponseTurn
from cloche.gateway.gateway import Gateway
from cloche.store.responses import StoredResponse

MAX_RUNS = 200
MAX_RUNS_OF_OWNER = 50
FLUSH_SECONDS = 1.0
POLL_SECONDS = 0.5


class BackgroundRun:
    """A background response in progress. `told` has all of its events so far; an event's number is its index."""

    def __init__(self, answer: ResponseTurn, gateway: Gateway):
        self.answer = answer
        self._gateway = gateway
        self._told: list[Event] = []
        self._news = asyncio.Event()
        self._kept = 0  # events that are in the store
        self._kept_at = time.monotonic()
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> Event:
        """Returns the queued response. Raises the errors that are known before the model is called."""
        queued = self.answer.events.response
        told = self.answer.told()
        self._told += await anext(told)
        self.answer.begun = True
        self.answer.keep(instance=self._gateway.instance.name)
        self._flush_events()  # not before: events of what is not kept are not kept either
        self._task = self._gateway.errands.start(self._run_to_end(told))
        return queued

    async def follow(self, after: int) -> AsyncGenerator[list[Event], None]:
        """The events with greater numbers, as they come, until the last."""
        at = after + 1
        while True:
            if at < len(self._told):
                batch = self._told[at:]
                at += len(batch)
                yield batch
            elif self._ended:
                return
            else:
                await self._news.wait()

    async def cancel(self) -> None:
        """Interrupts the running code; its container lives. Returns when all has ended. Harmless at any time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def when_ended(self, call: Callable[[], object]) -> None:
        assert self._task is not None
        self._task.add_done_callback(lambda _: call())

    async def _run_to_end(self, told: AsyncGenerator[list[Event], None]) -> None:
        try:
            async with aclosing(told):
                async for batch in told:
                    self._add_events(batch)
        finally:
            self._add_events(self.answer.last_words)
            self._flush_events()
            self._ended = True
            self._wake_followers()

    def _add_events(self, batch: list[Event]) -> None:
        self._told += batch
        # The last events are stored together with the end: a reader of the end reads no further.
        if self.answer.events.ended or time.monotonic() - self._kept_at > FLUSH_SECONDS:
            self._flush_events()
        self._wake_followers()

    def _wake_followers(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _flush_events(self) -> None:
        self._gateway.gateway_store.responses.add_events(self.answer.events.id, self._told[self._kept :])
        self._kept, self._kept_at = len(self._told), time.monotonic()


class BackgroundRuns:
    """All background responses in progress, by their ids."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._runs: dict[str, BackgroundRun] = {}

    async def start(self, answer: ResponseTurn) -> tuple[BackgroundRun, Event]:
        """Returns the run, and the queued response. Raises the errors of `BackgroundRun.begin`."""
        run, id = BackgroundRun(answer, self._gateway), answer.events.id
        try:
            self._check_limits(answer.owner)
            self._runs[id] = run
            queued = await run.begin()
        except BaseException:
            self._runs.pop(id, None)
            answer.until_end.close()
            raise
        run.when_ended(lambda: self._runs.pop(id, None))
        await (
            self._gateway.gateway_store.responses.written()
        )  # a client with the id finds it also if this process dies now
        return run, queued

    def find(self, owner: str, id: str) -> BackgroundRun | None:
        run = self._runs.get(id)
        return run if run is not None and run.answer.owner == owner else None

    async def stored(self, owner: str, id: str) -> StoredResponse | None:
        """The stored response. One that no process works on any more has failed."""
        stored = self._gateway.gateway_store.responses
        found = await stored.get(owner, id)
        if found is None or not self._is_abandoned(id, found.instance):
            return found
        await stored.lose(id, found.instance)
        return await stored.get(owner, id)  # it may have ended meanwhile, or be gone

    async def stored_events(self, owner: str, id: str, after: int) -> AsyncGenerator[list[Event], None]:
        """The stored events with greater numbers, until the response has ended."""
        stored = self._gateway.gateway_store.responses
        while True:
            instance = await stored.instance(owner, id)
            if self._is_abandoned(id, instance):
                await stored.lose(id, instance)
            events = await stored.events(id, after)
            if events:
                after = events[-1]["sequence_number"]
                yield events
            elif instance is None:
                return
            else:
                await asyncio.sleep(POLL_SECONDS)

    def _is_abandoned(self, id: str, instance: str | None) -> bool:
        """Whether no process works on it any more, though `instance` did when it was read."""
        if instance is None or id in self._runs:
            return False
        here = self._gateway.instance
        return instance == here.name or not here.is_live(instance)

    def _check_limits(self, owner: str) -> None:
        of_owner = sum(run.answer.owner == owner for run in self._runs.values())
        if len(self._runs) >= MAX_RUNS or of_owner >= MAX_RUNS_OF_OWNER:
            raise BadParameter(
                f"Too many responses are made in the background: {MAX_RUNS_OF_OWNER} of one owner can be, and "
                f"{MAX_RUNS} in all. Wait for one to end, or cancel one.",
                None,
                "rate_limit_exceeded",
                status=429,
            )


def visible_event(event: Event, *, with_outputs: bool) -> Event:
    """An event as its reader sees it: with the outputs of code, or without."""
    if with_outputs:
        return event
    if "item" in event:
        return {**event, "item": without_outputs(event["item"])}
    if "response" in event:
        response = event["response"]
        return {**event, "response": {**response, "output": [without_outputs(each) for each in response["output"]]}}
    return event
