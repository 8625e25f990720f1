"""Pyplot's backend inside a kernel: Agg, whose `show` displays in the cell's output. Imported by matplotlib only."""

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
        """`plt.show()`: displays what is open, then closes it."""
        figures.show_open(display)


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager  # type: ignore[assignment]
