"""One answer: calls of a model, the code that it asks for between them, until it is done.

    leg ─► items ─► is there code? ──no──► done
     ▲                    │ yes
     └── its results ◄── run it

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
from cloche.config import Gateway as Settings
from cloche.events import AnyEvent, Ended, Raised
from cloche.gateway import tools as tooling
from cloche.gateway.code_runner import Citations, Workplace
from cloche.gateway.events import (
    Cited,
    Closed,
    Delta,
    Finished,
    Happening,
    Interpreting,
    Opened,
    OwnCallIds,
    Passed,
    Printed,
    Tokens,
)
from cloche.gateway.items import CodeInArguments, Item, new_item_id
from cloche.gateway.outputs import SeenPictures, Sight, said_by
from cloche.gateway.request import Asked
from cloche.gateway.trace import Trace
from cloche.gateway.upstream import Call, Upstream

# A leg's happenings, one item after the other: upstreams may send several at once, and clients read them in a row.


class InOrder:
    """An iterator over a leg that can be drained: what code is asked for is known to be whole before any of it runs."""

    def __init__(self, leg: AsyncGenerator[Happening, None]):
        self._leg = leg
        self._ready: deque[Happening] = deque()
        self._waiting: dict[int, list[Happening]] = {}  # by item, in the order in which they opened
        self._current: int | None = None
        self.finished: Finished | None = None

    def __aiter__(self) -> InOrder:
        return self

    async def __anext__(self) -> Happening:
        while not self._ready:
            if self.finished is not None:
                raise StopAsyncIteration
            self._take(await self._next())
        return self._ready.popleft()

    async def drain(self) -> Finished:
        """Reads the leg to its end, for later. Raises what the leg raises."""
        while self.finished is None:
            self._take(await self._next())
        return self.finished

    async def _next(self) -> Happening:
        happening = await anext(self._leg, None)
        if happening is None:
            raise errors.UpstreamFailed("the model's answer broke off")
        return happening

    def _take(self, happening: Happening) -> None:
        coming = deque((happening,))
        while coming:
            coming.extendleft(reversed(self._place(coming.popleft())))

    def _place(self, happening: Happening) -> list[Happening]:
        """Those that waited for this one, if it was the last of its item."""
        if isinstance(happening, Finished):
            self.finished = happening
            for queued in self._waiting.values():
                self._ready.extend(queued)
            self._ready.append(happening)
        elif self._current in (None, happening.index):
            self._current = None if isinstance(happening, Closed) else happening.index
            self._ready.append(happening)
            if self._current is None and self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
        else:
            self._waiting.setdefault(happening.index, []).append(happening)
        return []


# Calls in a call. Some models now and then ask for several functions by one that nobody offered them: `parallel`,
# with
# `{"tool_uses": [{"recipient_name": "functions.python", "parameters": {..}}, ..]}`. It is taken apart here, before
# anyone
# is shown it.

WRAPPERS = frozenset({"parallel", "multi_tool_use.parallel"})
MAX_CALLS = 100


class Unwrapped:
    """Feed it what a leg says; it says the same, with several calls in the place of one."""

    def __init__(self, tools: Iterable[Item]):
        self._offered = {tool.get("name") for tool in tools}
        self._numbers: dict[int, int] = {}  # of items, as they came -> as they are said
        self._count = 0
        self._held: set[int] = set()

    def of(self, happening: Happening) -> Iterator[Happening]:
        match happening:
            case Finished():
                yield happening
            case Opened() if self._is_wrapper(happening.item):
                self._held.add(happening.index)
            case Closed() if happening.index in self._held:
                self._held.discard(happening.index)
                yield from self._unwrap(happening.item)
            case Opened():
                self._numbers[happening.index] = self._new()
                yield self._renumbered(happening)
            case _ if happening.index not in self._held:
                yield self._renumbered(happening)

    def _is_wrapper(self, item: Item) -> bool:
        name = item.get("name")
        return item.get("type") == "function_call" and name in WRAPPERS and name not in self._offered

    def _unwrap(self, item: Item) -> Iterator[Happening]:
        calls = _calls_in(item.get("arguments"), self._offered)
        for name, arguments in calls:
            # The ids are the upstream's for a call that is not there any more.
            yield from self._call({**item, "id": new_item_id("function_call"), "name": name, "arguments": arguments})
        if not calls:
            yield from self._call(item)

    def _call(self, item: Item) -> Iterator[Happening]:
        index = self._new()
        yield Opened(index=index, item={**item, "arguments": "", "status": "in_progress"})
        yield Delta(index=index, kind="arguments", text=item["arguments"])
        yield Closed(index=index, item=item)

    def _renumbered(self, happening: Any) -> Happening:
        number = self._numbers[happening.index]
        same: Happening = happening if number == happening.index else replace(happening, index=number)
        return same

    def _new(self) -> int:
        self._count += 1
        return self._count - 1


def _calls_in(arguments: Any, offered: set[Any]) -> list[tuple[str, str]]:
    """Names and arguments of the calls; none unless all of them are of functions that were offered."""
    try:
        uses = json.loads(arguments)["tool_uses"]
        calls = [(str(use["recipient_name"]).removeprefix("functions."), use["parameters"]) for use in uses]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    if len(calls) > MAX_CALLS or not all(name in offered for name, _ in calls):
        return []
    return [(name, given if isinstance(given, str) else json.dumps(given)) for name, given in calls]


NOT_RUN = "Not run: this response has used all of its code calls. Answer with what you have."
LEAST_OUTPUT_TOKENS = 16  # with fewer, a model is not asked again
STUBBORN_LEGS = 2  # in which a model may still call code that may not run, before it is asked no more


class Turn:
    """Use `prepare`, then `happenings`, once. `transcript` is what this turn adds to the conversation."""

    def __init__(
        self,
        upstream: Upstream,
        asked: Asked,
        workplace: Workplace | None,
        settings: Settings,
        trace: Trace,
        inlined: Callable[[list[Item], list[Item]], Awaitable[list[Item]]],
    ):
        self._upstream = upstream
        self._inlined = inlined
        self._asked = asked
        self._workplace = workplace
        self._settings = settings
        self._trace = trace
        self._python = tooling.python_name(asked.tools)
        self._citations = Citations(workplace, every_file=asked.cite_new_files or settings.cite_new_files)
        self._code_calls_left = settings.code_calls
        self._outputs_left = self._telling_left = settings.outputs_bytes
        self._seen_pictures = SeenPictures() if upstream.vision else None
        self._tool_calls_left = asked.max_tool_calls  # code, and tools that the upstream has itself
        self._stubborn_legs = 0
        self._next_index = 0
        self._legs = 0
        self._given: list[Item] = [*asked.history, *asked.items]  # as the model is shown it, without files
        self.transcript: list[Item] = list(asked.items)
        self.tokens = Tokens()
        self.ran_code = False  # whether it would be wrong to simply try again

    async def prepare(self) -> None:
        """Raises what can be known before the model is asked: a container that is gone, say."""
        if self._workplace is not None:
            await self._workplace.prepare()
            self._given = self._workplace.shown(self._given)
        else:
            self._given = await self._inlined(self._asked.history, self._asked.items)

    async def happenings(self) -> AsyncGenerator[Happening, None]:
        """Raises UpstreamFailed, and what the engine raises where no sandbox can be had."""
        while True:
            leg = _Leg(self)
            async with contextlib.aclosing(leg.happenings()) as happenings:
                async for happening in happenings:
                    yield happening
            assert leg.finished is not None
            self._stubborn_legs += not leg.ran_code
            if not leg.goes_on or self._stubborn_legs > STUBBORN_LEGS:
                yield replace(leg.finished, tokens=self.tokens)
                return
            if self._is_out_of_tokens:
                yield replace(leg.finished, status="incomplete", reason="max_output_tokens", tokens=self.tokens)
                return

    @property
    def _is_out_of_tokens(self) -> bool:
        most = self._asked.max_output_tokens
        return most is not None and most - self.tokens.output < LEAST_OUTPUT_TOKENS

    # -- what a leg needs

    def call(self) -> Call:
        """The next call of the model."""
        asked = self._asked
        tools, choice = tooling.tools_for(
            asked,
            self._python,
            has_code=self._workplace is not None,
            first=self._legs == 0,
            may_run=self._may_run,
            may_host=self._tool_calls_left is None or self._tool_calls_left > 0,
            notes=self._workplace.notes() if self._workplace is not None else [],
        )
        self._legs += 1
        return Call(
            model=asked.model,
            items=[*self._given, *self.transcript[len(asked.items) :]],
            instructions=asked.instructions,
            tools=tools,
            tool_choice=choice,
            max_output_tokens=self._output_tokens_left(),
            max_tool_calls=self._tool_calls_left or None,
            options=asked.options,
            request_id=self._trace.request,
        )

    async def leg(self, call: Call) -> AsyncGenerator[Happening, None]:
        """The model's answer, recorded."""
        finished: Finished | None = None
        call_ids, unwrapped = OwnCallIds(call.items), Unwrapped(call.tools)
        with self._trace.step("model_call", model=call.model, leg=self._legs) as step:
            self._trace.capture_prompt(step, self._asked.items if self._legs == 1 else [])
            async with contextlib.aclosing(self._upstream.leg(call)) as happenings:
                async for happening in happenings:
                    step.first()
                    if isinstance(happening, Finished):
                        finished = happening
                        break
                    said_at = time.monotonic()
                    for each in unwrapped.of(happening):
                        yield call_ids.of(each)
                    step.others_took(time.monotonic() - said_at)
            if finished is None:
                raise errors.UpstreamFailed("the model's answer broke off")
            self.tokens += finished.tokens
            step.finished(finished)
        yield finished  # the call is over and recorded, whatever becomes of the rest

    def new_index(self) -> int:
        self._next_index += 1
        return self._next_index - 1

    def is_code(self, item: Item) -> bool:
        """Whether a call is one of ours. Small models do not always use the name that they were shown."""
        if self._workplace is None or item.get("type") != "function_call" or item.get("namespace"):
            return False
        return item.get("name") == self._python or tooling.means_python(item.get("name"), self._asked.tools)

    def take_code_call(self) -> bool:
        """Whether one more may run."""
        may_run = self._may_run
        self._code_calls_left -= 1
        self.count_call()
        return may_run

    def count_call(self) -> None:
        """A tool was called that is not the client's."""
        if self._tool_calls_left is not None:
            self._tool_calls_left = max(self._tool_calls_left - 1, 0)

    @property
    def _may_run(self) -> bool:
        return self._code_calls_left > 0 and self._tool_calls_left != 0

    @property
    def workplace(self) -> Workplace:
        assert self._workplace is not None
        return self._workplace

    @property
    def citations(self) -> Citations:
        return self._citations

    @property
    def trace(self) -> Trace:
        return self._trace

    def new_sight(self) -> Sight:
        """Of an execution that begins. What the model is shown of it is always kept."""
        return Sight(max(self._outputs_left, self._settings.model_output_bytes))

    def may_tell(self, event: AnyEvent) -> bool:
        """Whether who watches is told of it: of no more text than a response keeps. How a program ends is always."""
        said = said_by(event)
        if said is None or isinstance(event, (Raised, Ended)):
            return True
        self._telling_left -= len(said[0])
        return self._telling_left >= 0

    def saw(self, sight: Sight) -> str | list[Item]:
        """What the model is told of an execution that has ended."""
        self._outputs_left -= sight.kept_bytes
        self._citations.saw(sight)
        return self.workplace.prefaced(sight.result(self._settings.model_output_bytes, self._seen_pictures))

    def _output_tokens_left(self) -> int | None:
        most = self._asked.max_output_tokens
        return None if most is None else most - self.tokens.output


