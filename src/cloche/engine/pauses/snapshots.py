"""An owner's snapshots: their names, limits and records."""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections.abc import Mapping, Sequence

from cloche import errors
from cloche.config import RetentionLimits
from cloche.engine.operations.audit import AuditLog
from cloche.engine.pauses.images import SandboxImages
from cloche.model import GIB, Snapshot, Template, check_snapshot_name
from cloche.store.base import SnapshotRecords as Store
from cloche.telemetry import log

_SNAPSHOT_ID = re.compile(r"s[a-z0-9]{20}")


def is_snapshot_id(ref: str) -> bool:
    """Whether it can be the id of a snapshot, which no template has for a name."""
    return _SNAPSHOT_ID.fullmatch(ref) is not None


class SnapshotRegistry:
    def __init__(
        self,
        store: Store,
        images: SandboxImages,
        kept: RetentionLimits,
        aliases: Mapping[str, str],
        audit_log: AuditLog,
    ):
        self._store = store
        self._audit_log = audit_log
        self._images = images
        self._kept = kept
        self._aliases = aliases  # of templates
        self._adding = asyncio.Lock()

    async def list(self, owner: str | None, sandbox: str | None = None) -> Sequence[Snapshot]:
        """The newest first, of that owner or with None of all; with `sandbox` those of that one only.

        Snapshots of template builds are not among them.
        """
        found = await self._store.list(owner)
        return [each for each in found if each.launch is None and sandbox in (None, each.sandbox)]

    async def find(self, ref: str, owner: str | None) -> Snapshot | None:
        """The one of that id, else the newest of that name, else that of the built template of that name and tag."""
        return await self._store.find(ref, owner)

    async def get(self, ref: str, owner: str | None) -> Snapshot:
        """As `find`, but none of a template. Raises SnapshotNotFound."""
        found = await self.find(ref, owner)
        if found is None or found.launch is not None:
            raise errors.SnapshotNotFound(f"there is no snapshot {ref!r}")
        return found

    async def remove(self, ref: str, owner: str) -> Snapshot:
        """Returns the removed one. Sandboxes made from it have their own files. Raises SnapshotNotFound."""
        snapshot = await self.get(ref, owner)
        if not await self._store.remove(snapshot.id, owner):
            raise errors.SnapshotNotFound(f"there is no snapshot {ref!r}")
        await self._images.remove(snapshot.image)
        log.info("snapshot.removed", snapshot=snapshot.id, owner=owner)
        self._audit_log.record("snapshot.removed", owner, id=snapshot.id)
        return snapshot

    async def check_name(self, name: str, owner: str, templates: Sequence[Template]) -> None:
        """Raises InvalidRequest for an invalid name, or the name of a template, or of one that the owner built."""
        check_snapshot_name(name)
        taken = is_snapshot_id(name) or name in {"python", *(each.name for each in templates)}
        taken = taken or any(fnmatch.fnmatchcase(name, each) for each in self._aliases)
        found = None if taken else await self._store.find(name, owner)
        if taken or (found is not None and found.of_build):
            raise errors.InvalidRequest(f"a snapshot cannot be called {name!r}: that is the name of a template")

    async def check_room(self, owner: str, *, for_build: bool = False) -> None:
        """Raises InvalidRequest where the owner has as many as one may have, QuotaExceeded where they have as much.

        Builds count by their bytes alone.
        """
        await self._store.allow(owner, 0)
        found = await self._store.list(owner)
        count = sum(1 for each in found if each.launch is None)
        if count >= self._kept.snapshots and not for_build:
            raise errors.InvalidRequest(
                f"there are {count} snapshots already, as many as one may have here: remove some first"
            )
        size = sum(each.bytes for each in found)
        if size >= self._kept.snapshot_bytes:
            raise errors.InvalidRequest(
                f"snapshots and built templates take {size / GIB:.1f} GiB already, of "
                f"{self._kept.snapshot_bytes / GIB:.1f} that one may have here: remove some first"
            )

    async def add(self, snapshot: Snapshot) -> None:
        """One after the other, so that many at once are not too many. Raises InvalidRequest, Unavailable."""
        async with self._adding:
            await self.check_room(snapshot.owner)
            await self._store.add(snapshot)

    async def images(self) -> set[str]:
        """The ids of images that must be kept."""
        return await self._store.images()
