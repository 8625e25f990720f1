"""Types of what requests hold, as far as we look at it: what is wrong there is said before anything is done."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from cloche.api.openai.dialect import BadParameter
from cloche.gateway.items import Item

MAX_ITEMS = 10_000  # of an input, or messages of a chat
MAX_PARTS = 50_000  # of all items together: contents, outputs, calls
MAX_TOOLS = 128
MAX_INCLUDE = 100
MAX_MODEL = 256  # characters

Parts = list[dict[str, Any]]


class Options(msgspec.Struct):
    """What is for the upstream, and echoed in the response."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    safety_identifier: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    user: str | None = None
    prompt: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None


class _Named(msgspec.Struct):
    type: str
    id: str | None = None
    status: str | None = None


class _Message(_Named, kw_only=True):
    role: str
    content: str | Parts | None = None


class _Call(_Named, kw_only=True):
    call_id: str
    name: str
    arguments: str = ""
    input: str = ""


class _Output(_Named, kw_only=True):
    call_id: str
    output: str | Parts


class _CodeCall(_Named, kw_only=True):
    code: str | None = None
    container_id: str | None = None
    outputs: Parts | None = None


class _Reasoning(_Named, kw_only=True):
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: str | None = None


class _Reference(_Named, kw_only=True):
    id: str


_ITEMS: dict[str, type[_Named]] = {
    "message": _Message,
    "function_call": _Call,
    "custom_tool_call": _Call,
    "function_call_output": _Output,
    "custom_tool_call_output": _Output,
    "code_interpreter_call": _CodeCall,
    "reasoning": _Reasoning,
    "item_reference": _Reference,
}


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    server_label: str | None = None
    description: str | None = None


class _NamedTool(_Tool, kw_only=True):
    name: str


_NAMED_TOOLS = ("function", "custom")


def check_model(name: str | None) -> str:
    """The name. Raises InvalidRequest."""
    if not name:
        raise missing("model")
    if len(name) > MAX_MODEL:
        raise BadParameter(
            f"Invalid 'model': string too long. Expected a string with maximum length {MAX_MODEL}, but got a string "
            f"with length {len(name)} instead.",
            "model",
            "string_above_max_length",
        )
    if not name.isprintable():
        raise BadParameter("Invalid 'model': it has characters that no name has.", "model")
    return name


def check_length(value: Any, most: int, param: str) -> None:
    """Raises InvalidRequest for a list that is too long. What is none is somebody else's to refuse."""
    if isinstance(value, list) and len(value) > most:
        raise BadParameter(
            f"Invalid '{param}': array too long. Expected an array with maximum length {most}, but got an array with "
            f"length {len(value)} instead.",
            param,
            "array_above_max_length",
        )


def check_lengths(items: Any, param: str) -> None:
    """Raises InvalidRequest if there are too many items, or too many parts of them all: before they are looked at."""
    check_length(items, MAX_ITEMS, param)
    parts = 0
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            parts += sum(len(value) for value in item.values() if isinstance(value, list))
    if parts > MAX_PARTS:
        raise BadParameter(
            f"Invalid '{param}': too many parts. Expected {MAX_PARTS} at most in all of them, but got {parts} instead.",
            param,
            "array_above_max_length",
        )


def check_item(item: Item, where: str) -> None:
    """Raises InvalidRequest that names the field. Of types that we do not know, only the type is looked at."""
    typed(item, _Named, where)
    typed(item, _ITEMS.get(item["type"], _Named), where)


def check_tool(tool: Item, where: str) -> None:
    """Raises InvalidRequest that names the field."""
    typed(tool, _NamedTool if tool.get("type") in _NAMED_TOOLS else _Tool, where)


def typed(raw: dict[str, Any], kind: type[Any], where: str = "") -> Any:
    """Raises InvalidRequest that names the field. `where` is the place of the object in the request."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        text, _, inside = str(error).partition(" - at `$")
        param = (where + inside.rstrip("`")).lstrip(".") or None
        if "missing required field" in text:
            raise missing(f"{where}.{text.split('`')[1]}".lstrip(".")) from None
        raise BadParameter(f"Invalid type for '{param}': {text}.", param, "invalid_type") from None


def missing(param: str) -> BadParameter:
    return BadParameter(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
