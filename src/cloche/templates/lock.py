"""A recipe and an interpreter become a list of exact, hashed wheels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from cloche.model import Struct
from cloche.templates import uv
from cloche.templates.pythons import Interpreter
from cloche.templates.recipe import Recipe

# What our own code in the sandbox needs, in every template.
GUEST_REQUIREMENTS = (
    "ipython>=8.18",  # the kernel
    "threadpoolctl",  # quiets BLAS thread pools before the fork
    "pip",  # so that `python -m pip` exists
)
# Reads the data of charts; it needs matplotlib, so it goes only where matplotlib goes.
CHART_REQUIREMENTS = ("e2b-charts",)


class Lock(Struct):
    text: str  # a requirements file with hashes and no registry in it
    packages: tuple[str, ...]  # "numpy==2.1.0", ...


def lock(recipe: Recipe, interpreter: Interpreter, directory: Path, on_line: Callable[[str], None]) -> Lock:
    """Resolves the recipe for that interpreter, using `directory` for scratch. Raises TemplateBuildFailed."""
    wanted = sorted({*recipe.packages, *GUEST_REQUIREMENTS})
    locked = _compile(wanted, interpreter, directory, on_line)
    if any(package.startswith("matplotlib==") for package in locked.packages):
        locked = _compile(sorted({*wanted, *CHART_REQUIREMENTS}), interpreter, directory, on_line)
    return locked


def _compile(wanted: Iterable[str], interpreter: Interpreter, directory: Path, on_line: Callable[[str], None]) -> Lock:
    arguments = ["pip", "compile", "-", "--python", interpreter.path, "--generate-hashes", "--only-binary", ":all:"]
    arguments += [
        "--no-header",
        "--no-annotate",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--no-python-downloads",
    ]
    text = uv.run(arguments, directory, on_line, stdin="\n".join(wanted) + "\n")
    return parse(text)


def parse(text: str) -> Lock:
    """The lock that a file of such lines is."""
    return Lock(text=text, packages=tuple(re.findall(r"^([\w.-]+==[^\s;\\]+)", text, re.MULTILINE)))
