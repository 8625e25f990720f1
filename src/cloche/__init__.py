"""Cloche: sealed, pre-warmed sandboxes for untrusted code.

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
    from cloche.sdk.async_parts import AsyncDetachedRun as AsyncDetachedRun
    from cloche.sdk.async_resources import AsyncSnapshots as AsyncSnapshots
    from cloche.sdk.async_resources import AsyncVolumes as AsyncVolumes
    from cloche.sdk.async_sandbox import AsyncContext as AsyncContext
    from cloche.sdk.async_sandbox import AsyncSandbox as AsyncSandbox
    from cloche.sdk.async_sandbox import arun as arun
    from cloche.sdk.parts import CommandResult as CommandResult
    from cloche.sdk.parts import DetachedRun as DetachedRun
    from cloche.sdk.resources import Snapshots as Snapshots
    from cloche.sdk.resources import Volumes as Volumes
    from cloche.sdk.resources import snapshots as snapshots
    from cloche.sdk.resources import volumes as volumes
    from cloche.sdk.sandbox import Context as Context
    from cloche.sdk.sandbox import Sandbox as Sandbox
    from cloche.sdk.sandbox import run as run
    from cloche.sdk.tools import Tool as Tool

# Where each name lives. Importing `cloche` imports none of it (PEP 562): what is used is imported when it is used.
_EXPORT_MODULES = {
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
    "AsyncContext": "cloche.sdk.async_sandbox",
    "AsyncSandbox": "cloche.sdk.async_sandbox",
    "arun": "cloche.sdk.async_sandbox",
    "AsyncDetachedRun": "cloche.sdk.async_parts",
    "DetachedRun": "cloche.sdk.parts",
    "CommandResult": "cloche.sdk.parts",
    "Context": "cloche.sdk.sandbox",
    "Sandbox": "cloche.sdk.sandbox",
    "run": "cloche.sdk.sandbox",
    "AsyncSnapshots": "cloche.sdk.async_resources",
    "Snapshots": "cloche.sdk.resources",
    "snapshots": "cloche.sdk.resources",
    "Tool": "cloche.sdk.tools",
    "AsyncVolumes": "cloche.sdk.async_resources",
    "Volumes": "cloche.sdk.resources",
    "volumes": "cloche.sdk.resources",
    "Variable": "cloche.model",
    "Variables": "cloche.model",
}
_EXPORTED_SUBMODULES = ("errors", "events")

__all__ = [*_EXPORT_MODULES, *_EXPORTED_SUBMODULES]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _EXPORTED_SUBMODULES:
        return import_module(f"cloche.{name}")
    if name not in _EXPORT_MODULES:
        raise AttributeError(f"module 'cloche' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_EXPORT_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
