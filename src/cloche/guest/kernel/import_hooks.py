"""Hooks that run when the program imports a module, and not earlier, so that other programs pay nothing."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class _ImportHook(importlib.abc.MetaPathFinder):
    """Lets one module be found as usual, and takes a step after it ran."""

    def __init__(self, name: str, step: Any):
        self.name = name
        self._step = step

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                sys.meta_path.remove(self)
                _run_after(spec.loader, self._step)
                return spec
        return None


def _run_after(loader: Any, step: Any) -> None:
    original = loader.exec_module

    def exec_module(module: Any) -> None:
        original(module)
        step()

    loader.exec_module = exec_module


def after_import(name: str, step: Any) -> None:
    """Calls `step()` once the module is there: now, or when it is imported."""
    if name in sys.modules:
        step()
    elif not any(isinstance(finder, _ImportHook) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook(name, step))


def remove_hooks() -> None:
    """Removes all hooks: later imports trigger nothing."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _ImportHook)]
