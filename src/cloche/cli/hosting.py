"""The server's application, put together and listening: for `cloche serve`, and for `cloche chat` where none runs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from cloche.api.auth import Gatekeeper
from cloche.app import Server, Trusted
from cloche.cli.listening import Listener, control_socket
from cloche.cli.progress import showing
from cloche.config import Config
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
