"""Whom `cloche chat` speaks to: the server that runs, else one of its own, in a thread, on a private socket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec

from cloche.cli.control import client_of, sockets
from cloche.config import Config, Pool, refuse_networks, refuse_upstreams

PRIVATE_SOCKET = "chat.sock"


@contextlib.contextmanager
def reached(config: Config, *, alone: bool = False) -> Iterator[httpx2.Client]:
    """A client of a server. Raises InvalidConfig, and what starting one does."""
    found = [] if alone else sockets(config)
    if found:
        with client_of(found[0]) as client:
            yield client
        return
    refuse_upstreams(config.origins)
    refuse_networks(config.origins)
    with _own(config) as socket, client_of(socket) as client:
        yield client


@contextlib.contextmanager
def _own(config: Config) -> Iterator[Path]:
    """The control socket of a server for us alone."""
    from cloche.api.auth import Gatekeeper  # here, and below: with a server, none of this is needed
    from cloche.app import LOCAL_ADMIN
    from cloche.cli.hosting import hosted, silence_uvicorn
    from cloche.sdk.loop_thread import LoopThread
    from cloche.store.database import Database
    from cloche.store.keys import StoredKeys

    silence_uvicorn()
    alone = msgspec.structs.replace(config, pool=Pool(ready=0))  # one sandbox: none need wait in advance
    keys = StoredKeys(Database(Path(config.data_dir) / "store.sqlite3"))
    stack = contextlib.AsyncExitStack()

    async def open_() -> Path:
        await stack.enter_async_context(keys)
        host = await stack.enter_async_context(
            hosted(alone, keys, Gatekeeper(keys, LOCAL_ADMIN), private=PRIVATE_SOCKET)
        )
        return host.control

    thread = LoopThread("cloche-chat", "the chat has ended")
    try:
        yield thread.call(open_)
    finally:
        thread.call(stack.aclose)
        thread.stop()
