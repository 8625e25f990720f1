"""Paginated lists: `limit`, `order`, and `after`, the id of the last item of the page before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from cloche.api.openai.context import BadParameter
from cloche.model import Struct

T = TypeVar("T")
ListOrder = Literal["asc", "desc"]


class PageRequest(Struct):
    limit: int
    order: ListOrder
    after: str | None = None


def decode_page(
    query: Mapping[str, str], *, usual: int = 20, most: int = 100, order: ListOrder = "desc"
) -> PageRequest:
    """Raises InvalidRequest in OpenAI's words."""
    return PageRequest(
        limit=_decode_limit(query.get("limit"), usual, most),
        order=_decode_order(query.get("order"), order),
        after=query.get("after") or None,
    )


def slice_page(items: Sequence[T], page: PageRequest, id_of: Callable[[T], str]) -> tuple[list[T], bool]:
    """Returns the items after `after`, and whether there are more. `items` are all, in the requested order.

    Raises InvalidRequest if none of them has the id `after`.
    """
    start = 0
    if page.after is not None:
        start = next((at + 1 for at, item in enumerate(items) if id_of(item) == page.after), 0)
        if not start:
            raise BadParameter(f"Invalid 'after': there is no '{page.after[:100]}' in this list.", "after")
    return list(items[start : start + page.limit]), len(items) > start + page.limit


def list_body(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _decode_limit(value: str | None, usual: int, most: int) -> int:
    if value is None or value == "":
        return usual
    try:
        limit = int(value[:20])
    except ValueError:
        raise BadParameter("Invalid type for 'limit': expected an integer.", "limit", "invalid_type") from None
    return check_integer("limit", limit, 1, most)


def check_integer(param: str, value: int, least: int, most: int) -> int:
    """Raises InvalidRequest in OpenAI's words unless it is between the two."""
    if value < least:
        raise BadParameter(
            f"Invalid '{param}': integer below minimum value. Expected a value >= {least}, but got {value} instead.",
            param,
            "integer_below_min_value",
        )
    if value > most:
        raise BadParameter(
            f"Invalid '{param}': integer above maximum value. Expected a value <= {most}, but got {value} instead.",
            param,
            "integer_above_max_value",
        )
    return value


def _decode_order(value: str | None, usual: ListOrder) -> ListOrder:
    match value:
        case None | "":
            return usual
        case "asc" | "desc":
            return value
    raise BadParameter(f"Invalid value: '{value[:100]}'. Supported values are: 'asc' and 'desc'.", "order")


# Parameters in the query of a URL.


def included_fields(request: Request) -> list[str]:
    """`include[]=..` as the SDKs write it, and `include=..`."""
    query = request.query_params
    return [*query.getlist("include[]"), *query.getlist("include")]


def boolean_parameter(request: Request, name: str) -> bool:
    """Raises InvalidRequest."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise BadParameter(f"Invalid type for '{name}': expected a boolean.", name, "invalid_type")
    return value == "true"


def integer_parameter(request: Request, name: str, usual: int) -> int:
    """Raises InvalidRequest."""
    value = request.query_params.get(name)
    if value is None:
        return usual
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise BadParameter(f"Invalid type for '{name}': expected an integer, 0 or more.", name, "invalid_type")
    return int(value)
