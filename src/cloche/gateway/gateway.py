"""Where turns begin: the upstreams, the containers, and the records of what was done."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from cloche import errors
from cloche.config import Config
from cloche.config.sections import Upstream as Settings
from cloche.engine.engine import Engine
from cloche.engine.principal import acting
from cloche.gateway.attachments import inlined
from cloche.gateway.code_runner import Workplace
from cloche.gateway.container_files import ContainerFiles
from cloche.gateway.containers import Containers
from cloche.gateway.request import Asked
from cloche.gateway.trace import Trace
from cloche.gateway.turn import Turn
from cloche.gateway.upstream import ECHO, Route, Upstream, Upstreams
from cloche.gateway.upstream.chat import ChatUpstream
from cloche.gateway.upstream.echo import Echo
from cloche.gateway.upstream.http import UpstreamServer
from cloche.gateway.upstream.responses import ResponsesUpstream
from cloche.store.gateway import Shelf, Step

# How many turns are made at once for one owner: nobody's take the connections and the sandboxes of all others.


class TooManyTurns(errors.InvalidRequest):
    """An owner has as many turns as one can have."""

    status = 429
    param = None
    reason = "rate_limit_exceeded"


class Crowd:
    def __init__(self, most_of_owner: int):
        self._most_of_owner = most_of_owner
        self._turns: Counter[str] = Counter()

    @contextmanager
    def enter(self, owner: str) -> Iterator[None]:
        """One more turn, for as long as the block lasts. Raises TooManyTurns."""
        if self._turns[owner] >= self._most_of_owner:
            raise TooManyTurns(
                f"Too many requests at once: {self._most_of_owner} answers are being made for this key's owner, and no "
                "more can be. Wait for one to end, and try again."
            )
        self._turns[owner] += 1
        try:
            yield
        finally:
            self._turns[owner] -= 1
            if not self._turns[owner]:
                del self._turns[owner]


# Work that outlives the request that asked for it.


class Errands:
    """Tasks that nobody waits for. They are held here, and cancelled when the server stops."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], str] = {}  # with whose each is
        self.closing = False  # whether whoever is cancelled is so because the server stops

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task, who = asyncio.create_task(work), acting()
        self._tasks[task] = "" if who is None else who.owner
        task.add_done_callback(self._tasks.pop)
        return task

    async def cancel(self, owner: str) -> None:
        """Those that an owner asked for, and waits until they have ended."""
        theirs = [task for task, whose in self._tasks.items() if whose == owner]
        for task in theirs:
            task.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)

    async def aclose(self) -> None:
        """Cancels all, and waits until they have ended."""
        self.closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# What the gateway has done since it began, counted.


class Tally:
    """Counts records as they are made. All words in it are ours."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by outcome
        self.model_calls: Counter[str] = Counter()
        self.executions: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter(input=0, output=0)

    def count(self, step: Step) -> None:
        counts = {"request": self.requests, "model_call": self.model_calls, "execution": self.executions}.get(step.kind)
        if counts is not None:
            counts[step.outcome] += 1
        if step.kind == "model_call":
            self.tokens["input"] += step.fields.get("input_tokens", 0)
            self.tokens["output"] += step.fields.get("output_tokens", 0)


class Gateway:
    """`shelf` is what it keeps; `write` takes the records of what was done."""

    def __init__(self, engine: Engine, config: Config, shelf: Shelf, write: Callable[[Step], None]):
        self.config = config
        self.shelf = shelf
        shelf.guard(engine.quotas.check_stored)
        self.upstreams = Upstreams(routes(config))
        self.containers = Containers(engine, config)
        self.container_files = ContainerFiles(shelf)
        self.tally = Tally()
        self.errands = Errands()
        self.crowd = Crowd(config.gateway.turns_per_owner)
        self.instance = engine.instance
        self._write = write

    def trace(self, request: str, owner: str) -> Trace:
        return Trace(request, owner, self._record, capture=self.config.gateway.capture)

    def turn(self, asked: Asked, trace: Trace) -> Turn:
        """Raises ModelNotFound."""
        upstream = self.upstreams.find(asked.model)
        place = self._workplace(asked, trace) if asked.code is not None else None
        return Turn(upstream, asked, place, self.config.gateway, trace, partial(inlined, self.shelf.files, trace.owner))

    def _workplace(self, asked: Asked, trace: Trace) -> Workplace:
        return Workplace(
            self.containers, self.container_files, self.shelf.files, self.config, trace.owner, asked, trace
        )

    def _record(self, step: Step) -> None:
        self.tally.count(step)
        self._write(step)

    async def start(self) -> None:
        """Once the engine has: responses that a dead process worked on have failed."""
        await self.shelf.responses.mark_lost(self.instance.is_live)

    async def stop(self) -> None:
        """Before the engine does: what runs without a client ends, and says so. No model is waited for."""
        await self.errands.aclose()
        await self.upstreams.aclose()

    async def aclose(self) -> None:
        await self.container_files.aclose()


def routes(config: Config) -> list[Route]:
    """`cloche/echo`, which is always there, whatever patterns match it; then those that are configured."""
    configured = [
        Route(patterns=each.models, upstream=_upstream(each), renamed=bool(each.model)) for each in config.upstream
    ]
    return [Route(patterns=(ECHO,), upstream=Echo()), *configured]


def _upstream(settings: Settings) -> Upstream:
    """Raises InvalidConfig."""
    server = UpstreamServer(settings)
    return ChatUpstream(settings, server) if settings.api == "chat" else ResponsesUpstream(settings, server)
