"""The server behind a command of one user: the one that runs on this machine, else its own, in a thread.

A lazy-import border: the help of these commands loads none of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cloche.cli.control import control_sockets
from cloche.config import Config, PoolConfig, refuse_local_networks, refuse_local_upstreams

PRIVATE_SOCKET_NAME = "private.sock"


@contextlib.contextmanager
def find_server(config: Config, *, alone: bool = False) -> Iterator[Path]:
    """The control socket of a server. Raises InvalidConfig, and the errors of starting one."""
    found = [] if alone else control_sockets(config)
    if found:
        yield found[0]
        return
    refuse_local_upstreams(config.origins)
    refuse_local_networks(config.origins)
    with _start_own_server(config) as socket:
        yield socket


@contextlib.contextmanager
def _start_own_server(config: Config) -> Iterator[Path]:
    """The control socket of a new server for this process alone."""
    from cloche.api.auth import Gatekeeper  # here, and below: with a server, none of this is needed
    from cloche.app import LOCAL_ADMIN
    from cloche.cli.hosting import host_server, silence_uvicorn
    from cloche.sdk.loop_thread import LoopThread
    from cloche.store.database import Database
    from cloche.store.keys import StoredKeys

    silence_uvicorn()
    alone = msgspec.structs.replace(config, pool=PoolConfig(ready=0))  # one sandbox: none need wait in advance
    keys = StoredKeys(Database(Path(config.data_dir) / "store.sqlite3"))
    stack = contextlib.AsyncExitStack()

    async def open_() -> Path:
        await stack.enter_async_context(keys)
        host = await stack.enter_async_context(
            host_server(alone, keys, Gatekeeper(keys, LOCAL_ADMIN), private=PRIVATE_SOCKET_NAME)
        )
        return host.control

    thread = LoopThread("cloche-server", "its server has ended")
    try:
        yield thread.call(open_)
    finally:
        thread.call(stack.aclose)
        thread.stop()
