"""Every route of every dialect, from the routers themselves: a new one cannot be forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from starlette.routing import Route, Router, WebSocketRoute

from cloche.api.auth import Gatekeeper
from cloche.app import LOCAL_ADMIN, ServerApp
from cloche.config import Config
from cloche.engine.operations.health import Health
from cloche.gateway.gateway import Gateway
from cloche.sdk.assembly import assemble_engine
from cloche.store.database import Database
from cloche.store.gateway import GatewayStore
from cloche.store.keys import StoredKeys

WEBSOCKET = "WEBSOCKET"
ANY = "OPTIONS"  # what a route is tried with that takes every method


class Known(NamedTuple):
    """`plane` is where the router was found; `path` is as it is written there."""

    plane: str
    method: str
    path: str

    @property
    def name(self) -> str:
        return f"{self.plane} {self.method} {self.path}"


def all_routes(place: Path) -> list[Known]:
    """Of a server that is put together as `cloche serve` does it, and never started."""
    config = Config(data_dir=str(place))
    engine = assemble_engine(config)
    try:
        keys, gateway_store = StoredKeys(Database(place / "store.sqlite3"), None), GatewayStore(place, 1, 1)
        gateway, health = Gateway(engine, config, gateway_store, gateway_store.steps.put), Health(engine, 1.0)
        server = ServerApp(engine, gateway, Gatekeeper(keys, LOCAL_ADMIN), config, b"-" * 32, keys=keys, health=health)
        found = [each for plane, router in _routers(server, "server", set()) for each in _of(plane, router)]
        found = [each._replace(plane="ui") if each.path.startswith("/ui") else each for each in found]
        return list(dict.fromkeys(found))  # one may be in several routers, so that it is found sooner
    finally:
        engine.instance.close()


def _of(plane: str, router: Router) -> Iterator[Known]:
    for route in router.routes:
        if isinstance(route, WebSocketRoute):
            yield Known(plane, WEBSOCKET, route.path)
        elif isinstance(route, Route):
            for method in sorted((route.methods or {ANY}) - {"HEAD"}):  # which GET answers, without a body
                yield Known(plane, method, route.path)
        else:
            raise AssertionError(f"{plane}: a {type(route).__name__} is a new kind of route: say how it is walked")


def _routers(thing: Any, plane: str, seen: set[int]) -> Iterator[tuple[str, Router]]:
    """Whatever a dialect calls the place where it keeps them."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Router):
        yield plane, thing
    elif isinstance(thing, dict):
        for name, each in thing.items():
            yield from _routers(each, str(name) if isinstance(name, (str, int)) else plane, seen)
    elif isinstance(thing, (list, tuple)):
        for each in thing:
            yield from _routers(each, plane, seen)
    elif type(thing).__module__.startswith(("cloche.api", "cloche.app", "cloche.mcp")) and hasattr(thing, "__dict__"):
        for name, each in vars(thing).items():
            yield from _routers(each, {"_e2b": "e2b", "mcp": "mcp"}.get(name, plane), seen)
