"""All sandboxes of one host process."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Protocol

from cloche import errors
from cloche.config import Config
from cloche.engine.endings import gone, never
from cloche.engine.instance import Instance
from cloche.engine.nursery import LiveNursery
from cloche.engine.pool import Pool
from cloche.engine.sandbox import Sandbox
from cloche.isolation.base import Backend, CellSpec
from cloche.model import Limits, SandboxInfo, SandboxSpec, Template, new_id
from cloche.store.base import Records, SandboxRecord
from cloche.telemetry import log

TEMPLATE_SECONDS = 2.0  # how soon a newly built version of a template is noticed
KEEP_DEFAULT_SECONDS = 3600.0
KEEP_OTHER_SECONDS = 60.0


class Templates(Protocol):
    """Where templates come from."""

    def resolve(self, ref: str) -> Template:
        """Raises TemplateNotFound or TemplateBuildFailed. May take long: it is called in a thread."""


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
        self._closing = False

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

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A running sandbox.

        Raises InvalidRequest for limits or a lifetime that this host does not allow, TemplateNotFound,
        TemplateBuildFailed, NurseryFailed, IsolationUnavailable, ShuttingDown.
        """
        self._check(spec)
        template = await self._template(spec.template)
        limits = spec.limits or default_limits(self.config, template)
        self.config.limits.check(limits)
        ready = await self._pool(template, spec, limits).take()
        if self._closing:
            await ready.aclose()
            raise _shutting_down()
        record = self._new_record(spec, template, limits)
        sandbox = Sandbox(
            ready, spec, record, max_lifetime_seconds=self.config.lifetime.max_seconds, on_change=self._on_change
        )
        self._sandboxes[sandbox.id] = sandbox
        self._records.put(record)
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
        if record.state != "running":
            raise gone(record)
        if self._instance.is_live(record.instance):
            raise errors.SandboxNotFound(f"sandbox {id!r} runs in another process of this host, not in this one")
        raise errors.SandboxLost(f"sandbox {id} was lost: its host process died; create a new one")

    def list(self, owner: str) -> list[SandboxInfo]:
        """The running sandboxes of that owner in this process, the oldest first."""
        return [each.info for each in self._sandboxes.values() if each.spec.owner == owner]

    async def warm(self, ref: str = "python") -> Template:
        """Starts the template's nursery and fills its pool, before anybody asks. Raises as `create` does."""
        template = await self._template(ref)
        await self._nursery(template).get()
        self._pool(template, SandboxSpec(template=ref), default_limits(self.config, template)).refill()
        return template

    async def raw_cost_seconds(self, ref: str = "python") -> float:
        """What a bare fork into namespaces costs right now in that template's nursery. Raises as `create` does."""
        nursery = await self._nursery(await self._template(ref)).get()
        return await nursery.raw_cost_seconds()

    @property
    def waiting(self) -> int:
        """How many cells wait in pools."""
        return sum(pool.ready for pool in self._pools.values())

    async def aclose(self) -> None:
        """Ends all sandboxes (their executions say "shutdown"), then everything that made them."""
        self._closing = True
        ending = [each.end("killed", "shutdown", "its host shut down") for each in list(self._sandboxes.values())]
        await asyncio.gather(*ending, *(pool.aclose() for pool in self._pools.values()))
        await asyncio.gather(*self._destroying)  # those that had ended just before
        await asyncio.gather(*(nursery.aclose() for nursery in self._nurseries.values()))
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
        if spec.network.allow:
            raise errors.InvalidRequest("network access is not available yet: a sandbox has loopback only")
        most = self.config.lifetime.max_seconds
        if spec.lifetime_seconds is not None and spec.lifetime_seconds > most:
            raise errors.InvalidRequest(f"a lifetime can be {most:g} s on this host, not {spec.lifetime_seconds:g}")

    async def _template(self, ref: str) -> Template:
        at, template = self._templates.get(ref, (0.0, None))
        now = time.monotonic()
        if template is None or now - at > TEMPLATE_SECONDS:
            template = await asyncio.to_thread(self._catalogue.resolve, ref)
            self._templates[ref] = (time.monotonic(), template)
        return template

    def _nursery(self, template: Template) -> LiveNursery:
        if template.version not in self._nurseries:
            self._nurseries[template.version] = LiveNursery(self._backend, template)
        return self._nurseries[template.version]

    def _pool(self, template: Template, spec: SandboxSpec, limits: Limits) -> Pool:
        cell = CellSpec(user=spec.user, space_bytes=limits.space_bytes, open_files=limits.open_files)
        key = (template.version, cell)
        if key not in self._pools:
            usual_limits = default_limits(self.config, template)
            usual = CellSpec(space_bytes=usual_limits.space_bytes, open_files=usual_limits.open_files)
            size = self.config.pool.ready
            self._pools[key] = Pool(
                self._nursery(template),
                cell,
                usual_limits,
                size=size if cell == usual else min(size, 1),
                keep_seconds=KEEP_DEFAULT_SECONDS if cell == usual else KEEP_OTHER_SECONDS,
            )
        return self._pools[key]

    def _new_record(self, spec: SandboxSpec, template: Template, limits: Limits) -> SandboxRecord:
        now = time.time()
        return SandboxRecord(
            id=new_id(),
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
        self._records.put(record)
        if record.state != "running":
            self._sandboxes.pop(sandbox.id, None)
            self._wait_for(sandbox.destroying)
            log.info("sandbox.ended", sandbox=sandbox.id, state=record.state, reason=record.end_reason)

    def _wait_for(self, destroying: asyncio.Task[None] | None) -> None:
        if destroying is not None:
            self._destroying.add(destroying)
            destroying.add_done_callback(self._destroying.discard)


def _shutting_down() -> errors.ShuttingDown:
    return errors.ShuttingDown("the host is shutting down")
