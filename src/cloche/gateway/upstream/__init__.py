"""Upstreams: whoever has a model. A leg is one call of one."""

from __future__ import annotations

import asyncio
import fnmatch
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from cloche import errors
from cloche.gateway.events import Happening
from cloche.gateway.items import Item
from cloche.model import Struct

ECHO = "cloche/echo"
MAX_ITEMS = 1000  # of one leg


class Call(Struct):
    """What an upstream is asked in one leg."""

    model: str
    items: list[Item]  # the whole transcript
    instructions: str | None = None
    tools: list[Item] = []
    tool_choice: Any = "auto"
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that the upstream has itself
    options: dict[str, Any] = {}
    request_id: str = ""  # for the upstream's own logs


class Upstream(Protocol):
    """A server with models, spoken to in its own protocol."""

    vision: bool

    def leg(self, call: Call) -> AsyncGenerator[Happening, None]:
        """The model's answer as it comes; the last is `Finished`. Whoever stops before the end closes it.

        Raises UpstreamFailed: before the first happening if the upstream refused.
        """

    async def models(self) -> Item:
        """What its server answers who asks for its models. Raises UpstreamFailed."""

    async def aclose(self) -> None: ...


class Route(Struct):
    """Which models are where."""

    patterns: tuple[str, ...]
    upstream: Any  # an Upstream
    renamed: bool = False  # the upstream is sent another name, so its list says nothing of these


class Upstreams:
    """All that are configured, and `cloche/echo`."""

    def __init__(self, routes: Sequence[Route]):
        self.routes = list(routes)

    def find(self, model: str) -> Upstream:
        """Raises ModelNotFound."""
        found: Upstream = self.route(model).upstream
        return found

    def route(self, model: str) -> Route:
        """Raises ModelNotFound."""
        for route in self.routes:
            if any(fnmatch.fnmatchcase(model, pattern) for pattern in route.patterns):
                return route
        raise errors.ModelNotFound(
            f"The model '{model[:200]}' does not exist here. Models are {', '.join(self.names)}: an operator adds "
            "others as [[upstream]] in cloche.toml"
        )

    @property
    def names(self) -> list[str]:
        """The patterns that models match, in the order in which they are tried."""
        return [pattern for route in self.routes for pattern in route.patterns]

    async def aclose(self) -> None:
        for route in self.routes:
            await route.upstream.aclose()


# Which models there are: those that are named, and where a pattern stands for many, those that the upstream lists.

FRESH_SECONDS = 60.0
MAX_MODELS = 10_000  # of one upstream
MAX_NAME = 500


class Model(Struct):
    name: str
    created: int = 0  # seconds since 1970
    owner: str = "upstream"


class ModelList:
    """Asks upstreams at most once in a while, all at once. One that does not answer lists nothing."""

    def __init__(self, upstreams: Upstreams):
        self._upstreams = upstreams
        self._asking = asyncio.Lock()
        self._listed: list[list[Model]] = []  # by route
        self._asked_at = float("-inf")

    async def all(self) -> list[Model]:
        """In the order in which patterns are tried, each name once."""
        found: dict[str, Model] = {}
        for route, listed in zip(self._upstreams.routes, await self._lists(), strict=True):
            for model in _models_of(route, listed):
                if self._upstreams.route(model.name) is route:
                    found.setdefault(model.name, model)
        return list(found.values())

    async def get(self, name: str) -> Model:
        """Raises ModelNotFound, also for a name that a pattern matches if its upstream lists others only."""
        route = self._upstreams.route(name)
        lists = await self._lists()
        listed = lists[self._upstreams.routes.index(route)]
        known = {model.name: model for model in _models_of(route, listed)}
        if name in known:
            return known[name]
        if listed:
            raise errors.ModelNotFound(f"The model '{name[:200]}' does not exist")
        return Model(name=name)

    async def _lists(self) -> list[list[Model]]:
        async with self._asking:
            if time.monotonic() - self._asked_at > FRESH_SECONDS:
                self._listed = list(await asyncio.gather(*map(_listed, self._upstreams.routes)))
                self._asked_at = time.monotonic()
        return self._listed


async def _listed(route: Route) -> list[Model]:
    """What an upstream says it has."""
    if route.renamed or not any(_is_pattern(pattern) for pattern in route.patterns):
        return []
    try:
        return models_in(await route.upstream.models())
    except errors.UpstreamFailed:
        return []


def models_in(body: Item) -> list[Model]:
    """The models in the answer of an upstream, as far as they make sense."""
    data = body.get("data")
    return [_model(each) for each in (data if isinstance(data, list) else [])[:MAX_MODELS] if _has_name(each)]


def _models_of(route: Route, listed: Sequence[Model]) -> list[Model]:
    known = {model.name: model for model in listed}
    found = []
    for pattern in route.patterns:
        if _is_pattern(pattern):
            found += [model for model in listed if fnmatch.fnmatchcase(model.name, pattern)]
        else:
            found.append(known.get(pattern, Model(name=pattern, owner="cloche" if pattern == ECHO else "upstream")))
    return found


def _is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[")


def _has_name(model: Any) -> bool:
    return isinstance(model, dict) and isinstance(model.get("id"), str) and 0 < len(model["id"]) <= MAX_NAME


def _model(model: Item) -> Model:
    created, owner = model.get("created"), model.get("owned_by")
    return Model(
        name=model["id"],
        created=created if isinstance(created, int) and 0 <= created < 1 << 40 else 0,
        owner=owner[:200] if isinstance(owner, str) and owner else "upstream",
    )
