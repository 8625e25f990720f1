"""Whether a request was made by the console's own pages, and not by another site that a visitor has open.

A cookie does not say that: a browser sends it along whoever asks, and to every port of a host.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from cloche import errors

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
HEADER = "x-cloche-csrf"


def check_token(headers: Mapping[str, str], expected: str, field: str = "") -> None:
    """Raises Forbidden unless an unsafe request carries the session's token: in its header, or in a form's field."""
    sent = headers.get(HEADER) or field
    if not secrets.compare_digest(sent.encode(), expected.encode()):
        raise errors.Forbidden("this request did not come from a page of this session: load the page again")


def check_origin(headers: Mapping[str, str], public_url: str) -> None:
    """Raises Forbidden unless a browser says that a page of ours asks; also where it says nothing."""
    origin = headers.get("origin")
    if origin is None and headers.get("sec-fetch-site") == "same-origin":
        return
    if origin is None or not _is_own(origin, headers.get("host", ""), public_url):
        raise errors.Forbidden(
            "this request came from another site. If a proxy stands before the server, it must pass on the Host "
            "header, or `cloche serve --public-url` must say where people reach it"
        )


def check_reading(headers: Mapping[str, str]) -> None:
    """For what only pages of ours ask for. Raises Forbidden where a browser says that another site does.

    A name that was typed, or a bookmark, is `none`.
    """
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise errors.Forbidden("another site asks for this: open the console itself")


def _is_own(origin: str, host: str, public_url: str) -> bool:
    own = _split(origin)
    if own is None or not own.netloc or own.scheme not in ("http", "https"):
        return False
    public = _split(public_url) if public_url else None
    return own.netloc == host or (public is not None and (own.scheme, own.netloc) == (public.scheme, public.netloc))


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url.lower())
    except ValueError:  # brackets without an address between them
        return None
