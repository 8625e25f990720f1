"""Measurement: `python3` in a sandbox's shell, beside the real interpreter behind it, in turns."""

from __future__ import annotations

import time

from cloche.bench.lab import Lab
from cloche.bench.samples import expect_answer
from cloche.sdk.sandbox import Sandbox

# By its path, the interpreter itself is started, and imports what the program imports.
PYTHONS = {"python_warm": "python3", "python_cold": "/opt/cloche/env/bin/python3"}
HEREDOC_PROGRAM = "import pandas\nprint(pandas.Series([20, 22]).sum())"


def measure_heredocs(lab: Lab) -> None:
    """bash that runs a program with pandas from a heredoc."""
    with lab.with_pool(), Sandbox() as box:
        for python in PYTHONS.values():
            _heredoc_seconds(box, python)  # what the host reads from disk, it reads now
        for _ in range(lab.counts.peer):
            for key, python in PYTHONS.items():
                with lab.book.attempt(key):
                    lab.book.add(key, _heredoc_seconds(box, python))


def _heredoc_seconds(box: Sandbox, python: str) -> float:
    began = time.perf_counter()
    result = box.commands.run(f"{python} - <<'END'\n{HEREDOC_PROGRAM}\nEND")
    seconds = time.perf_counter() - began
    expect_answer((result.exit_code, result.stdout) == (0, "42\n"), result)
    return seconds
