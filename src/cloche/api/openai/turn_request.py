"""From what a client wants to what is asked of a turn: with all that went before, out of the store."""

from __future__ import annotations

from collections import Counter

import msgspec

from cloche.api.openai.context import BadParameter, NotThere
from cloche.api.openai.responses_request import NEW_FILES, Wanted
from cloche.gateway import history
from cloche.gateway.gateway import Gateway
from cloche.gateway.items import Item
from cloche.gateway.request import Asked
from cloche.gateway.tools import python_name
from cloche.model import Struct
from cloche.store.responses import Chain


class Past(Struct):
    """What went before the input."""

    items: list[Item] = []  # as an upstream is shown them
    container: str | None = None


async def resolved(gateway: Gateway, owner: str, wanted: Wanted) -> Wanted:
    """The same, with the items that its input refers to. Raises NotFound for one that is not kept."""
    items = await resolved_items(gateway, owner, wanted.input, "input")
    return msgspec.structs.replace(wanted, input=items)


async def resolved_items(gateway: Gateway, owner: str, items: list[Item], param: str) -> list[Item]:
    """The items, with those that they refer to, and with the outputs of code where they are kept.

    Raises NotFound, and InvalidRequest for references that would make much out of little.
    """
    references = history.referenced(items)
    _check_references(references, param)
    stored = await gateway.shelf.responses.items(owner, references)
    outputs = history.without_output(items)[::-1]  # if all are too much, the newest
    stored = {**await gateway.shelf.responses.items(owner, outputs, strict=False), **stored}
    for id in references:
        if id not in stored:
            raise NotThere(
                f"Item with id '{id[:100]}' not found. Items are not persisted when `store` is set to false. Try "
                "again with `store` set to true, or send the item itself.",
                param,
            )
    return history.resolved(items, stored)


def _check_references(ids: list[str], param: str) -> None:
    twice = next((id for id, times in Counter(ids).items() if times > 1), None)
    if twice is not None:
        raise BadParameter(f"Item with id '{twice[:100]}' is referred to more than once: name it once.", param)


async def asked_of(gateway: Gateway, owner: str, wanted: Wanted) -> Asked:
    """`wanted` has been resolved. Raises NotFound, and InvalidRequest for what cannot be gone on from."""
    python, max_bytes = python_name(wanted.other_tools), gateway.config.gateway.model_output_bytes
    items = history.shown(wanted.input, python, max_bytes)
    past = await _past(gateway, owner, wanted, python, max_bytes)
    return Asked(
        model=wanted.model,
        items=items,
        history=history.sealed(past.items, items, python),
        instructions=wanted.instructions,
        code=wanted.code,
        known_container=history.container_of(wanted.input) or past.container,
        tools=wanted.other_tools,
        tool_choice=wanted.tool_choice,
        max_tool_calls=wanted.max_tool_calls,
        max_output_tokens=wanted.max_output_tokens,
        options=wanted.options,
        cite_new_files=NEW_FILES in wanted.include,
    )


async def _past(gateway: Gateway, owner: str, wanted: Wanted, python: str, max_bytes: int) -> Past:
    if wanted.conversation is not None:
        found = await gateway.shelf.conversations.get(owner, wanted.conversation)
        if found is None:
            raise NotThere(f"Conversation with id '{wanted.conversation[:100]}' not found.", "conversation")
        await gateway.shelf.conversations.check_room(found.id, wanted.input)
        items = await gateway.shelf.conversations.items(found.id)
        return Past(items=history.shown(items, python, max_bytes), container=found.container)
    if wanted.previous_response_id is not None:
        chain = await gateway.shelf.responses.chain(owner, wanted.previous_response_id)
        _check(chain)
        items = [item for transcript in chain.transcripts for item in history.recalled(transcript, python)]
        return Past(items=items, container=chain.container)
    return Past()


def _check(chain: Chain) -> None:
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
