"""What tools take and give: messages whose JSON schemas a model reads."""

from __future__ import annotations

import re
from typing import Any, TypeVar, dataclass_transform

import msgspec

from cloche import errors
from cloche.mcp.content import sayable

A = TypeVar("A", bound="Arguments")

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(.*)")
_NO_CHOICE = re.compile(r"Invalid enum value (.*) - at `\$\.(\w+)`")


@dataclass_transform(frozen_default=True, kw_only_default=True)  # for mypy
class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tool takes. Nothing else is taken: a misspelt argument must not be ignored."""


@dataclass_transform(frozen_default=True, kw_only_default=True)  # for mypy
class Given(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tool gives as structured content."""


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Its JSON schema, with the object itself at the top, as MCP wants it."""
    whole = msgspec.json.schema(kind)
    others = dict(whole["$defs"])
    top: dict[str, Any] = others.pop(kind.__name__)
    top.pop("title", None)
    top.pop("description", None)  # the tool's own says it
    found: dict[str, Any] = _typed({**top, "$defs": others} if others else top)
    return found


def _typed(shape: Any) -> Any:
    """The same with a type for choices, too: some models' APIs refuse tools of which any part has none."""
    if isinstance(shape, list):
        return [_typed(each) for each in shape]
    if not isinstance(shape, dict):
        return shape
    made = {name: _typed(each) for name, each in shape.items()}
    choices = made.get("enum")
    untyped = isinstance(choices, list) and "type" not in made and all(isinstance(each, str) for each in choices)
    return {"type": "string", **made} if untyped else made


def arguments_of(kind: type[A], given: dict[str, Any] | None) -> A:
    """Raises InvalidRequest, which says which argument is wrong and what there is."""
    try:
        return msgspec.convert(given or {}, kind)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(_complaint(kind, str(error))) from None


def _complaint(kind: type[Arguments], said: str) -> str:
    if match := _UNKNOWN.match(said):
        known = ", ".join(kind.__struct_fields__) or "none"
        return f"there is no argument {match[1][:100]!r}; there are: {known}"
    if match := _NO_CHOICE.match(said):
        shape = schema_of(kind)["properties"][match[2]]
        choices = [one for each in (shape, *shape.get("anyOf", ())) for one in each.get("enum", ())]
        return f"{match[2]} cannot be {match[1][:100]}; it is one of: {', '.join(choices)}"
    return f"wrong arguments: {said}"


def structured(given: Given) -> dict[str, Any]:
    """As plain JSON values."""
    found: dict[str, Any] = msgspec.to_builtins(given)
    try:
        msgspec.json.encode(found)
    except UnicodeEncodeError:
        return sayable_values(found)  # type: ignore[no-any-return]  # a dict, as it was
    return found


def sayable_values(value: Any) -> Any:
    """The same without halves of surrogates, which a program can have anywhere."""
    if isinstance(value, str):
        return sayable(value)
    if isinstance(value, dict):
        return {sayable_values(name): sayable_values(each) for name, each in value.items()}
    return [sayable_values(each) for each in value] if isinstance(value, list) else value
