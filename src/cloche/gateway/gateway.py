"""The gateway: creates turns, and owns the upstreams, the containers and the request records."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from cloche import errors
from cloche.config import Config
from cloche.config.sections import UpstreamConfig as Settings
from cloche.engine.engine import Engine
from cloche.engine.principal import current_principal
from cloche.gateway.attachments import inline_stored_files
from cloche.gateway.container_files import ContainerFiles
from cloche.gateway.containers import Containers
from cloche.gateway.request import TurnRequest
from cloche.gateway.trace import RequestTrace
from cloche.gateway.turn import Turn
from cloche.gateway.turn_container import TurnContainer
from cloche.gateway.upstream import ECHO_MODEL, ModelRoute, ModelUpstream, Upstreams
from cloche.gateway.upstream.chat import ChatUpstream
from cloche.gateway.upstream.echo import EchoUpstream
from cloche.gateway.upstream.http import UpstreamServer
from cloche.gateway.upstream.responses import ResponsesUpstream
from cloche.store.gateway import GatewayStore, StepRecord

# Limits the concurrent turns of one owner, so that none takes the connections and sandboxes of all others.


class TooManyTurns(errors.InvalidRequest):
    """The owner has the maximum of concurrent turns."""

    status = 429
    param = None
    reason = "rate_limit_exceeded"


class TurnLimiter:
    def __init__(self, most_of_owner: int):
        self._most_of_owner = most_of_owner
        self._turns: Counter[str] = Counter()

    @contextmanager
    def enter(self, owner: str) -> Iterator[None]:
        """Counts one more turn for the duration of the block. Raises TooManyTurns."""
        if self._turns[owner] >= self._most_of_owner:
            raise TooManyTurns(
                f"Too many requests at once: {self._most_of_owner} answers of this key's owner are in "
                "progress, which is the limit. Wait for one to end, and try again."
            )
        self._turns[owner] += 1
        try:
            yield
        finally:
            self._turns[owner] -= 1
            if not self._turns[owner]:
                del self._turns[owner]


# Background tasks that outlive the request that started them.


class BackgroundTasks:
    """Owns tasks without a waiting caller, and cancels them when the server stops."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], str] = {}  # with the owner of each
        self.closing = False  # whether a cancellation is caused by the server's stop

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task, who = asyncio.create_task(work), current_principal()
        self._tasks[task] = "" if who is None else who.owner
        task.add_done_callback(self._tasks.pop)
        return task

    async def cancel(self, owner: str) -> None:
        """Cancels the tasks of an owner, and waits until they have ended."""
        theirs = [task for task, task_owner in self._tasks.items() if task_owner == owner]
        for task in theirs:
            task.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)

    async def aclose(self) -> None:
        """Cancels all tasks, and waits until they have ended."""
        self.closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# Counters of the gateway's work since it started.


class GatewayCounters:
    """Counts step records as they are made. All of its labels are ours."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by outcome
        self.model_calls: Counter[str] = Counter()
        self.executions: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter(input=0, output=0)

    def count(self, step: StepRecord) -> None:
        counts = {"request": self.requests, "model_call": self.model_calls, "execution": self.executions}.get(step.kind)
        if counts is not None:
            counts[step.outcome] += 1
        if step.kind == "model_call":
            self.tokens["input"] += step.fields.get("input_tokens", 0)
            self.tokens["output"] += step.fields.get("output_tokens", 0)


class Gateway:
    """Creates turns and traces. `shelf` is its store; `write` receives the step records."""

    def __init__(
        self, engine: Engine, config: Config, gateway_store: GatewayStore, write: Callable[[StepRecord], None]
    ):
        self.config = config
        self.gateway_store = gateway_store
        gateway_store.guard(engine.quotas.check_stored)
        self.upstreams = Upstreams(build_routes(config))
        self.containers = Containers(engine, config)
        self.container_files = ContainerFiles(gateway_store)
        self.counters = GatewayCounters()
        self.errands = BackgroundTasks()
        self.crowd = TurnLimiter(config.gateway.turns_per_owner)
        self.instance = engine.instance
        self._write = write

    def trace(self, request: str, owner: str) -> RequestTrace:
        return RequestTrace(request, owner, self._record_step, capture=self.config.gateway.capture)

    def turn(self, request: TurnRequest, trace: RequestTrace) -> Turn:
        """Raises ModelNotFound."""
        upstream = self.upstreams.find(request.model)
        place = self._new_turn_container(request, trace) if request.code is not None else None
        return Turn(
            upstream,
            request,
            place,
            self.config.gateway,
            trace,
            partial(inline_stored_files, self.gateway_store.files, trace.owner),
        )

    def _new_turn_container(self, request: TurnRequest, trace: RequestTrace) -> TurnContainer:
        return TurnContainer(
            self.containers, self.container_files, self.gateway_store.files, self.config, trace.owner, request, trace
        )

    def _record_step(self, step: StepRecord) -> None:
        self.counters.count(step)
        self._write(step)

    async def start(self) -> None:
        """Call after the engine has started: responses that a dead process worked on are marked failed."""
        await self.gateway_store.responses.mark_lost(self.instance.is_live)

    async def stop(self) -> None:
        """Call before the engine stops: background turns end, and report so. No model is waited for."""
        await self.errands.aclose()
        await self.upstreams.aclose()

    async def aclose(self) -> None:
        await self.container_files.aclose()


def build_routes(config: Config) -> list[ModelRoute]:
    """Returns the route of `cloche/echo`, which is always first, then the configured routes."""
    configured = [
        ModelRoute(patterns=each.models, upstream=_make_upstream(each), renamed=bool(each.model))
        for each in config.upstream
    ]
    return [ModelRoute(patterns=(ECHO_MODEL,), upstream=EchoUpstream()), *configured]


def _make_upstream(settings: Settings) -> ModelUpstream:
    """Raises InvalidConfig."""
    server = UpstreamServer(settings)
    return ChatUpstream(settings, server) if settings.api == "chat" else ResponsesUpstream(settings, server)
