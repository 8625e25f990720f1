"""A sandbox's network: its policy, its door, and the log of allowed and refused connections."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import TYPE_CHECKING

from cloche import errors
from cloche.engine.executions.tool_server import open_guest_listener
from cloche.engine.sandboxes.init_client import InitClient
from cloche.guest.paths import DOOR_PORT
from cloche.network_policy import NetworkEntry, NetworkPolicy

if TYPE_CHECKING:
    from cloche.egress import EgressProxy
    from cloche.egress.authority import CertificateAuthority
    from cloche.egress.door import SandboxEgress

# CA certificates for programs in a sandbox with a network: this host's, and for secrets the sandbox's own.

# One place for the whole life of a sandbox, so that a secret that is added later needs no other environment.
CA_BUNDLE_PATH = "/run/cloche/ca.pem"
_BUNDLE_VARIABLES = dict.fromkeys(
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
    CA_BUNDLE_PATH,
)
TRUST_ENV = {**_BUNDLE_VARIABLES, "SYSTEM_WGETRC": "/etc/cloche-wgetrc"}  # wget: see isolation/rootfs.py
MAX_CA_BUNDLE_BYTES = 16 << 20
_CA_BUNDLE_PATHS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_SEEN_INSIDE = ("/etc/ssl/certs/", "/etc/ca-certificates/", "/usr/")  # as in isolation/rootfs.py


async def write_ca_bundle(guest: InitClient, own: bytes = b"") -> None:
    """`own` is the certificate of the sandbox's own authority. Raises NoSpace, FileError, Gone."""
    system = system_ca_bundle()
    inside = system is not None and system.startswith(_SEEN_INSIDE)
    content = b"" if inside or system is None else _read_ca_bundle(system)
    try:
        await guest.request("trust", content + own, path=CA_BUNDLE_PATH, system=system if inside else "")
    except errors.NoSpace:
        raise errors.NoSpace(
            "the sandbox has no space left for the certificates that its network needs: remove some files first"
        ) from None


def system_ca_bundle() -> str | None:
    """The file with the authorities that this host trusts; None where it has no such file."""
    usual = ssl.get_default_verify_paths().cafile  # that of SSL_CERT_FILE, where it is set
    found = next((place for place in (usual, *_CA_BUNDLE_PATHS) if place and os.path.isfile(place)), None)
    return None if found is None else os.path.realpath(found)


def _read_ca_bundle(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_CA_BUNDLE_BYTES) + b"\n"


PROXY_URL = f"http://127.0.0.1:{DOOR_PORT}"
NO_PROXY = "localhost,127.0.0.1,0.0.0.0,::1,cloche"  # no networks: many programs know only addresses
PROXY_ENV = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), PROXY_URL),
    **dict.fromkeys(
        ("ALL_PROXY", "all_proxy"), PROXY_URL
    ),  # httpx, with which many talk to models, fails at socks5h://
    **dict.fromkeys(("NO_PROXY", "no_proxy"), NO_PROXY),
    "NODE_USE_ENV_PROXY": "1",  # so that Node's own fetch heeds them
}


def network_environment(policy: NetworkPolicy) -> dict[str, str]:
    """Environment variables for a network: the proxy, the CA bundle, and the placeholders of secrets."""
    if not policy.allows_something:
        return {}
    placeholders = {secret.name: f"${secret.name}" for secret in policy.secrets if secret.name is not None}
    return {**placeholders, **PROXY_ENV, **TRUST_ENV}