class _Leg:
    """One call of the model, with the code that it asked for."""

    def __init__(self, turn: Turn):
        self._turn = turn
        self._leg = turn.leg(turn.call())
        self._source = InOrder(self._leg)
        self._item: Item = {}  # the open one, as the client sees it
        self._index = 0
        self._reading: CodeInArguments | None = None  # of the code call that is open
        self._held: Item | None = None  # a message that is whole; whether it is the last is seen by what follows
        self._ignoring = False
        self._results: list[Item] = []
        self._has_calls_for_client = False
        self.ran_code = False
        self.finished: Finished | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the model must be asked again."""
        return bool(self._results) and not self._has_calls_for_client and self._completed

    @property
    def _completed(self) -> bool:
        return self.finished is not None and self.finished.status == "completed"

    async def happenings(self) -> AsyncGenerator[Happening, None]:
        async with contextlib.aclosing(self._leg), contextlib.aclosing(self._as_clients_see()) as seen:
            async for each in seen:
                yield each

    async def _as_clients_see(self) -> AsyncGenerator[Happening, None]:
        async for happening in self._source:
            if self._held is not None:
                final = isinstance(happening, Finished) and not self._results
                async with contextlib.aclosing(self._close_message(final=final)) as closing:
                    async for each in closing:
                        yield each
            if isinstance(happening, Finished):
                self.finished = happening
                continue
            async with contextlib.aclosing(self._client_sees(happening)) as seen:
                async for each in seen:
                    yield each
        self._turn.transcript += self._results

    async def _client_sees(self, happening: Happening) -> AsyncGenerator[Happening, None]:
        match happening:
            case Opened():
                opened = await self._open(happening.item)
                if opened is not None:
                    yield opened
            case Closed():
                async with contextlib.aclosing(self._close(happening.item)) as seen:
                    async for each in seen:
                        yield each
            case Delta() if self._reading is not None:
                code = self._reading.feed(happening.text)
                if code:
                    yield Delta(index=self._index, kind="code", text=code)
            case Delta() | Cited() | Passed() if not self._ignoring:
                yield _moved(happening, self._index)

    # -- opening

    async def _open(self, item: Item) -> Opened | None:
        self._reading, self._ignoring = None, False
        if self._turn.is_code(item):
            return await self._open_code()
        self._index = self._turn.new_index()
        self._item = {**item, "id": item["id"] if _is_answered_by_id(item) else new_item_id(str(item.get("type")))}
        return Opened(index=self._index, item=self._item)

    async def _open_code(self) -> Opened | None:
        self._ignoring = not self._turn.take_code_call()
        if self._ignoring:
            return None
        self._reading = CodeInArguments()
        container = await self._turn.workplace.enter()
        self._index = self._turn.new_index()
        self._item = {
            "id": new_item_id("code_interpreter_call"),
            "type": "code_interpreter_call",
            "status": "in_progress",
            "code": "",
            "container_id": container,
            "outputs": [],
        }
        return Opened(index=self._index, item=self._item)

    # -- closing

    async def _close(self, item: Item) -> AsyncGenerator[Happening, None]:
        self._turn.transcript.append(item)
        if self._ignoring:
            self._answer(item, NOT_RUN)
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
            yield Closed(index=self._index, item={**item, "id": self._item["id"]})

    async def _close_code(self, call: Item) -> AsyncGenerator[Happening, None]:
        assert self._reading is not None
        code, rest = self._reading.whole(), self._reading.rest()
        if rest:
            yield Delta(index=self._index, kind="code", text=rest)
        finished = await self._source.drain()
        if finished.status != "completed" and call.get("status") == "incomplete":
            yield Closed(index=self._index, item={**self._item, "code": code, "status": "incomplete"})
            self._answer(call, "Not run: the call was cut off.")
            return
        sight = self._turn.new_sight()
        async with contextlib.aclosing(self._run(code, sight)) as running:
            async for each in running:
                yield each
        item = {**self._item, "code": code, "status": "completed", "outputs": sight.outputs()}
        self._answer(call, self._turn.saw(sight))
        yield Closed(index=self._index, item=item)

    async def _run(self, code: str, sight: Sight) -> AsyncGenerator[Happening, None]:
        turn, index = self._turn, self._index
        yield Interpreting(index=index, code=code)
        turn.ran_code = self.ran_code = True
        with turn.trace.step("execution", container=self._item["container_id"]) as step:
            async with contextlib.aclosing(turn.workplace.run(code)) as events:
                async for event in events:
                    sight.feed(event)
                    if isinstance(event, Ended):
                        step.ended(event)
                    if turn.may_tell(event):
                        yield Printed(index=index, event=event)
            turn.trace.capture_run(step, code, sight)

    def _answer(self, call: Item, output: str | list[Item]) -> None:
        self._results.append({"type": "function_call_output", "call_id": call.get("call_id"), "output": output})

    async def _close_message(self, *, final: bool) -> AsyncGenerator[Happening, None]:
        assert self._held is not None
        item, self._held = {**self._held, "id": self._item["id"]}, None
        content: list[Any] = []
        for part, each in enumerate(item.get("content") or []):
            added = await self._turn.citations.of(each, final=final)
            for annotation in added:
                yield Cited(index=self._index, annotation=annotation, part=part)
            content.append({**each, "annotations": [*each.get("annotations", []), *added]} if added else each)
        yield Closed(index=self._index, item={**item, "content": content})


def _is_answered_by_id(item: Item) -> bool:
    """Whether a client answers it by its id, which the upstream must know again: as with the ids of calls."""
    return item.get("type") == "mcp_approval_request" and isinstance(item.get("id"), str)


def _moved(happening: Delta | Cited | Passed, index: int) -> Happening:
    fields = {name: getattr(happening, name) for name in happening.__struct_fields__}
    return type(happening)(**{**fields, "index": index})
