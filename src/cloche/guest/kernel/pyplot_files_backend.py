"""Matplotlib's backend for programs that save their pictures as files, where CLOCHE_FIGURES=files is set.

`plt.show()` saves each open figure as figure-1.png, figure-2.png and so on, the first that is free in the
working directory, and closes it. It lies in sandboxes as `cloche_show`: see `usersite`.
"""

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg


class FigureManager(FigureManagerBase):
    def show(self):
        """`figure.show()`"""
        _save_figure(self)

    @classmethod
    def pyplot_show(cls, *, block=None):
        """`plt.show()`"""
        for manager in Gcf.get_all_fig_managers():
            _save_figure(manager)


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager


def _save_figure(manager):
    with _free_file() as file:
        manager.canvas.figure.savefig(file, format="png", bbox_inches="tight")
    Gcf.destroy(manager)


def _free_file():
    number = 1
    while True:
        try:
            return open(f"figure-{number}.png", "xb")
        except FileExistsError:
            number += 1
