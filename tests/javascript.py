"""Runs programs of tests/js with Node.js, which comes with the development environment."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

JS = Path(__file__).parent / "js"
BIN = Path(sys.executable).parent


def install() -> None:
    """The released clients, as the lock file names them; installed once, and again when that changes."""
    stamp = JS / "node_modules/.stamp"
    with open(JS / "package-lock.json") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests run in several processes
        lock = file.read()
        if not stamp.exists() or stamp.read_text() != lock:
            run(["npm", "ci", "--no-audit", "--no-fund"])
            stamp.write_text(lock)


def run(command: list[str], *, input: str | None = None, **variables: str) -> str:
    """What the command says on stdout. Fails unless it ends well."""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    variables["NODE_USE_SYSTEM_CA"] = "1"  # what the system trusts, as pip and uv do
    environ = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(command, cwd=JS, env=environ, input=input, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{' '.join(command)} failed\n{done.stdout[-20000:]}\n{done.stderr[-5000:]}"
    return done.stdout
