"""The data behind a matplotlib figure, by the `e2b_charts` package where the template has it."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from typing import Any

MIME = "application/vnd.cloche.chart+json"
MAX_POINTS = 20_000

_available: bool | None = None


def available() -> bool:
    """Whether the package is there. Asked once; it is not imported for that."""
    global _available
    if _available is None:
        _available = "e2b_charts" in sys.modules or importlib.util.find_spec("e2b_charts") is not None
    return _available


def chart(figure: Any) -> dict | None:
    """What the figure shows: type, title, elements. None without the package, for figures of more than MAX_POINTS
    points, and for figures that it cannot read: a chart is an extra, never the reason why a cell fails."""
    if not available() or not figure.axes or _points(figure) > MAX_POINTS:
        return None
    try:
        from e2b_charts import chart_figure_to_dict  # type: ignore[import-not-found]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return chart_figure_to_dict(figure) or None
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _points(figure: Any) -> int:
    lines = sum(len(line.get_xdata(orig=False)) for axes in figure.axes for line in axes.lines)
    return lines + sum(len(one.get_offsets()) for axes in figure.axes for one in axes.collections)
