"""What a page's own script asks for."""

from __future__ import annotations

import gzip
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import whole_body
from cloche.model import KIB, Struct

T = TypeVar("T", bound=Struct)

MAX_ASKED_BYTES = 128 * KIB
PACKING = 5  # of 9: most of the gain, in a millisecond for 200 KB


def is_partial(request: Request) -> bool:
    """Whether htmx asks, for a part of the page that it has."""
    return "hx-request" in request.headers and "hx-history-restore-request" not in request.headers


def packed(request: Request, response: Response) -> Response:
    """The part of a page that htmx asks for, compressed: a list that is sent every few seconds has much alike in it.

    Not for whole pages, which have a session's token in them: what is repeated beside it would show in the length.
    """
    if is_partial(request) and "gzip" in request.headers.get("accept-encoding", ""):
        response.body = gzip.compress(bytes(response.body), PACKING, mtime=0)
        response.headers["content-length"] = str(len(response.body))
        response.headers["content-encoding"] = "gzip"
    return response


async def body_of(request: Request, kind: type[T]) -> T:
    """Raises InvalidRequest, TooLarge."""
    try:
        return msgspec.json.decode(await whole_body(request, MAX_ASKED_BYTES), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"the request makes no sense: {error}") from None
