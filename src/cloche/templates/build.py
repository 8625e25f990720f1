"""From a recipe to a template on disk: atomically, and once however many ask for it at the same time."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cloche import errors
from cloche.model import Template
from cloche.templates import catalogue as catalogues
from cloche.templates import install, pythons
from cloche.templates import recipe as recipes
from cloche.templates.catalogue import Catalogue
from cloche.templates.lock import Lock, lock
from cloche.templates.progress import Phase, Progress, Report, silent
from cloche.templates.pythons import Interpreter
from cloche.templates.recipe import Recipe

# Where each phase begins on the way from 0 to 1, by how long it takes on a machine with an empty cache.
_BEGINS: dict[Phase, float] = {"wait": 0.0, "lock": 0.0, "install": 0.1, "compile": 0.6, "archive": 0.0, "done": 1.0}


def build(catalogue: Catalogue, recipe: Recipe, report: Report = silent) -> Template:
    """The template of `recipe` with today's packages; the existing one if that version was built before.

    Raises TemplateBuildFailed, with uv's own words and what to do. Nothing half-built is ever visible.
    """
    with catalogue.locked(recipe.name, lambda: _report_wait(report, recipe.name)):
        template = _build(catalogue, recipe, report)
    report(Progress(phase="done", detail=template.ref, fraction=1.0))
    return template


def ensure(catalogue: Catalogue, ref: str, report: Report = silent) -> Template:
    """The template that `ref` means; a built-in one is built at its first use.

    Raises TemplateNotFound, also where a template's interpreter is gone; TemplateBuildFailed.
    """
    try:
        template = catalogue.resolve(ref)
    except errors.TemplateNotFound:
        name = catalogue.unalias(ref)
        if name not in recipes.BUILT_IN or catalogue.pinned(name):
            raise
        return _build_first(catalogue, name, report)
    if os.access(template.python, os.X_OK):
        return template
    if "@" not in ref and template.name in recipes.BUILT_IN and not catalogue.pinned(template.name):
        return build(catalogue, recipes.built_in(template.name), report)
    raise errors.TemplateNotFound(f"{template.ref} needs {template.python}, which is gone: build the template again")


def _build_first(catalogue: Catalogue, name: str, report: Report) -> Template:
    with catalogue.locked(name, lambda: _report_wait(report, name)):
        try:
            template = catalogue.resolve(name)  # by whoever we waited for
        except errors.TemplateNotFound:
            template = _build(catalogue, recipes.built_in(name), report)
    report(Progress(phase="done", detail=template.ref, fraction=1.0))
    return template


def _report_wait(report: Report, name: str) -> None:
    report(Progress(phase="wait", detail=f"another process is building {name}: waiting for it", fraction=0.0))


def _build(catalogue: Catalogue, recipe: Recipe, report: Report) -> Template:
    interpreter = pythons.choose(recipe.python)
    with catalogue.scratch(recipe.name) as scratch:
        report(Progress(phase="lock", detail=f"choosing versions for Python {interpreter.version}", fraction=0.0))
        locked = lock(recipe, interpreter, scratch, _uv_lines("lock", report))
        version = digest(recipe, interpreter, locked)
        existing = catalogue.get(recipe.name, version)
        if existing:
            return _with_interpreter(existing, interpreter)
        root = scratch / "root"
        _fill(root, recipe, interpreter, locked, report)
        size_bytes = install.open_to_readers(root)
        final = catalogue.directory / recipe.name / version
        template = describe(recipe, interpreter, locked, version, final, size_bytes)
        catalogues.write(template, root)
        if final.exists():  # damaged, or `get` would have found it
            final.rename(scratch / "damaged")
        root.rename(final)
    return template


def digest(recipe: Recipe, interpreter: Interpreter, locked: Lock) -> str:
    """The version: changes with the packages' files, the recipe, the Python version or the platform."""
    parts = (locked.text, recipes.canonical(recipe), interpreter.version, interpreter.platform)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _fill(root: Path, recipe: Recipe, interpreter: Interpreter, locked: Lock, report: Report) -> None:
    root.mkdir()
    (root / "template.toml").write_text(recipes.canonical(recipe), "utf-8")
    lock_file = root.parent / "lock.txt"
    lock_file.write_text(locked.text, "utf-8")
    count = len(locked.packages)
    report(Progress(phase="install", detail=f"fetching {count} packages", fraction=_BEGINS["install"]))
    install.install(lock_file, interpreter, root / "env", _uv_lines("install", report))
    lock_file.rename(root / "lock.txt")
    install.compile_bytecode(interpreter, root / "env", _compile_steps(report))


def describe(
    recipe: Recipe, interpreter: Interpreter, locked: Lock, version: str, root: Path, size_bytes: int
) -> Template:
    """The template that a recipe and its lock are on that interpreter, in the directory `root`."""
    return Template(
        name=recipe.name,
        version=version,
        python=interpreter.path,
        python_version=interpreter.version,
        python_prefix=interpreter.prefix,
        root=str(root),
        packages=locked.packages,
        imports=recipe.imports,
        env=recipe.env,
        limits=recipe.limits,
        network=recipe.network,
        created_at=time.time(),
        size_bytes=size_bytes,
    )


def _with_interpreter(template: Template, interpreter: Interpreter) -> Template:
    """The same template, on an equal interpreter where its own has gone from the host."""
    if os.access(template.python, os.X_OK):
        return template
    moved = msgspec.structs.replace(template, python=interpreter.path, python_prefix=interpreter.prefix)
    catalogues.write(moved, Path(template.root))
    return moved


def _uv_lines(phase: Phase, report: Report) -> Callable[[str], None]:
    """Reports uv's lines. It announces each large download and its end: the share that ended is the progress."""
    begin = _BEGINS[phase]
    room = 0.9 * ((_BEGINS["install"] if phase == "lock" else _BEGINS["compile"]) - begin)
    started = ended = 0
    fraction = begin

    def on_line(line: str) -> None:
        nonlocal started, ended, fraction
        started += bool(re.match(r"\s*Downloading ", line))
        ended += bool(re.match(r"\s*Downloaded ", line))
        if re.match(r"\s*(Prepared|Installed) ", line):
            ended = started
        fraction = max(fraction, begin + room * ended / max(started, 1))
        if not line.startswith(" + "):  # the list of what was installed is in the lock
            report(Progress(phase=phase, detail=line.strip(), fraction=fraction))

    return on_line


def _compile_steps(report: Report) -> Callable[[int, int], None]:
    begin, end = _BEGINS["compile"], _BEGINS["done"]

    def on_file(done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            fraction = begin + (end - begin) * done / total
            report(Progress(phase="compile", detail=f"compiled {done} of {total} modules", fraction=fraction))

    return on_file
