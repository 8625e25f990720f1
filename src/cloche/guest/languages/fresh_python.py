"""A kernel in an interpreter of its own, which has imported nothing yet: see `languages`."""

from __future__ import annotations

import os

from cloche.guest.kernel.installed import Installed

_FDS = (3, 4, 5)  # as those of every kernel: see `processes`


def main(token: str) -> None:
    """Never returns."""
    installed = Installed()
    installed.follow()  # before IPython is imported: it may have been replaced, too
    installed.begin()
    from cloche.guest.kernel import figures, kernel, pil_images, plotly_figures
    from cloche.guest.kernel.shell import Shell

    for fd in _FDS:
        os.set_inheritable(fd, False)
    shell = Shell.instance()
    shell.installed = installed
    figures.follow()
    pil_images.follow()
    plotly_figures.follow()
    kernel.prepared[:] = [kernel.Kernel(shell)]
    kernel.main(*_FDS, token)
