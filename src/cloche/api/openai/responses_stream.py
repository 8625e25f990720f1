"""The events of a response's stream, from the events of a turn: numbered, in OpenAI's format."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any, Protocol

import msgspec

from cloche import errors
from cloche.api.http import log_internal_error
from cloche.api.openai.context import FailedAfterCode, status_and_body
from cloche.api.openai.response_object import (
    assign_ids,
    minted_ids,
    new_response_id,
    response_error,
    response_object,
    without_outputs,
)
from cloche.api.openai.responses_request import INCLUDE_OUTPUTS, ResponseRequest
from cloche.gateway import history
from cloche.gateway.events import (
    AnswerFinished,
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
from cloche.gateway.gateway import Gateway
from cloche.gateway.items import Item, new_item_id, output_text_part
from cloche.gateway.outputs import ExecutionOutputs, event_text
from cloche.gateway.request import TurnRequest
from cloche.gateway.trace import RequestTrace
from cloche.store.responses import StoredResponse

Event = dict[str, Any]

_DELTA_EVENTS = {
    "arguments": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
    "code": "response.code_interpreter_call_code",
}
_PART_TYPES = {"text": "output_text", "refusal": "refusal", "reasoning": "reasoning_text"}
_PART_EVENTS = {"output_text": "output_text", "refusal": "refusal", "reasoning_text": "reasoning_text"}


class ResponseEvents:
    """Takes the events of a turn and returns numbered stream events. `response` is the current object."""

    def __init__(self, request: ResponseRequest, id: str | None = None):
        self.id = id or new_response_id()
        self._wanted = request
        self._created_at = int(time.time())
        self._number = 0
        self._output: list[Item] = []
        self._open: dict[int, _OpenResponseItem] = {}
        self.response: dict[str, Any] = self._build_response("queued" if request.background else "in_progress")

    @property
    def output(self) -> list[Item]:
        """The complete items, with the outputs of their code."""
        return self._output

    @property
    def whole(self) -> dict[str, Any]:
        """The current object, with all complete items and the outputs of their code."""
        return {**self.response, "output": list(self._output)}

    @property
    def ended(self) -> bool:
        return self.response["status"] in ("completed", "incomplete", "failed", "cancelled")

    def begin(self) -> list[Event]:
        kinds = ["response.created", "response.in_progress"]
        if self._wanted.background:
            kinds.insert(1, "response.queued")
        events = []
        for kind in kinds:
            if kind == "response.in_progress":
                self.response = self._build_response("in_progress")
            events.append(self._number_event({"type": kind, "response": self.response}))
        return events

    def feed(self, turn_event: TurnEvent) -> list[Event]:
        return [self._number_event(event) for event in self._events_of(turn_event)]

    def fail_with(self, error: errors.ClocheError, tokens: TokenUsage) -> list[Event]:
        """Ends the response with an error. Open items are closed first, so that no reader is left with half of one."""
        events = list(self._abort_items("failed"))
        self.response = self._build_response("failed", tokens=tokens, error=response_error(error))
        _, body = status_and_body(error)
        # OpenAI's document has the fields in the event itself, its server sends them as `error`: clients read either.
        said = {name: body[name] for name in ("code", "message", "param")}
        events += [
            {"type": "error", **said, "error": body},
            {"type": "response.failed", "response": self.response},
        ]
        return [self._number_event(event) for event in events]

    def cancel(self, tokens: TokenUsage) -> list[Event]:
        """Ends a cancelled response. OpenAI has no such event: clients know `incomplete`, and see the status."""
        events = list(self._abort_items("incomplete"))
        self.response = self._build_response("cancelled", tokens=tokens)
        events.append({"type": "response.incomplete", "response": self.response})
        return [self._number_event(event) for event in events]

    # -- inside

    def _events_of(self, turn_event: TurnEvent) -> Iterator[Event]:
        match turn_event:
            case ItemOpened():
                yield from self._open_item(turn_event)
            case AnswerFinished():
                self.response = self._build_response(
                    turn_event.status,
                    tokens=turn_event.tokens,
                    reason=turn_event.reason,
                    service_tier=turn_event.service_tier,
                )
                yield {"type": f"response.{turn_event.status}", "response": self.response}
            case ItemClosed():
                item = self._visible_item(turn_event.item)
                yield from self._open.pop(turn_event.index).close(item)
                yield {"type": "response.output_item.done", "output_index": turn_event.index, "item": item}
                self._output.append(turn_event.item)
            case _:
                yield from self._open[turn_event.index].events_of(turn_event)

    def _open_item(self, turn_event: ItemOpened) -> Iterator[Event]:
        index, item = turn_event.index, turn_event.item
        self._open[index] = _OpenResponseItem(index, item, stream_outputs=self._wanted.stream_outputs)
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        if item["type"] == "code_interpreter_call":
            yield self._open[index].about("response.code_interpreter_call.in_progress")

    def _abort_items(self, status: str) -> Iterator[Event]:
        for index, open_item in sorted(self._open.items()):
            item = self._visible_item(open_item.aborted_item(status))
            yield from open_item.close(item)
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
            self._output.append(open_item.aborted_item(status))
        self._open.clear()

    def _visible_item(self, item: Item) -> Item:
        return item if self._wanted.with_outputs else without_outputs(item)

    def _build_response(self, status: str, **about: Any) -> dict[str, Any]:
        output = [self._visible_item(item) for item in self._output]
        return response_object(self.id, self._wanted, self._created_at, status=status, output=output, **about)

    def _number_event(self, event: Event) -> Event:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}


class _OpenResponseItem:
    """An item that has been announced, and is not complete."""

    def __init__(self, index: int, item: Item, *, stream_outputs: bool):
        self._index = index
        self._item = item
        self._watched = (
            ExecutionOutputs() if stream_outputs else None
        )  # what its code has shown so far, if that is streamed
        self._texts: dict[str, list[str]] = {}  # of arguments, code, input
        self._parts: dict[int, _OpenContentPart] = {}
        self._summaries: dict[int, list[str]] = {}
        self._code_is_whole = False

    def about(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": self._index, "item_id": self._item["id"], **fields}

    def events_of(self, turn_event: TurnEvent) -> Iterator[Event]:
        match turn_event:
            case ItemDelta():
                yield from self._add_delta(turn_event)
            case CodeStarted():
                yield from self._code_done(turn_event.code)
                yield self.about("response.code_interpreter_call.interpreting")
            case CitationAdded():
                part = self._find_part(turn_event.part, "output_text")
                yield from part.opening()
                yield part.cite(turn_event.annotation)
            case ProgramEvent() if self._watched is not None:
                self._watched.feed(turn_event.event)
                if said := event_text(turn_event.event):
                    text, stream = said
                    yield self.about("response.code_interpreter_call_output.delta", delta=text, stream=stream)
            case PassedThrough():
                yield {**turn_event.event, "output_index": self._index, "item_id": self._item["id"]}

    def close(self, item: Item) -> Iterator[Event]:
        """The events before `output_item.done`."""
        match item["type"]:
            case "code_interpreter_call":
                yield from self._code_done(item["code"])
                if item["status"] == "completed":
                    yield self.about("response.code_interpreter_call.completed")
            case "function_call":
                yield from self._text_rest("arguments", item["arguments"])
                yield self.about(
                    "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
                )
            case "custom_tool_call":
                yield from self._text_rest("custom", item["input"])
                yield self.about("response.custom_tool_call_input.done", input=item["input"])
            case "message" | "reasoning":
                yield from self._close_summaries(item)
                yield from self._close_parts(item)

    def aborted_item(self, status: str) -> Item:
        """The item as far as it was received."""
        item = {**self._item, "status": "incomplete"}
        match item["type"]:
            case "code_interpreter_call":
                outputs = self._watched.outputs() if self._watched is not None else []
                return {**item, "status": status, "code": self._joined_text("code"), "outputs": outputs}
            case "message":
                return {**item, "content": self._content_parts()}
            case "reasoning":
                content = {"content": self._content_parts()} if self._parts else {}
                return {**item, "summary": self._summary_parts(), **content}
            case "function_call":
                return {**item, "arguments": self._joined_text("arguments")}
            case "custom_tool_call":
                return {**item, "input": self._joined_text("custom")}
        return item

    # -- inside

    def _joined_text(self, kind: str) -> str:
        return "".join(self._texts.get(kind, []))

    def _content_parts(self) -> list[Item]:
        return [part.whole() for _, part in sorted(self._parts.items())]

    def _summary_parts(self) -> list[Item]:
        return [{"type": "summary_text", "text": "".join(texts)} for _, texts in sorted(self._summaries.items())]

    def _add_delta(self, delta: ItemDelta) -> Iterator[Event]:
        if delta.kind in _DELTA_EVENTS:
            self._texts.setdefault(delta.kind, []).append(delta.text)
            yield self.about(_DELTA_EVENTS[delta.kind] + ".delta", delta=delta.text)
        elif delta.kind == "summary":
            yield from self._add_summary(delta)
        else:
            part = self._find_part(delta.part, _PART_TYPES[delta.kind])
            yield from part.opening()
            yield part.delta(delta)

    def _text_rest(self, kind: str, whole: str) -> Iterator[Event]:
        """Sends in one delta the text that no delta had."""
        said = self._joined_text(kind)
        if whole != said and whole.startswith(said):
            yield self.about(_DELTA_EVENTS[kind] + ".delta", delta=whole[len(said) :])

    def _code_done(self, code: str) -> Iterator[Event]:
        if not self._code_is_whole:
            self._code_is_whole = True
            yield self.about("response.code_interpreter_call_code.done", code=code)

    def _find_part(self, number: int, kind: str) -> _OpenContentPart:
        if number not in self._parts:
            self._parts[number] = _OpenContentPart(self, number, kind)
        return self._parts[number]

    def _close_parts(self, item: Item) -> Iterator[Event]:
        for number, content in enumerate(item.get("content") or []):
            if content.get("type") in _PART_EVENTS:
                part = self._find_part(number, content["type"])
                yield from part.opening()
                yield from part.closing(content)

    def _add_summary(self, delta: ItemDelta) -> Iterator[Event]:
        if delta.part not in self._summaries:
            self._summaries[delta.part] = []
            empty = {"type": "summary_text", "text": ""}
            yield self.about("response.reasoning_summary_part.added", summary_index=delta.part, part=empty)
        self._summaries[delta.part].append(delta.text)
        yield self.about("response.reasoning_summary_text.delta", summary_index=delta.part, delta=delta.text)

    def _close_summaries(self, item: Item) -> Iterator[Event]:
        for number, summary in enumerate(item.get("summary") or []):
            if number not in self._summaries:
                yield from self._add_summary(
                    ItemDelta(index=self._index, kind="summary", text=summary["text"], part=number)
                )
            yield self.about("response.reasoning_summary_text.done", summary_index=number, text=summary["text"])
            yield self.about("response.reasoning_summary_part.done", summary_index=number, part=summary)


class _OpenContentPart:
    """One part of a message's or a reasoning's content."""

    def __init__(self, owner: _OpenResponseItem, number: int, kind: str):
        self._owner = owner
        self._number = number
        self._kind = kind
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._annotations: list[Item] = []
        self._opened = False

    def opening(self) -> Iterator[Event]:
        if not self._opened:
            self._opened = True
            part = output_text_part() if self._kind == "output_text" else {"type": self._kind, self._text_field: ""}
            yield self._part_event("response.content_part.added", part=part)

    def delta(self, delta: ItemDelta) -> Event:
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs
        extra = {"logprobs": delta.logprobs} if self._kind == "output_text" else {}
        return self._part_event(f"response.{_PART_EVENTS[self._kind]}.delta", delta=delta.text, **extra)

    def cite(self, annotation: Item) -> Event:
        self._annotations.append(annotation)
        place = len(self._annotations) - 1
        return self._part_event("response.output_text.annotation.added", annotation_index=place, annotation=annotation)

    def closing(self, content: Item) -> Iterator[Event]:
        text, said = str(content.get(self._text_field, "")), "".join(self._texts)
        if text != said and text.startswith(said):
            yield self.delta(ItemDelta(index=0, kind="text", text=text[len(said) :]))
        extra = {"logprobs": content.get("logprobs") or []} if self._kind == "output_text" else {}
        yield self._part_event(f"response.{_PART_EVENTS[self._kind]}.done", **{self._text_field: text}, **extra)
        yield self._part_event("response.content_part.done", part=content)

    def whole(self) -> Item:
        text = "".join(self._texts)
        if self._kind != "output_text":
            return {"type": self._kind, self._text_field: text}
        return {**output_text_part(text, self._annotations), "logprobs": self._logprobs}

    @property
    def _text_field(self) -> str:
        return "refusal" if self._kind == "refusal" else "text"

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._owner.about(kind, content_index=self._number, **fields)


# A response in progress: one turn, streamed as events, and stored when it has ended in any way.

FIRST_WORD_SECONDS = 10.0


class ResponseTurn:
    """`told` can be used once.

    Until `begun`, the client does not know the response: failures are raised, and nothing is stored. From then on
    a failure is an event, and closing `told` before its end cancels the response.
    """

    def __init__(self, gateway: Gateway, trace: RequestTrace, request: ResponseRequest, message: TurnRequest):
        self._gateway = gateway
        self._trace = trace
        self.wanted = request
        self._request = message
        self.until_end = ExitStack()  # left when it has ended, before that is sent
        self._input = assign_ids(request.input)
        self._minted = minted_ids(request.input, self._input)  # ids of items that they got here
        self.turn = gateway.turn(message, trace)
        self.events = ResponseEvents(_include_outputs(request) if request.background else request)
        self.begun = False
        self._error: errors.ClocheError | None = None  # that it ended with, after it had begun
        self.last_words: list[Event] = []  # those that could not be told, since `told` was closed

    @property
    def owner(self) -> str:
        return self._trace.owner

    async def told(self) -> AsyncGenerator[list[Event], None]:
        """The events, in batches; the first batch before the model is called, when all that it needs is there."""
        wanted, events = self.wanted, self.events
        about = {"response": events.id, "model": wanted.model, "stream": wanted.stream}
        with self._hold_turn(), self._trace.step("request", **about) as step:
            try:
                async with aclosing(self._stream_turn()) as told:
                    async for batch in told:
                        yield batch
            finally:
                step.fields["status"] = events.response["status"]
                if self._error is not None:
                    step.failed(self._error)
                elif wanted.background and events.response["status"] == "cancelled":
                    step.outcome = "cancelled"  # by a cancel request; otherwise the client disconnected

    def keep(self, *, instance: str | None = None) -> None:
        """Stores the response as it is now. `instance` is the process that goes on working on it."""
        response, stored = self.events.whole, self._gateway.gateway_store.responses
        keep = stored.change if self.wanted.background and instance is None else stored.put
        keep(
            StoredResponse(
                id=self.events.id,
                owner=self.owner,
                created_at=response["created_at"],
                status=response["status"],
                body=response,
                input=self._input,
                transcript=history.to_stored_transcript(self.turn.transcript, self._request.tools),
                previous=self.wanted.previous_response_id,
                container=self._last_container,
                instance=instance,
                include=list(self.wanted.include),
            ),
            self._all_minted_ids,
        )

    # -- inside

    @contextmanager
    def _hold_turn(self) -> Iterator[None]:
        """Counts as one of the owner's turns until the end. Raises TooManyTurns."""
        with self.until_end:
            if not self.wanted.background:  # those have a limit of their own
                self.until_end.enter_context(self._gateway.crowd.enter(self.owner))
            yield

    async def _stream_turn(self) -> AsyncGenerator[list[Event], None]:
        try:
            await self.turn.prepare()
            yield self.events.begin()
            async with aclosing(self.turn.stream_events()) as turn_events:
                async for turn_event in turn_events:
                    self._check_shutdown()
                    batch = self.events.feed(turn_event)
                    if self.events.ended:
                        self._finish_response()  # before the event is sent: its reader may go on at once
                    if batch:
                        yield batch
        except errors.ClocheError as error:
            yield self._fail_response(error)
        except (asyncio.CancelledError, GeneratorExit):
            self._on_disconnect()
            raise
        except Exception as error:  # noqa: BLE001 - the dialect's edge, of a stream
            yield self._fail_response(log_internal_error(error, self._trace.request))

    def _fail_response(self, error: errors.ClocheError) -> list[Event]:
        """Raises the error unless the client knows of the response."""
        error = _server_stopped() if self._gateway.errands.closing else error  # all else is because of that
        events = self.events.fail_with(error, self.turn.tokens)
        if not self.begun:
            raise error
        self._error = error
        self._finish_response()
        return events

    def _check_shutdown(self) -> None:
        """Raises ShuttingDown. A model that saw the sandbox's end would answer about it."""
        if self._gateway.errands.closing:
            raise _server_stopped()

    def _on_disconnect(self) -> None:
        if self.events.ended:
            return
        if self._gateway.errands.closing:
            self._error = _server_stopped()
            self.last_words = self.events.fail_with(self._error, self.turn.tokens)
        else:
            self.last_words = self.events.cancel(self.turn.tokens)
        if self.begun:
            self._finish_response()

    def _finish_response(self) -> None:
        if self.wanted.store:
            self.keep()
        if self.wanted.conversation and self.events.response["status"] in ("completed", "incomplete"):
            items: list[Item] = [*self._input, *self.events.output]
            self._gateway.gateway_store.conversations.add_turn(
                self.wanted.conversation, items, self._all_minted_ids, new_item_id, self._last_container
            )
        self.until_end.close()

    @property
    def _all_minted_ids(self) -> set[str]:
        return self._minted.union(item["id"] for item in self.events.output)

    @property
    def _last_container(self) -> str | None:
        """The container of the conversation's last code."""
        return history.last_container(self.events.output) or self._request.known_container


