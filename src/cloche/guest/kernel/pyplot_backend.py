"""Pyplot's backend inside a kernel: Agg with a `show` that displays in the cell's output.

Imported by matplotlib only.
"""

from __future__ import annotations

from typing import Any

from IPython.display import display
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from cloche.guest.kernel import figures


class FigureManager(FigureManagerBase):
    def show(self) -> None:
        display(self.canvas.figure)

    @classmethod
    def pyplot_show(cls, *, block: Any = None) -> None:
        """`plt.show()`: displays the open figures, then closes them."""
        figures.show_open_figures(display)


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager  # type: ignore[assignment]
