"""A sandbox's network: its policy, its door, and the log of what went through it or did not."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import TYPE_CHECKING

from cloche import errors
from cloche.engine.executions.tool_server import open_listener
from cloche.engine.sandboxes.init_client import Guest, only_fd
from cloche.guest.paths import DOOR_PORT
from cloche.network_policy import NetworkEntry, NetworkPolicy

if TYPE_CHECKING:
    from cloche.egress import Egress
    from cloche.egress.authority import Authority
    from cloche.egress.door import Door

# Whom programs in a sandbox with a network trust: this host's authorities, and where it has secrets one of its own.

# One place for the whole life of a sandbox, so that a secret that is added later needs no other environment.
BUNDLE = "/run/cloche/ca.pem"
_BY_NAME = dict.fromkeys(
    (
        "SSL_CERT_FILE",  # OpenSSL, Python's ssl, httpx, uv, Go, Ruby
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "PIP_CERT",
        "NODE_EXTRA_CA_CERTS",
        "DENO_CERT",
        "CARGO_HTTP_CAINFO",
        "AWS_CA_BUNDLE",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    ),
    BUNDLE,
)
TRUST_ENV = {**_BY_NAME, "SYSTEM_WGETRC": "/etc/cloche-wgetrc"}  # wget: see isolation/rootfs.py
MAX_BYTES = 16 << 20
_PLACES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_SEEN_INSIDE = ("/etc/ssl/certs/", "/etc/ca-certificates/", "/usr/")  # as in isolation/rootfs.py


async def write_bundle(guest: Guest, own: bytes = b"") -> None:
    """`own` is the certificate of the sandbox's own authority. Raises NoSpace, FileError, Gone."""
    system = system_bundle()
    inside = system is not None and system.startswith(_SEEN_INSIDE)
    content = b"" if inside or system is None else _read(system)
    try:
        await guest.request("trust", content + own, path=BUNDLE, system=system if inside else "")
    except errors.NoSpace:
        raise errors.NoSpace(
            "the sandbox has no space left for the certificates that its network needs: remove some files first"
        ) from None


def system_bundle() -> str | None:
    """The file with the authorities that this host trusts; None where it has no such file."""
    usual = ssl.get_default_verify_paths().cafile  # that of SSL_CERT_FILE, where it is set
    found = next((place for place in (usual, *_PLACES) if place and os.path.isfile(place)), None)
    return None if found is None else os.path.realpath(found)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_BYTES) + b"\n"


PROXY = f"http://127.0.0.1:{DOOR_PORT}"
NO_PROXY = "localhost,127.0.0.1,0.0.0.0,::1,cloche"  # no networks: many programs know only addresses
PROXY_ENV = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), PROXY),
    **dict.fromkeys(("ALL_PROXY", "all_proxy"), PROXY),  # httpx, with which many talk to models, fails at socks5h://
    **dict.fromkeys(("NO_PROXY", "no_proxy"), NO_PROXY),
    "NODE_USE_ENV_PROXY": "1",  # so that Node's own fetch heeds them
}


def environment_of(policy: NetworkPolicy) -> dict[str, str]:
    """What programs need to know of a network: where its door is, whom to trust, and the placeholders of secrets."""
    if not policy.allows_something:
        return {}
    placeholders = {secret.name: f"${secret.name}" for secret in policy.secrets if secret.name is not None}
    return {**placeholders, **PROXY_ENV, **TRUST_ENV}


