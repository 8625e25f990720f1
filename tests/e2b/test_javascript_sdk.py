"""E2B's JavaScript clients against a server. The tests themselves are in tests/js; this runs them with Node.js."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JS = Path(__file__).parent.parent / "js"
BIN = Path(sys.executable).parent  # Node.js and npm come with the development environment


@pytest.fixture(scope="session")
def node_modules() -> None:
    """The released clients, as the lock file names them; installed once, and again when that changes."""
    stamp = JS / "node_modules/.stamp"
    lock = (JS / "package-lock.json").read_text()
    if not stamp.exists() or stamp.read_text() != lock:
        run(["npm", "ci", "--no-audit", "--no-fund"])
        stamp.write_text(lock)


def run(command: list[str], **variables: str) -> None:
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    variables["NODE_USE_SYSTEM_CA"] = "1"  # what the system trusts, as pip and uv do
    done = subprocess.run(
        command, cwd=JS, env={**os.environ, "PATH": path, **variables}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{' '.join(command)} failed\n{done.stdout[-20000:]}\n{done.stderr[-5000:]}"


@pytest.mark.parametrize("file", sorted(path.name for path in JS.glob("*.test.mjs")))
def test_the_javascript_client_works_unmodified(file: str, server, node_modules):
    url = f"{server.url}/e2b"
    run(["node", "--test", file], E2B_API_KEY=server.key, E2B_API_URL=url, E2B_SANDBOX_URL=url)
