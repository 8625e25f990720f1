"""Upstreams: the model servers, and the routes from model names to them."""

from __future__ import annotations

import asyncio
import fnmatch
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from cloche import errors
from cloche.gateway.events import TurnEvent
from cloche.gateway.items import Item
from cloche.model import Struct

ECHO_MODEL = "cloche/echo"
ECHO_ALIAS = "cloche-echo"  # for clients to which a slash ends the name of a provider; it is not listed
MAX_ITEMS = 1000  # of one leg


class ModelCall(Struct):
    """One model call: the request to an upstream."""

    model: str
    items: list[Item]  # the whole transcript
    instructions: str | None = None
    tools: list[Item] = []
    tool_choice: Any = "auto"
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that the upstream has itself
    options: dict[str, Any] = {}
    request_id: str = ""  # for the upstream's own logs


class ModelUpstream(Protocol):
    """A model server with its own protocol."""

    vision: bool

    def call_model(self, call: ModelCall) -> AsyncGenerator[TurnEvent, None]:
        """Streams the model's answer; the last event is `AnswerFinished`. A caller that stops early must close it.

        Raises UpstreamFailed: before the first event if the upstream refused.
        """

    async def models(self) -> Item:
        """Returns the server's answer to a request for its models. Raises UpstreamFailed."""

    async def aclose(self) -> None: ...


class ModelRoute(Struct):
    """Maps patterns of model names to an upstream."""

    patterns: tuple[str, ...]
    upstream: Any  # an Upstream
    renamed: bool = False  # the upstream is sent another name, so its list says nothing of these


class Upstreams:
    """All configured upstreams, and `cloche/echo`."""

    def __init__(self, routes: Sequence[ModelRoute]):
        self.routes = list(routes)

    def find(self, model: str) -> ModelUpstream:
        """Raises ModelNotFound."""
        found: ModelUpstream = self.route(model).upstream
        return found

    def route(self, model: str) -> ModelRoute:
        """Raises ModelNotFound."""
        name = ECHO_MODEL if model == ECHO_ALIAS else model
        for route in self.routes:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in route.patterns):
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


# The list of models: the named ones, and for patterns, the models that the upstream lists.

LIST_FRESH_SECONDS = 60.0
MAX_LISTED_MODELS = 10_000  # of one upstream
MAX_MODEL_NAME = 500


class ListedModel(Struct):
    name: str
    created: int = 0  # seconds since 1970
    owner: str = "upstream"


class ModelList:
    """Queries all upstreams concurrently, at most once in a while. One that does not answer lists nothing."""

    def __init__(self, upstreams: Upstreams):
        self._upstreams = upstreams
        self._asking = asyncio.Lock()
        self._listed: list[list[ListedModel]] = []  # by route
        self._asked_at = float("-inf")

    async def all(self) -> list[ListedModel]:
        """Returns all models in the order in which patterns are tried, each name once."""
        found: dict[str, ListedModel] = {}
        for route, listed in zip(self._upstreams.routes, await self._fetch_lists(), strict=True):
            for model in _route_models(route, listed):
                if self._upstreams.route(model.name) is route:
                    found.setdefault(model.name, model)
        return list(found.values())

    async def get(self, name: str) -> ListedModel:
        """Raises ModelNotFound, also for a name that a pattern matches if its upstream lists others only."""
        route = self._upstreams.route(name)
        lists = await self._fetch_lists()
        listed = lists[self._upstreams.routes.index(route)]
        known = {model.name: model for model in _route_models(route, listed)}
        if name in known:
            return known[name]
        if listed:
            raise errors.ModelNotFound(f"The model '{name[:200]}' does not exist")
        return ListedModel(name=name)

    async def _fetch_lists(self) -> list[list[ListedModel]]:
        async with self._asking:
            if time.monotonic() - self._asked_at > LIST_FRESH_SECONDS:
                self._listed = list(await asyncio.gather(*map(_fetch_models, self._upstreams.routes)))
                self._asked_at = time.monotonic()
        return self._listed


async def _fetch_models(route: ModelRoute) -> list[ListedModel]:
    """Returns the models that an upstream lists."""
    if route.renamed or not any(_is_pattern(pattern) for pattern in route.patterns):
        return []
    try:
        return parse_models(await route.upstream.models())
    except errors.UpstreamFailed:
        return []


def parse_models(body: Item) -> list[ListedModel]:
    """Parses the models in an upstream's answer, as far as they are valid."""
    data = body.get("data")
    return [
        _parse_model(each) for each in (data if isinstance(data, list) else [])[:MAX_LISTED_MODELS] if _has_name(each)
    ]


def _route_models(route: ModelRoute, listed: Sequence[ListedModel]) -> list[ListedModel]:
    known = {model.name: model for model in listed}
    found = []
    for pattern in route.patterns:
        if _is_pattern(pattern):
            found += [model for model in listed if fnmatch.fnmatchcase(model.name, pattern)]
        else:
            found.append(
                known.get(pattern, ListedModel(name=pattern, owner="cloche" if pattern == ECHO_MODEL else "upstream"))
            )
    return found


def _is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[")


def _has_name(model: Any) -> bool:
    return isinstance(model, dict) and isinstance(model.get("id"), str) and 0 < len(model["id"]) <= MAX_MODEL_NAME


def _parse_model(model: Item) -> ListedModel:
    created, owner = model.get("created"), model.get("owned_by")
    return ListedModel(
        name=model["id"],
        created=created if isinstance(created, int) and 0 <= created < 1 << 40 else 0,
        owner=owner[:200] if isinstance(owner, str) and owner else "upstream",
    )
