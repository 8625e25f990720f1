"""A template's nursery, replaced when it dies."""

from __future__ import annotations

import asyncio
import os
import time

from cloche import errors
from cloche.isolation.base import IsolationBackend, Nursery
from cloche.model import Template
from cloche.tasks import TaskSet
from cloche.telemetry import log
from cloche.templates.catalogue import hold_template

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0


class LiveNursery:
    """Returns a nursery that works. The live cells of one that died stay alive."""

    def __init__(self, backend: IsolationBackend, template: Template):
        self.template = template
        self._backend = backend
        self._nursery: Nursery | None = None
        self._starting = asyncio.Lock()
        self._failure: errors.ClocheError | None = None
        self._retry_at = 0.0
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self._closing = TaskSet()
        self._closed = False
        self._held: int | None = None

    @property
    def alive(self) -> bool:
        """Whether cells can be had from it at once."""
        return self._nursery is not None and self._nursery.alive

    @property
    def why(self) -> str:
        """The reason why it could not be started, the last time; empty where it could."""
        return "" if self._failure is None else str(self._failure)

    async def get(self) -> Nursery:
        """Raises NurseryFailed or IsolationUnavailable; the same again for a short while, so as not to spin."""
        if self._nursery is not None and self._nursery.alive:
            return self._nursery
        async with self._starting:
            if self._closed:
                raise errors.ShuttingDown("the host is shutting down")
            if self._nursery is None or not self._nursery.alive:
                if self._nursery is not None:
                    log.warning("nursery.died", template=self.template.ref)
                self._retire_nursery()
                self._nursery = await self._start_nursery()
            return self._nursery

    async def aclose(self) -> None:
        self._closed = True
        async with self._starting:  # one that is being started is closed as well, when it can be
            self._retire_nursery()
        await asyncio.gather(*self._closing)
        if self._held is not None:
            os.close(self._held)
            self._held = None

    async def _start_nursery(self) -> Nursery:
        if self._failure is not None and time.monotonic() < self._retry_at:
            raise self._failure
        try:
            self._hold_template()
            nursery = await self._backend.start(self.template)
        except errors.Unavailable as error:
            self._failure = error
            self._retry_at = time.monotonic() + self._backoff_seconds
            self._backoff_seconds = min(self._backoff_seconds * 2, MAX_BACKOFF_SECONDS)
            log.error("nursery.failed", template=self.template.ref, error=str(error))
            raise
        self._failure, self._backoff_seconds = None, FIRST_BACKOFF_SECONDS
        log.info("nursery.ready", template=self.template.ref)
        return nursery

    def _hold_template(self) -> None:
        """Keeps all processes from collecting this version of the template."""
        if self._held is None:
            self._held = hold_template(self.template)

    def _retire_nursery(self) -> None:
        nursery, self._nursery = self._nursery, None
        if nursery is None:
            return
        self._closing.start(nursery.aclose())
