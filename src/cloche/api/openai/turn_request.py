"""The turn of a Responses request: its input, and the history from the store."""

from __future__ import annotations

from collections import Counter

import msgspec

from cloche.api.openai.context import BadParameter, OpenAiNotFound
from cloche.api.openai.responses_request import INCLUDE_NEW_FILES, ResponseRequest
from cloche.gateway import history
from cloche.gateway.gateway import Gateway
from cloche.gateway.items import Item
from cloche.gateway.request import TurnRequest
from cloche.gateway.tools import choose_python_name
from cloche.model import Struct
from cloche.store.responses import ResponseChain


class TurnHistory(Struct):
    """The items and the container before the input."""

    items: list[Item] = []  # as an upstream is shown them
    container: str | None = None


async def resolve_request(gateway: Gateway, owner: str, request: ResponseRequest) -> ResponseRequest:
    """Returns the request with the items that its input refers to. Raises NotFound for one that is not stored."""
    items = await resolve_items(gateway, owner, request.input, "input")
    return msgspec.structs.replace(request, input=items)


async def resolve_items(gateway: Gateway, owner: str, items: list[Item], param: str) -> list[Item]:
    """The items, with the items that they refer to, and with stored outputs of code.

    Raises NotFound, and InvalidRequest for repeated references, which would multiply the input.
    """
    references = history.referenced_ids(items)
    _check_references(references, param)
    stored = await gateway.gateway_store.responses.items(owner, references)
    outputs = history.calls_without_output(items)[::-1]  # if all are too much, the newest
    stored = {**await gateway.gateway_store.responses.items(owner, outputs, strict=False), **stored}
    for id in references:
        if id not in stored:
            raise OpenAiNotFound(
                f"Item with id '{id[:100]}' not found. Items are not persisted when `store` is set to false. Try "
                "again with `store` set to true, or send the item itself.",
                param,
            )
    return history.resolve_references(items, stored)


def _check_references(ids: list[str], param: str) -> None:
    twice = next((id for id, times in Counter(ids).items() if times > 1), None)
    if twice is not None:
        raise BadParameter(f"Item with id '{twice[:100]}' is referred to more than once: name it once.", param)


async def response_turn_request(gateway: Gateway, owner: str, request: ResponseRequest) -> TurnRequest:
    """The turn of a resolved request. Raises NotFound, and InvalidRequest if its history cannot continue."""
    python, max_bytes = choose_python_name(request.other_tools), gateway.config.gateway.model_output_bytes
    items = history.to_upstream_items(request.input, python, max_bytes)
    past = await _load_history(gateway, owner, request, python, max_bytes)
    return TurnRequest(
        model=request.model,
        items=items,
        history=history.complete_outputs(past.items, items, python),
        instructions=request.instructions,
        code=request.code,
        known_container=history.last_container(request.input) or past.container,
        tools=request.other_tools,
        tool_choice=request.tool_choice,
        max_tool_calls=request.max_tool_calls,
        max_output_tokens=request.max_output_tokens,
        options=request.options,
        cite_new_files=INCLUDE_NEW_FILES in request.include,
    )


async def _load_history(
    gateway: Gateway, owner: str, request: ResponseRequest, python: str, max_bytes: int
) -> TurnHistory:
    if request.conversation is not None:
        found = await gateway.gateway_store.conversations.get(owner, request.conversation)
        if found is None:
            raise OpenAiNotFound(f"Conversation with id '{request.conversation[:100]}' not found.", "conversation")
        await gateway.gateway_store.conversations.check_room(found.id, request.input)
        items = await gateway.gateway_store.conversations.items(found.id)
        return TurnHistory(items=history.to_upstream_items(items, python, max_bytes), container=found.container)
    if request.previous_response_id is not None:
        chain = await gateway.gateway_store.responses.load_chain(owner, request.previous_response_id)
        _check_chain(chain)
        items = [
            item for transcript in chain.transcripts for item in history.from_stored_transcript(transcript, python)
        ]
        return TurnHistory(items=items, container=chain.container)
    return TurnHistory()


def _check_chain(chain: ResponseChain) -> None:
    param = "previous_response_id"
    if chain.missing is not None:
        message = f"Previous response with id '{chain.missing[:100]}' not found."
        raise BadParameter(message, param, "previous_response_not_found")
    if chain.running is not None:
        raise BadParameter(
            f"Previous response with id '{chain.running}' has not ended: wait for it, or cancel it.", param
        )
    if chain.too_long:
        raise BadParameter(
            "This chain of responses is too long: begin a new one, with what matters of it in the input.", param
        )
