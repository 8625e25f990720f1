"""Items: what a conversation with a model is made of, in the words of the Responses API.

    {"type": "message", "role": .., "content": [..]}        {"type": "reasoning", "summary": [..], ..}
    {"type": "function_call", "call_id", "name", "arguments"}      {"type": "function_call_output", "call_id", "output"}
    {"type": "code_interpreter_call", "code", "container_id", "outputs"}                   and whatever upstreams add

A *transcript* is the list of items as an upstream is shown them: there, code is a call of the function `python`.
"""

from __future__ import annotations

import secrets
from typing import Any

Item = dict[str, Any]

PYTHON = "python"
"""The function that a model sees instead of the code interpreter. Models are trained on this name."""

_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "call": "call_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "code_interpreter_call": "ci_",
    "custom_tool_call": "ctc_",
    "web_search_call": "ws_",
    "file_search_call": "fs_",
    "image_generation_call": "ig_",
    "mcp_call": "mcp_",
    "mcp_list_tools": "mcpl_",
    "computer_call": "cu_",
    "compaction": "cmp_",
    "local_shell_call": "lsh_",
    "shell_call": "sh_",
    "shell_call_output": "sho_",
    "apply_patch_call": "apc_",
}
_MARK = "c10c4e"  # at the beginning of every id of ours, by which they are told from an upstream's


def new_item_id(kind: str) -> str:
    """An id of ours for an item of that type."""
    return _PREFIXES.get(kind, "item_") + _MARK + secrets.token_hex(21)


def is_ours(id: object) -> bool:
    """Whether an item has its id from here."""
    return isinstance(id, str) and id.partition("_")[2].startswith(_MARK)


def message(text: str, annotations: list[Item] | None = None) -> Item:
    """What the assistant said, whole."""
    return {
        "id": new_item_id("message"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [output_text(text, annotations)],
    }


def output_text(text: str = "", annotations: list[Item] | None = None) -> Item:
    return {"type": "output_text", "text": text, "annotations": annotations or [], "logprobs": []}


def without_credentials(item: Item, depth: int = 3) -> Item:
    """A tool, or an item that brings tools along, without what lets a model's server into others: that is not kept."""
    if item.get("type") == "mcp":
        item = {name: value for name, value in item.items() if name not in ("authorization", "headers")}
    if item.get("type") == "code_interpreter":
        item = _without_secrets(item)
    tools = item.get("tools")
    if not isinstance(tools, list):
        return item
    known = [each for each in tools if isinstance(each, dict)] if depth else []
    return {**item, "tools": [without_credentials(each, depth - 1) for each in known]}


def _without_secrets(tool: Item) -> Item:
    container = tool.get("container")
    policy = container.get("network_policy") if isinstance(container, dict) else None
    if not isinstance(container, dict) or not isinstance(policy, dict) or "domain_secrets" not in policy:
        return tool
    harmless = {name: value for name, value in policy.items() if name != "domain_secrets"}
    return {**tool, "container": {**container, "network_policy": harmless}}


def text_of(item: Item) -> str:
    """The text of a message, whichever of its shapes it has; each part begins a line."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)
