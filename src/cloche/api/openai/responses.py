"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import ExitStack, aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from cloche.api.dialect import encode_sse, json_reply
from cloche.api.http import StreamResponse, read_decoded, request_id, run_unless_disconnected
from cloche.api.openai.background import BackgroundRuns, visible_event
from cloche.api.openai.context import BadParameter, OpenAiContext, OpenAiNotFound, turn_stream
from cloche.api.openai.conversations import ConversationLocks
from cloche.api.openai.pagination import (
    boolean_parameter,
    decode_page,
    included_fields,
    integer_parameter,
    list_body,
    slice_page,
)
from cloche.api.openai.response_object import visible_items
from cloche.api.openai.responses_request import INCLUDE_OUTPUTS, ResponseRequest, decode_response
from cloche.api.openai.responses_stream import Event, ResponseTurn, complete_response, open_stream
from cloche.api.openai.turn_request import resolve_request, response_turn_request
from cloche.gateway.request import TurnRequest
from cloche.store.responses import StoredResponse

BYTES_OF_TOKEN = 4  # about


class ResponseRoutes:
    def __init__(self, api: OpenAiContext, busy: ConversationLocks):
        self._api = api
        self._busy = busy
        self._gateway = api.gateway
        self._stored = api.gateway.gateway_store.responses
        self._runs = BackgroundRuns(api.gateway)
        one = "/v1/responses/{id}"
        self.routes = [
            api.route("POST", "/v1/responses", self.create),
            api.route("POST", "/v1/responses/input_tokens", self.count),
            api.route("POST", "/v1/responses/compact", self.compact_conversation),
            api.route("GET", one, self.retrieve),
            api.route("DELETE", one, self.delete),
            api.route("POST", f"{one}/cancel", self.cancel),
            api.route("GET", f"{one}/input_items", self.input_items),
        ]

    async def create(self, request: Request) -> ASGIApp:
        owner = self._api.owner(request)
        message = await resolve_request(self._gateway, owner, await read_decoded(request, decode_response))
        if message.store:
            await self._stored.check_allowed(owner)
        answer = await self._start_turn(owner, message, request_id(request))
        if message.background:
            return await self._in_background(answer, message)
        if message.stream:
            return stream_events(await run_unless_disconnected(request, open_stream(answer)))
        return json_reply(await run_unless_disconnected(request, complete_response(answer)))

    async def retrieve(self, request: Request) -> ASGIApp:
        owner, id = self._api.owner(request), request.path_params["id"]
        if boolean_parameter(request, "stream"):
            return await self._follow_stream(request, owner, id)
        run = self._runs.find(owner, id)
        if run is not None:
            return json_reply(
                visible_response(run.answer.events.whole, (*run.answer.wanted.include, *included_fields(request)))
            )
        return json_reply(_visible_stored(await self._find_response(owner, id), request))

    async def delete(self, request: Request) -> Response:
        owner, id = self._api.owner(request), request.path_params["id"]
        run = self._runs.find(owner, id)
        if run is not None:
            await run.cancel()
        if not await self._stored.delete(owner, id):
            raise _response_not_found(id)
        return json_reply({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        owner, id = self._api.owner(request), request.path_params["id"]
        run = self._runs.find(owner, id)
        if run is not None:
            await run.cancel()
        found = await self._find_response(owner, id)
        if not found.body["background"]:
            raise BadParameter("Cannot cancel a synchronous response: only one with background=true.", None)
        return json_reply(_visible_stored(found, request))

    async def input_items(self, request: Request) -> Response:
        owner, id = self._api.owner(request), request.path_params["id"]
        message = decode_page(request.query_params)
        given = await self._stored.input(owner, id)
        if given is None:
            raise _response_not_found(id)
        items = visible_items(given, included_fields(request))
        ordered = items if message.order == "asc" else items[::-1]
        page, has_more = slice_page(ordered, message, lambda item: str(item["id"]))
        return json_reply(list_body(page, has_more=has_more))

    async def count(self, request: Request) -> Response:
        """An estimate: only the upstream has the model's tokenizer."""
        owner = self._api.owner(request)
        message = await resolve_request(self._gateway, owner, await read_decoded(request, decode_response))
        turn_request = await response_turn_request(self._gateway, owner, message)
        return json_reply({"object": "response.input_tokens", "input_tokens": estimated_tokens(turn_request)})

    async def compact_conversation(self, request: Request) -> Response:
        self._api.owner(request)
        await read_decoded(request, decode_response)
        raise OpenAiNotFound(
            "This server does not compact conversations: send what matters of them as input.", reason="unsupported"
        )

    # -- inside

    async def _start_turn(self, owner: str, message: ResponseRequest, request: str) -> ResponseTurn:
        with ExitStack() as until_end:
            if message.conversation is not None:
                until_end.enter_context(self._busy.claim(owner, message.conversation))
            turn_request = await response_turn_request(self._gateway, owner, message)
            trace = self._gateway.trace(request, owner)
            answer = ResponseTurn(self._gateway, trace, message, turn_request)
            answer.until_end = until_end.pop_all()
            return answer

    async def _in_background(self, answer: ResponseTurn, request: ResponseRequest) -> ASGIApp:
        run, queued = await self._runs.start(answer)
        if not request.stream:
            return json_reply(queued)
        return stream_events(run.follow(after=-1), with_outputs=request.with_outputs)

    async def _follow_stream(self, request: Request, owner: str, id: str) -> ASGIApp:
        after, include = integer_parameter(request, "starting_after", -1), included_fields(request)
        run = self._runs.find(owner, id)
        if run is not None:
            return stream_events(
                run.follow(after), with_outputs=INCLUDE_OUTPUTS in (*run.answer.wanted.include, *include)
            )
        found = await self._find_response(owner, id)
        if not found.body["background"]:
            raise BadParameter("Only a response with background=true can be streamed again.", "stream")
        return stream_events(
            self._runs.stored_events(owner, id, after), with_outputs=INCLUDE_OUTPUTS in (*found.include, *include)
        )

    async def _find_response(self, owner: str, id: str) -> StoredResponse:
        found = await self._runs.stored(owner, id)
        if found is None:
            raise _response_not_found(id)
        return found


def stream_events(batches: AsyncGenerator[list[Event], None], *, with_outputs: bool = True) -> StreamResponse:
    return turn_stream(_encode_batches(batches, with_outputs=with_outputs))


def encode_event(event: Event) -> bytes:
    return encode_sse(msgspec.json.encode(event), str(event["type"]).encode())


def visible_response(body: dict[str, Any], include: Iterable[str]) -> dict[str, Any]:
    """A response as a client sees it that sent this `include`."""
    return {**body, "output": visible_items(body["output"], include)}


def estimated_tokens(request: TurnRequest) -> int:
    text = msgspec.json.encode([request.instructions, request.history, request.items, request.tools])
    return len(text) // BYTES_OF_TOKEN + 1


async def _encode_batches(
    batches: AsyncGenerator[list[Event], None], *, with_outputs: bool
) -> AsyncGenerator[bytes, None]:
    async with aclosing(batches):
        async for batch in batches:
            yield b"".join(encode_event(visible_event(event, with_outputs=with_outputs)) for event in batch)


def _visible_stored(stored: StoredResponse, request: Request) -> dict[str, Any]:
    """The stored response, with the `include` of its creation and of this request."""
    return visible_response(stored.body, (*stored.include, *included_fields(request)))


def _response_not_found(id: str) -> OpenAiNotFound:
    return OpenAiNotFound(f"Response with id '{id[:100]}' not found.")
