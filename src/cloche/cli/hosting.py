"""The assembled, listening application: for `cloche serve`, and for `cloche chat` where no server runs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.app import ControlSocketApp, ServerApp
from cloche.cli.connection import HttpConnection, HttpConnectionLimiter, WebSocketConnection
from cloche.cli.control import short_path
from cloche.cli.progress import show_progress
from cloche.config import Config, ServerConfig
from cloche.engine.engine import Engine
from cloche.engine.operations.audit import AuditLog
from cloche.engine.operations.gc import collect_periodically
from cloche.engine.operations.health import Health
from cloche.gateway.gateway import Gateway
from cloche.sdk.assembly import assemble_engine
from cloche.store.audit import AuditFileWriter
from cloche.store.gateway import GatewayStore
from cloche.store.keys import StoredKeys, server_secret
from cloche.telemetry import log

# The listening sockets of the server: an address for its clients, and a control socket for its operator.

KEEP_ALIVE_SECONDS = 75  # clients pool connections for longer than uvicorn's 5 s, and then see resets
SHUTDOWN_SECONDS = 10.0  # for answers that go on when the server stops
BACKLOG = 2048
# libuv takes one connection of a listening socket in each turn of the loop, and in a turn a busy server answers a dozen
# requests: the last of many clients would wait for many turns. So it listens on several descriptors of one socket.
LISTENING_DESCRIPTORS = 16


class UvicornListener(uvicorn.Server):
    """A uvicorn server that leaves signals to us."""

    def __init__(self, app: ASGIApp, bound: socket.socket, settings: ServerConfig | None = None):
        super().__init__(
            uvicorn.Config(
                app,
                # The control socket is open only to the user that runs the server, so it needs no limiter.
                # uvicorn accepts any factory of a protocol, but declares a class only.
                http=functools.partial(HttpConnection, crowd=HttpConnectionLimiter() if settings else None),  # type: ignore[arg-type]
                ws=WebSocketConnection,
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(SHUTDOWN_SECONDS),
                ws_per_message_deflate=False,  # a message of a few kilobytes could become one of many megabytes
                ws_ping_timeout=None,  # a client that reads slowly answers late, and must not be cut off for it
                ssl_certfile=(settings and settings.tls_cert) or None,
                ssl_keyfile=(settings and settings.tls_key) or None,
            )
        )
        self._bound = bound
        self._serving: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def start(self) -> None:
        """Takes connections when this returns."""
        doors = [self._bound, *(self._bound.dup() for _ in range(LISTENING_DESCRIPTORS - 1))]  # uvicorn closes them
        self._serving = asyncio.create_task(self.serve(doors))
        while not self.started and not self._serving.done():
            await asyncio.sleep(0.002)
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Takes no more connections, and waits for the answers that are under way."""
        self.should_exit = True
        if self._serving is not None:
            await self._serving


def bind_socket(settings: ServerConfig) -> socket.socket:
    """Binds a socket to the server's address; it does not listen yet. Raises Unavailable or InvalidConfig."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise errors.InvalidConfig(f"server.host = {settings.host!r} is no address of this machine: {error}") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        taken = error.errno == errno.EADDRINUSE
        hint = "another program has it: choose one with --port" if taken else "choose another --host"
        raise errors.Unavailable(f"cannot listen on {settings.host}:{settings.port}: {error}; {hint}") from None
    return bound


def check_tls(settings: ServerConfig) -> None:
    """Raises InvalidConfig unless certificate and key, where given, are valid and match."""
    if not settings.tls_cert:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # an SSLError is one
        raise errors.InvalidConfig(f"cannot use server.tls_cert with server.tls_key: {error}") from None


def server_url(settings: ServerConfig, bound: socket.socket) -> str:
    """The URL of the server, with the actual port."""
    scheme = "https" if settings.tls_cert else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{bound.getsockname()[1]}"


def local_url(url: str) -> str:
    """The URL for a client on this machine, where the server listens on all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


@contextlib.contextmanager
def open_control_socket(path: Path) -> Iterator[socket.socket]:
    """The control socket, open to its owner alone from its first moment; its file is removed in the end."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.fchmod(bound.fileno(), 0o600)  # the mode with which `bind` creates the file
    with short_path(path) as short:
        bound.bind(short)
    try:
        yield bound
    finally:
        bound.close()
        path.unlink(missing_ok=True)


def silence_uvicorn() -> None:
    """Turns uvicorn's errors into events of ours. A cut-off response is not one: it is how we report a failure."""
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.handlers[:] = [_UvicornLogHandler()]
    logging.getLogger("uvicorn.access").disabled = True


class _UvicornLogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        what = record.getMessage()
        # A WebSocket that is answered with a status has no handshake either.
        if re.search("without (completing|starting) (response|handshake)", what):
            return
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
        log.error("http.failed", what=what, error=kind)


@contextlib.asynccontextmanager
async def open_audit_log(audit_log: AuditLog, config: Config, instance: str) -> AsyncIterator[None]:
    """Keeps the audit log open until the very end."""
    audit_log.open(AuditFileWriter(Path(config.data_dir, "audit"), instance, config.audit.max_bytes), config.audit)
    try:
        yield
    finally:
        await audit_log.aclose()


class HostedServer(NamedTuple):
    """A listening application with its engine."""

    app: ServerApp
    engine: Engine
    health: Health
    control: Path  # its control socket


@contextlib.asynccontextmanager
async def host_server(
    config: Config,
    keys: StoredKeys,
    gatekeeper: Gatekeeper,
    *,
    bound: socket.socket | None = None,
    private: str | None = None,
) -> AsyncIterator[HostedServer]:
    """Listens at its control socket, and at `bound` for clients.

    With a `private` name for the control socket, no other command finds it; such a server is for one user, so its
    nursery imports nothing in advance. Contexts are left in reverse order: sandboxes end while their last events
    can still be sent. Raises the errors of `assemble_engine`, and Unavailable.
    """
    store = Path(config.data_dir)
    async with contextlib.AsyncExitStack() as stack:
        report = stack.enter_context(show_progress("building the template"))
        engine = assemble_engine(config, report, preload=private is None)
        health = Health(engine, config.server.canary_seconds)
        kept = GatewayStore(store, config.gateway.stored_days, config.librechat.files_hours)
        gateway_store = await stack.enter_async_context(kept)
        gateway = Gateway(engine, config, gateway_store, gateway_store.steps.put)
        stack.push_async_callback(gateway.aclose)
        secret = server_secret(store / "secret")
        app = ServerApp(engine, gateway, gatekeeper, config, secret, keys=keys, health=health)
        await stack.enter_async_context(open_audit_log(engine.audit_log, config, engine.instance.name))
        path = engine.control_socket.with_name(private) if private else engine.control_socket
        listeners = [UvicornListener(ControlSocketApp(app), stack.enter_context(open_control_socket(path)))]
        if bound is not None:
            listeners.append(UvicornListener(app, bound, config.server))
        for listener in listeners:
            stack.push_async_callback(listener.stop)
        await stack.enter_async_context(engine)
        if private is None:
            await stack.enter_async_context(collect_periodically(engine))
        stack.push_async_callback(gateway.stop)
        stack.push_async_callback(app.mcp.aclose)
        await gateway.start()
        for listener in listeners:
            await listener.start()
        yield HostedServer(app, engine, health, path)
        for listener in listeners:
            listener.should_exit = True  # no new connections from here on
