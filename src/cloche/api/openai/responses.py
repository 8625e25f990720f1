"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import ExitStack, aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cloche.api.http import Edge, Stream, request_id, unless_left, whole_body
from cloche.api.openai.background import Runs, seen_event
from cloche.api.openai.context import BadParameter, Door, NotThere, OpenAiErrors, json_reply
from cloche.api.openai.conversations import Busy
from cloche.api.openai.pagination import include_of, integer_of, is_true, list_body, page_asked, page_of
from cloche.api.openai.response_object import seen_by
from cloche.api.openai.responses_request import OUTPUTS, Wanted, decode
from cloche.api.openai.responses_stream import Answer, Event, answered, opened
from cloche.api.openai.turn_request import asked_of, resolved
from cloche.gateway.request import Asked
from cloche.store.responses import StoredResponse

QUIET_SECONDS = 10.0
KEEPALIVE = b": keep-alive\n\n"
BYTES_OF_TOKEN = 4  # about


class Responses:
    def __init__(self, door: Door, dialect: OpenAiErrors, busy: Busy):
        self._door = door
        self._busy = busy
        self._gateway = door.gateway
        self._stored = door.gateway.shelf.responses
        self._runs = Runs(door.gateway)
        one = "/v1/responses/{id}"
        self.routes = [
            Route("/v1/responses", Edge(dialect, self.create), methods=["POST"]),
            Route("/v1/responses/input_tokens", Edge(dialect, self.count), methods=["POST"]),
            Route("/v1/responses/compact", Edge(dialect, self.compact), methods=["POST"]),
            Route(one, Edge(dialect, self.retrieve), methods=["GET"]),
            Route(one, Edge(dialect, self.delete), methods=["DELETE"]),
            Route(f"{one}/cancel", Edge(dialect, self.cancel), methods=["POST"]),
            Route(f"{one}/input_items", Edge(dialect, self.input_items), methods=["GET"]),
        ]

    async def create(self, request: Request) -> ASGIApp:
        owner = self._door.owner_of(request)
        wanted = await resolved(self._gateway, owner, decode(await whole_body(request)))
        if wanted.store:
            await self._stored.check_allowed(owner)
        answer = await self._answer(owner, wanted, request_id(request))
        if wanted.background:
            return await self._in_background(answer, wanted)
        if wanted.stream:
            return sse(await unless_left(request, opened(answer)))
        return json_reply(await unless_left(request, answered(answer)))

    async def retrieve(self, request: Request) -> ASGIApp:
        owner, id = self._door.owner_of(request), request.path_params["id"]
        if is_true(request, "stream"):
            return await self._follow(request, owner, id)
        run = self._runs.find(owner, id)
        if run is not None:
            return json_reply(seen(run.answer.events.whole, (*run.answer.wanted.include, *include_of(request))))
        return json_reply(_told(await self._find(owner, id), request))

    async def delete(self, request: Request) -> Response:
        owner, id = self._door.owner_of(request), request.path_params["id"]
        run = self._runs.find(owner, id)
        if run is not None:
            await run.cancel()
        if not await self._stored.delete(owner, id):
            raise _not_found(id)
        return json_reply({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        owner, id = self._door.owner_of(request), request.path_params["id"]
        run = self._runs.find(owner, id)
        if run is not None:
            await run.cancel()
        found = await self._find(owner, id)
        if not found.body["background"]:
            raise BadParameter("Cannot cancel a synchronous response: only one with background=true.", None)
        return json_reply(_told(found, request))

    async def input_items(self, request: Request) -> Response:
        owner, id = self._door.owner_of(request), request.path_params["id"]
        asked = page_asked(request.query_params)
        given = await self._stored.input(owner, id)
        if given is None:
            raise _not_found(id)
        items = seen_by(given, include_of(request))
        ordered = items if asked.order == "asc" else items[::-1]
        page, has_more = page_of(ordered, asked, lambda item: str(item["id"]))
        return json_reply(list_body(page, has_more=has_more))

    async def count(self, request: Request) -> Response:
        """An estimate: only the upstream has the model's tokenizer."""
        owner = self._door.owner_of(request)
        wanted = await resolved(self._gateway, owner, decode(await whole_body(request)))
        asked = await asked_of(self._gateway, owner, wanted)
        return json_reply({"object": "response.input_tokens", "input_tokens": estimated_tokens(asked)})

    async def compact(self, request: Request) -> Response:
        self._door.owner_of(request)
        decode(await whole_body(request))
        raise NotThere(
            "This server does not compact conversations: send what matters of them as input.", reason="unsupported"
        )

    # -- inside

    async def _answer(self, owner: str, wanted: Wanted, request: str) -> Answer:
        with ExitStack() as until_end:
            if wanted.conversation is not None:
                until_end.enter_context(self._busy.claim(owner, wanted.conversation))
            asked = await asked_of(self._gateway, owner, wanted)
            trace = self._gateway.trace(request, owner)
            answer = Answer(self._gateway, trace, wanted, asked)
            answer.until_end = until_end.pop_all()
            return answer

    async def _in_background(self, answer: Answer, wanted: Wanted) -> ASGIApp:
        run, queued = await self._runs.start(answer)
        if not wanted.stream:
            return json_reply(queued)
        return sse(run.follow(after=-1), with_outputs=wanted.with_outputs)

    async def _follow(self, request: Request, owner: str, id: str) -> ASGIApp:
        after, include = integer_of(request, "starting_after", -1), include_of(request)
        run = self._runs.find(owner, id)
        if run is not None:
            return sse(run.follow(after), with_outputs=OUTPUTS in (*run.answer.wanted.include, *include))
        found = await self._find(owner, id)
        if not found.body["background"]:
            raise BadParameter("Only a response with background=true can be streamed again.", "stream")
        return sse(self._runs.stored_events(owner, id, after), with_outputs=OUTPUTS in (*found.include, *include))

    async def _find(self, owner: str, id: str) -> StoredResponse:
        found = await self._runs.stored(owner, id)
        if found is None:
            raise _not_found(id)
        return found


def sse(batches: AsyncGenerator[list[Event], None], *, with_outputs: bool = True) -> Stream:
    return Stream(
        _frames(batches, with_outputs=with_outputs),
        headers={"cache-control": "no-cache"},
        media_type="text/event-stream; charset=utf-8",
        at_once=True,
        quiet_seconds=QUIET_SECONDS,
        keepalive=KEEPALIVE,
    )


def frame(event: Event) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def seen(body: dict[str, Any], include: Iterable[str]) -> dict[str, Any]:
    """A response as a client sees it who asked for that."""
    return {**body, "output": seen_by(body["output"], include)}


def estimated_tokens(asked: Asked) -> int:
    text = msgspec.json.encode([asked.instructions, asked.history, asked.items, asked.tools])
    return len(text) // BYTES_OF_TOKEN + 1


async def _frames(batches: AsyncGenerator[list[Event], None], *, with_outputs: bool) -> AsyncGenerator[bytes, None]:
    async with aclosing(batches):
        async for batch in batches:
            yield b"".join(frame(seen_event(event, with_outputs=with_outputs)) for event in batch)


def _told(stored: StoredResponse, request: Request) -> dict[str, Any]:
    """With what its client asked for when it was made, or asks for now."""
    return seen(stored.body, (*stored.include, *include_of(request)))


def _not_found(id: str) -> NotThere:
    return NotThere(f"Response with id '{id[:100]}' not found.")
