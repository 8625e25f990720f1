"""A client of a server: requests, streams of events, WebSockets. Belongs to one event loop."""

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
from cloche.protocol import API_PREFIX, OWN_ONLY_HEADER, responses

E = TypeVar("E", bound=Event)

CONNECT_SECONDS = 10.0
KEPT_SECONDS = 60.0  # less than the server keeps an idle connection, so that it is never closed under a request
MAX_MESSAGE_BYTES = 1 << 30
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
UNIX_SCHEME = "unix:"
_LONGEST_LOCATION = 200
_LONGEST_SOCKET_PATH = 100  # the kernel takes 107
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=KEPT_SECONDS)


class ServerAddress:
    """The address of a server: `http://HOST:PORT`, `https://...`, or `unix:PATH` of its control socket."""

    def __init__(self, url: str):
        """Raises InvalidRequest."""
        self.url = url.rstrip("/")
        self.socket: str | None = None
        self._directory: int | None = None
        if url.startswith(UNIX_SCHEME):
            self.socket = self._short_path(url[len(UNIX_SCHEME) :])
            self.base = "http://localhost"
            return
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise errors.InvalidRequest(f"{url!r} is not an address of a server: give http://HOST:PORT, or unix:PATH")
        self.base = self.url

    @property
    def websocket_base(self) -> str:
        return "ws" + self.base.removeprefix("http")

    @property
    def is_direct(self) -> bool:
        """Whether the connection bypasses every proxy that the environment names."""
        return self.socket is not None or urlsplit(self.base).hostname in LOOPBACK_HOSTS

    def close(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def _short_path(self, path: str) -> str:
        """A path that the kernel takes, until `close`: a data directory may lie deep."""
        if len(os.fsencode(path)) < _LONGEST_SOCKET_PATH:
            return path
        try:
            self._directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
        except OSError as error:
            raise errors.Unavailable(f"there is no server at {UNIX_SCHEME}{path}: {error.strerror}") from None
        return f"/proc/self/fd/{self._directory}/{os.path.basename(path)}"


class _NoRedirectConnect(sockets.connect):
    """Follows no redirect: the key is for the host that was named, and for no other."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class ServerClient:
    """The client of one server. Every method raises Unavailable with the address, or the error that the server
    sent.

    With `own_only` resources of other owners are not found, also over the control socket, which is the
    operator's.
    """

    def __init__(self, url: str, api_key: str, *, own_only: bool = False):
        self._address = ServerAddress(url)
        self._headers = {"x-api-key": api_key} if api_key else {}
        if own_only:
            self._headers[OWN_ONLY_HEADER] = "true"
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
        sent = responses.encode_json(body) if body is not None else content
        target = _request_target(path, query)
        try:
            response = await self._http_client.request(method, target, content=sent)
        except httpx2.HTTPError as error:
            raise self._unreachable_error(error) from None
        if not response.is_success:
            raise self._error_from(response, response.content, target)
        return response.content if kind is None else _decode_answer(response.content, kind)

    @contextlib.asynccontextmanager
    async def open_stream(self, path: str, query: Mapping[str, Any]) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """The answer's bytes as they come."""
        target = _request_target(path, query)
        try:
            async with self._http_client.stream("GET", target) as response:
                if not response.is_success:
                    raise self._error_from(response, await response.aread(), target)
                yield response.aiter_raw()
        except httpx2.HTTPError as error:
            raise self._unreachable_error(error) from None

    async def connect(self, path: str, query: Mapping[str, Any] | None = None) -> ServerSocket:
        """A WebSocket."""
        target = _request_target(path, query)
        how: dict[str, Any] = {
            "additional_headers": self._headers,
            "compression": None,
            "max_size": MAX_MESSAGE_BYTES,
            "open_timeout": CONNECT_SECONDS,
            "ping_timeout": None,  # the pong waits behind data that a slow reader has not read yet
        }
        if self._address.socket is not None:
            how.update(unix=True, path=self._address.socket)
        elif self._address.is_direct:
            how["proxy"] = None
        try:
            return ServerSocket(self, await _NoRedirectConnect(self._address.websocket_base + target, **how))
        except InvalidStatus as refused:
            raise self._error_from(refused.response, bytes(refused.response.body or b""), target) from None
        except (OSError, WebSocketException) as error:
            raise self._unreachable_error(error) from None

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        self._address.close()

    def _unreachable_error(self, error: BaseException) -> errors.Unavailable:
        why = str(error) or type(error).__name__
        return errors.Unavailable(f"no answer from a Cloche server at {self._address.url}: {why}; does it run there?")

    def _error_from(
        self, response: httpx2.Response | websockets.http11.Response, body: bytes, target: str
    ) -> errors.ClocheError:
        """The error in an unsuccessful response. Redirects are not followed, since the key would be sent along."""
        location = response.headers.get("location")
        if not 300 <= response.status_code < 400 or location is None:
            return responses.exception_from_response(body, response.status_code)
        there = location.removesuffix(target)[:_LONGEST_LOCATION]
        return errors.Unavailable(
            f"the server at {self._address.url} redirects to {there!r}: use this url, if it is yours"
        )

    def lost(self) -> errors.Unavailable:
        return errors.Unavailable(f"the connection to the Cloche server at {self._address.url} was lost")

    @property
    def _http_client(self) -> httpx2.AsyncClient:
        if self._client is None:
            self._client = httpx2.AsyncClient(
                base_url=self._address.base,
                headers=self._headers,
                # No time limit but for connecting: a run takes as long as it takes, and the server limits that.
                timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
                limits=_LIMITS,
                transport=self._direct_transport() if self._address.is_direct else None,
            )
        return self._client

    def _direct_transport(self) -> httpx2.AsyncHTTPTransport:
        """One that looks for no proxy in the environment."""
        return httpx2.AsyncHTTPTransport(uds=self._address.socket, limits=_LIMITS)


class ServerSocket:
    """A WebSocket that carries the protocol's messages."""

    def __init__(self, server: ServerClient, connection: sockets.ClientConnection):
        self._server = server
        self._connection = connection

    async def send(self, message: object) -> None:
        """Bytes go as they are. Raises Unavailable."""
        try:
            await self._connection.send(
                message if isinstance(message, bytes) else responses.encode_json(message).decode()
            )
        except ConnectionClosed:
            raise self._server.lost() from None

    async def receive(self) -> Any:
        """The next event, or bytes; None after the server's last. Raises the error that the server reports."""
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
            raise responses.unexpected_answer_error(f"{type(event).__name__} instead of {kind.__name__}")
        return event

    def lost(self) -> errors.Unavailable:
        return self._server.lost()

    async def close(self) -> None:
        await self._connection.close()


async def decode_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Event, None]:
    """Server-sent events. Raises the error that the last of them may report."""
    events = responses.EventStreamParser()
    async for chunk in chunks:
        for event in events.feed(chunk):
            yield event


def _decode_answer(content: bytes, kind: Any) -> Any:
    try:
        return responses.decode_json(content, kind)
    except (ValueError, msgspec.MsgspecError) as error:
        raise responses.unexpected_answer_error(error) from None


def _request_target(path: str, query: Mapping[str, Any] | None) -> str:
    """The path with its query. Booleans are written as in JSON; None is left out."""
    given = {name: str(value).lower() if isinstance(value, bool) else value for name, value in (query or {}).items()}
    sent = urlencode({name: value for name, value in given.items() if value is not None})
    return API_PREFIX + path + (f"?{sent}" if sent else "")
