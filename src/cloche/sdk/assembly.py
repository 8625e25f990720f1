"""Putting an engine together from a configuration: the backend, the templates, the records, the instance."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec

from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.instance import Instance
from cloche.engine.stores import Stores
from cloche.isolation.base import Backend
from cloche.model import Template
from cloche.store.builds import BuildFiles, StoredBuilds
from cloche.store.quotas import StoredQuotas
from cloche.store.runs import RunStore
from cloche.store.sandboxes import SqliteRecords
from cloche.store.snapshots import StoredSnapshots
from cloche.store.volumes import StoredVolumes
from cloche.templates import Catalogue, Report, ensure
from cloche.templates.build import silent

MOST_OPEN_FILES = 1 << 17


class BuiltTemplates:
    """The catalogue; a built-in template is built at its first use."""

    def __init__(self, config: Config, report: Report, preload: bool):
        self._catalogue = Catalogue(config.data_dir, config.aliases)
        self._report = report
        self._preload = preload

    def resolve(self, ref: str) -> Template:
        template = ensure(self._catalogue, ref, self._report)
        return template if self._preload else msgspec.structs.replace(template, imports=())

    def list(self) -> list[Template]:
        return self._catalogue.list()

    def remove_abandoned(self) -> None:
        """What a build that was killed has left. Harmless when others build just now."""
        self._catalogue.remove_abandoned()


def assemble(config: Config, report: Report = silent, *, preload: bool = True) -> Engine:
    """An engine, to be entered with `async with`. Raises IsolationUnavailable or Unavailable.

    Without `preload` the nursery imports nothing in advance: it is there in a third of the time, which is what counts
    for a single sandbox.
    """
    raise_open_files()
    data_dir = Path(config.data_dir)
    instance = Instance(data_dir / "run")
    instance.open()
    try:
        backend = _backend(config, instance)
    except BaseException:
        instance.close()
        raise
    templates = BuiltTemplates(config, report, preload)
    templates.remove_abandoned()
    return Engine(config, backend, templates, instance, stores_in(data_dir, config))


def stores_in(data_dir: Path, config: Config) -> Stores:
    """All that lies in that directory, in one database."""
    records = SqliteRecords(data_dir / "store.sqlite3")
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
    """Lets this process have as many files open as it may: a sandbox takes about ten, and the usual limit is 1024.

    That limit is as low as it is for programs that call select(), which cannot take higher descriptors; nothing of
    ours does. What a sandbox may have open is set by its own limits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _backend(config: Config, instance: Instance) -> Backend:
    if config.backend == "plain-unsafe":
        from cloche.isolation.plain import PlainBackend

        return PlainBackend(instance.directory, asked_for=config.backend)
    from cloche.isolation.namespaces import NamespacesBackend

    return NamespacesBackend(instance.directory, instance.name, instance.is_live, packages=config.packages.enabled)
