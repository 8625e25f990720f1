"""The jobs of a sandbox: those that run, and, for a moment, those that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Reversible
from typing import NoReturn, TypeVar

from cloche import errors
from cloche.engine.job import Job, PastJob

REMEMBERED_SECONDS = 30.0
MAX_REMEMBERED = 1024

J = TypeVar("J", Job, PastJob)


class Jobs:
    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._ended: dict[int, PastJob] = {}  # the newest last

    def add(self, job: Job) -> None:
        self._running[job.pid] = job

    def end(self, job: Job) -> None:
        """It has ended; for a while one can still ask how."""
        if self._running.get(job.pid) is job:
            del self._running[job.pid]
        if job.exited is None:
            return
        past = PastJob(pid=job.pid, tag=job.tag, exited=job.exited)
        self._ended.pop(job.pid, None)
        self._ended[job.pid] = past
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        asyncio.get_running_loop().call_later(REMEMBERED_SECONDS, self._forget, past)

    def list(self) -> list[Job]:
        """Those that run, the oldest first."""
        return list(self._running.values())

    def find(self, pid: int | None = None, tag: str | None = None) -> Job:
        """The job of that pid or tag that runs. Raises ProcessNotFound."""
        return _newest(self._running.values(), pid, tag) or _not_found(pid, tag)

    def recall(self, pid: int | None = None, tag: str | None = None) -> Job | PastJob:
        """As `find`; also what is known of one that ended a moment ago."""
        running = _newest(self._running.values(), pid, tag)
        return running or _newest(self._ended.values(), pid, tag) or _not_found(pid, tag)

    def _forget(self, past: PastJob) -> None:
        if self._ended.get(past.pid) is past:
            del self._ended[past.pid]


def _newest(known: Reversible[J], pid: int | None, tag: str | None) -> J | None:
    for job in reversed(known):
        if (pid is not None and job.pid == pid) or (tag is not None and job.tag == tag):
            return job
    return None


def _not_found(pid: int | None, tag: str | None) -> NoReturn:
    what = f"pid {pid}" if pid is not None else f"tag {tag}"
    raise errors.ProcessNotFound(f"process with {what} not found")
