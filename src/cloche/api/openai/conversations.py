"""`/v1/conversations`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.http import Edge, whole_body
from cloche.api.openai.context import BadParameter, Door, NotThere, OpenAiErrors, json_reply
from cloche.api.openai.pagination import include_of, list_body, page_asked
from cloche.api.openai.response_object import minted, seen_by, with_ids
from cloche.api.openai.responses_request import input_items, json_object, metadata_of, missing, typed
from cloche.api.openai.turn_request import resolved_items
from cloche.gateway.items import Item, new_item_id
from cloche.store.conversations import Conversation

MAX_ITEMS = 20  # of one request


class Busy:
    """The conversations that a turn works on now. Two at once would each miss what the other adds."""

    def __init__(self) -> None:
        self._claimed: set[tuple[str, str]] = set()

    @contextmanager
    def claim(self, owner: str, conversation: str) -> Iterator[None]:
        """Raises InvalidRequest (a conflict, which SDKs try again) if another turn has it."""
        if (owner, conversation) in self._claimed:
            raise BadParameter(
                "Another response is being made in this conversation. Wait for its end, then try again.",
                "conversation",
                "conversation_locked",
                status=409,
            )
        self._claimed.add((owner, conversation))
        try:
            yield
        finally:
            self._claimed.discard((owner, conversation))


class Conversations:
    def __init__(self, door: Door, dialect: OpenAiErrors):
        self._door = door
        self._stored = door.gateway.shelf.conversations
        one, items = "/v1/conversations/{id}", "/v1/conversations/{id}/items"
        self.routes = [
            Route("/v1/conversations", Edge(dialect, self.create), methods=["POST"]),
            Route(one, Edge(dialect, self.retrieve), methods=["GET"]),
            Route(one, Edge(dialect, self.update), methods=["POST"]),
            Route(one, Edge(dialect, self.delete), methods=["DELETE"]),
            Route(items, Edge(dialect, self.add_items), methods=["POST"]),
            Route(items, Edge(dialect, self.list_items), methods=["GET"]),
            Route(f"{items}/{{item}}", Edge(dialect, self.retrieve_item), methods=["GET"]),
            Route(f"{items}/{{item}}", Edge(dialect, self.delete_item), methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        owner = self._door.owner_of(request)
        body = decode(await whole_body(request))
        given, items = await self._resolved(owner, body.items or [])
        made = await self._stored.create(owner, body.metadata or {}, items, minted(given, items))
        return json_reply(encode(made))

    async def retrieve(self, request: Request) -> Response:
        return json_reply(encode(await self._find(request)))

    async def update(self, request: Request) -> Response:
        found = await self._find(request)
        metadata = decode(await whole_body(request)).metadata
        if metadata is None:
            raise missing("metadata")
        await self._stored.describe(found.id, metadata)
        return json_reply(encode(found, metadata))

    async def delete(self, request: Request) -> Response:
        found = await self._find(request)
        await self._stored.delete(found.id)
        return json_reply({"id": found.id, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, request: Request) -> Response:
        found = await self._find(request)
        sent = decode(await whole_body(request)).items
        if sent is None:
            raise missing("items")
        given, items = await self._resolved(found.owner, sent)
        added = await self._stored.add(found.id, items, minted(given, items), new_item_id)
        return json_reply(list_body(seen_by(added, include_of(request)), has_more=False))

    async def list_items(self, request: Request) -> Response:
        found = await self._find(request)
        asked = page_asked(request.query_params)
        try:
            page, has_more = await self._stored.page(found.id, asked.limit, asked.order, asked.after)
        except errors.NotFound as error:
            raise BadParameter(f"Invalid 'after': {error}.", "after") from None
        return json_reply(list_body(seen_by(page, include_of(request)), has_more=has_more))

    async def retrieve_item(self, request: Request) -> Response:
        _, item = await self._find_item(request)
        return json_reply(seen_by([item], include_of(request))[0])

    async def delete_item(self, request: Request) -> Response:
        found, item = await self._find_item(request)
        await self._stored.remove_item(found.id, item["id"])
        return json_reply(encode(found))

    async def _find(self, request: Request) -> Conversation:
        owner, id = self._door.owner_of(request), request.path_params["id"]
        found = await self._stored.get(owner, id)
        if found is None:
            raise NotThere(f"Conversation with id '{id[:100]}' not found.")
        return found

    async def _find_item(self, request: Request) -> tuple[Conversation, Item]:
        found, id = await self._find(request), request.path_params["item"]
        item = await self._stored.item(found.id, id)
        if item is None:
            raise NotThere(f"Item with id '{id[:100]}' not found in conversation '{found.id}'.")
        return found, item

    async def _resolved(self, owner: str, items: list[Item]) -> tuple[list[Item], list[Item]]:
        """The items with the outputs of code that are kept, and the same with ids. Raises NotFound."""
        given = await resolved_items(self._door.gateway, owner, items, "items")
        return given, with_ids(given)


class _Body(msgspec.Struct):
    items: list[Any] | None = None
    metadata: dict[str, str] | None = None


def decode(body: bytes) -> _Body:
    """Raises InvalidRequest in OpenAI's words."""
    fields: _Body = typed(json_object(body or b"{}"), _Body)
    if fields.items is not None:
        if len(fields.items) > MAX_ITEMS:
            message = f"Invalid 'items': array too long. Expected an array with maximum length {MAX_ITEMS}."
            raise BadParameter(message, "items", "array_above_max_length")
        fields.items = input_items(fields.items, "items")
    if fields.metadata is not None:
        fields.metadata = metadata_of(fields.metadata)
    return fields


def encode(conversation: Conversation, metadata: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata if metadata is None else metadata,
    }
