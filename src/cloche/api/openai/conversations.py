"""`/v1/conversations`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.http import read_decoded
from cloche.api.openai.context import BadParameter, OpenAiContext, OpenAiNotFound
from cloche.api.openai.pagination import decode_page, included_fields, list_body
from cloche.api.openai.response_object import assign_ids, minted_ids, visible_items
from cloche.api.openai.responses_request import (
    check_metadata,
    convert_typed,
    input_items,
    json_object,
    missing_parameter,
)
from cloche.api.openai.turn_request import resolve_items
from cloche.gateway.items import Item, new_item_id
from cloche.store.conversations import StoredConversation

MAX_NEW_ITEMS = 20  # of one request


class ConversationLocks:
    """Locks of the conversations with a running turn. Two turns at once would each miss the other's items."""

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


class ConversationRoutes:
    def __init__(self, api: OpenAiContext):
        self._api = api
        self._stored = api.gateway.gateway_store.conversations
        one, items = "/v1/conversations/{id}", "/v1/conversations/{id}/items"
        self.routes = [
            api.route("POST", "/v1/conversations", self.create),
            api.route("GET", one, self.retrieve),
            api.route("POST", one, self.update),
            api.route("DELETE", one, self.delete),
            api.route("POST", items, self.add_items),
            api.route("GET", items, self.list_items),
            api.route("GET", f"{items}/{{item}}", self.retrieve_item),
            api.route("DELETE", f"{items}/{{item}}", self.delete_item),
        ]

    async def create(self, request: Request) -> Response:
        owner = self._api.owner(request)
        body = await read_decoded(request, decode_conversation)
        given, items = await self._resolve_items(owner, body.items or [])
        made = await self._stored.create(owner, body.metadata or {}, items, minted_ids(given, items))
        return json_reply(conversation_body(made))

    async def retrieve(self, request: Request) -> Response:
        return json_reply(conversation_body(await self._find_conversation(request)))

    async def update(self, request: Request) -> Response:
        found = await self._find_conversation(request)
        metadata = (await read_decoded(request, decode_conversation)).metadata
        if metadata is None:
            raise missing_parameter("metadata")
        await self._stored.describe(found.id, metadata)
        return json_reply(conversation_body(found, metadata))

    async def delete(self, request: Request) -> Response:
        found = await self._find_conversation(request)
        await self._stored.delete(found.id)
        return json_reply({"id": found.id, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, request: Request) -> Response:
        found = await self._find_conversation(request)
        sent = (await read_decoded(request, decode_conversation)).items
        if sent is None:
            raise missing_parameter("items")
        given, items = await self._resolve_items(found.owner, sent)
        added = await self._stored.add(found.id, items, minted_ids(given, items), new_item_id)
        return json_reply(list_body(visible_items(added, included_fields(request)), has_more=False))

    async def list_items(self, request: Request) -> Response:
        found = await self._find_conversation(request)
        message = decode_page(request.query_params)
        try:
            page, has_more = await self._stored.page(found.id, message.limit, message.order, message.after)
        except errors.NotFound as error:
            raise BadParameter(f"Invalid 'after': {error}.", "after") from None
        return json_reply(list_body(visible_items(page, included_fields(request)), has_more=has_more))

    async def retrieve_item(self, request: Request) -> Response:
        _, item = await self._find_item(request)
        return json_reply(visible_items([item], included_fields(request))[0])

    async def delete_item(self, request: Request) -> Response:
        found, item = await self._find_item(request)
        await self._stored.remove_item(found.id, item["id"])
        return json_reply(conversation_body(found))

    async def _find_conversation(self, request: Request) -> StoredConversation:
        owner, id = self._api.owner(request), request.path_params["id"]
        found = await self._stored.get(owner, id)
        if found is None:
            raise OpenAiNotFound(f"Conversation with id '{id[:100]}' not found.")
        return found

    async def _find_item(self, request: Request) -> tuple[StoredConversation, Item]:
        found, id = await self._find_conversation(request), request.path_params["item"]
        item = await self._stored.item(found.id, id)
        if item is None:
            raise OpenAiNotFound(f"Item with id '{id[:100]}' not found in conversation '{found.id}'.")
        return found, item

    async def _resolve_items(self, owner: str, items: list[Item]) -> tuple[list[Item], list[Item]]:
        """Returns the items with stored outputs of code, and the same with ids. Raises NotFound."""
        given = await resolve_items(self._api.gateway, owner, items, "items")
        return given, assign_ids(given)


class _ConversationBody(msgspec.Struct):
    items: list[Any] | None = None
    metadata: dict[str, str] | None = None


def decode_conversation(body: bytes) -> _ConversationBody:
    """Raises InvalidRequest in OpenAI's words."""
    fields: _ConversationBody = convert_typed(json_object(body or b"{}"), _ConversationBody)
    if fields.items is not None:
        if len(fields.items) > MAX_NEW_ITEMS:
            message = f"Invalid 'items': array too long. Expected an array with maximum length {MAX_NEW_ITEMS}."
            raise BadParameter(message, "items", "array_above_max_length")
        fields.items = input_items(fields.items, "items")
    if fields.metadata is not None:
        fields.metadata = check_metadata(fields.metadata)
    return fields


def conversation_body(conversation: StoredConversation, metadata: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata if metadata is None else metadata,
    }
