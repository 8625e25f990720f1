"""Builds a recipe into a template on disk: atomically, and once for any number of concurrent requests."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from cloche import errors
from cloche.model import Struct, Template
from cloche.templates import catalogue as catalogues
from cloche.templates import pythons, uv
from cloche.templates import recipe as recipes
from cloche.templates.catalogue import Catalogue
from cloche.templates.pythons import Interpreter
from cloche.templates.recipe import Recipe

# Installs a lock's wheels: `env/` as it will be seen at /opt/cloche/env in a sandbox.

GUEST_ENV = "/opt/cloche/env"
GUEST_PYTHON = "/opt/cloche/python"
COMPILE_SECONDS = 1800

# The two ways in which an installer starts a script: the plain one, and the one for interpreters with long paths.
_SHEBANG = re.compile(rb"#![^\n]*python[^\n]*\n")
_TRAMPOLINE = re.compile(rb"#!/bin/sh\n'''exec' [^\n]*\n' '''\n")


def install_wheels(
    lock_file: Path, interpreter: Interpreter, env: Path, on_line: Callable[[str], None], for_minor: str = ""
) -> None:
    """Unpacks the wheels of `lock_file` below `env`. None of their code runs. Raises TemplateBuildFailed.

    `for_minor`: the version of another Python that they are for, of which there is no interpreter here.
    """
    site = env / "lib" / f"python{for_minor}" / "site-packages"
    place = ["--target", str(site), "--python-version", for_minor] if for_minor else ["--prefix", str(env)]
    arguments = ["pip", "install", "--python", interpreter.path, *place, "--requirements", str(lock_file)]
    arguments += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-python-downloads"]
    # Copies, because files that are shared with the user's uv cache would not be immutable.
    arguments += ["--no-compile-bytecode", "--link-mode", "copy"]
    uv.run_uv(arguments, lock_file.parent, on_line)
    if (site / "bin").is_dir():
        (site / "bin").rename(env / "bin")
    _make_environment(env, for_minor or interpreter.version, for_minor or interpreter.minor_version)


def compile_bytecode(interpreter: Interpreter, env: Path, on_file: Callable[[int, int], None]) -> None:
    """Compiles every module for the path that it has in the sandbox; `on_file(done, of)` as it goes.

    Compiling runs none of the compiled code. Files that do not compile (there are always some) are left as they
    are. The bytecode is never checked against its source again, since neither changes.
    """
    library = env / "lib"
    total = sum(1 for _ in library.rglob("*.py"))
    done = 0

    def count(line: str) -> None:
        nonlocal done
        if line.startswith("Compiling "):
            done += 1
            on_file(min(done, total), total)

    command = [
        interpreter.path,
        "-I",
        "-S",
        "-W",
        "ignore",
        "-m",
        "compileall",
        "--invalidation-mode",
        "unchecked-hash",
    ]
    command += ["-j", str(len(os.sched_getaffinity(0))), "-s", str(env), "-p", GUEST_ENV, str(library)]
    uv.run_watched(command, count, cwd=env, seconds=COMPILE_SECONDS)


def make_readable(root: Path) -> int:
    """Makes everything below `root` readable for all (and writable for its owner only); the bytes it takes on disk."""
    size_bytes = 0
    for path in (root, *_walk_paths(root)):
        status = path.lstat()
        size_bytes += status.st_blocks * 512
        if stat.S_ISLNK(status.st_mode):
            continue
        executable = stat.S_ISDIR(status.st_mode) or status.st_mode & 0o111
        path.chmod(0o755 if executable else 0o644)
    return size_bytes


def _walk_paths(root: Path) -> Iterator[Path]:
    for directory, directories, files in os.walk(root):
        for name in (*directories, *files):
            yield Path(directory, name)


def _make_environment(env: Path, version: str, minor: str) -> None:
    scripts = env / "bin"
    scripts.mkdir(parents=True, exist_ok=True)
    for script in scripts.iterdir():
        _point_at_guest(script)
    for name in ("python", "python3", f"python{minor}"):
        link = scripts / name
        link.unlink(missing_ok=True)  # a wheel may have brought a script of that name
        link.symlink_to(f"{GUEST_PYTHON}/bin/python{minor}")
    settings = f"home = {GUEST_PYTHON}/bin\ninclude-system-site-packages = false\nversion = {version}\n"
    (env / "pyvenv.cfg").write_text(settings)


def _point_at_guest(script: Path) -> None:
    content = script.read_bytes()
    match = _TRAMPOLINE.match(content) or _SHEBANG.match(content)
    if match:
        script.write_bytes(f"#!{GUEST_ENV}/bin/python3\n".encode() + content[match.end() :])


# Locks a recipe for an interpreter to a list of exact, hashed wheels.

# The dependencies of our own code in the sandbox, in every template.
GUEST_REQUIREMENTS = (
    "ipython>=8.18",  # the kernel
    "threadpoolctl",  # quiets BLAS thread pools before the fork
    "pip",  # so that `python -m pip` exists
)
# Reads the data of charts; it needs matplotlib, so it goes only where matplotlib goes.
CHART_REQUIREMENTS = ("e2b-charts",)


class PackageLock(Struct):
    text: str  # a requirements file with hashes and no registry in it
    packages: tuple[str, ...]  # "numpy==2.1.0", ...


def lock_packages(
    recipe: Recipe,
    interpreter: Interpreter,
    directory: Path,
    on_line: Callable[[str], None],
    for_minor: str = "",
    present: Collection[str] = (),
) -> PackageLock:
    """Resolves the recipe for that interpreter, using `directory` for scratch. Raises TemplateBuildFailed.

    `for_minor`: the version of another Python that it is for; `present`: packages that this one has already.
    """
    own = [each for each in GUEST_REQUIREMENTS if each.partition(">")[0] not in present]
    wanted = sorted({*recipe.packages, *own})
    locked = _compile_lock(wanted, interpreter, directory, on_line, for_minor)
    if any(package.startswith("matplotlib==") for package in locked.packages):
        locked = _compile_lock(sorted({*wanted, *CHART_REQUIREMENTS}), interpreter, directory, on_line, for_minor)
    return locked


def _compile_lock(
    wanted: Iterable[str],
    interpreter: Interpreter,
    directory: Path,
    on_line: Callable[[str], None],
    for_minor: str,
) -> PackageLock:
    arguments = ["pip", "compile", "-", "--python", interpreter.path, "--generate-hashes", "--only-binary", ":all:"]
    arguments += [
        "--no-header",
        "--no-annotate",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--no-python-downloads",
        *(["--python-version", for_minor] if for_minor else []),
    ]
    text = uv.run_uv(arguments, directory, on_line, stdin="\n".join(wanted) + "\n")
    return parse_lock(text)


def parse_lock(text: str) -> PackageLock:
    """The lock that a file of such lines is."""
    return PackageLock(text=text, packages=tuple(re.findall(r"^([\w.-]+==[^\s;\\]+)", text, re.MULTILINE)))


# Progress reports of a build.

Phase = Literal["wait", "lock", "install", "compile", "archive", "done"]


class TemplateProgress(Struct):
    phase: Phase
    detail: str
    fraction: float | None = None  # of the whole build, 0 to 1; None: not known


ReportProgress = Callable[[TemplateProgress], None]


def ignore_progress(_progress: TemplateProgress) -> None:
    """A Report for callers that do not watch."""


# Where each phase begins on the way from 0 to 1, by how long it takes on a machine with an empty cache.
_PHASE_STARTS: dict[Phase, float] = {
    "wait": 0.0,
    "lock": 0.0,
    "install": 0.1,
    "compile": 0.6,
    "archive": 0.0,
    "done": 1.0,
}


def build_template(catalogue: Catalogue, recipe: Recipe, report: ReportProgress = ignore_progress) -> Template:
    """The template of `recipe` with today's packages; the existing one if that version was built before.

    Raises TemplateBuildFailed, with uv's own message and advice. Nothing half-built is ever visible.
    """
    with catalogue.locked(recipe.name, lambda: _report_wait(report, recipe.name)):
        template = _build_locked(catalogue, recipe, report)
    report(TemplateProgress(phase="done", detail=template.ref, fraction=1.0))
    return template


def ensure_template(catalogue: Catalogue, ref: str, report: ReportProgress = ignore_progress) -> Template:
    """The template that `ref` means; a built-in one is built at its first use.

    Raises TemplateNotFound, also where a template's interpreter is gone; TemplateBuildFailed.
    """
    try:
        template = catalogue.resolve(ref)
    except errors.TemplateNotFound:
        name = catalogue.resolve_alias(ref)
        if name not in recipes.BUILT_IN_TEMPLATES or catalogue.pinned(name):
            raise
        return _build_first(catalogue, name, report)
    if _has_interpreter(template):
        return template
    if "@" not in ref and template.name in recipes.BUILT_IN_TEMPLATES and not catalogue.pinned(template.name):
        return build_template(catalogue, recipes.built_in_recipe(template.name), report)
    raise errors.TemplateNotFound(f"{template.ref} needs {template.python}, which is gone: build the template again")


def _has_interpreter(template: Template) -> bool:
    return (template.image is not None and template.image.own_python) or os.access(template.python, os.X_OK)


def _build_first(catalogue: Catalogue, name: str, report: ReportProgress) -> Template:
    with catalogue.locked(name, lambda: _report_wait(report, name)):
        try:
            template = catalogue.resolve(name)  # built by the process that held the lock
        except errors.TemplateNotFound:
            template = _build_locked(catalogue, recipes.built_in_recipe(name), report)
    report(TemplateProgress(phase="done", detail=template.ref, fraction=1.0))
    return template


def _report_wait(report: ReportProgress, name: str) -> None:
    report(TemplateProgress(phase="wait", detail=f"another process is building {name}: waiting for it", fraction=0.0))


def _build_locked(catalogue: Catalogue, recipe: Recipe, report: ReportProgress) -> Template:
    interpreter = pythons.choose_interpreter(recipe.python)
    with catalogue.scratch_directory(recipe.name) as scratch:
        report(
            TemplateProgress(phase="lock", detail=f"choosing versions for Python {interpreter.version}", fraction=0.0)
        )
        locked = lock_packages(recipe, interpreter, scratch, _uv_lines("lock", report))
        version = template_version(recipe, interpreter, locked)
        existing = catalogue.get(recipe.name, version)
        if existing:
            return _with_interpreter(existing, interpreter)
        root = scratch / "root"
        _fill_root(root, recipe, interpreter, locked, report)
        size_bytes = make_readable(root)
        final = catalogue.directory / recipe.name / version
        template = describe_template(recipe, interpreter, locked, version, final, size_bytes)
        catalogues.write_template(template, root)
        if final.exists():  # damaged, or `get` would have found it
            final.rename(scratch / "damaged")
        root.rename(final)
    return template


def template_version(recipe: Recipe, interpreter: Interpreter, locked: PackageLock) -> str:
    """The version: changes with the packages' files, the recipe, the Python version or the platform."""
    parts = (locked.text, recipes.canonical_text(recipe), interpreter.version, interpreter.platform)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _fill_root(
    root: Path, recipe: Recipe, interpreter: Interpreter, locked: PackageLock, report: ReportProgress
) -> None:
    root.mkdir()
    (root / "template.toml").write_text(recipes.canonical_text(recipe), "utf-8")
    lock_file = root.parent / "lock.txt"
    lock_file.write_text(locked.text, "utf-8")
    count = len(locked.packages)
    report(TemplateProgress(phase="install", detail=f"fetching {count} packages", fraction=_PHASE_STARTS["install"]))
    install_wheels(lock_file, interpreter, root / "env", _uv_lines("install", report))
    lock_file.rename(root / "lock.txt")
    compile_bytecode(interpreter, root / "env", _compile_steps(report))


