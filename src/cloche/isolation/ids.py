"""The user and group ids of sandboxes on this host.

root          the server is root: each sandbox has 4096 ids of its own, from a region that nothing else uses
subordinate   an ordinary user with /etc/subuid, /etc/subgid and newuidmap: two ids of its own per sandbox
single        an ordinary user without: `user` and `root` inside are both that one user outside
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
from typing import Any, Literal

from cloche.model import Struct

REGION_START, REGION_COUNT = 0x70000000, 0x10000000  # above the range of systemd's containers, below 2**31
IDS_PER_CELL = 4096
_SYS_ADMIN = 21

IdMode = Literal["root", "subordinate", "single"]


class IdMapping(Struct):
    """The mapping of ids for nurseries and cells of this process."""

    mode: IdMode
    start: int = 0  # of the region or of the subordinate ids
    count: int = 0
    gid_start: int = 0
    gid_count: int = 0

    def order(self) -> dict[str, Any]:
        """The fields for `launch`."""
        maps = {
            "root": [(0, self.start, self.count)],
            "subordinate": [(0, 0, 1), (1, 1, min(self.count, self.gid_count))],  # an extent must lie within one above
            "single": [(0, 0, 1)],
        }[self.mode]
        return {
            "mode": self.mode,
            "subuids": (self.start, self.count),
            "subgids": (self.gid_start, self.gid_count),
            "nursery_uids": maps,
            "nursery_gids": maps,
        }

    @property
    def single(self) -> bool:
        return self.mode == "single"


class IdRanges:
    """Hands out ids for cells; no two live cells of this process share any."""

    def __init__(self, ids: IdMapping):
        self._ids = ids
        self._taken: set[int] = set()
        self._size = IDS_PER_CELL if ids.mode == "root" and ids.count == REGION_COUNT else 2
        usable = min(ids.count, ids.gid_count or ids.count)
        self._number = max(usable // self._size - 1, 0)

    def take(self) -> dict[str, Any]:
        """The id part of a cell's spawn order."""
        if self._ids.single:
            return {"single": True, "sparse": False, "base_id": 0, **_same_maps([(1000, 0, 1)])}
        index = self._free_index()
        self._taken.add(index)
        base = (index + 1) * self._size  # the first slice is the nursery's own
        sparse = self._size == 2
        dense = [(0, base, IDS_PER_CELL - 1), (65534, base + IDS_PER_CELL - 1, 1)]
        return {
            "single": False,
            "sparse": sparse,
            "base_id": base,
            **_same_maps([(0, base, 1), (1000, base + 1, 1)] if sparse else dense),
        }

    @property
    def volume_owner(self) -> int:
        """The owner of a new volume: the id in it that `user` has, see `volume_maps`."""
        return 0 if self._ids.single else (1 if self._size == 2 else 1000)

    def give_back(self, spec: dict[str, Any]) -> None:
        if not self._ids.single:
            self._taken.discard(spec["base_id"] // self._size - 1)

    def _free_index(self) -> int:
        """A random one, so that two servers on one host rarely pick the same."""
        if len(self._taken) >= self._number:
            raise LookupError(f"all {self._number} id ranges of this host are in use")
        while (index := secrets.randbelow(self._number)) in self._taken:
            pass
        return index


def volume_maps(share: dict[str, Any]) -> dict[str, Any]:
    """How the ids in a volume are those of one cell. They are those inside it; where it has two, they are 0 and 1."""
    if share["single"]:
        return {}
    base = share["base_id"]
    return _same_maps([(0, base, 2)]) if share["sparse"] else {"uids": share["uids"], "gids": share["gids"]}


def _same_maps(extents: list[tuple[int, int, int]]) -> dict[str, Any]:
    return {"uids": extents, "gids": extents}


def find_mapping() -> IdMapping:
    """The best mode that this process has the rights for."""
    if os.geteuid() == 0 and _has_capability(_SYS_ADMIN):
        return _root_mapping()
    return _subordinate_mapping() or IdMapping(mode="single")


def _root_mapping() -> IdMapping:
    """All of our region; or, in a container that maps fewer ids, the ids above its system users."""
    start, count = REGION_START, REGION_COUNT
    with open("/proc/self/uid_map") as file:
        mapped = [tuple(map(int, line.split())) for line in file]
    if any(inside <= start and start + count <= inside + size for inside, _, size in mapped):
        return IdMapping(mode="root", start=start, count=count)
    inside, _, size = max(mapped, key=lambda extent: extent[2])
    low = max(inside, 2000)
    return (
        IdMapping(mode="root", start=low, count=inside + size - low)
        if inside + size - low >= 64
        else IdMapping(mode="single")
    )


def _has_capability(number: int) -> bool:
    with open("/proc/self/status") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)


def _subordinate_mapping() -> IdMapping | None:
    if not (shutil.which("newuidmap") and shutil.which("newgidmap")):
        return None
    uids, gids = _largest_range("/etc/subuid", os.geteuid()), _largest_range("/etc/subgid", os.geteuid())
    if not uids or not gids or min(uids[1], gids[1]) < 64:
        return None
    return IdMapping(mode="subordinate", start=uids[0], count=uids[1], gid_start=gids[0], gid_count=gids[1])


def _largest_range(path: str, uid: int) -> tuple[int, int] | None:
    """The largest range that a subordinate id file gives to a user, by name or number."""
    names = {str(uid)}
    try:
        names.add(pwd.getpwuid(uid).pw_name)
    except KeyError:
        pass
    try:
        with open(path) as file:
            rows = [line.strip().split(":") for line in file if line.count(":") == 2]
    except OSError:
        return None
    mine = [(int(start), int(count)) for owner, start, count in rows if owner in names]
    return max(mine, key=lambda each: each[1], default=None)
