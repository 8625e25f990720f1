"""`/ui/health`: whether the server works; for admins also its load, and the result of `cloche doctor`."""

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

from cloche.api.admin import measure_capacity
from cloche.api.console import format
from cloche.api.console.context import ConsoleContext, ConsolePage, ConsoleVisitor, is_partial
from cloche.engine.operations.doctor import missing_requirements, run_checkup
from cloche.engine.operations.health import HealthVerdict

# Disk, memory, uptime and software versions of the host, for the page of its health.

REPORTED_PACKAGES = ("cloche", "starlette", "uvicorn", "uvloop", "msgspec")
BLOCK_BYTES = 512  # in which `st_blocks` counts, whatever the file system has
_PART_DESCRIPTIONS = {
    "templates": "templates, with their packages",
    "images": "snapshots, paused sandboxes and volumes",
    "blobs": "uploaded files",
    "cache": "packages that were fetched",
    "audit": "the audit log",
    "run": "what servers that run need",
    "builds": "logs of builds",
    "secret": "what tokens are signed with",
}


class DataDisk(NamedTuple):
    """The file system of the data directory."""

    path: str
    free_bytes: int
    total_bytes: int

    @property
    def used_part(self) -> float:
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class DiskPart(NamedTuple):
    """A part of the data directory."""

    name: str
    what: str
    size_bytes: int


def data_disk(data_dir: str) -> DataDisk | None:
    """None where it cannot be read."""
    try:
        found = shutil.disk_usage(data_dir)
    except OSError:
        return None
    return DataDisk(data_dir, found.free, found.total)


def disk_parts(data_dir: str) -> list[DiskPart]:
    """The parts of the data directory, the largest first. It reads every file's size: run it in a thread."""
    found: dict[str, int] = {}
    for entry in _scan_entries(data_dir):
        name = "store" if entry.name.startswith("store.") else entry.name
        found[name] = found.get(name, 0) + _entry_size(entry)
    parts = (
        DiskPart(name, _PART_DESCRIPTIONS.get(name, "records" if name == "store" else ""), size)
        for name, size in found.items()
    )
    return sorted(parts, key=lambda each: -each.size_bytes)


def _entry_size(entry: os.DirEntry[str]) -> int:
    """The size with all below it. Files that vanish meanwhile, or may not be read, count as 0."""
    try:
        own = entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
    except OSError:
        return 0
    if not entry.is_dir(follow_symlinks=False):
        return own
    return own + sum(_entry_size(each) for each in _scan_entries(entry.path))


def _scan_entries(directory: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            yield from found
    except OSError:
        return


def software_versions() -> list[tuple[str, str]]:
    """The versions of the software that matters for support."""
    own = [(name.capitalize() if name == "cloche" else name, version(name)) for name in REPORTED_PACKAGES]
    host = [("Python", platform.python_version()), ("Linux", platform.release()), ("SQLite", sqlite3.sqlite_version)]
    return [own[0], *host, *own[1:]]


def server_memory() -> int | None:
    """The memory of this process; None where the host does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def uptime_seconds() -> float:
    """The age of this process."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


_VERDICT_MEANINGS = {
    "nursery_failed": "The process that sandboxes are forked from could not be started.",
    "isolation_unavailable": "This host does not allow what the walls of a sandbox need.",
    "template_not_found": "The template “python” is not built.",
    "template_build_failed": "The template “python” could not be built.",
    "timed_out": "A trial sandbox did not answer in time: the host may be overloaded.",
    "canary_failed": "A trial sandbox was made, but did not run the simplest program.",
}


class HealthPage:
    def __init__(self, context: ConsoleContext):
        self._context = context
        self._engine = context.engine
        self._looking = asyncio.Lock()  # one at a time is enough for everybody

    async def show(self, request: Request, visitor: ConsoleVisitor) -> Response:
        values = {**self._public_values(), **(self._admin_values() if visitor.is_admin else {})}
        name = "health_facts.html" if is_partial(request) else "health.html"
        return self._context.render(request, visitor, name, words=format, **values)

    async def show_doctor(self, request: Request, visitor: ConsoleVisitor) -> Response:
        """The current result of `cloche doctor` for this host."""
        began = time.monotonic()
        async with self._looking:
            sections = await asyncio.to_thread(run_checkup, self._context.config)
        counts = Counter(check.state for section in sections for check in section.checks)
        return self._context.render(
            request,
            visitor,
            "health_doctor.html",
            sections=sections,
            missing=missing_requirements(sections),
            counts=counts,
            seconds=time.monotonic() - began,
        )

    async def disk(self, request: Request, visitor: ConsoleVisitor) -> Response:
        """The current sizes of the parts of the data directory."""
        async with self._looking:
            parts = await asyncio.to_thread(disk_parts, self._context.config.data_dir)
        return self._context.render(request, visitor, "health_disk.html", words=format, parts=parts)

    def _public_values(self) -> dict[str, Any]:
        verdict = self._context.health.verdict
        return {"verdict": verdict, "meaning": explain_verdict(verdict)}

    def _admin_values(self) -> dict[str, Any]:
        engine, admission = self._engine, self._engine.cell_supply.admission
        return {
            "failing": failing_parts(self._context),
            "capacity": measure_capacity(engine),
            "refused": {gate.what: sum(gate.refused.values()) for gate in (admission.sandboxes, admission.executions)},
            "nurseries": engine.cell_supply.nurseries,
            "living": Counter(each.record.template for each in engine.live_sandboxes() if each.spec.owner),
            "disk": data_disk(self._context.config.data_dir),
            "server_bytes": server_memory(),
            "load": os.getloadavg(),
            "cores": len(os.sched_getaffinity(0)),
            "uptime_seconds": uptime_seconds(),
            "versions": software_versions(),
            "backend": self._context.config.backend,
        }


def explain_verdict(verdict: HealthVerdict) -> str:
    """The reason why the server does not work, for people; empty where it does."""
    return "" if verdict.ok else _VERDICT_MEANINGS.get(verdict.why, f"What was seen: {verdict.why}.")


def failing_parts(context: ConsoleContext) -> list[str]:
    """Other parts that fail although sandboxes work."""
    parts = (
        ("The audit log", context.engine.audit_log.failing),
        ("The store of records", context.engine.records.failing),
    )
    return [f"{name} cannot be written: look at the disk." for name, fails in parts if fails]


def pages(context: ConsoleContext) -> list[ConsolePage]:
    page = HealthPage(context)
    return [
        ConsolePage("/health", page.show),
        ConsolePage("/health/doctor", page.show_doctor, admin=True),
        ConsolePage("/health/disk", page.disk, admin=True),
    ]
