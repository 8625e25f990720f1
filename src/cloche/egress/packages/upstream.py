"""The HTTP client of an index: verified TLS, checked redirects, and bounded answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit
from urllib.request import getproxies_environment, proxy_bypass

import httpcore2
import httpx2

from cloche.egress.connect import NameUnresolved, ResolveName
from cloche.egress.packages.replies import ForbiddenIndexHost, NotInIndex, UpstreamError
from cloche.egress.rules import FORBIDDEN_NETWORKS, Address, InvalidDestination, is_own_address, parse_destination
from cloche.network_policy import IpNetwork
from cloche.telemetry import log

if TYPE_CHECKING:
    import httpx2

# The addresses that the host itself may connect to for packages: the operator's indexes, else public
# addresses.


class IndexReach:
    """`chosen` are hosts and ports of configured indexes, at any address; hosts named by their pages must be
    public.
    """

    def __init__(self, resolve: ResolveName, chosen: Collection[tuple[str, int]], internal: Sequence[IpNetwork] = ()):
        self._resolve = resolve
        self._chosen = frozenset(chosen)
        self._internal = tuple(internal)

    async def allowed_addresses(self, host: str, port: int) -> list[Address]:
        """The addresses that may be connected to, one at least. Raises ForbiddenIndexHost."""
        try:
            destination = parse_destination(host, port)
            found = [destination.address] if destination.address is not None else await self._resolve(destination.host)
        except (InvalidDestination, NameUnresolved):
            raise ForbiddenIndexHost(f"{host} has no address") from None
        if (host, port) not in self._chosen:
            found = [address for address in found if self._is_public(address)]
        if not found:
            raise ForbiddenIndexHost(
                f"the index names files at {host}:{port}, which is in a network of this host's own: its operator can "
                "allow that with network.internal"
            )
        return found

    def _is_public(self, address: Address) -> bool:
        if any(address.version == each.version and address in each for each in self._internal):
            return True
        near = any(address.version == network.version and address in network for network, _ in FORBIDDEN_NETWORKS)
        return not near and not is_own_address(address)


# httpx2's transport, which connects to checked addresses only.


class GuardedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, reach: IndexReach, context: ssl.SSLContext, limits: httpx2.Limits):
        super().__init__(verify=context, limits=limits, trust_env=False)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_GuardedNetwork(reach),
        )


class _GuardedNetwork(httpcore2.AnyIOBackend):
    def __init__(self, reach: IndexReach):
        self._reach = reach

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._reach.allowed_addresses(host, port)  # raises ForbiddenIndexHost
        for address in addresses[:-1]:
            try:
                return await super().connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await super().connect_tcp(str(addresses[-1]), port, timeout, local_address, socket_options)


# URLs of indexes and of the files that their pages name: their origins, and the credentials sent there.

MAX_URL_LENGTH = 4096

_DEFAULT_PORTS = {"http": 80, "https": 443}
_PLAIN = re.compile(r"[\x21-\x7e]+")


class BadURL(ValueError):
    """It leads to no HTTP server."""


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int


def url_origin(url: str) -> Origin:
    """Raises BadURL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadURL("it is not a URL") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise BadURL("it does not begin with https:// and a host")
    return Origin(parts.scheme, parts.hostname.removesuffix("."), port or _DEFAULT_PORTS[parts.scheme])


def join_url(base: str, reference: str) -> str:
    """The target of a reference in the page at `base`, without a fragment or a password. Raises BadURL."""
    if len(reference) > MAX_URL_LENGTH:
        raise BadURL(f"it is longer than {MAX_URL_LENGTH} characters")
    try:
        url = urljoin(base, reference.strip())
        parts = urlsplit(url)
    except ValueError:
        raise BadURL("it is not a URL") from None
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))
    bare = quote(bare, safe="%/:?#[]@!$&'()*+,;=~")
    if not _PLAIN.fullmatch(bare):
        raise BadURL("it is not a URL")
    url_origin(bare)
    return bare


def gives_up_tls(before: str, after: str) -> bool:
    """Whether going from one to the other gives up TLS."""
    return url_origin(before).scheme == "https" and url_origin(after).scheme != "https"


class IndexCredential(NamedTuple):
    """The authorization sent to one host, over one scheme, below one path."""

    origin: Origin
    path: str
    authorization: str

    def __repr__(self) -> str:  # it ends up in logs and tracebacks
        return f"IndexCredential({self.origin.host!r})"


class Keyring:
    """This host's credentials. The longest path wins; among equals, the first that was added."""

    def __init__(self) -> None:
        self._credentials: list[IndexCredential] = []

    def add(self, url: str, authorization: str) -> None:
        """Raises BadURL."""
        place, path = url_origin(url), urlsplit(url).path
        if authorization.isascii() and authorization.isprintable():
            self._credentials.append(IndexCredential(place, path if path.endswith("/") else path + "/", authorization))

    def authorization(self, url: str) -> str | None:
        """The credential for exactly that scheme, host and port. Raises BadURL."""
        place, path = url_origin(url), urlsplit(url).path + "/"
        fit = [each for each in self._credentials if each.origin == place and path.startswith(each.path)]
        return max(fit, key=lambda each: len(each.path)).authorization if fit else None


def basic_authorization(user: str, password: str) -> str:
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()


def split_userinfo(url: str) -> tuple[str, str | None]:
    """A URL without its user and password, and the authorization header of them. Raises BadURL."""
    bare = join_url(url, "")
    userinfo, at, _ = urlsplit(url.strip()).netloc.rpartition("@")
    if not at:
        return bare, None
    user, _, password = userinfo.partition(":")
    return bare, basic_authorization(unquote(user), unquote(password))


