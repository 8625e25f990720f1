"""All that an engine keeps on a disk, but for images, which it makes itself."""

from __future__ import annotations

from typing import NamedTuple

from cloche.store.base import Allow, Records, Snapshots
from cloche.store.builds import BuildFiles, StoredBuilds
from cloche.store.quotas import StoredQuotas
from cloche.store.runs import RunStore
from cloche.store.volumes import StoredVolumes


class Stores(NamedTuple):
    """The records are opened and closed by the engine; the others lie in the same database."""

    records: Records
    snapshots: Snapshots
    runs: RunStore
    builds: StoredBuilds
    build_files: BuildFiles
    volumes: StoredVolumes
    quotas: StoredQuotas

    def guard(self, allow: Allow) -> None:
        """From now on it is asked before anything of an owner's is kept."""
        for each in (self.snapshots, self.volumes, self.build_files, self.runs):
            each.allow = allow
