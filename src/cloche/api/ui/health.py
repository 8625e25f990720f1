"""`/ui/health`: whether the server is well, how full it is, what `cloche doctor` says. For users, only the first."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.admin_capacity import capacity_of
from cloche.api.ui import words
from cloche.api.ui.asking import is_partial
from cloche.api.ui.host_facts import disk_of, memory_of_server, parts_of, uptime_seconds, versions
from cloche.api.ui.house import House, Page, Visitor
from cloche.engine.operations.doctor import examine, missing_in
from cloche.engine.operations.health import Verdict

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
        return self._house.render(request, visitor, name, words=words, **values)

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
        return self._house.render(request, visitor, "health_disk.html", words=words, parts=parts)

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
