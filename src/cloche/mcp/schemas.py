"""Arguments and structured outputs of tools: messages with JSON schemas that a model reads."""

from __future__ import annotations

import re
from typing import Any, TypeVar, dataclass_transform

import msgspec

from cloche import errors
from cloche.mcp.content import escape_surrogates

A = TypeVar("A", bound="ToolArguments")

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(.*)")
_INVALID_CHOICE = re.compile(r"Invalid enum value (.*) - at `\$\.(\w+)`")


@dataclass_transform(frozen_default=True, kw_only_default=True)  # for mypy
class ToolArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a tool. Unknown ones are refused: a misspelt argument must not be ignored."""


@dataclass_transform(frozen_default=True, kw_only_default=True)  # for mypy
class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The structured content that a tool returns."""


def tool_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of the struct, with the object itself at the top, as MCP requires."""
    whole = msgspec.json.schema(kind)
    others = dict(whole["$defs"])
    top: dict[str, Any] = others.pop(kind.__name__)
    top.pop("title", None)
    top.pop("description", None)  # the tool's own says it
    found: dict[str, Any] = _add_choice_types({**top, "$defs": others} if others else top)
    return found


def _add_choice_types(shape: Any) -> Any:
    """Adds a type to enumerations: some models' APIs refuse tools in which any part has none."""
    if isinstance(shape, list):
        return [_add_choice_types(each) for each in shape]
    if not isinstance(shape, dict):
        return shape
    made = {name: _add_choice_types(each) for name, each in shape.items()}
    choices = made.get("enum")
    untyped = isinstance(choices, list) and "type" not in made and all(isinstance(each, str) for each in choices)
    return {"type": "string", **made} if untyped else made


def decode_arguments(kind: type[A], given: dict[str, Any] | None) -> A:
    """Decodes the arguments. Raises InvalidRequest, which names the wrong argument and the valid ones."""
    try:
        return msgspec.convert(given or {}, kind)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(_describe_problem(kind, str(error))) from None


def _describe_problem(kind: type[ToolArguments], said: str) -> str:
    if match := _UNKNOWN_FIELD.match(said):
        known = ", ".join(kind.__struct_fields__) or "none"
        return f"there is no argument {match[1][:100]!r}; there are: {known}"
    if match := _INVALID_CHOICE.match(said):
        shape = tool_schema(kind)["properties"][match[2]]
        choices = [one for each in (shape, *shape.get("anyOf", ())) for one in each.get("enum", ())]
        return f"{match[2]} cannot be {match[1][:100]}; it is one of: {', '.join(choices)}"
    return f"wrong arguments: {said}"


def to_json_values(given: StructuredOutput) -> dict[str, Any]:
    """The output as plain JSON values."""
    found: dict[str, Any] = msgspec.to_builtins(given)
    try:
        msgspec.json.encode(found)
    except UnicodeEncodeError:
        return escape_values(found)  # type: ignore[no-any-return]  # a dict, as it was
    return found


def escape_values(value: Any) -> Any:
    """The same without lone surrogates, which a program can have anywhere."""
    if isinstance(value, str):
        return escape_surrogates(value)
    if isinstance(value, dict):
        return {escape_values(name): escape_values(each) for name, each in value.items()}
    return [escape_values(each) for each in value] if isinstance(value, list) else value
