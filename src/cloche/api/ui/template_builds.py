"""Builds of templates that were started in the console: each in a thread, its words kept for whoever looks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

from cloche import errors
from cloche.model import new_id
from cloche.telemetry import log
from cloche.templates import Catalogue, Progress, Recipe, build

MAX_LINES = 2000
MAX_LINE = 500  # characters
KEPT = 8  # that have ended
MAX_AT_ONCE = 2


class HostBuild:
    """One of them. Its thread writes, the server's reads."""

    def __init__(self, recipe: Recipe):
        self.id = new_id("b")
        self.recipe = recipe
        self.started_at = time.time()
        self.ended_at: float | None = None
        self.state: Literal["building", "ready", "error"] = "building"
        self.fraction = 0.0
        self.ref = ""  # what it made
        self.reason = ""  # why it failed
        self._lines: deque[tuple[int, str]] = deque(maxlen=MAX_LINES)  # numbered from 1

    def run(self, catalogue: Catalogue) -> None:
        """To its end. What goes wrong is in `reason`."""
        try:
            self.ref = build(catalogue, self.recipe, self._hear).ref
            self.state = "ready"
        except (errors.ClocheError, OSError) as error:
            self.reason = str(error)
            self.state = "error"
        self.ended_at = time.time()
        log.info("template.built_in_console", template=self.recipe.name, state=self.state, ref=self.ref)

    def lines_after(self, number: int) -> tuple[list[str], int]:
        """What was said since the line of that number, and the number of the last."""
        known = self._lines.copy()  # at once, as its thread goes on
        return [text for each, text in known if each > number], known[-1][0] if known else number

    def _hear(self, progress: Progress) -> None:
        self.fraction = self.fraction if progress.fraction is None else progress.fraction
        last = self._lines[-1][0] if self._lines else 0
        self._lines.append((last + 1, f"{progress.phase}: {progress.detail[:MAX_LINE]}"))


class HostBuilds:
    """Those of this server. None outlives it: then nothing of it is there."""

    def __init__(self, catalogue: Catalogue):
        self._catalogue = catalogue
        self._known: dict[str, HostBuild] = {}

    def start(self, recipe: Recipe) -> HostBuild:
        """Raises Busy where others go on."""
        if sum(each.state == "building" for each in self._known.values()) >= MAX_AT_ONCE:
            raise errors.Busy(f"{MAX_AT_ONCE} templates are being built already: wait for one of them")
        self._make_room()
        started = HostBuild(recipe)
        self._known[started.id] = started
        # A daemon: a server that ends does not wait for a download.
        threading.Thread(target=started.run, args=(self._catalogue,), name="cloche-template", daemon=True).start()
        return started

    def get(self, id: str) -> HostBuild:
        """Raises NotFound."""
        try:
            return self._known[id]
        except KeyError:
            raise errors.NotFound(f"there is no build {id[:50]!r}: a server knows its own, the last {KEPT}") from None

    def list(self) -> Sequence[HostBuild]:
        """The newest first."""
        return [*self._known.values()][::-1]

    def _make_room(self) -> None:
        ended = [id for id, each in self._known.items() if each.state != "building"]
        for id in ended[: max(len(ended) - KEPT + 1, 0)]:
            del self._known[id]
