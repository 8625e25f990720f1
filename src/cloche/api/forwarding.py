"""A request as a program inside a sandbox gets it: what goes along, and what stays outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import quote, unquote

from starlette.types import Scope

from cloche.api.auth import OWN_HEADERS, SESSION_COOKIES, key_of

RawHeaders = list[tuple[bytes, bytes]]

# Said between two neighbours only, and so said anew on each side.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
_KEY_HEADERS = frozenset(name.encode() for name in (*OWN_HEADERS, "authorization"))


class Outward:
    """Makes headers for programs. What opens a sandbox or the server stays outside: they must not see that.

    `private` are names of headers of the dialect's own; `is_key` knows the server's keys, which people send along by
    mistake where their programs have keys of their own under the same names.
    """

    def __init__(self, private: Iterable[bytes], is_key: Callable[[str], bool]):
        self._withheld = frozenset(private) | HOP_BY_HOP
        self._is_key = is_key

    def headers(self, scope: Scope) -> RawHeaders:
        """With who asked for it, and under which name; `state["host"]` is what the program is told for a Host."""
        given = (_without_session(*pair) for pair in scope["headers"] if pair[0] not in self._withheld)
        own = [pair for pair in given if not self._has_key(*pair)]
        client = (scope.get("client") or ("", 0))[0]
        host = next((value for name, value in own if name == b"host"), b"")
        mask = scope["state"].get("host")
        if mask is not None:
            own = [(b"host", mask.encode()), *(pair for pair in own if pair[0] != b"host")]
        return [
            *(pair for pair in own if not pair[0].startswith(b"x-forwarded-")),
            (b"x-forwarded-for", client.encode()),
            (b"x-forwarded-proto", scope.get("scheme", "http").replace("ws", "http").encode()),
            (b"x-forwarded-host", host),
        ]

    def _has_key(self, name: bytes, value: bytes) -> bool:
        return name in _KEY_HEADERS and self._is_key(key_of({name.decode(): value.decode("latin-1")}))


def _without_session(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """The header; of a browser's cookies without those that are the console's."""
    if name != b"cookie" or not any(each.encode() in value for each in SESSION_COOKIES):
        return name, value
    pairs = [pair.strip() for pair in value.split(b";")]
    return name, b"; ".join(pair for pair in pairs if pair.partition(b"=")[0].decode("latin-1") not in SESSION_COOKIES)


def target_of(scope: Scope) -> str:
    """Path and query as the client wrote them, where no prefix was taken off."""
    raw = scope.get("raw_path", b"").decode("ascii", "replace")
    path = raw if raw and unquote(raw) == scope["path"] else quote(scope["path"], safe="/:@!$&'()*+,;=~-._")
    query = scope.get("query_string", b"").decode("ascii", "replace")
    return f"{path}?{query}" if query else path
