"""The state that all pages of the console share: engine, gateway, visitors, and the rendering of templates."""

from __future__ import annotations

import functools
import gzip
import math
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.console.statics import ConsoleStatics
from cloche.api.dialect import InvalidJson, decode_json
from cloche.api.http import read_decoded
from cloche.api.requests import RequestTracker, audited_id_of
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.operations.health import Health
from cloche.gateway.gateway import Gateway
from cloche.model import KIB, Principal, Struct
from cloche.store.keys import StoredKeys

if TYPE_CHECKING:
    import jinja2

PAGES_DIRECTORY = Path(__file__).parent / "pages"


class ConsoleVisitor(NamedTuple):
    """The principal of a session, and its CSRF token."""

    principal: Principal
    csrf: str  # what unsafe requests of this session carry

    @property
    def is_admin(self) -> bool:
        return self.principal.role == "admin"

    @property
    def owner(self) -> str:
        return self.principal.owner

    @property
    def visible_owner(self) -> str | None:
        """The owner of the visible objects, as the engine takes it: None for all."""
        return None if self.is_admin else self.principal.owner


PageHandler = Callable[[Request, ConsoleVisitor], Awaitable[Response]]


class ConsolePage(NamedTuple):
    path: str  # below /ui, with parameters as Starlette writes them
    handler: PageHandler
    methods: tuple[str, ...] = ("GET",)
    admin: bool = False  # whether it is for admins alone


class NavigationEntry(NamedTuple):
    """An entry of the navigation."""

    path: str
    name: str
    key: str  # after `g`, on the keyboard
    admin: bool = False
    more: tuple[str, ...] = ()  # pages that are parts of it

    def has(self, path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") for each in (self.path, *self.more))


NAVIGATION = (
    NavigationEntry("/playground", "Playground", "p"),
    NavigationEntry("/sandboxes", "Sandboxes", "s"),
    NavigationEntry("/requests", "Requests", "r"),
    NavigationEntry("/templates", "Templates", "t"),
    NavigationEntry("/network", "Network", "n"),
    NavigationEntry("/keys", "Keys and usage", "k", more=("/usage", "/audit")),
    NavigationEntry("/health", "Health", "h"),
)


class ConsoleContext:
    """One for the server. With `gatekeeper.keyless` there are no logins."""

    def __init__(
        self,
        engine: Engine,
        gateway: Gateway,
        gatekeeper: Gatekeeper,
        config: Config,
        *,
        keys: StoredKeys,
        health: Health,
        traffic: RequestTracker,
    ):
        self.engine = engine
        self.gateway = gateway
        self.gatekeeper = gatekeeper
        self.config = config
        self.keys = keys
        self.health = health
        self.traffic = traffic
        self.statics = ConsoleStatics()

    def render(
        self, request: Request, visitor: ConsoleVisitor | None, name: str, *, status_code: int = 200, **values: Any
    ) -> Response:
        """Renders the template of that name, from `pages`, as a response."""
        places = [place for place in NAVIGATION if visitor is not None and (visitor.is_admin or not place.admin)]
        text = self._jinja_environment.get_template(name).render(
            visitor=visitor,
            csrf=visitor.csrf if visitor is not None else "",
            places=places,
            here=request.scope["path"].removeprefix("/ui") or "/",
            keyless=self.gatekeeper.is_keyless,
            release=_cloche_version(),
            **values,
        )
        return HTMLResponse(text, status_code)

    @functools.cached_property
    def _jinja_environment(self) -> jinja2.Environment:
        import jinja2  # here: only the console needs it

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(PAGES_DIRECTORY), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        environment.globals["static"] = self.statics.url
        return environment


@functools.cache
def _cloche_version() -> str:
    return version("cloche")


# Requests of the pages' own scripts: partial pages, compression and JSON bodies.

T = TypeVar("T", bound=Struct)

MAX_BODY_BYTES = 128 * KIB
GZIP_LEVEL = 5  # of 9: most of the gain, in a millisecond for 200 KB


def is_partial(request: Request) -> bool:
    """Whether htmx requests a part of a page that it already shows."""
    return "hx-request" in request.headers and "hx-history-restore-request" not in request.headers


def compress_partial(request: Request, response: Response) -> Response:
    """Compresses the part of a page that htmx requests: a list sent every few seconds is repetitive.

    Whole pages are not compressed: they hold the session's token, and repeated text beside it would show in the
    length.
    """
    if is_partial(request) and "gzip" in request.headers.get("accept-encoding", ""):
        response.body = gzip.compress(bytes(response.body), GZIP_LEVEL, mtime=0)
        response.headers["content-length"] = str(len(response.body))
        response.headers["content-encoding"] = "gzip"
    return response


async def decode_body(request: Request, kind: type[T]) -> T:
    """Raises InvalidRequest, TooLarge."""
    try:
        return await read_decoded(request, lambda body: decode_json(body, kind), MAX_BODY_BYTES)
    except InvalidJson as error:
        raise errors.InvalidRequest(f"invalid request: {error.detail}") from None


# Audit records of the pages that an admin reads in the console, if they show other owners' objects.

RecordAudit = Callable[..., None]  # as `Trail.note`

AUDITED_PAGES = frozenset({"sandboxes", "requests", "network", "keys", "usage", "audit", "templates"})
REPEAT_SECONDS = 900.0  # an open page asks every few seconds, and gets one audit line in so many
MAX_REMEMBERED_READS = 10_000  # that are remembered


class AdminReadAudit:
    def __init__(self, noted: RecordAudit, clock: Callable[[], float] = time.monotonic):
        self._noted = noted
        self._clock = clock
        self._told: dict[tuple[str, str, str], float] = {}  # when, by session, page and id; the oldest first

    def record(self, request: Request, visitor: ConsoleVisitor, page: ConsolePage) -> None:
        """Records that the visitor was shown that page, whole or in part."""
        noun, id = page.path.split("/")[1], audited_id_of(request.scope)
        what, now = (visitor.csrf, page.path, id), self._clock()
        if not visitor.is_admin or request.method != "GET" or noun not in AUDITED_PAGES:
            return
        if now - self._told.get(what, -math.inf) < REPEAT_SECONDS:
            return
        self._told.pop(what, None)
        if len(self._told) >= MAX_REMEMBERED_READS:
            del self._told[next(iter(self._told))]
        self._told[what] = now
        self._noted(f"admin.{noun}.read", visitor.owner, id=id, about=f"GET /ui{page.path}")
