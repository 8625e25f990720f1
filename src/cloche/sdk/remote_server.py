"""A server and the ways to it: requests, streams of events, WebSockets. Belongs to one event loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import httpx2
import msgspec
import websockets.asyncio.client as sockets
import websockets.http11
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from cloche import errors
from cloche.events import Event
from cloche.protocol import OWN_ONLY, PREFIX, responses

E = TypeVar("E", bound=Event)

CONNECT_SECONDS = 10.0
KEPT_SECONDS = 60.0  # less than the server keeps an idle connection, so that it is never closed under a request
MAX_MESSAGE_BYTES = 1 << 30
LOOPBACK = ("127.0.0.1", "localhost", "::1")
UNIX = "unix:"
_LONGEST_LOCATION = 200
_LONGEST_SOCKET_PATH = 100  # the kernel takes 107
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=KEPT_SECONDS)


class Address:
    """Where a server is: `http://HOST:PORT`, `https://...`, or `unix:PATH` of its control socket."""

    def __init__(self, url: str):
        """Raises InvalidRequest."""
        self.url = url.rstrip("/")
        self.socket: str | None = None
        self._directory: int | None = None
        if url.startswith(UNIX):
            self.socket = self._short(url[len(UNIX) :])
            self.base = "http://localhost"
            return
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise errors.InvalidRequest(f"{url!r} is no address of a server: give http://HOST:PORT, or unix:PATH")
        self.base = self.url

    @property
    def for_sockets(self) -> str:
        return "ws" + self.base.removeprefix("http")

    @property
    def direct(self) -> bool:
        """Whether no proxy can be on the way, whatever the environment says."""
        return self.socket is not None or urlsplit(self.base).hostname in LOOPBACK

    def close(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def _short(self, path: str) -> str:
        """A path that the kernel takes, until `close`: a data directory may lie deep."""
        if len(os.fsencode(path)) < _LONGEST_SOCKET_PATH:
            return path
        try:
            self._directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
        except OSError as error:
            raise errors.Unavailable(f"there is no server at {UNIX}{path}: {error.strerror}") from None
        return f"/proc/self/fd/{self._directory}/{os.path.basename(path)}"


class _Straight(sockets.connect):
    """Follows no redirect: the key is for the host that was named, and for no other."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class Server:
    """Every method raises Unavailable, which says where it tried, and what the server answered as an error.

    With `own_only` what is others' is not found, also where this is the operator's way in: its control socket.
    """

    def __init__(self, url: str, api_key: str, *, own_only: bool = False):
        self._address = Address(url)
        self._headers = {"x-api-key": api_key} if api_key else {}
        if own_only:
            self._headers[OWN_ONLY] = "true"
        self._client: httpx2.AsyncClient | None = None

    async def ask(
        self,
        method: str,
        path: str,
        kind: Any = None,
        *,
        body: object = None,
        query: Mapping[str, Any] | None = None,
        content: bytes | AsyncIterable[bytes] | None = None,
    ) -> Any:
        """The answer: of that type, or its bytes."""
        sent = responses.encode(body) if body is not None else content
        target = _target(path, query)
        try:
            response = await self._http.request(method, target, content=sent)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from None
        if not response.is_success:
            raise self._refusal(response, response.content, target)
        return response.content if kind is None else _decoded(response.content, kind)

    @contextlib.asynccontextmanager
    async def streaming(self, path: str, query: Mapping[str, Any]) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """The answer's bytes as they come."""
        target = _target(path, query)
        try:
            async with self._http.stream("GET", target) as response:
                if not response.is_success:
                    raise self._refusal(response, await response.aread(), target)
                yield response.aiter_raw()
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from None

    async def connect(self, path: str, query: Mapping[str, Any] | None = None) -> Socket:
        """A WebSocket."""
        target = _target(path, query)
        how: dict[str, Any] = {
            "additional_headers": self._headers,
            "compression": None,
            "max_size": MAX_MESSAGE_BYTES,
            "open_timeout": CONNECT_SECONDS,
            "ping_timeout": None,  # the answer waits behind what a slow reader has not taken yet
        }
        if self._address.socket is not None:
            how.update(unix=True, path=self._address.socket)
        elif self._address.direct:
            how["proxy"] = None
        try:
            return Socket(self, await _Straight(self._address.for_sockets + target, **how))
        except InvalidStatus as refused:
            raise self._refusal(refused.response, bytes(refused.response.body or b""), target) from None
        except (OSError, WebSocketException) as error:
            raise self._unreachable(error) from None

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        self._address.close()

    def _unreachable(self, error: BaseException) -> errors.Unavailable:
        why = str(error) or type(error).__name__
        return errors.Unavailable(f"no answer from a Cloche server at {self._address.url}: {why}; does it run there?")

    def _refusal(
        self, response: httpx2.Response | websockets.http11.Response, body: bytes, target: str
    ) -> errors.ClocheError:
        """What an answer without success says. Redirects are not followed, for the key would go along."""
        location = response.headers.get("location")
        if not 300 <= response.status_code < 400 or location is None:
            return responses.error_in(body, response.status_code)
        there = location.removesuffix(target)[:_LONGEST_LOCATION]
        return errors.Unavailable(
            f"the server at {self._address.url} redirects to {there!r}: use this url, if it is yours"
        )

    def lost(self) -> errors.Unavailable:
        return errors.Unavailable(f"the connection to the Cloche server at {self._address.url} was lost")

    @property
    def _http(self) -> httpx2.AsyncClient:
        if self._client is None:
            self._client = httpx2.AsyncClient(
                base_url=self._address.base,
                headers=self._headers,
                # No time limit but for connecting: a run takes as long as it takes, and the server limits that.
                timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
                limits=_LIMITS,
                transport=self._direct_transport() if self._address.direct else None,
            )
        return self._client

    def _direct_transport(self) -> httpx2.AsyncHTTPTransport:
        """One that looks for no proxy in the environment."""
        return httpx2.AsyncHTTPTransport(uds=self._address.socket, limits=_LIMITS)


