"""`[[upstream]]`: where a server with models is, and how it is spoken to."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from cloche import errors
from cloche.structs import Struct

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_OWN_HEADERS = frozenset({"connection", "content-length", "host", "transfer-encoding"})  # each request has its own


def _check_url(url: str) -> None:
    """Raises InvalidRequest. The URL itself is not said: it may hold a password."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise errors.InvalidRequest("upstream.base_url must be a URL such as https://host/v1")
    if "@" in parts.netloc:
        raise errors.InvalidRequest("upstream.base_url cannot have a user and a password: use api_key, or headers")
    if "?" in url or "#" in url:
        raise errors.InvalidRequest(
            "upstream.base_url cannot have a query or a fragment: paths are added at its end. Azure needs none at "
            "https://NAME.openai.azure.com/openai/v1"
        )


class Upstream(Struct, forbid_unknown_fields=True):
    """A server with models. Requests for a model go to the first upstream with a pattern that matches its name."""

    models: tuple[str, ...]
    base_url: str
    api_key: str = ""  # "env:NAME" takes it from the environment
    api: Literal["responses", "chat"] = "chat"
    model: str = ""  # the name that is sent, if that is another
    vision: bool = True  # whether pictures that code shows go back to the model
    stream: bool = True  # whether the server can stream
    timeout_seconds: float = 600.0  # without a byte
    headers: dict[str, str] = {}  # sent with every request; here too "env:NAME" is possible

    def __post_init__(self) -> None:
        if not self.models:
            raise errors.InvalidRequest('upstream.models must have a pattern, such as "gpt-5*"')
        _check_url(self.base_url)
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise errors.InvalidRequest(f"upstream.headers has {name!r}, whose name or value no header can have")
            if name.lower() in _OWN_HEADERS:
                raise errors.InvalidRequest(
                    f"upstream.headers has {name!r}, which each request has its own of: remove it"
                )
        if not 0 < self.timeout_seconds < float("inf"):
            raise errors.InvalidRequest(
                f"upstream.timeout_seconds must be a positive number, not {self.timeout_seconds}"
            )
