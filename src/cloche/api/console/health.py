"""`/ui/health`: whether the server is well, how full it is, what `cloche doctor` says. For users, only the first."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.admin import capacity_of
from cloche.api.console import format
from cloche.api.console.context import House, Page, Visitor, is_partial
from cloche.engine.operations.doctor import examine, missing_in
from cloche.engine.operations.health import Verdict

# What the host has, and how much of it is used: what the page of its health shows beside the engine's own numbers.

PACKAGES = ("cloche", "starlette", "uvicorn", "uvloop", "msgspec")
BLOCK_BYTES = 512  # in which `st_blocks` counts, whatever the file system has
_PLAIN = {
    "templates": "templates, with their packages",
    "images": "snapshots, paused sandboxes and volumes",
    "blobs": "uploaded files",
    "cache": "packages that were fetched",
    "audit": "the audit log",
    "run": "what servers that run need",
    "builds": "logs of builds",
    "secret": "what tokens are signed with",
}


class Disk(NamedTuple):
    """Of the data directory's file system."""

    path: str
    free_bytes: int
    total_bytes: int

    @property
    def used_part(self) -> float:
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class Part(NamedTuple):
    """Of the data directory."""

    name: str
    what: str
    size_bytes: int


def disk_of(data_dir: str) -> Disk | None:
    """None where it cannot be told."""
    try:
        found = shutil.disk_usage(data_dir)
    except OSError:
        return None
    return Disk(data_dir, found.free, found.total)


def parts_of(data_dir: str) -> list[Part]:
    """What takes room, the largest first. It looks at every file: in a thread."""
    found: dict[str, int] = {}
    for entry in _entries(data_dir):
        name = "store" if entry.name.startswith("store.") else entry.name
        found[name] = found.get(name, 0) + _size(entry)
    parts = (Part(name, _PLAIN.get(name, "records" if name == "store" else ""), size) for name, size in found.items())
    return sorted(parts, key=lambda each: -each.size_bytes)


def _size(entry: os.DirEntry[str]) -> int:
    """With all below it. What goes meanwhile, or may not be seen, counts for nothing."""
    try:
        own = entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
    except OSError:
        return 0
    if not entry.is_dir(follow_symlinks=False):
        return own
    return own + sum(_size(each) for each in _entries(entry.path))


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            yield from found
    except OSError:
        return


def versions() -> list[tuple[str, str]]:
    """Of what matters when somebody asks what is wrong."""
    own = [(name.capitalize() if name == "cloche" else name, version(name)) for name in PACKAGES]
    host = [("Python", platform.python_version()), ("Linux", platform.release()), ("SQLite", sqlite3.sqlite_version)]
    return [own[0], *host, *own[1:]]


def memory_of_server() -> int | None:
    """Of this process; None where the host does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def uptime_seconds() -> float:
    """Of this process."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


_WORDS = {
    "nursery_failed": "The process that sandboxes are forked from could not be started.",
    "isolation_unavailable": "This host does not allow what the walls of a sandbox need.",
    "template_not_found": "The template “python” is not built.",
    "template_build_failed": "The template “python” could not be built.",
    "timed_out": "A trial sandbox did not answer in time: the host may be overloaded.",
    "canary_failed": "A trial sandbox was made, but did not run the simplest program.",
}


class HealthPage:
    def __init__(self, house: House):
        self._house = house
        self._engine = house.engine
        self._looking = asyncio.Lock()  # one at a time is enough for everybody

    async def show(self, request: Request, visitor: Visitor) -> Response:
        values = {**self._of_all(), **(self._of_admins() if visitor.is_admin else {})}
        name = "health_facts.html" if is_partial(request) else "health.html"
        return self._house.render(request, visitor, name, words=format, **values)

    async def doctor(self, request: Request, visitor: Visitor) -> Response:
        """What `cloche doctor` says of this host, now."""
        began = time.monotonic()
        async with self._looking:
            sections = await asyncio.to_thread(examine, self._house.config)
        counts = Counter(check.state for section in sections for check in section.checks)
        return self._house.render(
            request,
            visitor,
            "health_doctor.html",
            sections=sections,
            missing=missing_in(sections),
            counts=counts,
            seconds=time.monotonic() - began,
        )

    async def disk(self, request: Request, visitor: Visitor) -> Response:
        """What takes room in the data directory, now."""
        async with self._looking:
            parts = await asyncio.to_thread(parts_of, self._house.config.data_dir)
        return self._house.render(request, visitor, "health_disk.html", words=format, parts=parts)

    def _of_all(self) -> dict[str, Any]:
        verdict = self._house.health.verdict
        return {"verdict": verdict, "meaning": meaning_of(verdict)}

    def _of_admins(self) -> dict[str, Any]:
        engine, admission = self._engine, self._engine.housing.admission
        return {
            "failing": failing_parts(self._house),
            "capacity": capacity_of(engine),
            "refused": {gate.what: sum(gate.refused.values()) for gate in (admission.sandboxes, admission.executions)},
            "nurseries": engine.housing.nurseries,
            "living": Counter(each.record.template for each in engine.living() if each.spec.owner),
            "disk": disk_of(self._house.config.data_dir),
            "server_bytes": memory_of_server(),
            "load": os.getloadavg(),
            "cores": len(os.sched_getaffinity(0)),
            "uptime_seconds": uptime_seconds(),
            "versions": versions(),
            "backend": self._house.config.backend,
        }


def meaning_of(verdict: Verdict) -> str:
    """Why it is not well, for people; empty where it is."""
    return "" if verdict.ok else _WORDS.get(verdict.why, f"What was seen: {verdict.why}.")


def failing_parts(house: House) -> list[str]:
    """What else does not work, though sandboxes do."""
    parts = (("The audit log", house.engine.trail.failing), ("The store of records", house.engine.records.failing))
    return [f"{name} cannot be written: look at the disk." for name, fails in parts if fails]


def pages(house: House) -> list[Page]:
    page = HealthPage(house)
    return [
        Page("/health", page.show),
        Page("/health/doctor", page.doctor, admin=True),
        Page("/health/disk", page.disk, admin=True),
    ]