class SandboxNetwork:
    """A policy that allows nothing needs no door. `listener`: the door's, where it was made in advance."""

    def __init__(self, guest: InitClient, policy: NetworkPolicy, listener: socket.socket | None = None):
        self._guest = guest
        self._policy = policy
        self._listener = listener
        self._door: SandboxEgress | None = None
        self._has_bundle = False
        self._closed = False
        self._opening = asyncio.Lock()

    @property
    def policy(self) -> NetworkPolicy:
        return self._policy

    @property
    def log(self) -> list[NetworkEntry]:
        """The connections that programs tried, the oldest first, then those that are still open."""
        return [] if self._door is None else self._door.log

    @property
    def dropped(self) -> int:
        """The number of entries that were dropped from the log."""
        return 0 if self._door is None else self._door.journal.dropped

    @property
    def is_open(self) -> bool:
        return self._door is not None

    async def open(self, egress: EgressProxy, *, sandbox: str, owner: str) -> None:
        """Raises InvalidRequest where a program inside has the door's port, Gone."""
        async with self._opening:
            if self._door is not None:
                return
            listener = self._listener or await open_door_listener(self._guest)
            self._listener = None
            if self._closed:  # the sandbox ended while its init answered
                listener.close()
                raise errors.SandboxLost("the sandbox ended before its network was opened")
            self._door = egress.open(listener, self._policy, sandbox=sandbox, owner=owner)
        await self.install_certificates(self._policy)

    async def install_certificates(self, policy: NetworkPolicy) -> None:
        """Writes the CA bundle that the policy needs: with secrets, also the proxy's own. Raises NoSpace, Gone."""
        async with self._opening:
            if self._door is None or self._door.authority is not None or not policy.allows_something:
                return
            if policy.secrets:
                self._door.authority = await self._create_authority()
            elif not self._has_bundle:
                await write_ca_bundle(self._guest)
            self._has_bundle = True

    async def _create_authority(self) -> CertificateAuthority:
        from cloche.egress.authority import CertificateAuthority

        authority = await asyncio.to_thread(CertificateAuthority)
        await write_ca_bundle(self._guest, authority.certificate_pem)
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


async def open_door_listener(guest: InitClient) -> socket.socket:
    """The listener of a sandbox's door, for us to accept on. Raises InvalidRequest where its port is taken, Gone."""
    try:
        return (await open_guest_listener(guest, DOOR_PORT)).socket
    except errors.FileError:
        raise errors.InvalidRequest(
            f"a program in the sandbox listens on port {DOOR_PORT}, which its network needs: end it first"
        ) from None


# Connections to programs that listen inside a sandbox.

CONNECT_SECONDS = 5.0
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


async def listening_ports(guest: InitClient, health_port: int | None) -> list[int]:
    """The ports on which programs listen, but for the two that are the host's. Raises ProtocolViolation, Gone."""
    told = (await guest.request("port_list")).ok.get("ports")
    if not isinstance(told, list) or not all(type(each) is int and 0 < each < 65536 for each in told):
        raise errors.ProtocolViolation("the guest's init sent no list of ports")
    return [port for port in told if port not in (DOOR_PORT, health_port)]


async def connect_port(guest: InitClient, port: int) -> socket.socket:
    """A connected, non-blocking socket. Raises PortNotOpen, InvalidRequest for an invalid port, Gone."""
    if port == DOOR_PORT:  # a client of the door acts as the sandbox, and uses its secrets
        raise errors.PortNotOpen(f"port {port} is the door of the sandbox's network, which opens from inside only")
    guest.noted("port.reached", about=str(port))
    for six in (False, True):  # most programs listen on IPv4, or on both
        try:
            return await _connect_family(guest, port, six)
        except errors.PortNotOpen:
            continue
    raise errors.PortNotOpen(f"nothing listens on port {port} of this sandbox")


async def _connect_family(guest: InitClient, port: int, six: bool) -> socket.socket:
    _, fd = await guest.request_descriptor("port_connect", port=port, six=six)
    if not guest.cell.passes_descriptors:
        relayed = socket.socket(fileno=fd)
        relayed.setblocking(False)
        return relayed
    connection = _check_tcp_socket(fd)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await guest.wait(_wait_writable(connection))
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise errors.PortNotOpen(os.strerror(error))
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise errors.PortNotOpen(f"port {port} is listened on, but no connection was accepted") from None
        raise
    return connection


def _check_tcp_socket(fd: int) -> socket.socket:
    """Raises ProtocolViolation unless the guest passed a TCP socket."""
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


def _wait_writable(connection: socket.socket) -> asyncio.Future[None]:
    """Done when a connection has come about, or has failed."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_writer(connection, ready)
    future.add_done_callback(lambda _: loop.remove_writer(connection))
    return future
