"""The server's application, put together and listening: for `cloche serve`, and for `cloche chat` where none runs."""

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
from cloche.app import Server, Trusted
from cloche.cli.connection import Connection, Crowd, Socket
from cloche.cli.control import short_path
from cloche.cli.progress import showing
from cloche.config import Config
from cloche.config import Server as ServerConfig
from cloche.engine.engine import Engine
from cloche.engine.operations.audit import Trail
from cloche.engine.operations.gc import collecting
from cloche.engine.operations.health import Health
from cloche.gateway.gateway import Gateway
from cloche.sdk.assembly import assemble
from cloche.store.audit import AuditFiles
from cloche.store.gateway import Shelf
from cloche.store.keys import StoredKeys
from cloche.store.secret import server_secret
from cloche.telemetry import log

# Where the server listens: an address for its clients, and a control socket for whoever runs it.

KEEP_ALIVE_SECONDS = 75  # clients pool connections for longer than uvicorn's 5 s, and then see resets
LEAVE_SECONDS = 10.0  # for answers that go on when the server stops
BACKLOG = 2048
# libuv takes one connection of a listening socket in each turn of the loop, and in a turn a busy server answers a dozen
# requests: who came last of a crowd would wait for many turns. So it listens by so many descriptors of the same socket.
DOORS = 16


class Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to us."""

    def __init__(self, app: ASGIApp, bound: socket.socket, settings: ServerConfig | None = None):
        super().__init__(
            uvicorn.Config(
                app,
                # The control socket is open to whoever runs the server, and to nobody else.
                # uvicorn takes whatever makes a protocol, and declares a class only.
                http=functools.partial(Connection, crowd=Crowd() if settings else None),  # type: ignore[arg-type]
                ws=Socket,
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(LEAVE_SECONDS),
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
        doors = [self._bound, *(self._bound.dup() for _ in range(DOORS - 1))]  # uvicorn closes them
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


def bind(settings: ServerConfig) -> socket.socket:
    """A socket at the server's address, which does not listen yet. Raises Unavailable or InvalidConfig."""
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
    """Raises InvalidConfig unless certificate and key, where given, are ones and fit together."""
    if not settings.tls_cert:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # an SSLError is one
        raise errors.InvalidConfig(f"cannot use server.tls_cert with server.tls_key: {error}") from None


def url_of(settings: ServerConfig, bound: socket.socket) -> str:
    """Where the server listens, with the port that it got."""
    scheme = "https" if settings.tls_cert else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{bound.getsockname()[1]}"


def reachable(url: str) -> str:
    """The same for a client on this machine, where the server listens on all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


@contextlib.contextmanager
def control_socket(path: Path) -> Iterator[socket.socket]:
    """The control socket, open to its owner alone from its first moment; its file is removed in the end."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.fchmod(bound.fileno(), 0o600)  # what `bind` makes the file with
    with short_path(path) as short:
        bound.bind(short)
    try:
        yield bound
    finally:
        bound.close()
        path.unlink(missing_ok=True)


def silence_uvicorn() -> None:
    """Its errors become events of ours. An answer that was cut off is no error: it is how we say that one failed."""
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.handlers[:] = [_Events()]
    logging.getLogger("uvicorn.access").disabled = True


class _Events(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        what = record.getMessage()
        # A WebSocket that is answered with a status has no handshake either.
        if re.search("without (completing|starting) (response|handshake)", what):
            return
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
        log.error("http.failed", what=what, error=kind)


@contextlib.asynccontextmanager
async def auditing(trail: Trail, config: Config, instance: str) -> AsyncIterator[None]:
    """What is done is written down, to the very end."""
    trail.open(AuditFiles(Path(config.data_dir, "audit"), instance, config.audit.max_bytes), config.audit)
    try:
        yield
    finally:
        await trail.aclose()


class Hosted(NamedTuple):
    """What listens, and what is behind it."""

    app: Server
    engine: Engine
    health: Health
    control: Path  # its control socket


@contextlib.asynccontextmanager
async def hosted(
    config: Config,
    keys: StoredKeys,
    gatekeeper: Gatekeeper,
    *,
    bound: socket.socket | None = None,
    private: str | None = None,
) -> AsyncIterator[Hosted]:
    """Listens at its control socket, and at `bound` for clients.

    With a `private` name for the control socket, no other command finds it; such a server is for one user, so its
    nursery imports nothing in advance. What is entered last is left first: sandboxes end while their last words can
    still be sent. Raises what `assemble` does, and Unavailable.
    """
    store = Path(config.data_dir)
    async with contextlib.AsyncExitStack() as stack:
        report = stack.enter_context(showing("building the template"))
        engine = assemble(config, report, preload=private is None)
        health = Health(engine, config.server.canary_seconds)
        kept = Shelf(store, config.gateway.stored_days, config.librechat.files_hours)
        shelf = await stack.enter_async_context(kept)
        gateway = Gateway(engine, config, shelf, shelf.steps.put)
        stack.push_async_callback(gateway.aclose)
        secret = server_secret(store / "secret")
        app = Server(engine, gateway, gatekeeper, config, secret, keys=keys, health=health)
        await stack.enter_async_context(auditing(engine.trail, config, engine.instance.name))
        path = engine.control_socket.with_name(private) if private else engine.control_socket
        listeners = [Listener(Trusted(app), stack.enter_context(control_socket(path)))]
        if bound is not None:
            listeners.append(Listener(app, bound, config.server))
        for listener in listeners:
            stack.push_async_callback(listener.stop)
        await stack.enter_async_context(engine)
        if private is None:
            await stack.enter_async_context(collecting(engine))
        stack.push_async_callback(gateway.stop)
        stack.push_async_callback(app.mcp.aclose)
        await gateway.start()
        for listener in listeners:
            await listener.start()
        yield Hosted(app, engine, health, path)
        for listener in listeners:
            listener.should_exit = True  # no new connections from here on
