"""The jobs of a sandbox: those that run, and, for a moment, those that have ended."""

from __future__ import annotations

import asyncio

from cloche import errors
from cloche.engine.job import Job

REMEMBERED_SECONDS = 30.0
MAX_REMEMBERED = 1024


class Jobs:
    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._ended: dict[int, Job] = {}  # the newest last

    def add(self, job: Job) -> None:
        self._running[job.pid] = job

    def end(self, job: Job) -> None:
        """It has ended; for a while one can still ask how."""
        if self._running.get(job.pid) is job:
            del self._running[job.pid]
        self._ended.pop(job.pid, None)
        self._ended[job.pid] = job
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        asyncio.get_running_loop().call_later(REMEMBERED_SECONDS, self._forget, job)

    def list(self) -> list[Job]:
        """Those that run, the oldest first."""
        return list(self._running.values())

    def find(self, pid: int | None = None, tag: str | None = None, *, ended: bool = False) -> Job:
        """The job of that pid or tag. With `ended`, also one that ended a moment ago. Raises ProcessNotFound."""
        for known in (self._running, self._ended) if ended else (self._running,):
            for job in reversed(known.values()):
                if (pid is not None and job.pid == pid) or (tag is not None and job.tag == tag):
                    return job
        what = f"pid {pid}" if pid is not None else f"tag {tag}"
        raise errors.ProcessNotFound(f"process with {what} not found")

    def _forget(self, job: Job) -> None:
        if self._ended.get(job.pid) is job:
            del self._ended[job.pid]
