"""What the nursery does once, so that a forked kernel does not: imports, caches, first times.

The warm-up runs cells through a real kernel on a channel that nobody listens to, so what a sandbox does later has been
done before by the same code. Then all traces of it are removed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator

from cloche.guest import wire
from cloche.guest.kernel import figures, pil_images, plotly_figures, reseed, threads
from cloche.guest.kernel import kernel as kernels
from cloche.guest.kernel.channel import Channel
from cloche.guest.kernel.kernel import Kernel
from cloche.guest.kernel.shell import Shell
from cloche.guest.zygote import heap

_ALWAYS = ("asyncio", "getpass", "pwd", "grp", "subprocess", "traceback", "tokenize", "pdb", "IPython.display")

_CELLS = (
    "1+1",
    "print('x')",
    "_cell = [1, 'a', {2: 3.5}]\n_cell",
    "def _f():\n    return 1/0\n_f()",
    "x = = 1",
    "%pwd",
    "import asyncio\nawait asyncio.sleep(0)",
    "from IPython.display import HTML\nHTML('<b>x</b>')",
)

_PANDAS = (
    "import pandas as pd\ndf = pd.DataFrame({'x': [1, 2, 3], 'y': [.5, None, 2.5], 's': list('aab'),"
    " 't': pd.date_range('2024-01-01', periods=3)})\ndf",
    "df.groupby('s')['x'].sum()",
    "df.describe()",
)

_MATPLOTLIB = (
    "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3], [1, 4, 9], label='x')\nplt.title('T')\nplt.legend()",
    "fig, ax = plt.subplots()\nax.bar(['a', 'b'], [1, 2])\nax.scatter([0, 1], [1, 2])\nax.hist([1, 2, 2])\nax.grid()\n"
    "fig.tight_layout()\nplt.show()",
)


def prepare(imports: list) -> None:
    """Imports, makes the one Shell, warms it up, and cleans it. Leaves no thread, no descriptor and no event loop.

    Raises what an import raises: a template whose imports fail must not be used.
    """
    for name in (*_ALWAYS, *imports):
        importlib.import_module(name)
    figures.follow()
    pil_images.follow()
    plotly_figures.follow()
    if "matplotlib" in sys.modules and figures.available():
        importlib.import_module("e2b_charts")
    threads.find()
    heap.fill()
    shell = Shell.instance()
    kernel = Kernel(shell)
    for _ in range(2):  # the interpreter specialises code that it has seen a few times: done here, not in each fork
        _rehearse(kernel, shell, _cells())
    # The cache of methods is full of names from all over memory, each of which a fork would write to (it counts
    # references) when it puts another in its place: 90 pages. Empty, it soon holds what every sandbox needs.
    sys._clear_type_cache()
    _rehearse(kernel, shell, _CELLS[:2])
    _let_figures_be()
    kernels.prepared[:] = [kernel]


def take_first_steps() -> None:
    """What the first kernel of a sandbox does until it has run a cell."""
    kernel = kernels.prepared[0]
    reseed.diverge()
    with _listening(kernel) as run:
        run(_CELLS[0])


def _rehearse(kernel: Kernel, shell: Shell, cells: tuple) -> None:
    with _listening(kernel) as run:
        for cell in cells:
            run(cell)
    _forget(shell)


def _cells() -> tuple:
    pandas = _PANDAS if "pandas" in sys.modules else ()
    drawing = _MATPLOTLIB if "matplotlib.pyplot" in sys.modules else ()
    return (*_CELLS, *pandas, *drawing, *_CELLS[:1])


@contextlib.contextmanager
def _listening(kernel: Kernel) -> Iterator:
    """While the kernel's answers and output go nowhere; gives a function that runs a cell in it."""
    ours, theirs = socket.socketpair()
    silence = os.open(os.devnull, os.O_WRONLY)
    saved = [os.dup(fd) for fd in (1, 2)]
    theirs.setblocking(False)
    handler = signal.getsignal(signal.SIGINT)
    kernel.attach(Channel(ours.detach(), os.dup(silence), os.dup(silence), "0" * 16, kernel.interrupts))
    try:
        for fd in (1, 2):
            os.dup2(silence, fd)
        yield lambda code: _run(kernel, theirs, code)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, fd)
        for fd in (silence, *saved):
            os.close(fd)
        kernel.detach()
        theirs.close()
        signal.signal(signal.SIGINT, handler)


def _run(kernel: Kernel, theirs: socket.socket, code: str) -> None:
    with warnings.catch_warnings():
        kernel.handle({"do": "execute", "run": "warm", "env": {}, "cwd": None, "input": False}, code.encode())
    decoder = wire.Decoder(wire.MAX_BODY_FROM_GUEST)
    with contextlib.suppress(BlockingIOError):
        while True:
            decoder.feed(theirs.recv(1 << 20))
    list(decoder.frames())


def _forget(shell: Shell) -> None:
    """Removes what the warm-up left where a program could see it."""
    shell.reset(new_session=False)
    shell.forget_cells()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    if shell.loop is not None:
        shell.loop.close()
        shell.loop = None
        sys.modules["asyncio"].set_event_loop(None)
    _close_fonts()


def _let_figures_be() -> None:
    """Pyplot has each cell followed by a look whether figures are to be drawn, which they are after `plt.ion()`.

    That installs it again; and whatever is open at a cell's end is drawn and shown anyway.
    """
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.uninstall_repl_displayhook()


def _close_fonts() -> None:
    """Fonts keep their files open, and whoever forks us closes descriptors under them. Opening them again is cheap."""
    fonts = sys.modules.get("matplotlib.font_manager")
    if fonts is not None and hasattr(fonts, "_get_font"):
        fonts._get_font.cache_clear()
        gc.collect()