async def complete_response(answer: ResponseTurn) -> Event:
    """Returns the ended response. Raises its error: FailedAfterCode if a retry would run code again."""
    try:
        async with aclosing(answer.told()) as told:
            async for _ in told:
                pass
    except errors.ClocheError as error:
        raise FailedAfterCode(error) if answer.turn.ran_code else error from None
    return answer.events.response


class StreamedTurn(Protocol):
    """A turn that can be streamed: of Responses and of Chat."""

    begun: bool

    def told(self) -> AsyncGenerator[list[Event], None]: ...


async def open_stream(answer: StreamedTurn, seconds: float = FIRST_WORD_SECONDS) -> AsyncGenerator[list[Event], None]:
    """Returns the events once the model has begun, or after so many seconds. Raises errors until then."""
    told = answer.told()
    begin = await anext(told)
    coming = asyncio.ensure_future(anext(told, None))
    try:
        await asyncio.wait((coming,), timeout=seconds)
        if coming.done():
            coming.result()
        answer.begun = True
    except BaseException:
        await _close_stream(told, coming)
        raise
    return _opened_stream(begin, coming, told)


async def _opened_stream(
    begin: list[Event], coming: asyncio.Future[list[Event] | None], told: AsyncGenerator[list[Event], None]
) -> AsyncGenerator[list[Event], None]:
    try:
        yield begin
        batch = await coming
        while batch is not None:
            yield batch
            batch = await anext(told, None)
    finally:
        await _close_stream(told, coming)


async def _close_stream(told: AsyncGenerator[list[Event], None], coming: asyncio.Future[list[Event] | None]) -> None:
    if not coming.done():
        coming.cancel()
        await asyncio.wait((coming,))
    await told.aclose()


def _server_stopped() -> errors.ShuttingDown:
    return errors.ShuttingDown("The server was stopped.")


def _include_outputs(request: ResponseRequest) -> ResponseRequest:
    """Background events always have the outputs of code: a reader may request them later."""
    return msgspec.structs.replace(request, include=(*request.include, INCLUDE_OUTPUTS))
