"""Assembles an engine from a configuration: the backend, the templates, the records, the instance."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec

from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.instance import Instance
from cloche.engine.stores import Stores
from cloche.isolation.base import IsolationBackend
from cloche.model import Template
from cloche.store.builds import BuildFiles, StoredBuilds
from cloche.store.quotas import StoredQuotas
from cloche.store.runs import RunStore
from cloche.store.sandboxes import SqliteSandboxRecords
from cloche.store.snapshots import StoredSnapshots
from cloche.store.volumes import StoredVolumes
from cloche.templates import Catalogue, ReportProgress, ensure_template
from cloche.templates.build import ignore_progress

MOST_OPEN_FILES = 1 << 17


class BuiltTemplates:
    """The catalogue; a built-in template is built at its first use."""

    def __init__(self, config: Config, report: ReportProgress, preload: bool):
        self._catalogue = Catalogue(config.data_dir, config.aliases)
        self._report = report
        self._preload = preload

    def resolve(self, ref: str) -> Template:
        template = ensure_template(self._catalogue, ref, self._report)
        return template if self._preload else msgspec.structs.replace(template, imports=())

    def list(self) -> list[Template]:
        return self._catalogue.list()

    def remove_abandoned(self) -> None:
        """Removes the leftovers of builds that were killed. Harmless while other processes build."""
        self._catalogue.remove_abandoned()


def assemble_engine(config: Config, report: ReportProgress = ignore_progress, *, preload: bool = True) -> Engine:
    """An engine, to be entered with `async with`. Raises IsolationUnavailable or Unavailable.

    Without `preload` the nursery imports nothing in advance: it is ready in a third of the time, which suits a
    single sandbox.
    """
    raise_open_files()
    data_dir = Path(config.data_dir)
    instance = Instance(data_dir / "run")
    instance.open()
    try:
        backend = _make_backend(config, instance)
    except BaseException:
        instance.close()
        raise
    templates = BuiltTemplates(config, report, preload)
    templates.remove_abandoned()
    return Engine(config, backend, templates, instance, open_stores(data_dir, config))


def open_stores(data_dir: Path, config: Config) -> Stores:
    """All stores of that data directory, in one database."""
    records = SqliteSandboxRecords(data_dir / "store.sqlite3")
    return Stores(
        records=records,
        snapshots=StoredSnapshots(records.database),
        runs=RunStore(records.database, config.runs),
        builds=StoredBuilds(records.database),
        build_files=BuildFiles(records.database, data_dir / "build-files"),
        volumes=StoredVolumes(records.database),
        quotas=StoredQuotas(records.database),
    )


def raise_open_files() -> None:
    """Raises this process's limit of open files as far as allowed: a sandbox takes about ten, the default is
    1024.

    The default is that low for programs that call select(), which cannot take higher descriptors; none of our
    code does. The open files of a sandbox are set by its own limits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _make_backend(config: Config, instance: Instance) -> IsolationBackend:
    if config.backend == "plain-unsafe":
        from cloche.isolation.plain import PlainBackend

        return PlainBackend(instance.directory, asked_for=config.backend)
    if config.backend == "gvisor":
        from cloche.isolation.gvisor import GvisorBackend

        return GvisorBackend(instance.directory, instance.name, instance.is_live, packages=config.packages.enabled)
    from cloche.isolation.namespaces import NamespacesBackend

    return NamespacesBackend(instance.directory, instance.name, instance.is_live, packages=config.packages.enabled)
