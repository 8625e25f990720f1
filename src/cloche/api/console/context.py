"""What every page of the console has at hand: the engine and its surroundings, who visits, and how a page is made."""

from __future__ import annotations

import functools
import gzip
import math
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.console.statics import Statics
from cloche.api.http import whole_body
from cloche.api.requests import Traffic, id_of
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.operations.health import Health
from cloche.gateway.gateway import Gateway
from cloche.model import KIB, Principal, Struct
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


# What a page's own script asks for.

T = TypeVar("T", bound=Struct)

MAX_ASKED_BYTES = 128 * KIB
PACKING = 5  # of 9: most of the gain, in a millisecond for 200 KB


def is_partial(request: Request) -> bool:
    """Whether htmx asks, for a part of the page that it has."""
    return "hx-request" in request.headers and "hx-history-restore-request" not in request.headers


def packed(request: Request, response: Response) -> Response:
    """The part of a page that htmx asks for, compressed: a list that is sent every few seconds has much alike in it.

    Not for whole pages, which have a session's token in them: what is repeated beside it would show in the length.
    """
    if is_partial(request) and "gzip" in request.headers.get("accept-encoding", ""):
        response.body = gzip.compress(bytes(response.body), PACKING, mtime=0)
        response.headers["content-length"] = str(len(response.body))
        response.headers["content-encoding"] = "gzip"
    return response


async def body_of(request: Request, kind: type[T]) -> T:
    """Raises InvalidRequest, TooLarge."""
    try:
        return msgspec.json.decode(await whole_body(request, MAX_ASKED_BYTES), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"the request makes no sense: {error}") from None


# What an admin looks at in the console, told to the audit log: pages that have others' things in them.

Noted = Callable[..., None]  # as `Trail.note`

TOLD = frozenset({"sandboxes", "requests", "network", "keys", "usage", "audit", "templates"})
AGAIN_SECONDS = 900.0  # a page that is open asks every few seconds, and is told of once in so many
MOST = 10_000  # that are remembered


class Looks:
    def __init__(self, noted: Noted, clock: Callable[[], float] = time.monotonic):
        self._noted = noted
        self._clock = clock
        self._told: dict[tuple[str, str, str], float] = {}  # when, by session, page and id; the oldest first

    def note(self, request: Request, visitor: Visitor, page: Page) -> None:
        """They were shown that page. Whether they asked for all of it or for a part is no matter."""
        noun, id = page.path.split("/")[1], id_of(request.scope)
        what, now = (visitor.csrf, page.path, id), self._clock()
        if not visitor.is_admin or request.method != "GET" or noun not in TOLD:
            return
        if now - self._told.get(what, -math.inf) < AGAIN_SECONDS:
            return
        self._told.pop(what, None)
        if len(self._told) >= MOST:
            del self._told[next(iter(self._told))]
        self._told[what] = now
        self._noted(f"admin.{noun}.read", visitor.owner, id=id, about=f"GET /ui{page.path}")
