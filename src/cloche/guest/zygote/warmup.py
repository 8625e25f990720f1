"""The warm-up of the nursery, done once so that forked kernels need not: imports, caches, first calls.

The warm-up runs cells through a real kernel on a channel without a listener, so the same code as in a sandbox
has run before. Then all traces of it are removed.
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
from cloche.guest.kernel.channel import KernelChannel
from cloche.guest.kernel.kernel import PythonKernel
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


def prepare_kernel(imports: list) -> None:
    """Imports, makes the one Shell, warms it up, and cleans it.

    Leaves no thread, no descriptor and no event loop.

    Raises an import's exception: a template with failing imports must not be used.
    """
    for name in (*_ALWAYS, *imports):
        importlib.import_module(name)
    figures.hook_matplotlib()
    pil_images.hook_pil()
    plotly_figures.hook_plotly()
    if "matplotlib" in sys.modules and figures.charts_available():
        importlib.import_module("e2b_charts")
    threads.find_libraries()
    heap.fill_heap()
    shell = Shell.instance()
    kernel = PythonKernel(shell)
    for _ in range(2):  # the interpreter specialises code that it has seen a few times: done here, not in each fork
        _rehearse_cells(kernel, shell, _warmup_cells())
    # The cache of methods is full of names from all over memory, each of which a fork would write to (it counts
    # references) when it puts another in its place: 90 pages. Empty, it soon holds what every sandbox needs.
    sys._clear_type_cache()
    _rehearse_cells(kernel, shell, _CELLS[:2])
    _uninstall_pyplot_hook()
    kernels.prepared[:] = [kernel]


def take_first_steps() -> None:
    """Does the steps of a sandbox's first kernel up to the end of a first cell."""
    kernel = kernels.prepared[0]
    reseed.reseed_after_fork()
    with _silent_channel(kernel) as run:
        run(_CELLS[0])


def _rehearse_cells(kernel: PythonKernel, shell: Shell, cells: tuple) -> None:
    with _silent_channel(kernel) as run:
        for cell in cells:
            run(cell)
    _remove_traces(shell)


def _warmup_cells() -> tuple:
    pandas = _PANDAS if "pandas" in sys.modules else ()
    drawing = _MATPLOTLIB if "matplotlib.pyplot" in sys.modules else ()
    return (*_CELLS, *pandas, *drawing, *_CELLS[:1])


@contextlib.contextmanager
def _silent_channel(kernel: PythonKernel) -> Iterator:
    """Sends the kernel's answers and output nowhere; yields a function that runs a cell in it."""
    ours, theirs = socket.socketpair()
    silence = os.open(os.devnull, os.O_WRONLY)
    saved = [os.dup(fd) for fd in (1, 2)]
    theirs.setblocking(False)
    handler = signal.getsignal(signal.SIGINT)
    kernel.attach(KernelChannel(ours.detach(), os.dup(silence), os.dup(silence), "0" * 16, kernel.interrupts))
    try:
        for fd in (1, 2):
            os.dup2(silence, fd)
        yield lambda code: _run_cell(kernel, theirs, code)
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


def _run_cell(kernel: PythonKernel, theirs: socket.socket, code: str) -> None:
    with warnings.catch_warnings():
        kernel.handle_request({"do": "execute", "run": "warm", "env": {}, "cwd": None, "input": False}, code.encode())
    decoder = wire.FrameDecoder(wire.MAX_BODY_FROM_GUEST)
    with contextlib.suppress(BlockingIOError):
        while True:
            decoder.feed(theirs.recv(1 << 20))
    list(decoder.frames())


def _remove_traces(shell: Shell) -> None:
    """Removes traces of the warm-up that a program could see."""
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


def _uninstall_pyplot_hook() -> None:
    """Removes pyplot's hook that checks after each cell whether figures are to be drawn (as after `plt.ion()`).

    That installs it again; and figures open at a cell's end are drawn and shown anyway.
    """
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.uninstall_repl_displayhook()


def _close_fonts() -> None:
    """Fonts keep their files open, and forks close descriptors under them. Opening them again is cheap."""
    fonts = sys.modules.get("matplotlib.font_manager")
    if fonts is not None and hasattr(fonts, "_get_font"):
        fonts._get_font.cache_clear()
        gc.collect()
