"""Runs programs of tests/js with Node.js, which comes with the development environment."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

JS = Path(__file__).parent / "js"
BIN = Path(sys.executable).parent
PATH = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
CI = ["npm", "ci", "--no-audit", "--no-fund"]
LEAN = ["--ignore-scripts", "--prefer-offline", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ERR_SOCKET_TIMEOUT")


def install() -> None:
    """The released clients, as the lock file names them; installed once, and again when that changes."""
    stamp = JS / "node_modules/.stamp"
    with open(JS / "package-lock.json") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests run in several processes
        lock = file.read()
        if not stamp.exists() or stamp.read_text() != lock:
            run(CI)
            stamp.write_text(lock)


def modules(place: Path) -> Path:
    """The node_modules that the lock file of `place` names: installed once per machine and user, not per checkout.

    Skips the test where there is no npm, or no registry to install from.
    """
    cache = _cache()
    ready = cache / _key(place) / "node_modules"
    with open(cache / f"{_key(place)}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not ready.exists():
            _install_into(ready.parent, place)
    return ready


def run(command: list[str], *, input: str | None = None, cwd: Path = JS, **variables: str) -> str:
    """What the command says on stdout. Fails unless it ends well."""
    done = _call(command, cwd, input, variables)
    assert done.returncode == 0, f"{' '.join(command)} failed\n{done.stdout[-20000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def _call(
    command: list[str], cwd: Path, input: str | None, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    variables["NODE_USE_SYSTEM_CA"] = "1"  # what the system trusts, as pip and uv do
    environ = {**os.environ, "PATH": PATH, **variables}
    return subprocess.run(command, cwd=cwd, env=environ, input=input, capture_output=True, text=True, timeout=240)


def _cache() -> Path:
    """Outside of the checkout, so that the next one finds it; inside where the home directory is not ours."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cloche-tests")
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass  # the next line says the same
    if os.access(home, os.W_OK):
        return home
    inside = JS / "librechat/node_modules"  # a name that git ignores
    inside.mkdir(exist_ok=True)
    return inside


def _key(place: Path) -> str:
    """Another lock file, another directory: what is there is never changed."""
    content = b"".join((place / name).read_bytes() for name in ("package.json", "package-lock.json"))
    return f"{hashlib.sha256(content).hexdigest()[:16]}-{platform.system()}-{platform.machine()}"


def _install_into(ready: Path, place: Path) -> None:
    """All or nothing: a run that was interrupted leaves nothing that looks complete."""
    if shutil.which("npm", path=PATH) is None:
        pytest.skip("there is no npm: `make setup` brings it")
    making = ready.with_suffix(".making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(place / name, making)
    done = _call([*CI, *LEAN], making, None, {})
    why = next((line for line in done.stderr.splitlines() if any(word in line for word in UNREACHABLE)), "")
    if done.returncode and why:
        pytest.skip(f"the registry of npm cannot be reached: {why[:200]}")
    assert done.returncode == 0, f"npm ci failed\n{done.stderr[-5000:]}"
    shutil.rmtree(ready, ignore_errors=True)
    making.rename(ready)
