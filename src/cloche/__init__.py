"""Cloche: sealed, pre-warmed sandboxes for code that nobody trusts.

import cloche

with cloche.Sandbox() as box:
    box.run("import pandas as pd; pd.DataFrame({'x': [1, 2]})").results[0].html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloche import errors as errors
    from cloche import events as events
    from cloche.errors import ClocheError as ClocheError
    from cloche.events import Error as Error
    from cloche.events import Result as Result
    from cloche.events import Run as Run
    from cloche.events import RunInfo as RunInfo
    from cloche.model import FileChange as FileChange
    from cloche.model import FileInfo as FileInfo
    from cloche.model import Limits as Limits
    from cloche.model import Mark as Mark
    from cloche.model import SandboxInfo as SandboxInfo
    from cloche.model import SnapshotInfo as SnapshotInfo
    from cloche.model import Usage as Usage
    from cloche.model import Variable as Variable
    from cloche.model import Variables as Variables
    from cloche.model import VolumeInfo as VolumeInfo
    from cloche.network_policy import NetworkEntry as NetworkEntry
    from cloche.network_policy import NetworkPolicy as NetworkPolicy
    from cloche.notebook import Cell as Cell
    from cloche.notebook import History as History
    from cloche.sdk.aio import AsyncContext as AsyncContext
    from cloche.sdk.aio import AsyncSandbox as AsyncSandbox
    from cloche.sdk.aio import arun as arun
    from cloche.sdk.aio_detached import AsyncDetachedRun as AsyncDetachedRun
    from cloche.sdk.detached import DetachedRun as DetachedRun
    from cloche.sdk.parts import CommandResult as CommandResult
    from cloche.sdk.sandbox import Context as Context
    from cloche.sdk.sandbox import Sandbox as Sandbox
    from cloche.sdk.sandbox import run as run
    from cloche.sdk.snapshots import AsyncSnapshots as AsyncSnapshots
    from cloche.sdk.snapshots import Snapshots as Snapshots
    from cloche.sdk.snapshots import snapshots as snapshots
    from cloche.sdk.tools import Tool as Tool
    from cloche.sdk.volumes import AsyncVolumes as AsyncVolumes
    from cloche.sdk.volumes import Volumes as Volumes
    from cloche.sdk.volumes import volumes as volumes

# Where each name lives. Importing `cloche` imports none of it (PEP 562): what is used is imported when it is used.
_PLACES = {
    "ClocheError": "cloche.errors",
    "Error": "cloche.events",
    "Result": "cloche.events",
    "Run": "cloche.events",
    "RunInfo": "cloche.events",
    "FileChange": "cloche.model",
    "FileInfo": "cloche.model",
    "Limits": "cloche.model",
    "Mark": "cloche.model",
    "SandboxInfo": "cloche.model",
    "SnapshotInfo": "cloche.model",
    "Usage": "cloche.model",
    "VolumeInfo": "cloche.model",
    "NetworkEntry": "cloche.network_policy",
    "NetworkPolicy": "cloche.network_policy",
    "Cell": "cloche.notebook",
    "History": "cloche.notebook",
    "AsyncContext": "cloche.sdk.aio",
    "AsyncSandbox": "cloche.sdk.aio",
    "arun": "cloche.sdk.aio",
    "AsyncDetachedRun": "cloche.sdk.aio_detached",
    "DetachedRun": "cloche.sdk.detached",
    "CommandResult": "cloche.sdk.parts",
    "Context": "cloche.sdk.sandbox",
    "Sandbox": "cloche.sdk.sandbox",
    "run": "cloche.sdk.sandbox",
    "AsyncSnapshots": "cloche.sdk.snapshots",
    "Snapshots": "cloche.sdk.snapshots",
    "snapshots": "cloche.sdk.snapshots",
    "Tool": "cloche.sdk.tools",
    "AsyncVolumes": "cloche.sdk.volumes",
    "Volumes": "cloche.sdk.volumes",
    "volumes": "cloche.sdk.volumes",
    "Variable": "cloche.model",
    "Variables": "cloche.model",
}
_MODULES = ("errors", "events")

__all__ = [*_PLACES, *_MODULES]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"cloche.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'cloche' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