MAX_FETCHES = 64  # at once, of all sandboxes
MAX_REDIRECTS = 5
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 30.0
PAGE_SECONDS = 60.0
QUEUE_SECONDS = 60.0
IDLE_CONNECTIONS = 8
REDIRECT_CODES = frozenset({301, 302, 303, 307, 308})
NOT_FOUND_CODES = frozenset({404, 410})


class IndexAnswer:
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
        """The raw bytes. Raises UpstreamError where they are compressed, or break off."""
        if self.header("content-encoding") not in ("", "identity"):
            raise UpstreamError("the index sent a file in an encoding that was not requested")
        with translate_failures(self.url):
            async for part in self._response.aiter_raw(chunk_bytes):
                yield part

    async def whole(self, most: int) -> bytes:
        """Raises UpstreamError where it is over `most` bytes, compressed or not, or breaks off."""
        body = bytearray()
        with translate_failures(self.url):
            async for part in self._response.aiter_bytes():
                body += part
                if len(body) > most:
                    raise UpstreamError(f"the index's page is over {most} bytes")
        return bytes(body)


class IndexClient:
    """The client of the servers of one kind of packages. Its maker closes it."""

    def __init__(
        self,
        keyring: Keyring,
        reach: IndexReach,
        ca_file: str | None = None,
        trusted_hosts: Collection[str] = (),
    ):
        self._keyring = keyring
        self._reach = reach
        self._ca_file = ca_file
        self._trusted_hosts = frozenset(trusted_hosts)
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._clients: dict[tuple[bool, ...], httpx2.AsyncClient] = {}

    @contextlib.asynccontextmanager
    async def get(self, url: str, headers: Mapping[str, str]) -> AsyncGenerator[IndexAnswer, None]:
        """The answer, after redirects: 200, or 304. Raises NotInIndex, UpstreamError."""
        async with self._fetch_slot(), contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_REDIRECTS + 1):
                answer = await self._send_request(stack, url, headers)
                if answer.status not in REDIRECT_CODES:
                    _check_status(answer)
                    yield answer
                    return
                url = _redirect_target(url, answer.header("location"))
            raise UpstreamError("the index redirects too often")

    async def _send_request(
        self, stack: contextlib.AsyncExitStack, url: str, headers: Mapping[str, str]
    ) -> IndexAnswer:
        authorization = self._keyring.authorization(url)
        own = {"authorization": authorization} if authorization else {}
        with translate_failures(url):
            response = await stack.enter_async_context(
                self._client_for(url).stream("GET", url, headers={**headers, **own})
            )
        return IndexAnswer(response, url)

    @contextlib.asynccontextmanager
    async def _fetch_slot(self) -> AsyncGenerator[None, None]:
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await self._fetches.acquire()
        except TimeoutError:
            raise UpstreamError("too much is fetched from the indexes at once: try again later") from None
        try:
            yield
        finally:
            self._fetches.release()

    def _client_for(self, url: str) -> httpx2.AsyncClient:
        place = url_origin(url)
        verified = place.scheme == "https" and place.host not in self._trusted_hosts
        kind = (_behind_proxy(place.scheme, place.host), verified)
        if kind not in self._clients:
            self._clients[kind] = self._new_client(*kind)
        return self._clients[kind]

    def _new_client(self, proxied: bool, verified: bool) -> httpx2.AsyncClient:
        import httpx2

        context = _verified_context(self._ca_file) if verified else _blind_context()
        limits = httpx2.Limits(max_connections=MAX_FETCHES, max_keepalive_connections=IDLE_CONNECTIONS)
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


def _check_status(answer: IndexAnswer) -> None:
    if answer.status in NOT_FOUND_CODES:
        raise NotInIndex("the index has no such thing")
    if answer.status in (401, 403, 407):
        raise UpstreamError(f"the index answered {answer.status}: it does not accept this host's credentials")
    if answer.status not in (200, 304):
        raise UpstreamError(f"the index answered {answer.status}")


def _redirect_target(url: str, location: str) -> str:
    try:
        after = join_url(url, location)
        if location and not gives_up_tls(url, after):
            return after
    except BadURL:
        pass
    raise UpstreamError("the index redirects to an address that must not be followed")


def _behind_proxy(scheme: str, host: str) -> bool:
    proxies = getproxies_environment()
    return bool(proxies.get(scheme) or proxies.get("all")) and not proxy_bypass(host)


def _blind_context() -> ssl.SSLContext:
    """For plain HTTP, and for hosts that pip is configured to trust without a valid certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _verified_context(ca_file: str | None) -> ssl.SSLContext:
    """A context with this host's authorities and those of `ca_file`. Raises UpstreamError if that cannot be
    read.
    """
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
def translate_failures(url: str) -> Iterator[None]:
    """Converts errors of the connection. Raises UpstreamError."""
    import httpx2

    try:
        yield
    except httpx2.TimeoutException:
        raise UpstreamError(f"{url_origin(url).host} took too long to answer") from None
    except httpx2.ConnectError as error:
        refused = isinstance(error.__cause__, ssl.SSLError) or "CERTIFICATE" in str(error)
        why = "its certificate is not trusted" if refused else "it cannot be connected to"
        raise UpstreamError(f"{url_origin(url).host} cannot be reached: {why}") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise UpstreamError(f"{url_origin(url).host} broke off: {type(error).__name__}") from None
    except (UnicodeError, OverflowError):  # of an address that cannot even be tried
        raise UpstreamError("the index names an address that cannot be") from None
