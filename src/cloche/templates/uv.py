"""Runs uv, and converts its errors to ours."""

from __future__ import annotations

import configparser
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer

from uv import find_uv_bin

from cloche import errors

# The package registry of builds: uv's own settings, else pip's.
#
# A user of a mirror has configured it in pip, and uv reads none of pip's settings. Where uv has no setting,
# pip's is passed to it.

_UV_OF_PIP = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
_UV_OWN = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_CONFIG_FILE")


def uv_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for uv, with pip's registry settings where uv has none of its own."""
    result = dict(environ)
    if any(environ.get(name) for name in _UV_OWN) or _uv_config(environ).exists():
        return result
    settings = {**_from_files(environ), **_from_variables(environ)}
    for key, variable in _UV_OF_PIP.items():
        if value := settings.get(key):
            # pip separates by white space; so does uv, but for find-links
            result[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(value.split())
    if "UV_INDEX" in result:
        result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # pip takes the best version of all indexes
    if cert := settings.get("cert"):
        result.setdefault("SSL_CERT_FILE", cert)
    return result


def _uv_config(environ: Mapping[str, str]) -> Path:
    return _config_home(environ) / "uv/uv.toml"


def _config_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "/") / ".config")


def _from_variables(environ: Mapping[str, str]) -> dict[str, str]:
    names = {key: "PIP_" + key.upper().replace("-", "_") for key in (*_UV_OF_PIP, "cert")}
    return {key: environ[name] for key, name in names.items() if environ.get(name)}


def _from_files(environ: Mapping[str, str]) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    home = Path(environ.get("HOME") or "/")
    files = [Path("/etc/pip.conf"), home / ".pip/pip.conf", _config_home(environ) / "pip/pip.conf"]
    if own := environ.get("PIP_CONFIG_FILE"):
        files = [] if own == os.devnull else [*files, Path(own)]
    try:
        parser.read(files, "utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}  # pip itself will complain; uv's default registry may still do
    return dict(parser["global"]) if "global" in parser else {}


LAST_LINES = 20
# Messages of uv, and the remedy for each. The first that occurs in its output is shown.
_UNREACHABLE = "check the network, a proxy, or point UV_DEFAULT_INDEX at your mirror."
_ADVICE = {
    "no usable wheels": "Cloche installs wheels only: change `python` or the package's version in template.toml.",
    "has no wheels": "Cloche installs wheels only: change `python` or the package's version in template.toml.",
    "error sending request": f"The package registry cannot be reached: {_UNREACHABLE}",
    "Failed to fetch": f"The package registry did not answer as it should: {_UNREACHABLE}",
    "No space left": "The disk is full: make room, or move CLOCHE_DATA_DIR or UV_CACHE_DIR.",
    "No solution found": "The packages do not fit together or do not exist: change them in template.toml.",
    "hash": "A downloaded file does not match the registry's hash: try again, then ask the registry's operator.",
}


def run_uv(arguments: Sequence[str], cwd: Path, on_line: Callable[[str], None], stdin: str = "") -> str:
    """Runs uv there and returns its stdout; each line of its stderr goes to `on_line`. Raises TemplateBuildFailed."""
    command = [find_uv_bin(), *arguments, "--color", "never", "--no-progress"]
    last: deque[str] = deque(maxlen=LAST_LINES)

    def note(line: str) -> None:
        last.append(line)
        on_line(line)

    source = cwd / ".stdin"  # a file rather than a pipe: no task has to feed it
    source.write_text(stdin, "utf-8")
    target = cwd / ".stdout"
    with source.open("rb") as reading, target.open("wb") as writing:
        status = run_watched(command, note, cwd=cwd, stdin=reading.fileno(), stdout=writing.fileno(), read="stderr")
    if status != 0:
        raise errors.TemplateBuildFailed(_failure_message(arguments, status, list(last)))
    return target.read_text("utf-8")


def run_watched(
    command: Sequence[str],
    on_line: Callable[[str], None],
    *,
    cwd: Path,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.PIPE,
    read: str = "stdout",
    seconds: float = 3600,
) -> int:
    """Runs `command` to its end, line by line; its exit status. When we are stopped, or at the time limit, it dies."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE if read == "stderr" else subprocess.DEVNULL,
        env=uv_environment(os.environ),
        encoding="utf-8",
        errors="replace",
        umask=0o022,
        process_group=0,  # so that its own children can be killed with it
    )
    timer = Timer(seconds, _kill_group, [process])
    timer.daemon = True
    timer.start()
    try:
        for line in getattr(process, read):
            on_line(line.rstrip("\n"))
        return process.wait()
    finally:
        timer.cancel()
        _kill_group(process)
        process.wait()
        getattr(process, read).close()


def _kill_group(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:  # not yet waited for: the group's id is still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _failure_message(arguments: Sequence[str], status: int, lines: list[str]) -> str:
    said = "\n".join(lines)
    advice = next((advice for sign, advice in _ADVICE.items() if sign in said), "Its own words are above.")
    return f"uv {' '.join(arguments[:2])} failed (exit status {status}):\n{said}\n{advice}"
