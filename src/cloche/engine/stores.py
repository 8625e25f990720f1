"""The stores of an engine. It makes the store of images itself."""

from __future__ import annotations

from typing import NamedTuple

from cloche.store.base import CheckAllowance, SandboxRecords, SnapshotRecords
from cloche.store.builds import BuildFiles, StoredBuilds
from cloche.store.quotas import StoredQuotas
from cloche.store.runs import RunStore
from cloche.store.volumes import StoredVolumes


class Stores(NamedTuple):
    """The records are opened and closed by the engine; the others lie in the same database."""

    records: SandboxRecords
    snapshots: SnapshotRecords
    runs: RunStore
    builds: StoredBuilds
    build_files: BuildFiles
    volumes: StoredVolumes
    quotas: StoredQuotas

    def guard(self, allow: CheckAllowance) -> None:
        """Sets the check that runs before anything of an owner's is stored."""
        for each in (self.snapshots, self.volumes, self.build_files, self.runs):
            each.allow = allow
