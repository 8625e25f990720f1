"""Pools of ready cells: init up, first kernel ready. Taking one is a message; each serves one sandbox only."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from cloche import errors
from cloche.config import Config
from cloche.engine.executions.kernel import KernelClient, take_first_kernel
from cloche.engine.quotas.capacity import Admission
from cloche.engine.quotas.occupancy import NurseryInfo, PoolInfo
from cloche.engine.sandboxes.init_client import InitClient
from cloche.engine.sandboxes.live_nursery import LiveNursery
from cloche.engine.sandboxes.network import open_door_listener
from cloche.isolation.base import CellMounts, CellSpec, IsolationBackend, SandboxCell
from cloche.model import Limits, Template, User
from cloche.tasks import TaskSet
from cloche.telemetry import log

CALM_SECONDS = 0.02  # after a checkout, so that a refill does not compete with the new sandbox
EMPTY_CALM_SECONDS = 0.003  # when the next one would find nothing
BUSY_SECONDS = 0.25  # that one more cell waits, at most, for programs that have all cores
EMPTY_BUSY_SECONDS = 0.05  # when the next one would find nothing
SHORT_MEMORY_SECONDS = 1.0  # after which it is looked again whether there is memory for cells that wait
MAX_SPAWNS = 4
MAX_REPLACEMENTS = 2  # times that a cell is made in the place of one that died before it was ready
MAX_BACKOFF_SECONDS = 10.0


class ReadyCell:
    """A cell with a guest that answers, a ready kernel, and a door's listener where every sandbox has a door."""

    def __init__(
        self,
        cell: SandboxCell,
        guest: InitClient,
        kernel: KernelClient,
        limits: Limits,
        listener: socket.socket | None = None,
    ):
        self.listener = listener
        self.cell = cell
        self.guest = guest
        self.kernel = kernel
        self._limits = limits

    @property
    def alive(self) -> bool:
        return self.guest.alive and self.kernel.alive

    def set_limits(self, limits: Limits) -> None:
        if limits != self._limits:
            self.cell.set_limits(limits)
            self._limits = limits

    async def aclose(self) -> None:
        if self.listener is not None:
            self.listener.close()
        self.kernel.close()
        self.guest.close()
        await self.cell.aclose()


# Of one that was killed: init is seen to end first, or its first kernel, which then reports its failure.
CELL_DIED_ERRORS = (errors.Gone, errors.FileError)


async def prepare_cell(
    nursery: LiveNursery, spec: CellSpec, limits: Limits, *, door: bool = False, mounts: CellMounts | None = None
) -> ReadyCell:
    """A new cell, ready; with its door's listener if `door`, and with those volumes.

    Raises NurseryFailed, IsolationUnavailable; and Unavailable where volumes cannot be mounted, or where it
    died before it was ready. It was unused until then: without volumes, another is made instead, and once more:
    a nursery that dies may take with it a cell that was begun just before, and then one that was requested
    before its death was known.
    """
    for _ in range(0 if mounts is not None else MAX_REPLACEMENTS):
        try:
            return await _spawn_ready_cell(nursery, spec, limits, door, mounts)
        except (errors.NurseryFailed, *CELL_DIED_ERRORS) as error:
            log.warning("cell.died", template=nursery.template.ref, reason=error.code)
            if isinstance(error, errors.NurseryFailed) and nursery.alive:
                break  # it lives, and cannot: one more request is enough
    try:
        return await _spawn_ready_cell(nursery, spec, limits, door, mounts)
    except (errors.NurseryFailed, *CELL_DIED_ERRORS) as error:
        raise _not_ready_error(error) from None


def _not_ready_error(error: errors.ClocheError) -> errors.ClocheError:
    """Unavailable instead of Gone: there was no sandbox yet."""
    if not isinstance(error, CELL_DIED_ERRORS):
        return error
    return errors.Unavailable(f"a new sandbox died before it was ready: {error}")


