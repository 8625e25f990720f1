"""A lock becomes files: `env/` as it will be seen at /opt/cloche/env in a sandbox."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from cloche.templates import uv
from cloche.templates.pythons import Interpreter

GUEST_ENV = "/opt/cloche/env"
GUEST_PYTHON = "/opt/cloche/python"
COMPILE_SECONDS = 1800

# The two ways in which an installer starts a script: the plain one, and the one for interpreters with long paths.
_SHEBANG = re.compile(rb"#![^\n]*python[^\n]*\n")
_TRAMPOLINE = re.compile(rb"#!/bin/sh\n'''exec' [^\n]*\n' '''\n")


def install(lock_file: Path, interpreter: Interpreter, env: Path, on_line: Callable[[str], None]) -> None:
    """Unpacks the wheels of `lock_file` below `env`. None of their code runs. Raises TemplateBuildFailed."""
    arguments = ["pip", "install", "--python", interpreter.path, "--prefix", str(env), "--requirements", str(lock_file)]
    arguments += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-python-downloads"]
    # Copies, because files that are shared with the user's uv cache would not be immutable.
    arguments += ["--no-compile-bytecode", "--link-mode", "copy"]
    uv.run(arguments, lock_file.parent, on_line)
    _make_environment(env, interpreter)


def compile_bytecode(interpreter: Interpreter, env: Path, on_file: Callable[[int, int], None]) -> None:
    """Compiles every module for the path that it has in the sandbox; `on_file(done, of)` as it goes.

    Compiling runs nothing of what it compiles. Files that do not compile (there are always some) are left as they
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
    uv.watch(command, count, cwd=env, seconds=COMPILE_SECONDS)


def open_to_readers(root: Path) -> int:
    """Makes everything below `root` readable for all (and writable for its owner only); the bytes it takes on disk."""
    size_bytes = 0
    for path in (root, *_walk(root)):
        status = path.lstat()
        size_bytes += status.st_blocks * 512
        if stat.S_ISLNK(status.st_mode):
            continue
        executable = stat.S_ISDIR(status.st_mode) or status.st_mode & 0o111
        path.chmod(0o755 if executable else 0o644)
    return size_bytes


def _walk(root: Path) -> Iterator[Path]:
    for directory, directories, files in os.walk(root):
        for name in (*directories, *files):
            yield Path(directory, name)


def _make_environment(env: Path, interpreter: Interpreter) -> None:
    scripts = env / "bin"
    scripts.mkdir(exist_ok=True)
    for script in scripts.iterdir():
        _point_at_guest(script)
    for name in ("python", "python3", f"python{interpreter.series}"):
        link = scripts / name
        link.unlink(missing_ok=True)  # a wheel may have brought a script of that name
        link.symlink_to(f"{GUEST_PYTHON}/bin/python{interpreter.series}")
    settings = f"home = {GUEST_PYTHON}/bin\ninclude-system-site-packages = false\nversion = {interpreter.version}\n"
    (env / "pyvenv.cfg").write_text(settings)


def _point_at_guest(script: Path) -> None:
    content = script.read_bytes()
    match = _TRAMPOLINE.match(content) or _SHEBANG.match(content)
    if match:
        script.write_bytes(f"#!{GUEST_ENV}/bin/python3\n".encode() + content[match.end() :])
