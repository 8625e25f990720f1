"""The Response object, as OpenAI's clients expect it: every key is always there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from cloche import errors
from cloche.api.openai.context import status_and_body
from cloche.api.openai.responses_request import INCLUDE_OUTPUTS, ResponseRequest
from cloche.gateway.events import TokenUsage
from cloche.gateway.items import Item, new_item_id, output_text_part, without_credentials

_ERROR_CODES = frozenset({"server_error", "rate_limit_exceeded", "invalid_prompt"})


def new_response_id() -> str:
    return "resp_" + secrets.token_hex(24)


def response_object(
    id: str,
    request: ResponseRequest,
    created_at: int,
    *,
    status: str,
    output: list[Item],
    tokens: TokenUsage | None = None,
    reason: str | None = None,
    error: dict[str, str] | None = None,
    service_tier: str | None = None,
) -> dict[str, Any]:
    """The response in its current state."""
    options = request.options
    done = status in ("completed", "incomplete", "failed", "cancelled")
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "background": request.background,
        "completed_at": int(time.time()) if done else None,
        "conversation": {"id": request.conversation} if request.conversation else None,
        "error": error,
        "incomplete_details": {"reason": reason} if reason else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "model": request.model,
        "output": output,
        "parallel_tool_calls": options.get("parallel_tool_calls", True),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": options.get("prompt_cache_key"),
        "prompt_cache_retention": options.get("prompt_cache_retention"),
        "reasoning": {"effort": None, "summary": None, **options.get("reasoning", {})},
        "safety_identifier": options.get("safety_identifier"),
        "service_tier": service_tier or options.get("service_tier") or "default",
        "store": request.store,
        "temperature": options.get("temperature", 1.0),
        "text": {"format": {"type": "text"}, "verbosity": "medium", **options.get("text", {})},
        "tool_choice": request.tool_choice,
        "tools": [_echo_tool(tool) for tool in request.tools],
        "top_logprobs": options.get("top_logprobs", 0),
        "top_p": options.get("top_p", 1.0),
        "truncation": options.get("truncation", "disabled"),
        "usage": response_usage(tokens) if tokens is not None else None,
        "user": options.get("user"),
    }


def response_usage(tokens: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": tokens.input,
        "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": tokens.cache_written},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        "total_tokens": tokens.total,
    }


def response_error(error: errors.ClocheError) -> dict[str, str]:
    """The `error` of a failed response, which has few codes."""
    status, body = status_and_body(error)
    code = body["code"] if body["code"] in _ERROR_CODES else "rate_limit_exceeded" if status == 429 else "server_error"
    return {"code": str(code), "message": str(body["message"])}


def without_outputs(item: Item) -> Item:
    """An item as clients see it that did not request the outputs of code."""
    return {**item, "outputs": None} if item.get("type") == "code_interpreter_call" else item


def _echo_tool(tool: Item) -> Item:
    """A function in an answer always has these fields."""
    if tool.get("type") == "function":
        return {"parameters": None, "strict": None, **tool}
    return without_credentials(tool)


# Clients' items in the shape in which they are listed and stored: with an id, and content in parts.

MAX_ID_CHARACTERS = 200  # characters


def assign_ids(items: Iterable[Item]) -> list[Item]:
    """The items, each with a unique id."""
    seen: set[str] = set()
    listed = []
    for item in items:
        id = item.get("id")
        if not isinstance(id, str) or not 0 < len(id) <= MAX_ID_CHARACTERS or id in seen:
            id = new_item_id(str(item.get("type")))
        seen.add(id)
        listed.append(_listed_item({**without_credentials(item), "id": id}))
    return listed


def minted_ids(given: Iterable[Item], listed: Iterable[Item]) -> set[str]:
    """The ids in `listed` that the server chose: those not in `given`."""
    return {item["id"] for item in listed} - {item["id"] for item in given if isinstance(item.get("id"), str)}


def visible_items(items: Iterable[Item], include: Iterable[str]) -> list[Item]:
    """The items as a client sees them that sent this `include`."""
    return list(items) if INCLUDE_OUTPUTS in include else [without_outputs(item) for item in items]


def _listed_item(item: Item) -> Item:
    match item.get("type"):
        case "message":
            content = item.get("content")
            parts = [_text_part(item, content)] if isinstance(content, str) else content
            return {**item, "status": item.get("status") or "completed", "content": parts or []}
        case "function_call" | "function_call_output":
            return {**item, "status": item.get("status") or "completed"}
        case "code_interpreter_call":
            return {"status": "completed", "code": None, "outputs": None, **item}
    return item


def _text_part(item: Item, text: str) -> Item:
    return output_text_part(text) if item.get("role") == "assistant" else {"type": "input_text", "text": text}
