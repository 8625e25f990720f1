"""Where sandboxes get their cells: templates, their nurseries, and the pools of cells that wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from cloche.config import Config
from cloche.engine.admission import Admission
from cloche.engine.nursery import LiveNursery
from cloche.engine.occupancy import NurseryInfo
from cloche.engine.pool import Pool, ReadyCell, prepare
from cloche.isolation.base import Backend, CellSpec, Mounts
from cloche.model import Limits, Template, User
from cloche.telemetry import log

TEMPLATE_SECONDS = 2.0  # how soon a newly built version of a template is noticed
KEEP_DEFAULT_SECONDS = 3600.0
KEEP_OTHER_SECONDS = 60.0
WATCH_SECONDS = 1.0  # how often it is looked whether there is memory for cells that only wait
MAX_TEMPLATES_KNOWN = 256  # by the names that were asked for: an alias may match any number of them
MAX_ODD_POOLS = 8  # of cells unlike the usual ones of their template: a caller may ask for any number of kinds


class Templates(Protocol):
    """Where templates come from."""

    def resolve(self, ref: str) -> Template:
        """Raises TemplateNotFound or TemplateBuildFailed. May take long: it is called in a thread."""

    def list(self) -> list[Template]:
        """All that are built, by name, the newest of each first. It is called in a thread, too."""


def default_limits(config: Config, template: Template) -> Limits:
    """Those of a sandbox that asks for none: the template's own where it has some, else this host's."""
    return template.limits if template.limits != Limits() else config.limits.default


class Housing:
    """`door`: whether every sandbox has one, so that it can be made before anybody waits for it."""

    def __init__(self, config: Config, backend: Backend, catalogue: Templates, *, door: bool):
        self._config = config
        self._backend = backend
        self.weighs_cells = backend.weighs_cells
        self._catalogue = catalogue
        self._door = door
        self.admission = Admission(config.capacity)
        self._templates: dict[str, tuple[float, Template]] = {}
        self._nurseries: dict[str, LiveNursery] = {}
        self._pools: dict[tuple[str, CellSpec], Pool] = {}
        self._odd_pools: set[tuple[str, CellSpec]] = set()
        self._watching: asyncio.TimerHandle | None = None

    async def take(self, template: Template, user: User, limits: Limits, mounts: Mounts | None = None) -> ReadyCell:
        """A cell for a sandbox whose kernels run as that user. Raises as `Pool.take` does.

        One with volumes is made for it: they are mounted before its walls stand. If that fails they are let go of.
        """
        if mounts is None:
            return await self._pool(template, user, limits).take()
        try:
            spec = _cell_spec(user, limits)
            return await prepare(self.nursery(template), spec, limits, door=self._door, mounts=mounts)
        except BaseException:
            mounts.let_go()
            raise

    async def templates(self) -> Sequence[Template]:
        """All that are built, by name, the newest of each first."""
        return await asyncio.to_thread(self._catalogue.list)

    async def warm(self, ref: str = "python", users: Sequence[User] = ("user",)) -> Template:
        """Starts the template's nursery and fills its pools, before anybody asks. Raises as `create` does.

        `users`: as whom the kernels of those sandboxes will run.
        """
        template = await self.template(ref)
        await self.nursery(template).get()
        for user in users:
            self._pool(template, user, default_limits(self._config, template)).refill()
        return template

    async def raw_cost_seconds(self, ref: str = "python") -> float:
        """What a bare fork into namespaces costs right now in that template's nursery. Raises as `create` does."""
        nursery = await self.nursery(await self.template(ref)).get()
        return await nursery.raw_cost_seconds()

    @property
    def ready(self) -> int:
        """How many cells wait in pools."""
        return sum(pool.ready for pool in self._pools.values())

    @property
    def wanted(self) -> int:
        """How many would wait if there were the memory and the time to make them."""
        return sum(pool.size for pool in self._pools.values() if not pool.idle)

    @property
    def nurseries(self) -> list[NurseryInfo]:
        """Those that were asked for, each with its pools."""
        return [
            NurseryInfo(
                template=nursery.template.ref,
                alive=nursery.alive,
                why=nursery.why,
                pools=[pool.info for (of, _), pool in self._pools.items() if of == version and not pool.idle],
            )
            for version, nursery in self._nurseries.items()
        ]

    async def close_pools(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(pool.aclose() for pool in self._pools.values()))

    async def close_nurseries(self) -> None:
        await asyncio.gather(*(nursery.aclose() for nursery in self._nurseries.values()))

    async def template(self, ref: str) -> Template:
        at, template = self._templates.get(ref, (0.0, None))
        now = time.monotonic()
        if template is None or now - at > TEMPLATE_SECONDS:
            template = await asyncio.to_thread(self._catalogue.resolve, ref)
            self._remember(ref, template)
        return template

    def _remember(self, ref: str, template: Template) -> None:
        now = time.monotonic()
        fresh = [(each, known) for each, known in self._templates.items() if now - known[0] <= TEMPLATE_SECONDS]
        self._templates = dict(fresh[1 - MAX_TEMPLATES_KNOWN :]) | {ref: (now, template)}

    def nursery(self, template: Template) -> LiveNursery:
        """The one of that template. Nothing is started yet."""
        if template.version not in self._nurseries:
            self._nurseries[template.version] = LiveNursery(self._backend, template)
        return self._nurseries[template.version]

    def _pool(self, template: Template, user: User, limits: Limits) -> Pool:
        usual_limits = default_limits(self._config, template)
        cell, usual = _cell_spec(user, limits), _cell_spec(user, usual_limits)
        key = (template.version, cell)
        if key in self._pools:
            return self._pools[key]
        self._forget_idle_pools()
        keeps, size, keep_seconds = True, self._config.pool.ready, KEEP_DEFAULT_SECONDS
        if cell != usual:
            keeps = len(self._odd_pools) < MAX_ODD_POOLS
            size, keep_seconds = (min(size, 1), KEEP_OTHER_SECONDS) if keeps else (0, 0.0)
        pool = Pool(
            self.nursery(template),
            cell,
            usual_limits,
            size=size,
            keep_seconds=keep_seconds,
            door=self._door,
            busy=self.admission.busy,
            ample=self.admission.memory.ample,
        )
        if keeps:
            self._watch_later()
            self._pools[key] = pool
            self._odd_pools |= {key} if cell != usual else set()
        return pool

    def _watch_later(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._watch)

    def _watch(self) -> None:
        """Cells that only wait are the first to go where memory runs short: one of each pool at a time."""
        self._watching = None
        if not self.admission.memory.ample() and self.ready:
            log.info("pool.shrinking", ready=self.ready, left_bytes=self.admission.memory.left_bytes)
            for pool in self._pools.values():
                pool.shrink()
        if self._pools:
            self._watch_later()

    def _forget_idle_pools(self) -> None:
        self._pools = {key: pool for key, pool in self._pools.items() if not pool.idle}
        self._odd_pools &= self._pools.keys()


def _cell_spec(user: User, limits: Limits) -> CellSpec:
    """What of a sandbox must be known when its cell is made."""
    return CellSpec(user=user, space_bytes=limits.space_bytes, open_files=limits.open_files)
