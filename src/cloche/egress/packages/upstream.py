"""What an index answers: over TLS that is checked, with redirects that are, and never more than was asked for."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.request import getproxies_environment, proxy_bypass

from cloche.egress.packages.problems import NotThere, UpstreamError
from cloche.egress.packages.reach import Reach
from cloche.egress.packages.urls import BadURL, Keyring, downgrades, join, origin
from cloche.telemetry import log

if TYPE_CHECKING:  # loaded with the first package that is asked for
    import httpx2

FETCHES = 64  # at once, of all sandboxes
REDIRECTS = 5
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 30.0
PAGE_SECONDS = 60.0
QUEUE_SECONDS = 60.0
IDLE_CONNECTIONS = 8
REDIRECT_CODES = frozenset({301, 302, 303, 307, 308})
NOT_THERE = frozenset({404, 410})


class Answer:
    """Headers, and a body that is read inside the block."""

    def __init__(self, response: httpx2.Response, url: str):
        self._response = response
        self.url = url  # where it came from in the end
        self.status = response.status_code

    def header(self, name: str) -> str:
        return str(self._response.headers.get(name, ""))

    @property
    def length(self) -> int | None:
        value = "" if self.header("transfer-encoding") else self.header("content-length")
        return int(value) if value.isascii() and value.isdecimal() and len(value) < 16 else None

    async def raw(self, chunk_bytes: int) -> AsyncGenerator[bytes, None]:
        """As it came. Raises UpstreamError where it is compressed, or breaks off."""
        if self.header("content-encoding") not in ("", "identity"):
            raise UpstreamError("the index sent a file in an encoding that was not asked for")
        with failures(self.url):
            async for part in self._response.aiter_raw(chunk_bytes):
                yield part

    async def whole(self, most: int) -> bytes:
        """Raises UpstreamError where it is over `most` bytes, compressed or not, or breaks off."""
        body = bytearray()
        with failures(self.url):
            async for part in self._response.aiter_bytes():
                body += part
                if len(body) > most:
                    raise UpstreamError(f"the index's page is over {most} bytes")
        return bytes(body)


class Upstream:
    """The servers of one kind of packages. Whoever makes it closes it."""

    def __init__(
        self,
        keyring: Keyring,
        reach: Reach,
        ca_file: str | None = None,
        trusted_hosts: Collection[str] = (),
    ):
        self._keyring = keyring
        self._reach = reach
        self._ca_file = ca_file
        self._trusted_hosts = frozenset(trusted_hosts)
        self._fetches = asyncio.Semaphore(FETCHES)
        self._clients: dict[tuple[bool, ...], httpx2.AsyncClient] = {}

    @contextlib.asynccontextmanager
    async def get(self, url: str, headers: Mapping[str, str]) -> AsyncGenerator[Answer, None]:
        """The answer, after redirects: 200, or 304. Raises NotThere, UpstreamError."""
        async with self._turn(), contextlib.AsyncExitStack() as stack:
            for _ in range(REDIRECTS + 1):
                answer = await self._ask(stack, url, headers)
                if answer.status not in REDIRECT_CODES:
                    _check_status(answer)
                    yield answer
                    return
                url = _redirected(url, answer.header("location"))
            raise UpstreamError("the index redirects too often")

    async def _ask(self, stack: contextlib.AsyncExitStack, url: str, headers: Mapping[str, str]) -> Answer:
        authorization = self._keyring.authorization(url)
        own = {"authorization": authorization} if authorization else {}
        with failures(url):
            response = await stack.enter_async_context(self._client(url).stream("GET", url, headers={**headers, **own}))
        return Answer(response, url)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None, None]:
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await self._fetches.acquire()
        except TimeoutError:
            raise UpstreamError("too much is fetched from the indexes at once: try again later") from None
        try:
            yield
        finally:
            self._fetches.release()

    def _client(self, url: str) -> httpx2.AsyncClient:
        place = origin(url)
        verified = place.scheme == "https" and place.host not in self._trusted_hosts
        kind = (_behind_proxy(place.scheme, place.host), verified)
        if kind not in self._clients:
            self._clients[kind] = self._new_client(*kind)
        return self._clients[kind]

    def _new_client(self, proxied: bool, verified: bool) -> httpx2.AsyncClient:
        import httpx2

        from cloche.egress.packages.transport import GuardedTransport

        context = _context(self._ca_file) if verified else _blind_context()
        limits = httpx2.Limits(max_connections=FETCHES, max_keepalive_connections=IDLE_CONNECTIONS)
        timeout = httpx2.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        transport = None if proxied else GuardedTransport(self._reach, context, limits)
        return httpx2.AsyncClient(
            transport=transport,
            verify=context,
            limits=limits,
            timeout=timeout,
            trust_env=proxied,
            follow_redirects=False,
        )

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()


def _check_status(answer: Answer) -> None:
    if answer.status in NOT_THERE:
        raise NotThere("the index has no such thing")
    if answer.status in (401, 403, 407):
        raise UpstreamError(f"the index answered {answer.status}: it does not accept this host's credentials")
    if answer.status not in (200, 304):
        raise UpstreamError(f"the index answered {answer.status}")


def _redirected(url: str, location: str) -> str:
    try:
        after = join(url, location)
        if location and not downgrades(url, after):
            return after
    except BadURL:
        pass
    raise UpstreamError("the index redirects to where nobody should follow")


def _behind_proxy(scheme: str, host: str) -> bool:
    proxies = getproxies_environment()
    return bool(proxies.get(scheme) or proxies.get("all")) and not proxy_bypass(host)


def _blind_context() -> ssl.SSLContext:
    """For plain HTTP, and for hosts that pip is told to trust whatever they show."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _context(ca_file: str | None) -> ssl.SSLContext:
    """With this host's authorities, and those of `ca_file`. Raises UpstreamError where that cannot be read."""
    context = ssl.create_default_context()  # heeds SSL_CERT_FILE and SSL_CERT_DIR
    if ca_file:
        try:
            context.load_verify_locations(ca_file)
        except (OSError, ssl.SSLError):
            log.warning("packages.ca_file_unreadable")
            raise UpstreamError(
                "the certificate authorities that this host's pip or npm names cannot be read"
            ) from None
    return context


@contextlib.contextmanager
def failures(url: str) -> Iterator[None]:
    """Says what a broken connection means. Raises UpstreamError."""
    import httpx2

    try:
        yield
    except httpx2.TimeoutException:
        raise UpstreamError(f"{origin(url).host} took too long to answer") from None
    except httpx2.ConnectError as error:
        refused = isinstance(error.__cause__, ssl.SSLError) or "CERTIFICATE" in str(error)
        why = "its certificate is not trusted" if refused else "it cannot be connected to"
        raise UpstreamError(f"{origin(url).host} cannot be reached: {why}") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise UpstreamError(f"{origin(url).host} broke off: {type(error).__name__}") from None
    except (UnicodeError, OverflowError):  # of an address that cannot even be tried
        raise UpstreamError("the index names an address that cannot be") from None
