"""The Python interpreters of this host that a template can be built on.

Only *base* interpreters count: a virtual environment's is followed to its base. Each candidate is queried
with `-I -S`, so that no site-packages, `.pth` files or environment variables have an effect.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from cloche import errors
from cloche.model import Struct

OLDEST_PYTHON = (3, 10)  # the guest's syntax
QUESTION_SECONDS = 20

_QUESTION = """
import json, os, sys, sysconfig
python = os.path.join(sys.base_prefix, "bin", "python%d.%d" % sys.version_info[:2])
usable = (
    sys.implementation.name == "cpython" and sys.version_info.releaselevel == "final" and not sys.abiflags
    and sys.base_prefix == sys.base_exec_prefix and os.access(python, os.X_OK)
)
print(json.dumps({
    "path": python,
    "version": "%d.%d.%d" % sys.version_info[:3],
    "prefix": sys.base_prefix,
    "platform": sysconfig.get_config_var("SOABI") or sysconfig.get_platform(),
} if usable else None))
"""


class Interpreter(Struct):
    path: str  # PREFIX/bin/python3.X
    version: str  # "3.11.7"
    prefix: str  # sys.base_prefix
    platform: str  # "cpython-311-x86_64-linux-gnu": the platform tag of compiled wheels

    @property
    def version_numbers(self) -> tuple[int, ...]:
        return parse_version(self.version)

    @property
    def minor_version(self) -> str:
        """ "3.11" """
        return self.version.rpartition(".")[0]


def parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def choose_interpreter(requirement: str) -> Interpreter:
    """The interpreter for `requirement` ("3.12", ">=3.11,<3.14").

    The one that runs Cloche if it fits, since it is known to work here; else the newest. Raises TemplateBuildFailed
    that says which interpreters there are.
    """
    running = own_interpreter()
    if running and fits_requirement(requirement, running.version):
        return running
    found = list(find_interpreters())
    fitting = [each for each in found if fits_requirement(requirement, each.version)]
    if fitting:
        return max(fitting, key=lambda each: each.version_numbers)
    have = ", ".join(f"{each.version} ({each.path})" for each in found) or "none"
    advice = "Install one (`uv python install` does), or change `python` in template.toml."
    raise errors.TemplateBuildFailed(f"no Python {requirement} on this host; found: {have}. {advice}")


def own_interpreter() -> Interpreter | None:
    """The one that runs Cloche, if templates can be built on it."""
    return query_interpreter(_own_path())


def find_interpreters() -> Iterator[Interpreter]:
    """Every usable interpreter of this host, each once."""
    seen = set()
    for path in _candidate_paths():
        interpreter = query_interpreter(path)
        if interpreter and os.path.realpath(interpreter.path) not in seen:
            seen.add(os.path.realpath(interpreter.path))
            yield interpreter


def query_interpreter(path: str) -> Interpreter | None:
    """The description of the interpreter at `path`; None if it does not run, or is no CPython 3.10 or newer."""
    command = [path, "-I", "-S", "-c", _QUESTION]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=QUESTION_SECONDS, check=True
        )
        interpreter = msgspec.json.decode(done.stdout, type=Interpreter | None)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return None
    return interpreter if interpreter and interpreter.version_numbers >= OLDEST_PYTHON else None


def fits_requirement(requirement: str, version: str) -> bool:
    """Whether `version` satisfies every clause of `requirement`. A bare "3.12" means any 3.12."""
    return all(_fits_clause(clause.strip(), parse_version(version)) for clause in requirement.split(","))


def _fits_clause(clause: str, version: tuple[int, ...]) -> bool:
    match = re.fullmatch(r"(==|>=|<=|<|>|!=)?\s*([\d.]+?)(\.\*)?", clause)
    if not match:
        raise errors.InvalidConfig(f'python {clause!r} must be like "3.12" or ">=3.11"')
    operator, wanted = match[1] or "==", parse_version(match[2])
    same_length = version[: len(wanted)]
    return {
        "==": same_length == wanted,
        "!=": same_length != wanted,
        ">=": same_length >= wanted,
        "<=": same_length <= wanted,
        ">": same_length > wanted,
        "<": same_length < wanted,
    }[operator]


def _own_path() -> str:
    # CPython's own name for the interpreter below a virtual environment; there is no public one.
    return str(getattr(sys, "_base_executable", "") or sys.executable)


def _candidate_paths() -> Iterator[str]:
    yield _own_path()
    for directory in dict.fromkeys(_search_directories()):
        yield from _pythons_in(directory)


def _search_directories() -> Iterable[Path]:
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    managed = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python")
    yield from (Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part)
    yield from (Path("/usr/bin"), Path("/usr/local/bin"))
    for versions in (pyenv / "versions", managed):
        yield from (each / "bin" for each in _list_directory(versions))


def _pythons_in(directory: Path) -> Iterator[str]:
    if directory.name == "shims":  # pyenv's scripts; the interpreters behind them are found directly
        return
    for each in _list_directory(directory):
        if re.fullmatch(r"python3(\.\d+)?", each.name) and os.access(each, os.X_OK):
            yield str(each)


def _list_directory(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
