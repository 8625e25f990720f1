"""What a sandbox used in the last minutes, as the points of a line. Drawn by the server: no request per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cloche.engine.operations.metrics import Meter, Sample

WIDTH, HEIGHT = 72, 20
POINTS = 36  # in a row: three minutes
LONG_WIDTH, LONG_HEIGHT = 360, 64
LONG_POINTS = 360  # on a sandbox's own page: half an hour
_HEADROOM = 1.25


class Line(NamedTuple):
    points: str  # of an SVG polyline
    now: float
    most: float


class Usage(NamedTuple):
    cpu: Line  # percent of what it may use
    memory: Line  # bytes


def usage_of(meter: Meter, count: int = POINTS, width: int = WIDTH, height: int = HEIGHT) -> Usage | None:
    """None of one that is so young that nobody has looked yet. A line of few points begins further to the right."""
    samples = meter.recent(count)
    return None if not samples else _usage(samples, max(len(samples), POINTS), width, height)


def _usage(samples: Sequence[Sample], count: int, width: int, height: int) -> Usage:
    cpu = [each.cpu_percent for each in samples]
    memory = [float(each.memory_bytes + each.space_bytes) for each in samples]
    step = width / max(count - 1, 1)
    return Usage(
        Line(_points(cpu, 100.0, step, width, height), cpu[-1], max(cpu)),
        Line(_points(memory, max(memory) * _HEADROOM, step, width, height), memory[-1], max(memory)),
    )


def _points(values: Sequence[float], top: float, step: float, width: int, height: int) -> str:
    """The newest at the right edge. A line on the ground is a line, too: one pixel stays below it and above."""
    room, first = height - 2, width - step * (len(values) - 1)
    if len(values) == 1:
        values, first = [*values, *values], width - step
    scaled = (height - 1 - room * min(value / top, 1.0) if top else height - 1 for value in values)
    return " ".join(f"{first + step * at:.4g},{y:.3g}" for at, y in enumerate(scaled))