async def _spawn_ready_cell(
    nursery: LiveNursery, spec: CellSpec, limits: Limits, door: bool, mounts: CellMounts | None
) -> ReadyCell:
    cell = await (await nursery.get()).spawn(spec, mounts)
    guest = InitClient(cell)
    try:
        cell.set_limits(limits)
        kernel = await _take_first_kernel(guest, cell)
        listener = await open_door_listener(guest) if door else None
    except BaseException:
        guest.close()
        await cell.aclose()
        raise
    return ReadyCell(cell, guest, kernel, limits, listener)


async def _take_first_kernel(guest: InitClient, cell: SandboxCell) -> KernelClient:
    """Raises one of DIED where it ended before it was ready."""
    try:
        return await take_first_kernel(guest, cell.first_kernel)
    except errors.Unavailable as error:
        raise errors.SandboxLost(str(error)) from None


class CellPool:
    """`size` ready cells of one template and spec. They are discarded `keep_seconds` after the last checkout.

    `door`: whether each of them will have one, so that its listener can be made in advance. `busy()`: whether
    programs have all cores, so that filling up would slow them; `ample()`: whether there is memory for ready
    cells.
    """

    def __init__(
        self,
        nursery: LiveNursery,
        spec: CellSpec,
        limits: Limits,
        *,
        size: int,
        keep_seconds: float,
        door: bool = False,
        busy: Callable[[], bool] = lambda: False,
        ample: Callable[[], bool] = lambda: True,
    ):
        self._busy = busy
        self._ample = ample
        self._nursery = nursery
        self._door = door
        self._spec = spec
        self._limits = limits
        self.size = size
        self._keep_seconds = keep_seconds
        self._ready: deque[ReadyCell] = deque()
        self._spawns = asyncio.Semaphore(MAX_SPAWNS)
        self._spawning = 0
        self._last_take = 0.0
        self._refilling: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._expired = False
        self._closing = TaskSet()
        self._closed = False

    @property
    def ready(self) -> int:
        """How many cells wait."""
        return len(self._ready)

    @property
    def info(self) -> PoolInfo:
        return PoolInfo(user=self._spec.user, space_bytes=self._spec.space_bytes, ready=self.ready, wanted=self.size)

    @property
    def idle(self) -> bool:
        """Whether it holds nothing, does nothing, and was not used for as long as it keeps cells."""
        doing = self._spawning or self._refilling is not None or self._closing
        return not self._ready and not doing and self._expiry is None

    @property
    def _needs_cells(self) -> bool:
        return len(self._ready) < self.size and not self._expired

    async def take(self) -> ReadyCell:
        """A cell that was never used. Raises as `prepare_cell` does."""
        loop = asyncio.get_running_loop()
        self._last_take, self._expired = loop.time(), False
        self._keep_until(self._last_take + self._keep_seconds)
        while self._ready:
            cell = self._ready.popleft()
            cell.guest.on_lost = None
            cell.cell.wake()
            if cell.guest.is_there() and cell.alive:
                self.start_refill()
                return cell
            self._discard_cell(cell)
        return await self._spawn_cell()

    def start_refill(self) -> None:
        """Fills up in the background."""
        if self._refilling is None and not self._closed and self._needs_cells:
            self._refilling = asyncio.create_task(self._refill_until_full())
            self._refilling.add_done_callback(self._on_refilled)

    def drop_one_cell(self) -> None:
        """Discards one cell. It fills up again once there is ample memory."""
        if self._ready:
            self._discard_oldest()
            self.start_refill()

    async def aclose(self) -> None:
        self._closed = True
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.wait([self._refilling])
        self._keep_until(None)
        self._discard_all()
        await asyncio.gather(*self._closing)

    async def _spawn_cell(self) -> ReadyCell:
        self._spawning += 1
        try:
            async with self._spawns:
                return await prepare_cell(self._nursery, self._spec, self._limits, door=self._door)
        finally:
            self._spawning -= 1
            self.start_refill()

    async def _refill_until_full(self) -> None:
        backoff_seconds = CALM_SECONDS
        while self._needs_cells:
            await self._wait_for_calm()
            try:
                cell = await prepare_cell(self._nursery, self._spec, self._limits, door=self._door)
            except errors.ClocheError as error:
                log.warning("pool.refill_failed", template=self._nursery.template.ref, error=str(error))
                backoff_seconds = min(backoff_seconds * 2, MAX_BACKOFF_SECONDS)
                await asyncio.sleep(backoff_seconds)
                continue
            cell.guest.on_lost = lambda why, cell=cell: self._on_lost(cell)
            self._ready.append(cell)
            cell.kernel.warm_up()
            cell.cell.rest()
        if self._expired:  # while the last one was made
            self._discard_all()

    async def _wait_for_calm(self) -> None:
        """Waits for a moment at which one more cell slows no program down, but not for ever."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        while (wait_seconds := self._wait_seconds(loop.time(), began_at)) > 0:
            await asyncio.sleep(max(wait_seconds, EMPTY_CALM_SECONDS))

    def _wait_seconds(self, now: float, began_at: float) -> float:
        if not self._ample():
            return SHORT_MEMORY_SECONDS
        quiet, patience = (CALM_SECONDS, BUSY_SECONDS) if self._ready else (EMPTY_CALM_SECONDS, EMPTY_BUSY_SECONDS)
        if self._spawning:
            return max(self._last_take + quiet - now, EMPTY_CALM_SECONDS)
        if self._busy() and now - began_at < patience:
            return EMPTY_CALM_SECONDS
        return self._last_take + quiet - now

    def _on_refilled(self, task: asyncio.Task[None]) -> None:
        self._refilling = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("pool.broken", template=self._nursery.template.ref, error=repr(error))
        else:
            self.start_refill()  # a cell may have been taken between the task's end and this

    def _on_lost(self, cell: ReadyCell) -> None:
        if cell in self._ready:
            self._ready.remove(cell)
            self._discard_cell(cell)
            self.start_refill()

    def _discard_cell(self, cell: ReadyCell) -> None:
        self._closing.start(cell.aclose())

    def _keep_until(self, when: float | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = None
        if when is not None:
            self._expiry = asyncio.get_running_loop().call_at(when, self._discard_all)

    def _discard_all(self) -> None:
        self._expiry, self._expired = None, True
        while self._ready:
            self._discard_oldest()

    def _discard_oldest(self) -> None:
        cell = self._ready.popleft()
        cell.guest.on_lost = None
        self._discard_cell(cell)


# The supply of cells: templates, their nurseries, and the pools of ready cells.

TEMPLATE_SECONDS = 2.0  # how soon a newly built version of a template is noticed
KEEP_DEFAULT_SECONDS = 3600.0
KEEP_OTHER_SECONDS = 60.0
MEMORY_WATCH_SECONDS = 1.0  # how often it is looked whether there is memory for cells that only wait
MAX_TEMPLATES_KNOWN = 256  # by the requested names: an alias may match any number of them
MAX_ODD_POOLS = 8  # of cells unlike the usual ones of their template: a caller may ask for any number of kinds


class TemplateSource(Protocol):
    """The catalogue of templates."""

    def resolve(self, ref: str) -> Template:
        """Raises TemplateNotFound or TemplateBuildFailed. May take long: it is called in a thread."""

    def list(self) -> list[Template]:
        """Every built template, by name, the newest of each first. It is called in a thread, too."""


def default_limits(config: Config, template: Template) -> Limits:
    """The limits of a sandbox that asks for none: the template's own where it has some, else this host's."""
    return template.limits if template.limits != Limits() else config.limits.default


class CellSupply:
    """`door`: whether every sandbox has one, so that its listener can be made in advance."""

    def __init__(self, config: Config, backend: IsolationBackend, catalogue: TemplateSource, *, door: bool):
        self._config = config
        self._backend = backend
        self.weighs_cells = backend.weighs_cells
        self._catalogue = catalogue
        self._door = door
        self.admission = Admission(config.capacity)
        self._templates: dict[str, tuple[float, Template]] = {}
        self._nurseries: dict[str, LiveNursery] = {}
        self._pools: dict[tuple[str, CellSpec], CellPool] = {}
        self._odd_pools: set[tuple[str, CellSpec]] = set()
        self._watching: asyncio.TimerHandle | None = None

    async def take(self, template: Template, user: User, limits: Limits, mounts: CellMounts | None = None) -> ReadyCell:
        """A cell for a sandbox whose kernels run as that user. Raises as `CellPool.take` does.

        A cell with volumes is made for that sandbox: they are mounted before its walls stand. If that fails they
        are released.
        """
        if mounts is None:
            return await self._find_pool(template, user, limits).take()
        try:
            spec = _make_cell_spec(user, limits)
            return await prepare_cell(self.nursery(template), spec, limits, door=self._door, mounts=mounts)
        except BaseException:
            mounts.let_go()
            raise

    async def templates(self) -> Sequence[Template]:
        """Every built template, by name, the newest of each first."""
        return await asyncio.to_thread(self._catalogue.list)

    async def warm(self, ref: str = "python", users: Sequence[User] = ("user",)) -> Template:
        """Starts the template's nursery and fills its pools in advance. Raises as `create` does.

        `users`: the users that the kernels of those sandboxes will run as.
        """
        template = await self.template(ref)
        await self.nursery(template).get()
        for user in users:
            self._find_pool(template, user, default_limits(self._config, template)).start_refill()
        return template

    async def raw_cost_seconds(self, ref: str = "python") -> float:
        """The cost of a bare fork into namespaces now, in that template's nursery. Raises as `create` does."""
        nursery = await self.nursery(await self.template(ref)).get()
        return await nursery.raw_cost_seconds()

    @property
    def ready(self) -> int:
        """How many cells wait in pools."""
        return sum(pool.ready for pool in self._pools.values())

    @property
    def wanted(self) -> int:
        """The number of ready cells if there were the memory and the time to make them."""
        return sum(pool.size for pool in self._pools.values() if not pool.idle)

    @property
    def nurseries(self) -> list[NurseryInfo]:
        """The nurseries in use, each with its pools."""
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
            self._remember_template(ref, template)
        return template

    def _remember_template(self, ref: str, template: Template) -> None:
        now = time.monotonic()
        fresh = [(each, known) for each, known in self._templates.items() if now - known[0] <= TEMPLATE_SECONDS]
        self._templates = dict(fresh[1 - MAX_TEMPLATES_KNOWN :]) | {ref: (now, template)}

    def nursery(self, template: Template) -> LiveNursery:
        """The nursery of that template. Nothing is started yet."""
        if template.version not in self._nurseries:
            self._nurseries[template.version] = LiveNursery(self._backend, template)
        return self._nurseries[template.version]

    def _find_pool(self, template: Template, user: User, limits: Limits) -> CellPool:
        usual_limits = default_limits(self._config, template)
        cell, usual = _make_cell_spec(user, limits), _make_cell_spec(user, usual_limits)
        key = (template.version, cell)
        if key in self._pools:
            return self._pools[key]
        self._drop_idle_pools()
        keeps, size, keep_seconds = True, self._config.pool.ready, KEEP_DEFAULT_SECONDS
        if cell != usual:
            keeps = len(self._odd_pools) < MAX_ODD_POOLS
            size, keep_seconds = (min(size, 1), KEEP_OTHER_SECONDS) if keeps else (0, 0.0)
        pool = CellPool(
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
            self._schedule_memory_check()
            self._pools[key] = pool
            self._odd_pools |= {key} if cell != usual else set()
        return pool

    def _schedule_memory_check(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().call_later(MEMORY_WATCH_SECONDS, self._shrink_if_short)

    def _shrink_if_short(self) -> None:
        """Drops one ready cell of each pool while memory is short."""
        self._watching = None
        if not self.admission.memory.ample() and self.ready:
            log.info("pool.shrinking", ready=self.ready, left_bytes=self.admission.memory.left_bytes)
            for pool in self._pools.values():
                pool.drop_one_cell()
        if self._pools:
            self._schedule_memory_check()

    def _drop_idle_pools(self) -> None:
        self._pools = {key: pool for key, pool in self._pools.items() if not pool.idle}
        self._odd_pools &= self._pools.keys()


def _make_cell_spec(user: User, limits: Limits) -> CellSpec:
    """The part of a sandbox's settings that must be known when its cell is made."""
    return CellSpec(user=user, space_bytes=limits.space_bytes, open_files=limits.open_files)
