"""Plotly's figures in cells: as in Jupyter, data that the client draws; and a short text for models.

Left to itself, plotly takes our shell for an unknown one and adds its whole library, 5 MB, to each first
figure; and it refuses to show any without `nbformat`, of which it uses nothing but the version.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from cloche.guest.kernel.import_hooks import after_import

MODULE = "plotly.io._renderers"
RENDERER = "plotly_mimetype"  # what it chooses in Jupyter's
NBFORMAT_VERSION = "5.0.0"  # it asks for 4.2 or newer

_own: dict = {}  # what it had chosen


def hook_plotly() -> None:
    """From now on plotly's figures are shown so, whenever it is imported."""
    after_import(MODULE, _patch_renderers)


def unhook_plotly() -> None:
    """Undoes `hook_plotly`, in a process that shows nothing and has removed its import hooks."""
    module: Any = sys.modules.get(MODULE)
    if module is not None and _own:
        module.nbformat, module.renderers.default = _own["nbformat"], _own["default"]


def _patch_renderers() -> None:
    module: Any = sys.modules[MODULE]
    _own.update(nbformat=module.nbformat, default=module.renderers.default)
    if module.nbformat is None:
        module.nbformat = types.SimpleNamespace(__version__=NBFORMAT_VERSION)
    if not os.environ.get("PLOTLY_RENDERER"):
        module.renderers.default = RENDERER
    renderer = module.renderers[RENDERER]
    bundle_of = renderer.to_mimebundle
    renderer.to_mimebundle = lambda figure: {**bundle_of(figure), "text/plain": _describe_figure(figure)}


def _describe_figure(figure: dict) -> str:
    """<Plotly figure: scatter, bar>, of a figure as plotly writes it down."""
    kinds = dict.fromkeys(str(trace.get("type", "scatter")) for trace in figure.get("data", ()))
    return f"<Plotly figure: {', '.join(kinds) or 'empty'}>"
