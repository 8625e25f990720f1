"""What a page's own script asks for."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from cloche import errors
from cloche.api.http import whole_body
from cloche.model import KIB, Struct

T = TypeVar("T", bound=Struct)

MAX_ASKED_BYTES = 128 * KIB


def is_partial(request: Request) -> bool:
    """Whether htmx asks, for a part of the page that it has."""
    return "hx-request" in request.headers and "hx-history-restore-request" not in request.headers


async def body_of(request: Request, kind: type[T]) -> T:
    """Raises InvalidRequest, TooLarge."""
    try:
        return msgspec.json.decode(await whole_body(request, MAX_ASKED_BYTES), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"the request makes no sense: {error}") from None
