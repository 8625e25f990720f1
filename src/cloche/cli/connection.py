"""Client connections of uvicorn, with bounds on a request's head, on its time, and on their number.

Neither uvicorn nor its parser has any: a header that never ends would be kept, and copied with every packet
of it, before any key is checked.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from cloche.api.auth import request_owner
from cloche.model import KIB
from cloche.telemetry import log

# A limit on simultaneous connections, and the choice of connections to close when it is reached.
#
# Each takes a descriptor, and so does much of every sandbox: silent connections must not use them up.
# Connecting takes no key, so the owner of a new connection is unknown until it is let in. Therefore room is
# made for it among the owners and addresses that have the most, and no owner's connections keep the others out.

DESCRIPTOR_SHARE = 4  # connections can use 1/N of this process's descriptors
MIN_CONNECTIONS = 32
LOG_INTERVAL_SECONDS = 10.0  # at most so often
EVICTED_SHARE = 16  # 1/N of the connections is closed at once, because finding them takes a while
LONG_SEARCH_SECONDS = 0.005  # a longer search that found little is followed by a pause
REST_FACTOR = 20  # the pause after that, as a multiple of its duration


class LimitedConnection(Protocol):
    """A connection, as the limiter sees it."""

    @property
    def peer(self) -> str:
        """The client's address."""

    @property
    def owner(self) -> str | None:
        """The owner that it counts for, once known; None before authentication."""

    @property
    def is_idle_or_slow(self) -> bool:
        """Whether the client owes something: a request, the rest of a slow one, or its credentials."""

    @property
    def has_sent_request(self) -> bool:
        """Whether a whole request has ever come."""

    def abandon(self) -> None: ...