class Socket:
    """A WebSocket that speaks our messages."""

    def __init__(self, server: Server, connection: sockets.ClientConnection):
        self._server = server
        self._connection = connection

    async def send(self, message: object) -> None:
        """Bytes go as they are. Raises Unavailable."""
        try:
            await self._connection.send(message if isinstance(message, bytes) else responses.encode(message).decode())
        except ConnectionClosed:
            raise self._server.lost() from None

    async def receive(self) -> Any:
        """The next event, or bytes; None when the server has said all. Raises the error that the server tells of."""
        try:
            message = await self._connection.recv()
        except ConnectionClosed as closed:
            if closed.rcvd is not None and closed.rcvd.code == 1000:
                return None
            raise self._server.lost() from None
        return message if isinstance(message, bytes) else responses.decode_event(message)

    async def expect(self, kind: type[E]) -> E:
        """The next event, which must be such a one. Raises as `receive` does, and Unavailable where it is not."""
        event = await self.receive()
        if event is None:
            raise self._server.lost()
        if not isinstance(event, kind):
            raise responses.not_ours(f"{type(event).__name__} instead of {kind.__name__}")
        return event

    def lost(self) -> errors.Unavailable:
        return self._server.lost()

    async def close(self) -> None:
        await self._connection.close()


async def events_of(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Event, None]:
    """Server-sent events. Raises the error that the last of them may tell of."""
    events = responses.EventsIn()
    async for chunk in chunks:
        for event in events.feed(chunk):
            yield event


def _decoded(content: bytes, kind: Any) -> Any:
    try:
        return responses.decode(content, kind)
    except (ValueError, msgspec.MsgspecError) as error:
        raise responses.not_ours(error) from None


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    """Booleans as JSON writes them; what is None is left out."""
    given = {name: str(value).lower() if isinstance(value, bool) else value for name, value in (query or {}).items()}
    sent = urlencode({name: value for name, value in given.items() if value is not None})
    return PREFIX + path + (f"?{sent}" if sent else "")
