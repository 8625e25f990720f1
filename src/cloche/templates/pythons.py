"""The Python interpreters of this host that a template can be built on.

Only *base* interpreters count: a virtual environment's is followed to what it was made from. Each candidate is asked
about itself with `-I -S`, so that nobody's site-packages, `.pth` files or environment variables have a say.
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

OLDEST = (3, 10)  # the guest's syntax
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
    platform: str  # "cpython-311-x86_64-linux-gnu": what a compiled wheel must fit

    @property
    def numbers(self) -> tuple[int, ...]:
        return numbers(self.version)

    @property
    def series(self) -> str:
        """ "3.11" """
        return self.version.rpartition(".")[0]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def choose(requirement: str) -> Interpreter:
    """The interpreter for `requirement` ("3.12", ">=3.11,<3.14").

    The one that runs Cloche if it fits, since it is known to work here; else the newest. Raises TemplateBuildFailed
    that says which interpreters there are.
    """
    running = own()
    if running and fits(requirement, running.version):
        return running
    found = list(find())
    fitting = [each for each in found if fits(requirement, each.version)]
    if fitting:
        return max(fitting, key=lambda each: each.numbers)
    have = ", ".join(f"{each.version} ({each.path})" for each in found) or "none"
    advice = "Install one (`uv python install` does), or change `python` in template.toml."
    raise errors.TemplateBuildFailed(f"no Python {requirement} on this host; found: {have}. {advice}")


def own() -> Interpreter | None:
    """The one that runs Cloche, if templates can be built on it."""
    return ask(_own())


def find() -> Iterator[Interpreter]:
    """Every usable interpreter of this host, each once."""
    seen = set()
    for path in _candidates():
        interpreter = ask(path)
        if interpreter and os.path.realpath(interpreter.path) not in seen:
            seen.add(os.path.realpath(interpreter.path))
            yield interpreter


def ask(path: str) -> Interpreter | None:
    """What the interpreter at `path` says it is; None if it does not run, or is no CPython 3.10 or newer."""
    command = [path, "-I", "-S", "-c", _QUESTION]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=QUESTION_SECONDS, check=True
        )
        interpreter = msgspec.json.decode(done.stdout, type=Interpreter | None)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return None
    return interpreter if interpreter and interpreter.numbers >= OLDEST else None


def fits(requirement: str, version: str) -> bool:
    """Whether `version` satisfies every clause of `requirement`. A bare "3.12" means any 3.12."""
    return all(_fits_clause(clause.strip(), numbers(version)) for clause in requirement.split(","))


def _fits_clause(clause: str, version: tuple[int, ...]) -> bool:
    match = re.fullmatch(r"(==|>=|<=|<|>|!=)?\s*([\d.]+?)(\.\*)?", clause)
    if not match:
        raise errors.InvalidConfig(f'python {clause!r} must be like "3.12" or ">=3.11"')
    operator, wanted = match[1] or "==", numbers(match[2])
    same_length = version[: len(wanted)]
    return {
        "==": same_length == wanted,
        "!=": same_length != wanted,
        ">=": same_length >= wanted,
        "<=": same_length <= wanted,
        ">": same_length > wanted,
        "<": same_length < wanted,
    }[operator]


def _own() -> str:
    # CPython's own name for the interpreter below a virtual environment; there is no public one.
    return str(getattr(sys, "_base_executable", "") or sys.executable)


def _candidates() -> Iterator[str]:
    yield _own()
    for directory in dict.fromkeys(_directories()):
        yield from _pythons_in(directory)


def _directories() -> Iterable[Path]:
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    managed = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python")
    yield from (Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part)
    yield from (Path("/usr/bin"), Path("/usr/local/bin"))
    for versions in (pyenv / "versions", managed):
        yield from (each / "bin" for each in _listing(versions))


def _pythons_in(directory: Path) -> Iterator[str]:
    if directory.name == "shims":  # pyenv's scripts; what they start is found by itself
        return
    for each in _listing(directory):
        if re.fullmatch(r"python3(\.\d+)?", each.name) and os.access(each, os.X_OK):
            yield str(each)


def _listing(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
