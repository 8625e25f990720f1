"""Tools as functions of Python: what of them a program needs to know. See `cloche.guest.tools`."""

from __future__ import annotations

from typing import Any

from cloche.model import Tool

MAX_DESCRIPTION = 2000


def described(identifier: str, tool: Tool) -> dict[str, Any]:
    """What a program needs to know of a tool: of the schema only what a signature can say."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    shape: dict[str, Any] = {"required": list(required) if isinstance(required, list | tuple) else []}
    if isinstance(properties, dict):
        shape["properties"] = {str(name): _type_of(schema) for name, schema in properties.items()}
    if "additionalProperties" in tool.parameters:
        shape["additionalProperties"] = tool.parameters["additionalProperties"] is not False
    description = tool.description[:MAX_DESCRIPTION]
    return {"identifier": identifier, "name": tool.name, "description": description, "parameters": shape}


def _type_of(schema: object) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    several = schema.get("anyOf")
    kinds = [each.get("type") for each in several if isinstance(each, dict)] if isinstance(several, list) else None
    kind = schema.get("type", kinds)
    return {"type": kind} if isinstance(kind, str | list) else {}
