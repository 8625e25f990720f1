"""What stands in the query of a URL."""

from __future__ import annotations

from starlette.requests import Request

from cloche.api.openai.dialect import BadParameter


def include_of(request: Request) -> list[str]:
    """`include[]=..` as the SDKs write it, and `include=..`."""
    query = request.query_params
    return [*query.getlist("include[]"), *query.getlist("include")]


def is_true(request: Request, name: str) -> bool:
    """Raises InvalidRequest."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise BadParameter(f"Invalid type for '{name}': expected a boolean.", name, "invalid_type")
    return value == "true"


def integer_of(request: Request, name: str, usual: int) -> int:
    """Raises InvalidRequest."""
    value = request.query_params.get(name)
    if value is None:
        return usual
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise BadParameter(f"Invalid type for '{name}': expected an integer, 0 or more.", name, "invalid_type")
    return int(value)