class SandboxNetwork:
    """Where the policy allows nothing there need be no door. `listener`: the door's, where it was made in advance."""

    def __init__(self, guest: Guest, policy: NetworkPolicy, listener: socket.socket | None = None):
        self._guest = guest
        self._policy = policy
        self._listener = listener
        self._door: Door | None = None
        self._has_bundle = False
        self._closed = False
        self._opening = asyncio.Lock()

    @property
    def policy(self) -> NetworkPolicy:
        return self._policy

    @property
    def log(self) -> list[NetworkEntry]:
        """What programs have tried, the oldest first, and then what is still open."""
        return [] if self._door is None else self._door.log

    @property
    def dropped(self) -> int:
        """How many entries of the log made room for those that it has."""
        return 0 if self._door is None else self._door.journal.dropped

    @property
    def is_open(self) -> bool:
        return self._door is not None

    async def open(self, egress: Egress, *, sandbox: str, owner: str) -> None:
        """Raises InvalidRequest where a program inside has the door's port, Gone."""
        async with self._opening:
            if self._door is not None:
                return
            listener = self._listener or await make_listener(self._guest)
            self._listener = None
            if self._closed:  # the sandbox ended while its init answered
                listener.close()
                raise errors.SandboxLost("the sandbox ended before its network was opened")
            self._door = egress.open(listener, self._policy, sandbox=sandbox, owner=owner)
        await self.vouch(self._policy)

    async def vouch(self, policy: NetworkPolicy) -> None:
        """Has programs trust whom they must for that policy: with secrets, also the proxy. Raises NoSpace, Gone."""
        async with self._opening:
            if self._door is None or self._door.authority is not None or not policy.allows_something:
                return
            if policy.secrets:
                self._door.authority = await self._own_authority()
            elif not self._has_bundle:
                await write_bundle(self._guest)
            self._has_bundle = True

    async def _own_authority(self) -> Authority:
        from cloche.egress.authority import Authority

        authority = await asyncio.to_thread(Authority)
        await write_bundle(self._guest, authority.certificate_pem)
        return authority

    def replace(self, policy: NetworkPolicy) -> None:
        self._policy = policy
        if self._door is not None:
            self._door.replace(policy)

    def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._door is not None:
            self._door.close()


async def make_listener(guest: Guest) -> socket.socket:
    """The listener of a sandbox's door, for us to accept on. Raises InvalidRequest where its port is taken, Gone."""
    try:
        return await open_listener(guest, DOOR_PORT)
    except errors.FileError:
        raise errors.InvalidRequest(
            f"a program in the sandbox listens on port {DOOR_PORT}, which its network needs: end it first"
        ) from None


# Connections to programs that listen inside a sandbox.

CONNECT_SECONDS = 5.0
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


async def listening(guest: Guest) -> list[int]:
    """The ports on which programs listen, but for the sandbox's own door. Raises ProtocolViolation, Gone."""
    told = (await guest.request("port_list")).ok.get("ports")
    if not isinstance(told, list) or not all(type(each) is int and 0 < each < 65536 for each in told):
        raise errors.ProtocolViolation("the guest's init sent no list of ports")
    return [port for port in told if port != DOOR_PORT]


async def connect_port(guest: Guest, port: int) -> socket.socket:
    """A connected, non-blocking socket. Raises PortNotOpen, InvalidRequest for what is no port, Gone."""
    if port == DOOR_PORT:  # whoever came in by it would speak in the sandbox's name, and use its secrets
        raise errors.PortNotOpen(f"port {port} is the door of the sandbox's network, which opens from inside only")
    guest.noted("port.reached", about=str(port))
    for six in (False, True):  # most programs listen on IPv4, or on both
        try:
            return await _connect(guest, port, six)
        except errors.PortNotOpen:
            continue
    raise errors.PortNotOpen(f"nothing listens on port {port} of this sandbox")


async def _connect(guest: Guest, port: int, six: bool) -> socket.socket:
    connection = _checked(only_fd(await guest.request("port_connect", port=port, six=six)))
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await guest.wait(_writable(connection))
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise errors.PortNotOpen(os.strerror(error))
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise errors.PortNotOpen(f"port {port} is listened on, but no connection was accepted") from None
        raise
    return connection


def _checked(fd: int) -> socket.socket:
    """What a guest passed must be what it says: a TCP socket."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise errors.ProtocolViolation("the guest's init passed something else than a socket") from None
    if connection.family not in _FAMILIES or connection.type != socket.SOCK_STREAM:
        connection.close()
        raise errors.ProtocolViolation("the guest's init passed a socket that is not of TCP")
    connection.setblocking(False)
    return connection


def _writable(connection: socket.socket) -> asyncio.Future[None]:
    """Done when a connection has come about, or has failed."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_writer(connection, ready)
    future.add_done_callback(lambda _: loop.remove_writer(connection))
    return future
