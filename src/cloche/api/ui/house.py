"""What every page of the console has at hand: the engine and its surroundings, who visits, and how a page is made."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from cloche.api.auth import Gatekeeper
from cloche.api.traffic import Traffic
from cloche.api.ui.statics import Statics
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.operations.health import Health
from cloche.gateway.gateway import Gateway
from cloche.model import Principal
from cloche.store.keys import StoredKeys

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "pages"


class Visitor(NamedTuple):
    """Whose session it is."""

    principal: Principal
    csrf: str  # what unsafe requests of this session carry

    @property
    def is_admin(self) -> bool:
        return self.principal.role == "admin"

    @property
    def owner(self) -> str:
        return self.principal.owner

    @property
    def sees(self) -> str | None:
        """Whose things they may see, as the engine takes it: None for all."""
        return None if self.is_admin else self.principal.owner


Handler = Callable[[Request, Visitor], Awaitable[Response]]


class Page(NamedTuple):
    path: str  # below /ui, with parameters as Starlette writes them
    handler: Handler
    methods: tuple[str, ...] = ("GET",)
    admin: bool = False  # whether it is for admins alone


class Place(NamedTuple):
    """A line of the navigation."""

    path: str
    name: str
    key: str  # after `g`, on the keyboard
    admin: bool = False
    more: tuple[str, ...] = ()  # pages that are parts of it

    def has(self, path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") for each in (self.path, *self.more))


NAVIGATION = (
    Place("/playground", "Playground", "p"),
    Place("/sandboxes", "Sandboxes", "s"),
    Place("/requests", "Requests", "r"),
    Place("/templates", "Templates", "t"),
    Place("/network", "Network", "n"),
    Place("/keys", "Keys and usage", "k", more=("/usage", "/audit")),
    Place("/health", "Health", "h"),
)


class House:
    """One for the server. `gatekeeper.keyless` says that nobody logs in here."""

    def __init__(
        self,
        engine: Engine,
        gateway: Gateway,
        gatekeeper: Gatekeeper,
        config: Config,
        *,
        keys: StoredKeys,
        health: Health,
        traffic: Traffic,
    ):
        self.engine = engine
        self.gateway = gateway
        self.gatekeeper = gatekeeper
        self.config = config
        self.keys = keys
        self.health = health
        self.traffic = traffic
        self.statics = Statics()

    def render(
        self, request: Request, visitor: Visitor | None, name: str, *, status_code: int = 200, **values: Any
    ) -> Response:
        """The template of that name, from `pages`, as an answer."""
        places = [place for place in NAVIGATION if visitor is not None and (visitor.is_admin or not place.admin)]
        text = self._templates.get_template(name).render(
            visitor=visitor,
            csrf=visitor.csrf if visitor is not None else "",
            places=places,
            here=request.scope["path"].removeprefix("/ui") or "/",
            keyless=self.gatekeeper.keyless,
            release=_release(),
            **values,
        )
        return HTMLResponse(text, status_code)

    @functools.cached_property
    def _templates(self) -> jinja2.Environment:
        import jinja2  # here: only who opens the console needs it

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        environment.globals["static"] = self.statics.url
        return environment


@functools.cache
def _release() -> str:
    return version("cloche")