def describe_template(
    recipe: Recipe, interpreter: Interpreter, locked: PackageLock, version: str, root: Path, size_bytes: int
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
    catalogues.write_template(moved, Path(template.root))
    return moved


def _uv_lines(phase: Phase, report: ReportProgress) -> Callable[[str], None]:
    """Reports uv's lines. It announces each large download and its end: the share that ended is the progress."""
    begin = _PHASE_STARTS[phase]
    room = 0.9 * ((_PHASE_STARTS["install"] if phase == "lock" else _PHASE_STARTS["compile"]) - begin)
    started = ended = 0
    fraction = begin

    def on_line(line: str) -> None:
        nonlocal started, ended, fraction
        started += bool(re.match(r"\s*Downloading ", line))
        ended += bool(re.match(r"\s*Downloaded ", line))
        if re.match(r"\s*(Prepared|Installed) ", line):
            ended = started
        fraction = max(fraction, begin + room * ended / max(started, 1))
        if not line.startswith(" + "):  # the list of installed packages is in the lock
            report(TemplateProgress(phase=phase, detail=line.strip(), fraction=fraction))

    return on_line


def _compile_steps(report: ReportProgress) -> Callable[[int, int], None]:
    begin, end = _PHASE_STARTS["compile"], _PHASE_STARTS["done"]

    def on_file(done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            fraction = begin + (end - begin) * done / total
            report(TemplateProgress(phase="compile", detail=f"compiled {done} of {total} modules", fraction=fraction))

    return on_file
