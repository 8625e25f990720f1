"""A kernel in an interpreter of its own, which has imported nothing yet: see `languages`."""

from __future__ import annotations

import os

from cloche.guest.kernel.installed import InstalledPackages

_FDS = (3, 4, 5)  # as those of every kernel: see `processes`


def main(token: str) -> None:
    """Never returns."""
    installed = InstalledPackages()
    installed.follow()  # before IPython is imported: it may have been replaced, too
    installed.begin()
    from cloche.guest.kernel import figures, kernel, pil_images, plotly_figures
    from cloche.guest.kernel.shell import Shell

    for fd in _FDS:
        os.set_inheritable(fd, False)
    shell = Shell.instance()
    shell.installed = installed
    figures.hook_matplotlib()
    pil_images.hook_pil()
    plotly_figures.hook_plotly()
    kernel.prepared[:] = [kernel.PythonKernel(shell)]
    kernel.main(*_FDS, token)
