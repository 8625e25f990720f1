"""Upstreams: whoever has a model. A leg is one call of one."""

from __future__ import annotations

import fnmatch
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from cloche import errors
from cloche.gateway.happenings import Happening
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
