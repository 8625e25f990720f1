"""What a browser is told with every answer of the console: nothing but its own files, no frame around it, no traces."""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope, Send

_NAMED = re.compile(r"(?:127\.0\.0\.1|[a-z0-9.-]*[a-z][a-z0-9.-]*)(?::[0-9]{1,5})?", re.IGNORECASE)

# For what is no page: an answer of an API that somebody opens as one gets an origin of its own, and can do nothing.
INERT = "sandbox; default-src 'none'; frame-ancestors 'self'"


def policy(host: str) -> str:
    """The Content-Security-Policy of a page.

    Scripts come from the directory of our own files only. Elsewhere below the same origin are files and ports of
    sandboxes. An address that no such rule can name (of IPv6, say) gets what comes closest.
    """
    own = f"{host}/ui/static/" if _NAMED.fullmatch(host) else "'self'"
    return (
        f"default-src 'none'; script-src {own}; style-src {own}; img-src 'self' data: blob:; font-src {own}; "
        "connect-src 'self'; frame-src 'self'; media-src 'self' blob:; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )


class Hardened:
    """A `send` that adds these headers where an answer does not bring its own. Of an inert one, the policy is ours."""

    def __init__(self, scope: Scope, send: Send):
        self._send = send
        self._is_inert = False
        self._policy = policy(Headers(scope=scope).get("host", ""))

    def make_inert(self) -> None:
        """From here on the answer is no page."""
        self._is_inert, self._policy = True, INERT

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self._harden(MutableHeaders(scope=message))
        await self._send(message)

    def _harden(self, headers: MutableHeaders) -> None:
        if self._is_inert:
            headers["content-security-policy"] = self._policy
        headers.setdefault("content-security-policy", self._policy)
        headers.setdefault("x-content-type-options", "nosniff")
        headers.setdefault("referrer-policy", "same-origin")  # with `no-referrer`, a form's Origin would be `null`
        headers.setdefault("cache-control", "no-store")
        headers.setdefault("cross-origin-opener-policy", "same-origin")
        headers.setdefault("cross-origin-resource-policy", "same-origin")
        headers.setdefault("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()")
