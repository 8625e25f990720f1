"""A turn: one answer, made of model calls and of the code that they request, until the model is done.

    model call ─► items ─► is there code? ──no──► done
        ▲                        │ yes
        └──── its results ◄── run it

Code never goes to the upstream's own interpreter: an upstream is shown a function, `python`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from cloche import errors
from cloche.config import GatewayConfig as Settings
from cloche.events import AnyEvent, Ended, Raised
from cloche.gateway import tools as tooling
from cloche.gateway.events import (
    AnswerFinished,
    CallIdRewriter,
    CitationAdded,
    CodeStarted,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    PassedThrough,
    ProgramEvent,
    TokenUsage,
    TurnEvent,
)
from cloche.gateway.items import CodeArgumentParser, Item, new_item_id
from cloche.gateway.outputs import ExecutionOutputs, PictureLimit, event_text
from cloche.gateway.request import TurnRequest
from cloche.gateway.trace import RequestTrace
from cloche.gateway.turn_container import Citations, TurnContainer
from cloche.gateway.upstream import ModelCall, ModelUpstream

# Orders the events of a model call item by item.
#
# Upstreams may interleave items; clients read one at a time.


class ItemSequencer:
    """Iterator over a model call that can be drained: all of its code calls are complete before any code runs."""

    def __init__(self, leg: AsyncGenerator[TurnEvent, None]):
        self._leg = leg
        self._ready: deque[TurnEvent] = deque()
        self._waiting: dict[int, list[TurnEvent]] = {}  # by item, in the order in which they opened
        self._current: int | None = None
        self.finished: AnswerFinished | None = None

    def __aiter__(self) -> ItemSequencer:
        return self

    async def __anext__(self) -> TurnEvent:
        while not self._ready:
            if self.finished is not None:
                raise StopAsyncIteration
            self._take_event(await self._next_event())
        return self._ready.popleft()

    async def drain(self) -> AnswerFinished:
        """Reads the model call to its end and buffers its events. Raises the errors of the model call."""
        while self.finished is None:
            self._take_event(await self._next_event())
        return self.finished

    async def _next_event(self) -> TurnEvent:
        turn_event = await anext(self._leg, None)
        if turn_event is None:
            raise errors.UpstreamFailed("the model's answer broke off")
        return turn_event

    def _take_event(self, turn_event: TurnEvent) -> None:
        coming = deque((turn_event,))
        while coming:
            coming.extendleft(reversed(self._place_event(coming.popleft())))

    def _place_event(self, turn_event: TurnEvent) -> list[TurnEvent]:
        """Places one event. Returns the events that waited for it, if it was the last of its item."""
        if isinstance(turn_event, AnswerFinished):
            self.finished = turn_event
            for queued in self._waiting.values():
                self._ready.extend(queued)
            self._ready.append(turn_event)
        elif self._current in (None, turn_event.index):
            self._current = None if isinstance(turn_event, ItemClosed) else turn_event.index
            self._ready.append(turn_event)
            if self._current is None and self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
        else:
            self._waiting.setdefault(turn_event.index, []).append(turn_event)
        return []


# Splits wrapped parallel calls.
#
# Some models now and then call several functions through one that was never offered: `parallel`, with
# `{"tool_uses": [{"recipient_name": "functions.python", "parameters": {..}}, ..]}`. It is split here, before
# any client sees it.

WRAPPER_NAMES = frozenset({"parallel", "multi_tool_use.parallel"})
MAX_WRAPPED_CALLS = 100


class ParallelCallSplitter:
    """Converts the events of a model call: one wrapped call becomes several calls."""

    def __init__(self, tools: Iterable[Item]):
        self._offered = {tool.get("name") for tool in tools}
        self._numbers: dict[int, int] = {}  # of items: number from the upstream -> number sent to the client
        self._count = 0
        self._held: set[int] = set()

    def of(self, turn_event: TurnEvent) -> Iterator[TurnEvent]:
        match turn_event:
            case AnswerFinished():
                yield turn_event
            case ItemOpened() if self._is_wrapper(turn_event.item):
                self._held.add(turn_event.index)
            case ItemClosed() if turn_event.index in self._held:
                self._held.discard(turn_event.index)
                yield from self._split_calls(turn_event.item)
            case ItemOpened():
                self._numbers[turn_event.index] = self._next_index()
                yield self._renumber_event(turn_event)
            case _ if turn_event.index not in self._held:
                yield self._renumber_event(turn_event)

    def _is_wrapper(self, item: Item) -> bool:
        name = item.get("name")
        return item.get("type") == "function_call" and name in WRAPPER_NAMES and name not in self._offered

    def _split_calls(self, item: Item) -> Iterator[TurnEvent]:
        calls = _parse_wrapped_calls(item.get("arguments"), self._offered)
        for name, arguments in calls:
            # The ids are the upstream's for a call that is not there any more.
            yield from self._call_events(
                {**item, "id": new_item_id("function_call"), "name": name, "arguments": arguments}
            )
        if not calls:
            yield from self._call_events(item)

    def _call_events(self, item: Item) -> Iterator[TurnEvent]:
        index = self._next_index()
        yield ItemOpened(index=index, item={**item, "arguments": "", "status": "in_progress"})
        yield ItemDelta(index=index, kind="arguments", text=item["arguments"])
        yield ItemClosed(index=index, item=item)

    def _renumber_event(self, turn_event: Any) -> TurnEvent:
        number = self._numbers[turn_event.index]
        same: TurnEvent = turn_event if number == turn_event.index else replace(turn_event, index=number)
        return same

    def _next_index(self) -> int:
        self._count += 1
        return self._count - 1


def _parse_wrapped_calls(arguments: Any, offered: set[Any]) -> list[tuple[str, str]]:
    """Returns names and arguments of the calls; none unless all are of offered functions."""
    try:
        uses = json.loads(arguments)["tool_uses"]
        calls = [(str(use["recipient_name"]).removeprefix("functions."), use["parameters"]) for use in uses]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    if len(calls) > MAX_WRAPPED_CALLS or not all(name in offered for name, _ in calls):
        return []
    return [(name, given if isinstance(given, str) else json.dumps(given)) for name, given in calls]


NOT_RUN_OUTPUT = "Not run: this response has used all of its code calls. Answer with what you have."
MIN_CALL_TOKENS = 16  # with fewer left, the model is not called again
MAX_STUBBORN_CALLS = 2  # in which a model can still call code over the limit, before the turn ends


class Turn:
    """One turn: call `prepare`, then `stream_events`, once. `transcript` is its addition to the conversation."""

    def __init__(
        self,
        upstream: ModelUpstream,
        request: TurnRequest,
        workplace: TurnContainer | None,
        settings: Settings,
        trace: RequestTrace,
        inlined: Callable[[list[Item], list[Item]], Awaitable[list[Item]]],
    ):
        self._upstream = upstream
        self._inlined = inlined
        self._request = request
        self._workplace = workplace
        self._settings = settings
        self._trace = trace
        self._python = tooling.choose_python_name(request.tools)
        self._citations = Citations(workplace, every_file=request.cite_new_files or settings.cite_new_files)
        self._code_calls_left = settings.code_calls
        self._outputs_left = self._telling_left = settings.outputs_bytes
        self._seen_pictures = PictureLimit() if upstream.vision else None
        self._tool_calls_left = request.max_tool_calls  # code, and tools that the upstream has itself
        self._stubborn_legs = 0
        self._next_index = 0
        self._legs = 0
        self._given: list[Item] = [*request.history, *request.items]  # as the model is shown it, without files
        self.transcript: list[Item] = list(request.items)
        self.tokens = TokenUsage()
        self.ran_code = False  # whether it would be wrong to simply try again

    async def prepare(self) -> None:
        """Finds the container and the files.

        Raises errors that are known before the model call, such as a container that is gone.
        """
        if self._workplace is not None:
            await self._workplace.prepare()
            self._given = self._workplace.shown(self._given)
        else:
            self._given = await self._inlined(self._request.history, self._request.items)

    async def stream_events(self) -> AsyncGenerator[TurnEvent, None]:
        """Yields the events. Raises UpstreamFailed, and the engine's errors where no sandbox is available."""
        while True:
            leg = _ModelCallStream(self)
            async with contextlib.aclosing(leg.stream_events()) as turn_events:
                async for turn_event in turn_events:
                    yield turn_event
            assert leg.finished is not None
            self._stubborn_legs += not leg.ran_code
            if not leg.goes_on or self._stubborn_legs > MAX_STUBBORN_CALLS:
                yield replace(leg.finished, tokens=self.tokens)
                return
            if self._is_out_of_tokens:
                yield replace(leg.finished, status="incomplete", reason="max_output_tokens", tokens=self.tokens)
                return

    @property
    def _is_out_of_tokens(self) -> bool:
        most = self._request.max_output_tokens
        return most is not None and most - self.tokens.output < MIN_CALL_TOKENS

    # -- preparation of a model call

    def call(self) -> ModelCall:
        """Returns the next model call."""
        request = self._request
        tools, choice = tooling.select_tools(
            request,
            self._python,
            has_code=self._workplace is not None,
            first=self._legs == 0,
            may_run=self._may_run_code,
            may_host=self._tool_calls_left is None or self._tool_calls_left > 0,
            notes=self._workplace.notes() if self._workplace is not None else [],
        )
        self._legs += 1
        return ModelCall(
            model=request.model,
            items=[*self._given, *self.transcript[len(request.items) :]],
            instructions=request.instructions,
            tools=tools,
            tool_choice=choice,
            max_output_tokens=self._output_tokens_left(),
            max_tool_calls=self._tool_calls_left or None,
            options=request.options,
            request_id=self._trace.request,
        )

    async def call_model(self, call: ModelCall) -> AsyncGenerator[TurnEvent, None]:
        """Yields the model's answer, and records it."""
        finished: AnswerFinished | None = None
        call_ids, unwrapped = CallIdRewriter(call.items), ParallelCallSplitter(call.tools)
        with self._trace.step("model_call", model=call.model, leg=self._legs) as step:
            self._trace.capture_prompt(step, self._request.items if self._legs == 1 else [])
            async with contextlib.aclosing(self._upstream.call_model(call)) as turn_events:
                async for turn_event in turn_events:
                    step.first()
                    if isinstance(turn_event, AnswerFinished):
                        finished = turn_event
                        break
                    said_at = time.monotonic()
                    for each in unwrapped.of(turn_event):
                        yield call_ids.of(each)
                    step.exclude_seconds(time.monotonic() - said_at)
            if finished is None:
                raise errors.UpstreamFailed("the model's answer broke off")
            self.tokens += finished.tokens
            step.finished(finished)
        yield finished  # the call is complete and recorded, even if the rest fails

    def new_index(self) -> int:
        self._next_index += 1
        return self._next_index - 1

    def is_code_call(self, item: Item) -> bool:
        """Whether a call is one of our function. Small models do not always use the name that they were shown."""
        if self._workplace is None or item.get("type") != "function_call" or item.get("namespace"):
            return False
        return item.get("name") == self._python or tooling.is_mistaken_python_name(
            item.get("name"), self._request.tools
        )

    def take_code_call(self) -> bool:
        """Counts a code call. Whether it may run."""
        may_run = self._may_run_code
        self._code_calls_left -= 1
        self.count_call()
        return may_run

    def count_call(self) -> None:
        """Counts a call of a tool that is not the client's."""
        if self._tool_calls_left is not None:
            self._tool_calls_left = max(self._tool_calls_left - 1, 0)

    @property
    def _may_run_code(self) -> bool:
        return self._code_calls_left > 0 and self._tool_calls_left != 0

    @property
    def turn_container(self) -> TurnContainer:
        assert self._workplace is not None
        return self._workplace

    @property
    def citations(self) -> Citations:
        return self._citations

    @property
    def trace(self) -> RequestTrace:
        return self._trace

    def new_execution_outputs(self) -> ExecutionOutputs:
        """Returns the outputs of a new execution. The part that the model is shown is always kept."""
        return ExecutionOutputs(max(self._outputs_left, self._settings.model_output_bytes))

    def may_report(self, event: AnyEvent) -> bool:
        """Whether a watching client gets the event: text up to the limit of a response, and always a program's end."""
        said = event_text(event)
        if said is None or isinstance(event, (Raised, Ended)):
            return True
        self._telling_left -= len(said[0])
        return self._telling_left >= 0

    def saw(self, sight: ExecutionOutputs) -> str | list[Item]:
        """Counts the outputs of an ended execution, and returns its result for the model."""
        self._outputs_left -= sight.kept_bytes
        self._citations.saw(sight)
        return self.turn_container.preface_output(sight.result(self._settings.model_output_bytes, self._seen_pictures))

    def _output_tokens_left(self) -> int | None:
        most = self._request.max_output_tokens
        return None if most is None else most - self.tokens.output