class HttpConnectionLimiter:
    """The connections of one listener.

    It closes connections without a request first: the oldest of the largest group.

    Where all are being answered, it closes the newest of the owner with the most connections, unless that owner
    has no more than an even share.
    """

    def __init__(self, most: int | None = None):
        self._most = most or max_connections()
        self._there: dict[LimitedConnection, None] = {}  # the oldest first
        self._said_at = -LOG_INTERVAL_SECONDS
        self._rests_until = 0.0

    def enter(self, visitor: LimitedConnection) -> bool:
        """Whether there is room, which may have been made."""
        if len(self._there) >= self._most:
            self._make_room()
        if len(self._there) >= self._most:
            return False
        self._there[visitor] = None
        return True

    def leave(self, visitor: LimitedConnection) -> None:
        """Harmless when it is not there."""
        self._there.pop(visitor, None)

    def _make_room(self) -> None:
        began_at = time.monotonic()
        if began_at < self._rests_until:
            return
        self._log_full(began_at)
        excess = max(self._most // EVICTED_SHARE, 1)
        leaving = list(islice(self._idle_connections(), excess)) or self._excess_connections(excess)
        for visitor in leaving:
            self.leave(visitor)
            visitor.abandon()
        took = time.monotonic() - began_at
        if took > LONG_SEARCH_SECONDS and len(leaving) < excess // 2:  # else the next search is far away
            self._rests_until = began_at + REST_FACTOR * took

    def _log_full(self, now: float) -> None:
        if now - self._said_at >= LOG_INTERVAL_SECONDS:
            self._said_at = now
            log.warning("connections.full", most=self._most)

    def _idle_connections(self) -> Iterator[LimitedConnection]:
        """Unidentified connections first, then those that can reconnect without loss."""
        idle = [each for each in self._there if each.is_idle_or_slow]
        yield from _sort_by_count((each for each in idle if not each.has_sent_request), {})
        yield from _sort_by_count((each for each in idle if each.has_sent_request and each.owner is None), {})
        owned = [each for each in idle if each.has_sent_request and each.owner is not None]
        if owned:
            yield from _sort_by_count(owned, self._count_by_owner())

    def _excess_connections(self, limit: int) -> list[LimitedConnection]:
        """The newest of the owner with the most, at most `limit`. The next call may choose another owner."""
        counts = self._count_by_owner()
        if not counts:
            return []
        (owner, count), *others = counts.most_common(2)
        share = max(self._most // (len(counts) + 1), 1)
        if count <= share:
            return []
        beyond = max(count - max(share, *(theirs for _, theirs in others), 0), 1)
        return list(islice((each for each in reversed(self._there) if each.owner == owner), min(beyond, limit)))

    def _count_by_owner(self) -> Counter[str]:
        return Counter(owner for each in self._there if (owner := each.owner) is not None)


def _sort_by_count(visitors: Iterable[LimitedConnection], owners: dict[str, int]) -> list[LimitedConnection]:
    """Sorts by group size, the largest first: by owner, where counts are given, else by address."""
    found = list(visitors)
    peers = Counter(each.peer for each in found)
    return sorted(found, key=lambda each: (-owners.get(each.owner or "", 0), -peers[each.peer]))


def max_connections() -> int:
    return max(MIN_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTOR_SHARE)


MAX_HEAD_BYTES = 64 * KIB
HEAD_SECONDS = 30.0  # from the connection, or from a request's first byte, until its head is there
LINGER_SECONDS = 1.0  # a refusal that is closed at once, with bytes unread, never reaches its client
SLOW_SECONDS = 60.0  # after which a client that still sends its request can be disconnected to make room
UNIDENTIFIED_SECONDS = 5.0  # the same for a client that has not yet sent a key
STATUS_HEAD_TOO_LARGE = 431
STATUS_FULL = 503
JOINED_BYTES = 64 * KIB  # of a body that is copied to go with its head


class CoalescingTransport:
    """A transport that joins the head of an answer with the first part of its body from the same loop turn.

    uvicorn writes them one after the other, and uvloop at once: two packets, for the first of which a client
    wakes up in vain.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self._begun = False

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._head = data
            self._loop.call_soon(self._flush_head)
        elif self._head is None or len(data) > JOINED_BYTES:
            self._flush_head()
            self._transport.write(data)
        else:
            head, self._head = self._head, None
            self._transport.write(head + data)

    def close(self) -> None:
        self._flush_head()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """All other members of the transport, after the pending head is sent."""
        self._flush_head()
        return getattr(self._transport, name)

    def _flush_head(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)


class WebSocketConnection(WebSocketsSansIOProtocol):
    """The connection after its upgrade to a WebSocket."""

    on_lost: Callable[[], None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)


class HttpConnection(HttpToolsProtocol):
    """An HTTP connection. The application can also reset it: see `cloche.api.http.ResetConnection`."""

    def __init__(self, *args: Any, crowd: HttpConnectionLimiter | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._crowd = crowd
        self._requested_at: float | None = None  # when the head of its last request was whole
        self._head_bytes: int | None = 0  # that came of a head, or of trailers, which are not whole yet; else None
        self._has_head = False
        self._overdue: asyncio.TimerHandle | None = None
        self._is_deaf = False  # it was refused, or is a WebSocket's
        self._socket: WebSocketConnection | None = None  # the owner of the transport after an upgrade
        self._last_owner: str | None = None  # of the request before this one

    # -- from the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._crowd is None or self._crowd.enter(self):
            self._expect_head()
        else:
            self._refuse_request(STATUS_FULL, "all connections are in use: try again in a moment", "retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._release_connection()
        self._expect_no_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self._is_deaf and not self.transport.is_closing():
            data = self._parse_some(data)

    def _parse_some(self, data: bytes) -> bytes:
        """Parses a part of the data and returns the rest."""
        if self._head_bytes is None:
            super().data_received(data)
            return b""
        room = MAX_HEAD_BYTES - self._head_bytes
        if room <= 0:
            self._refuse_request(
                STATUS_HEAD_TOO_LARGE,
                f"a request's head can have {MAX_HEAD_BYTES} bytes: send less in its headers or its path",
            )
            return b""
        self._expect_head()
        taken = data[:room]
        self._head_bytes += len(taken)
        super().data_received(taken)
        return data[room:]

    # -- from the parser

    def on_message_begin(self) -> None:
        self._last_owner = self.owner
        super().on_message_begin()
        self._has_head = False
        self._expect_head()
        self.scope["state"]["cut_off"] = self.cut_off

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # trailers are ignored: the caller is already identified
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._requested_at = self.loop.time()
        self._end_head()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before and self.scope["method"] != "HEAD":
            self.cycle.transport = CoalescingTransport(self.transport, self.loop)  # type: ignore[assignment]  # all that it calls

    def on_chunk_header(self) -> None:
        self._head_bytes = 0  # trailers follow, unless it is a chunk that has a body

    def on_body(self, body: bytes) -> None:
        self._end_head()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._expect_no_head()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._is_deaf = True
        super().handle_websocket_upgrade()
        upgraded = self.transport.get_protocol()
        assert isinstance(upgraded, WebSocketConnection)  # from here on it is the transport's protocol instead of this
        self._socket, upgraded.on_lost = upgraded, self._release_connection
        # Its own parser has read the head again. It would never answer a head that it cannot read.
        if not upgraded.handshake_initiated:
            self.send_400_response("This is not a WebSocket handshake: it can have 128 headers of 8 KiB each.")

    # -- for the crowd

    @property
    def peer(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def owner(self) -> str | None:
        scope = self.scope if self._socket is None else getattr(self._socket, "scope", None)
        return (request_owner(scope["state"]) if scope else None) or self._last_owner

    @property
    def is_idle_or_slow(self) -> bool:
        cycle = self.cycle
        if self._requested_at is None or (self._socket is None and (cycle is None or cycle.response_complete)):
            return True
        since = self.loop.time() - self._requested_at
        if self.owner is None and since > UNIDENTIFIED_SECONDS:
            return True
        return self._socket is None and cycle.more_body and since > SLOW_SECONDS

    @property
    def has_sent_request(self) -> bool:
        return self._requested_at is not None

    def abandon(self) -> None:
        self.transport.abort()

    def _release_connection(self) -> None:
        if self._crowd is not None:
            self._crowd.leave(self)

    # -- the end of a connection

    def cut_off(self) -> None:
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _end_head(self) -> None:
        self._head_bytes = None
        self._expect_no_head()

    def _expect_head(self) -> None:
        if self._overdue is None:
            self._overdue = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _expect_no_head(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _refuse_request(self, status: int, why: str, headers: str = "") -> None:
        self._is_deaf = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # another answer is under way: it can only end here
            return
        body = f"{why}\n".encode()
        about = f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        self.transport.write(STATUS_LINE[status] + f"{about}{headers}\r\n".encode() + body)
        self._expect_no_head()
        self._overdue = self.loop.call_later(LINGER_SECONDS, self.transport.close)
