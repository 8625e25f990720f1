"""Where turns begin: the upstreams, the containers, and the records of what was done."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cloche.config import Config
from cloche.config.sections import Upstream as Settings
from cloche.engine.engine import Engine
from cloche.gateway.asked import Asked
from cloche.gateway.attachments import inlined
from cloche.gateway.chat_upstream import ChatUpstream
from cloche.gateway.container_files import ContainerFiles
from cloche.gateway.containers import Containers
from cloche.gateway.crowd import Crowd
from cloche.gateway.echo import Echo
from cloche.gateway.errands import Errands
from cloche.gateway.responses_upstream import ResponsesUpstream
from cloche.gateway.tally import Tally
from cloche.gateway.trace import Trace
from cloche.gateway.turn import Turn
from cloche.gateway.upstream_http import UpstreamServer
from cloche.gateway.upstreams import ECHO, Route, Upstream, Upstreams
from cloche.gateway.workplace import Workplace
from cloche.store.gateway import Shelf, Step


class Gateway:
    """`shelf` is what it keeps; `write` takes the records of what was done."""

    def __init__(self, engine: Engine, config: Config, shelf: Shelf, write: Callable[[Step], None]):
        self.config = config
        self.shelf = shelf
        shelf.guard(engine.quotas.check_stored)
        self.upstreams = Upstreams(routes(config))
        self.containers = Containers(engine, config)
        self.container_files = ContainerFiles(shelf)
        self.tally = Tally()
        self.errands = Errands()
        self.crowd = Crowd(config.gateway.turns_per_owner)
        self.instance = engine.instance
        self._write = write

    def trace(self, request: str, owner: str) -> Trace:
        return Trace(request, owner, self._record, capture=self.config.gateway.capture)

    def turn(self, asked: Asked, trace: Trace) -> Turn:
        """Raises ModelNotFound."""
        upstream = self.upstreams.find(asked.model)
        place = self._workplace(asked, trace) if asked.code is not None else None
        return Turn(upstream, asked, place, self.config.gateway, trace, partial(inlined, self.shelf.files, trace.owner))

    def _workplace(self, asked: Asked, trace: Trace) -> Workplace:
        return Workplace(
            self.containers, self.container_files, self.shelf.files, self.config, trace.owner, asked, trace
        )

    def _record(self, step: Step) -> None:
        self.tally.count(step)
        self._write(step)

    async def start(self) -> None:
        """Once the engine has: responses that a dead process worked on have failed."""
        await self.shelf.responses.mark_lost(self.instance.is_live)

    async def stop(self) -> None:
        """Before the engine does: what runs without a client ends, and says so. No model is waited for."""
        await self.errands.aclose()
        await self.upstreams.aclose()

    async def aclose(self) -> None:
        await self.container_files.aclose()


def routes(config: Config) -> list[Route]:
    """`cloche/echo`, which is always there, whatever patterns match it; then those that are configured."""
    configured = [
        Route(patterns=each.models, upstream=_upstream(each), renamed=bool(each.model)) for each in config.upstream
    ]
    return [Route(patterns=(ECHO,), upstream=Echo()), *configured]


def _upstream(settings: Settings) -> Upstream:
    """Raises InvalidConfig."""
    server = UpstreamServer(settings)
    return ChatUpstream(settings, server) if settings.api == "chat" else ResponsesUpstream(settings, server)
