"""All sandboxes of one host process."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from cloche import errors
from cloche.config import Config
from cloche.engine.endings import gone, never
from cloche.engine.instance import CONTROL_SOCKET, Instance
from cloche.engine.networks import Networks
from cloche.engine.nursery import LiveNursery
from cloche.engine.pool import Pool
from cloche.engine.sandbox import Sandbox, info_of
from cloche.engine.tally import Tally
from cloche.isolation.base import Backend, CellSpec
from cloche.model import Limits, SandboxInfo, SandboxSpec, Template, User, new_id
from cloche.store.base import SHUT_DOWN, Records, SandboxRecord
from cloche.telemetry import log

TEMPLATE_SECONDS = 2.0  # how soon a newly built version of a template is noticed
KEEP_DEFAULT_SECONDS = 3600.0
KEEP_OTHER_SECONDS = 60.0
MAX_TEMPLATES_KNOWN = 256  # by the names that were asked for: an alias may match any number of them
MAX_HISTORY = 10_000
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


class Engine:
    """Use as `async with Engine(..) as engine`. On leaving, every sandbox ends and nothing of them remains."""

    def __init__(self, config: Config, backend: Backend, catalogue: Templates, records: Records, instance: Instance):
        self.config = config
        self._backend = backend
        self._catalogue = catalogue
        self._records = records
        self._instance = instance
        self._sandboxes: dict[str, Sandbox] = {}
        self._destroying: set[asyncio.Task[None]] = set()
        self._templates: dict[str, tuple[float, Template]] = {}
        self._nurseries: dict[str, LiveNursery] = {}
        self._pools: dict[tuple[str, CellSpec], Pool] = {}
        self._odd_pools: set[tuple[str, CellSpec]] = set()
        kept = Path(config.data_dir, "cache", "packages")
        self.networks = Networks(config.network, config.packages, kept, sealed=backend.seals_network)
        self._closing = False
        self.tally = Tally()

    async def __aenter__(self) -> Engine:
        await self._records.open()
        lost = await self._records.mark_lost(self._instance.is_live, time.time())
        dead = self._instance.clean()
        if lost or dead:
            log.info("instance.cleaned", instances=len(dead), sandboxes=lost)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def create(self, spec: SandboxSpec, *, id: str | None = None) -> Sandbox:
        """A running sandbox. `id` is one of `new_id()`, where the caller must know it before.

        A sandbox without an owner (the empty string) is neither recorded nor counted nor listed.

        Raises InvalidRequest for limits or a lifetime that this host does not allow, TemplateNotFound,
        TemplateBuildFailed, NurseryFailed, IsolationUnavailable, ShuttingDown, and Unavailable where too many files are
        open for one more.
        """
        began_at = time.monotonic()
        try:
            sandbox = await self._create(spec, id or new_id())
        except (errors.Unavailable, OSError) as failure:
            error = failure if isinstance(failure, errors.Unavailable) else out_of_files(failure)
            self.tally.not_created[error.code] += 1
            log.warning("sandbox.not_created", template=spec.template, reason=error.code)
            raise error from None
        if spec.owner:
            self.tally.sandbox_created(time.monotonic() - began_at)
        return sandbox

    async def _create(self, spec: SandboxSpec, id: str) -> Sandbox:
        self._check(spec)
        template = await self._template(spec.template)
        limits = spec.limits or default_limits(self.config, template)
        self.config.limits.check(limits)
        network = self.networks.policy_for(spec, template)
        ready = await self._pool(template, spec, limits).take()
        if self._closing:
            await ready.aclose()
            raise _shutting_down()
        record = self._new_record(id, spec, template, limits)
        try:
            sandbox = Sandbox(
                ready,
                spec,
                record,
                network=network,
                max_lifetime_seconds=self.config.lifetime.max_seconds,
                tally=self.tally if spec.owner else Tally(),
                on_change=self._on_change,
            )
        except BaseException:  # a spec that fits into no frame, say
            await ready.aclose()
            raise
        self._sandboxes[sandbox.id] = sandbox
        self._record(record)
        if self.networks.wants_door(network):
            await self.networks.open(sandbox)
        return sandbox

    async def get(self, id: str, owner: str) -> Sandbox:
        """A running sandbox of this process.

        Raises SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost: which, when and why, also after a restart.
        """
        sandbox = self._sandboxes.get(id)
        if sandbox is not None and sandbox.spec.owner == owner:
            return sandbox
        record = await self._records.get(id) if sandbox is None else None
        if record is None or record.owner != owner:
            raise never(id)
        raise self._absent(record)

    async def find(self, id: str) -> Sandbox:
        """As `get`, whoever the owner is: for callers who hold a secret of that very sandbox instead of a key."""
        sandbox = self._sandboxes.get(id)
        if sandbox is not None:
            return sandbox
        record = await self._records.get(id)
        raise never(id) if record is None else self._absent(record)

    def _absent(self, record: SandboxRecord) -> errors.ClocheError:
        if record.state != "running":
            return gone(record)
        if self._instance.is_live(record.instance):
            return errors.SandboxNotFound(
                f"sandbox {record.id!r} runs in another process of this host, not in this one"
            )
        return errors.SandboxLost(f"sandbox {record.id} was lost: its host process died; create a new one")

    def list(self, owner: str | None) -> list[SandboxInfo]:
        """The running sandboxes of that owner in this process, or with None of all, the oldest first."""
        found = [each for each in self._sandboxes.values() if each.spec.owner and owner in (None, each.spec.owner)]
        return [each.info for each in found]

    async def describe(self, id: str, owner: str | None) -> SandboxInfo:
        """What is known of a sandbox of that owner, or with None of anybody's, also long after it has ended.

        Raises SandboxNotFound.
        """
        sandbox = self._sandboxes.get(id)
        record = sandbox.record if sandbox is not None else await self._records.get(id)
        if record is None or owner not in (None, record.owner):
            raise never(id)
        return info_of(record)

    async def history(
        self, owner: str, label: str, value: str | None = None, *, limit: int = MAX_HISTORY
    ) -> Sequence[SandboxInfo]:
        """The newest with such metadata of that owner's sandboxes that have ended though nobody killed them."""
        return [info_of(record) for record in await self._records.ended(owner, label, value, limit)]

    async def disclaim(self, id: str, owner: str, reason: str) -> None:
        """A sandbox that has ended counts as killed by its owner from now on, for that reason."""
        record = await self._records.get(id)
        if record is not None and record.owner == owner and record.state != "running":
            self._record(msgspec.structs.replace(record, state="killed", end_reason=reason))

    async def template(self, ref: str) -> Template:
        """The template that a sandbox would be made from. Raises as `create` does."""
        return await self._template(ref)

    async def templates(self) -> Sequence[Template]:
        """All that are built, by name, the newest of each first."""
        return await asyncio.to_thread(self._catalogue.list)

    async def limits_of(self, ref: str) -> Limits:
        """The limits of a sandbox of that template that asks for none. Raises as `create` does."""
        return default_limits(self.config, await self._template(ref))

    async def warm(self, ref: str = "python", users: Sequence[User] = ("user",)) -> Template:
        """Starts the template's nursery and fills its pools, before anybody asks. Raises as `create` does.

        `users`: as whom the kernels of those sandboxes will run.
        """
        template = await self._template(ref)
        await self._nursery(template).get()
        for user in users:
            spec = SandboxSpec(template=ref, user=user)
            self._pool(template, spec, default_limits(self.config, template)).refill()
        return template

    async def raw_cost_seconds(self, ref: str = "python") -> float:
        """What a bare fork into namespaces costs right now in that template's nursery. Raises as `create` does."""
        nursery = await self._nursery(await self._template(ref)).get()
        return await nursery.raw_cost_seconds()

    @property
    def instance(self) -> Instance:
        """This host process, among those that share the data directory."""
        return self._instance

    @property
    def control_socket(self) -> Path:
        """Where this process listens for whoever runs it, if it is a server."""
        return self._instance.directory / CONTROL_SOCKET

    @property
    def closing(self) -> bool:
        """Whether it takes no more sandboxes, because it is about to end."""
        return self._closing

    @property
    def waiting(self) -> int:
        """How many cells wait in pools."""
        return sum(pool.ready for pool in self._pools.values())

    @property
    def running(self) -> int:
        """How many sandboxes run."""
        return sum(1 for each in self._sandboxes.values() if each.spec.owner)

    async def aclose(self) -> None:
        """Ends all sandboxes (their executions say "shutdown"), then everything that made them."""
        self._closing = True
        ending = [each.end("killed", "shutdown", SHUT_DOWN) for each in list(self._sandboxes.values())]
        await asyncio.gather(*ending, *(pool.aclose() for pool in self._pools.values()))
        await asyncio.gather(*self._destroying)  # those that had ended just before
        await asyncio.gather(*(nursery.aclose() for nursery in self._nurseries.values()))
        await self.networks.aclose()
        clean = await self._backend.aclose()
        await self._records.aclose()
        self._instance.close(keep=not clean)

    def disown(self) -> None:
        """In a forked child: lets go of what must end with the parent."""
        self._instance.disown()
        self._backend.disown()

    def _check(self, spec: SandboxSpec) -> None:
        if self._closing:
            raise _shutting_down()
        most = self.config.lifetime.max_seconds
        if spec.lifetime_seconds is not None and spec.lifetime_seconds > most:
            raise errors.InvalidRequest(f"a lifetime can be {most:g} s on this host, not {spec.lifetime_seconds:g}")

    async def _template(self, ref: str) -> Template:
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

    def _nursery(self, template: Template) -> LiveNursery:
        if template.version not in self._nurseries:
            self._nurseries[template.version] = LiveNursery(self._backend, template)
        return self._nurseries[template.version]

    def _pool(self, template: Template, spec: SandboxSpec, limits: Limits) -> Pool:
        usual_limits = default_limits(self.config, template)
        cell, usual = _cell_spec(spec.user, limits), _cell_spec(spec.user, usual_limits)
        key = (template.version, cell)
        if key in self._pools:
            return self._pools[key]
        self._forget_idle_pools()
        keeps, size, keep_seconds = True, self.config.pool.ready, KEEP_DEFAULT_SECONDS
        if cell != usual:
            keeps = len(self._odd_pools) < MAX_ODD_POOLS
            size, keep_seconds = (min(size, 1), KEEP_OTHER_SECONDS) if keeps else (0, 0.0)
        door = self.networks.always_open
        pool = Pool(self._nursery(template), cell, usual_limits, size=size, keep_seconds=keep_seconds, door=door)
        if keeps:
            self._pools[key] = pool
            self._odd_pools |= {key} if cell != usual else set()
        return pool

    def _forget_idle_pools(self) -> None:
        self._pools = {key: pool for key, pool in self._pools.items() if not pool.idle}
        self._odd_pools &= self._pools.keys()

    def _new_record(self, id: str, spec: SandboxSpec, template: Template, limits: Limits) -> SandboxRecord:
        now = time.time()
        return SandboxRecord(
            id=id,
            owner=spec.owner,
            template=template.ref,
            state="running",
            instance=self._instance.name,
            created_at=now,
            deadline_at=None if spec.lifetime_seconds is None else now + spec.lifetime_seconds,
            metadata=spec.metadata,
            limits=limits,
        )

    def _on_change(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        self._record(record)
        if record.state != "running":
            self._sandboxes.pop(sandbox.id, None)
            self._wait_for(sandbox.destroying)
            self._say_ended(record)

    def _record(self, record: SandboxRecord) -> None:
        if record.owner:
            self._records.put(record)

    def _say_ended(self, record: SandboxRecord) -> None:
        if record.owner:
            self.tally.ended[record.state] += 1
            about = {"sandbox": record.id, "owner": record.owner, "template": record.template}
            log.info("sandbox.ended", **about, state=record.state, reason=record.end_reason)

    def _wait_for(self, destroying: asyncio.Task[None] | None) -> None:
        if destroying is not None:
            self._destroying.add(destroying)
            destroying.add_done_callback(self._destroying.discard)


def out_of_files(error: OSError) -> errors.Unavailable:
    """What it means that no file can be opened. Raises the error itself where it means something else."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        raise error
    whose = "this process has" if error.errno == errno.EMFILE else "this host has"
    return errors.Unavailable(
        f"{whose} too many files open for one more sandbox: close some, or raise the limit (ulimit -n)"
    )


def _cell_spec(user: User, limits: Limits) -> CellSpec:
    """What of a sandbox must be known when its cell is made."""
    return CellSpec(user=user, space_bytes=limits.space_bytes, open_files=limits.open_files)


def _shutting_down() -> errors.ShuttingDown:
    return errors.ShuttingDown("the host is shutting down")