class _ModelCallStream:
    """One model call, with the code that it requested."""

    def __init__(self, turn: Turn):
        self._turn = turn
        self._leg = turn.call_model(turn.call())
        self._source = ItemSequencer(self._leg)
        self._item: Item = {}  # the open one, as the client sees it
        self._index = 0
        self._reading: CodeArgumentParser | None = None  # of the code call that is open
        self._held: Item | None = None  # a complete message; the next item decides whether it is the last
        self._ignoring = False
        self._results: list[Item] = []
        self._has_calls_for_client = False
        self.ran_code = False
        self.finished: AnswerFinished | None = None

    @property
    def goes_on(self) -> bool:
        """Whether another model call must follow."""
        return bool(self._results) and not self._has_calls_for_client and self._is_completed

    @property
    def _is_completed(self) -> bool:
        return self.finished is not None and self.finished.status == "completed"

    async def stream_events(self) -> AsyncGenerator[TurnEvent, None]:
        async with contextlib.aclosing(self._leg), contextlib.aclosing(self._stream_for_client()) as seen:
            async for each in seen:
                yield each

    async def _stream_for_client(self) -> AsyncGenerator[TurnEvent, None]:
        async for turn_event in self._source:
            if self._held is not None:
                final = isinstance(turn_event, AnswerFinished) and not self._results
                async with contextlib.aclosing(self._close_message(final=final)) as closing:
                    async for each in closing:
                        yield each
            if isinstance(turn_event, AnswerFinished):
                self.finished = turn_event
                continue
            async with contextlib.aclosing(self._convert_event(turn_event)) as seen:
                async for each in seen:
                    yield each
        self._turn.transcript += self._results

    async def _convert_event(self, turn_event: TurnEvent) -> AsyncGenerator[TurnEvent, None]:
        match turn_event:
            case ItemOpened():
                opened = await self._open_item(turn_event.item)
                if opened is not None:
                    yield opened
            case ItemClosed():
                async with contextlib.aclosing(self._close_item(turn_event.item)) as seen:
                    async for each in seen:
                        yield each
            case ItemDelta() if self._reading is not None:
                code = self._reading.feed(turn_event.text)
                if code:
                    yield ItemDelta(index=self._index, kind="code", text=code)
            case ItemDelta() | CitationAdded() | PassedThrough() if not self._ignoring:
                yield _with_index(turn_event, self._index)

    # -- opening

    async def _open_item(self, item: Item) -> ItemOpened | None:
        self._reading, self._ignoring = None, False
        if self._turn.is_code_call(item):
            return await self._open_code()
        self._index = self._turn.new_index()
        self._item = {**item, "id": item["id"] if _is_answered_by_id(item) else new_item_id(str(item.get("type")))}
        return ItemOpened(index=self._index, item=self._item)

    async def _open_code(self) -> ItemOpened | None:
        self._ignoring = not self._turn.take_code_call()
        if self._ignoring:
            return None
        self._reading = CodeArgumentParser()
        container = await self._turn.turn_container.enter()
        self._index = self._turn.new_index()
        self._item = {
            "id": new_item_id("code_interpreter_call"),
            "type": "code_interpreter_call",
            "status": "in_progress",
            "code": "",
            "container_id": container,
            "outputs": [],
        }
        return ItemOpened(index=self._index, item=self._item)

    # -- closing

    async def _close_item(self, item: Item) -> AsyncGenerator[TurnEvent, None]:
        self._turn.transcript.append(item)
        if self._ignoring:
            self._add_result(item, NOT_RUN_OUTPUT)
        elif self._reading is not None:
            async with contextlib.aclosing(self._close_code(item)) as seen:
                async for each in seen:
                    yield each
        elif item.get("type") == "message":
            self._held = item
        else:
            self._has_calls_for_client |= tooling.waits_for_client(item)
            if tooling.is_hosted(item):
                self._turn.count_call()
            yield ItemClosed(index=self._index, item={**item, "id": self._item["id"]})

    async def _close_code(self, call: Item) -> AsyncGenerator[TurnEvent, None]:
        assert self._reading is not None
        code, rest = self._reading.whole(), self._reading.rest()
        if rest:
            yield ItemDelta(index=self._index, kind="code", text=rest)
        finished = await self._source.drain()
        if finished.status != "completed" and call.get("status") == "incomplete":
            yield ItemClosed(index=self._index, item={**self._item, "code": code, "status": "incomplete"})
            self._add_result(call, "Not run: the call was cut off.")
            return
        sight = self._turn.new_execution_outputs()
        async with contextlib.aclosing(self._run_code(code, sight)) as running:
            async for each in running:
                yield each
        item = {**self._item, "code": code, "status": "completed", "outputs": sight.outputs()}
        self._add_result(call, self._turn.saw(sight))
        yield ItemClosed(index=self._index, item=item)

    async def _run_code(self, code: str, sight: ExecutionOutputs) -> AsyncGenerator[TurnEvent, None]:
        turn, index = self._turn, self._index
        yield CodeStarted(index=index, code=code)
        turn.ran_code = self.ran_code = True
        with turn.trace.step("execution", container=self._item["container_id"]) as step:
            async with contextlib.aclosing(turn.turn_container.run(code)) as events:
                async for event in events:
                    sight.feed(event)
                    if isinstance(event, Ended):
                        step.ended(event)
                    if turn.may_report(event):
                        yield ProgramEvent(index=index, event=event)
            turn.trace.capture_run(step, code, sight)

    def _add_result(self, call: Item, output: str | list[Item]) -> None:
        self._results.append({"type": "function_call_output", "call_id": call.get("call_id"), "output": output})

    async def _close_message(self, *, final: bool) -> AsyncGenerator[TurnEvent, None]:
        assert self._held is not None
        item, self._held = {**self._held, "id": self._item["id"]}, None
        content: list[Any] = []
        for part, each in enumerate(item.get("content") or []):
            added = await self._turn.citations.of(each, final=final)
            for annotation in added:
                yield CitationAdded(index=self._index, annotation=annotation, part=part)
            content.append({**each, "annotations": [*each.get("annotations", []), *added]} if added else each)
        yield ItemClosed(index=self._index, item={**item, "content": content})


def _is_answered_by_id(item: Item) -> bool:
    """Whether a client answers the item by its id, so that the upstream's id must stay, as with call ids."""
    return item.get("type") == "mcp_approval_request" and isinstance(item.get("id"), str)


def _with_index(turn_event: ItemDelta | CitationAdded | PassedThrough, index: int) -> TurnEvent:
    fields = {name: getattr(turn_event, name) for name in turn_event.__struct_fields__}
    return type(turn_event)(**{**fields, "index": index})
