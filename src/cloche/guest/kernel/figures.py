"""Matplotlib figures in cells: shown at the end of the cell or by `plt.show()`, once, as PNG, then closed.

Nothing here imports matplotlib: a program that draws nothing pays nothing. `hook_matplotlib()` makes our
backend the default when the program imports matplotlib; it is not in the environment, so that `python3
script.py` has its own.
"""

from __future__ import annotations

import importlib.util
import io
import math
import sys
import warnings
from typing import Any

from cloche.guest.kernel.import_hooks import after_import

BACKEND = "module://cloche.guest.kernel.pyplot_backend"
PNG_COMPRESS_LEVEL = 3

_shown: list = []  # figures that this cell displayed itself: not to be shown again at its end


def use_backend() -> None:
    """Makes ours the backend, in a process that has imported matplotlib."""
    sys.modules["matplotlib"].rcParams["backend"] = BACKEND


def hook_matplotlib() -> None:
    """From now on matplotlib uses our backend, whenever it is imported."""
    after_import("matplotlib", use_backend)


def open_figures() -> list:
    """The managers of pyplot's open figures, oldest first, if our backend made them."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is None or not helpers.Gcf.figs:
        return []
    backend = sys.modules.get("cloche.guest.kernel.pyplot_backend")
    managers = helpers.Gcf.get_all_fig_managers()
    return [one for one in managers if backend is not None and isinstance(one, backend.FigureManager)]


def show_open_figures(display: Any) -> None:
    """Displays and closes each open figure; one that the cell displayed itself is only closed."""
    managers = open_figures()
    if not managers and not _shown:
        return
    try:
        for manager in sorted(managers, key=lambda one: one.num):
            figure = manager.canvas.figure
            if not any(figure is one for one in _shown):
                display(figure)
    finally:
        _shown.clear()
        for manager in managers:
            sys.modules["matplotlib._pylab_helpers"].Gcf.destroy(manager)


def figure_png(figure: Any) -> bytes | None:
    """The figure as PNG, cropped to its drawing, as notebooks show it. None if there is nothing in it."""
    if not figure.axes and not figure.lines and not figure.texts and not figure.images and not figure.subfigs:
        return None
    _shown.append(figure)
    return _draw_once(figure) or _save_png(figure)


def _save_png(figure: Any) -> bytes:
    """By savefig, which draws twice: once to measure, once for real."""
    buffer = io.BytesIO()
    if getattr(figure.canvas, "get_renderer", None) is None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


def _draw_once(figure: Any) -> bytes | None:
    """The same picture from one drawing. None where savefig is asked to differ from the screen, or where something
    is drawn outside of the canvas."""
    backend = sys.modules.get("cloche.guest.kernel.pyplot_backend")
    settings = sys.modules["matplotlib"].rcParams
    as_on_screen = settings["savefig.dpi"] == "figure" and settings["savefig.facecolor"] == "auto"
    if (
        backend is None
        or type(figure.canvas) is not backend.FigureCanvas
        or not as_on_screen
        or settings["savefig.transparent"]
    ):
        return None
    canvas = figure.canvas
    canvas.draw()
    box = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height or not box.width or not box.height:
        return None
    return _encode_png(_crop_pixels(canvas.buffer_rgba(), box.padded(settings["savefig.pad_inches"]), figure))


def _crop_pixels(pixels: Any, box: Any, figure: Any) -> Any:
    """The part of the picture in `box` (inches, from the lower left), with the figure's colour beyond its edges."""
    import numpy

    source = numpy.asarray(pixels)
    rows, columns = source.shape[:2]
    left, right = math.floor(box.x0 * figure.dpi), math.ceil(box.x1 * figure.dpi)
    top, bottom = rows - math.ceil(box.y1 * figure.dpi), rows - math.floor(box.y0 * figure.dpi)
    if left >= 0 and top >= 0 and right <= columns and bottom <= rows:
        return numpy.ascontiguousarray(source[top:bottom, left:right])
    target = numpy.empty((bottom - top, right - left, 4), dtype=source.dtype)
    target[:] = [round(255 * part) for part in _face_colour(figure)]
    inner = source[max(top, 0) : bottom, max(left, 0) : right]
    at_row, at_column = max(-top, 0), max(-left, 0)
    target[at_row : at_row + inner.shape[0], at_column : at_column + inner.shape[1]] = inner
    return target


def _face_colour(figure: Any) -> Any:
    from matplotlib.colors import to_rgba

    return to_rgba(figure.get_facecolor())


def _encode_png(pixels: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png", compress_level=PNG_COMPRESS_LEVEL)
    return buffer.getvalue()


# The data behind a matplotlib figure, by the `e2b_charts` package where the template has it.

CHART_MIME = "application/vnd.cloche.chart+json"
MAX_CHART_POINTS = 20_000

_available: bool | None = None


def charts_available() -> bool:
    """Whether the package is there. Asked once; it is not imported for that."""
    global _available
    if _available is None:
        _available = "e2b_charts" in sys.modules or importlib.util.find_spec("e2b_charts") is not None
    return _available


def extract_chart(figure: Any) -> dict | None:
    """The chart of a figure: type, title, elements. None without the package, for figures of more than
    MAX_CHART_POINTS points, and for figures that it cannot read: a chart is an extra, never the reason why a cell
    fails.
    """
    if not charts_available() or not figure.axes or _count_points(figure) > MAX_CHART_POINTS:
        return None
    try:
        from e2b_charts import chart_figure_to_dict  # type: ignore[import-not-found]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return chart_figure_to_dict(figure) or None
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _count_points(figure: Any) -> int:
    lines = sum(len(line.get_xdata(orig=False)) for axes in figure.axes for line in axes.lines)
    return lines + sum(len(one.get_offsets()) for axes in figure.axes for one in axes.collections)
