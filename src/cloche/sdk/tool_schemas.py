"""The JSON schema of a function's arguments, read off its signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from cloche import errors

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def schema_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations that JSON has no word for allow anything. Raises InvalidRequest for arguments without a name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C do not say
        return {"type": "object"}
    hints, schema = _hints(function), Schema()
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            schema.takes_others()
        elif parameter.kind in _BY_NAME:
            schema.add(parameter, hints.get(parameter.name, Any))
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise errors.InvalidRequest(f"the tool {name!r} has an argument without a name: tools are called by names")
    return schema.made


class Schema:
    """Of an object, as it comes into being."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}

    def takes_others(self) -> None:
        self.made["additionalProperties"] = True

    def add(self, parameter: inspect.Parameter, hint: Any) -> None:
        described = _described(hint)
        self.made.setdefault("$defs", {}).update(described.pop("$defs", {}))
        if not self.made["$defs"]:
            del self.made["$defs"]
        self.made["properties"][parameter.name] = described
        if parameter.default is inspect.Parameter.empty:
            self.made["required"].append(parameter.name)
        elif isinstance(parameter.default, str | int | float):
            described.setdefault("default", parameter.default)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError, SyntaxError):  # names that are not there when the program runs
        return {}


def _described(hint: Any) -> dict[str, Any]:
    if hint is Any:
        return {}
    try:
        return dict(msgspec.json.schema(hint))
    except (TypeError, RuntimeError, NameError):
        return {}
