"""`cloche run`: a program in a fresh sandbox, as if it ran here."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tokenize
from pathlib import Path, PurePosixPath
from typing import Any

import click
import msgspec

from cloche import errors
from cloche.cli import OUR_FAILURE, configuration
from cloche.cli.network_options import NetworkAsk, network_options, taken
from cloche.cli.notebook import notebook_option
from cloche.config import bytes_of

INTERRUPTED = 130
BROKEN_PIPE = 141
MAX_ANSWERS_BYTES = 1 << 20


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line said."""

    code: str
    argv: list[str]
    reads_stdin: bool  # whether stdin is free to feed `input()`
    answers: list[str] | None  # for `input()`, where nobody stays to be asked
    template: str
    env: dict[str, str]
    uploads: list[tuple[Path, str]]
    limits: dict[str, float]
    timeout_seconds: float | None
    out: Path | None
    notebook: Path | None
    form: str  # "text", "json" or "events"
    network: NetworkAsk
    alone: bool  # whether to leave a server that runs aside
    detach: bool  # whether it goes on without us


class _WrongUse(click.UsageError):
    """A wrong command line is our failure too: click's own status, 2, could be the program's."""

    exit_code = OUR_FAILURE


class _Run(click.Command):
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _WrongUse(error.format_message(), error.ctx) from None


def _sized(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    size = bytes_of(value) if value is not None else None
    if value is not None and size is None:
        raise click.BadParameter(f'{value!r} is no size: write bytes, or like "512MiB" or "2g"')
    return size


def _variables(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for each in values:
        if not each.partition("=")[0] or "=" not in each:
            raise click.BadParameter(f"{each!r} is not NAME=VALUE")
    return {name: value for name, _, value in (each.partition("=") for each in values)}


def _uploads(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[tuple[Path, str]]:
    return [_upload(each) for each in values]


def _upload(text: str) -> tuple[Path, str]:
    path, name = Path(text), ""
    if not path.exists() and ":" in text:
        before, _, name = text.rpartition(":")
        path = Path(before)
    if not path.is_file():
        raise click.BadParameter(f"{str(path)!r} is not a file")
    place = PurePosixPath(name or path.name)
    if place.is_absolute() or ".." in place.parts:
        raise click.BadParameter(f"{name!r} must be a name below /mnt/data")
    return path, f"/mnt/data/{place}"


@click.command("run", cls=_Run)
@click.argument("words", metavar="[FILE | -] [-- ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("-c", "code", metavar="CODE", help="The program itself, instead of a file.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Save images and new files there.")
@notebook_option
@click.option("--file", "uploads", metavar="PATH[:NAME]", multiple=True, callback=_uploads, help="Copy into /mnt/data.")
@click.option("--env", metavar="K=V", multiple=True, callback=_variables, help="Set an environment variable.")
@click.option("--template", default="python", show_default=True, help="NAME or NAME@VERSION.")
@click.option("--timeout", "timeout_seconds", type=float, metavar="SECONDS", help="Time limit.  [default: 300]")
@click.option("--memory", metavar="SIZE", callback=_sized, help='Memory limit, like "512MiB".  [default: 2GiB]')
@network_options
@click.option("--json", "form", flag_value="json", help="Print one JSON object when it is over.")
@click.option("--events", "form", flag_value="events", help="Print each event as a line of JSON.")
@click.option("--alone", is_flag=True, help="Use no server, even where one runs.")
@click.option("--detach", is_flag=True, help="Leave it to the server, and print its id: see `cloche attach`.")
def command(words: tuple[str, ...], code: str | None, memory: int | None, form: str | None, **options: Any) -> None:
    """Run Python code in a fresh sandbox, of the server that runs on this machine or else of its own.

    Stdin feeds input(); for --detach all of it is read first, up to 1 MiB, unless it is a terminal. The value of the
    last expression is printed.

    Exit status: the program's own; 1 for an exception, 124 time-out, 125 Cloche failed, 130 interrupted, 137 out of
    memory.
    """
    if options["detach"]:
        _check_detached(options, form)
    source, argv = _source(words, code)
    ask = Ask(
        code=source,
        argv=argv,
        reads_stdin=argv[0] != "-",
        answers=_answers() if options["detach"] and argv[0] != "-" and not os.isatty(0) else None,
        form=form or "text",
        limits={"memory_bytes": memory} if memory else {},
        network=taken(options),
        **options,
    )
    sys.exit(_status(ask))


def _check_detached(options: dict[str, Any], form: str | None) -> None:
    """What needs somebody who stays."""
    given = {f"--{name}": options[name] for name in ("out", "notebook", "alone", "packages")}
    for name, value in {**given, f"--{form}": form}.items():
        if value:
            raise _WrongUse(f"--detach and {name} do not go together", click.get_current_context())


def _status(ask: Ask) -> int:
    try:
        from cloche.cli import (  # they take a while to import: not for `--help`, nor a wrong option
            detached,
            run_program,
        )

        return asyncio.run((detached.start if ask.detach else run_program.run)(configuration(), ask))
    except BrokenPipeError:
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED


def _source(words: tuple[str, ...], code: str | None) -> tuple[str, list[str]]:
    """The program and its `sys.argv`."""
    if code is not None:
        return code, ["-c", *words]
    if not words and os.isatty(0):
        raise _WrongUse("give a FILE, -c CODE, or a program on stdin", click.get_current_context())
    name, *arguments = words or ("-",)
    return _decoded(_read(name), name), [name, *arguments]


def _answers() -> list[str]:
    """The lines of our stdin. Raises InvalidRequest for too many."""
    content = _read("-", MAX_ANSWERS_BYTES + 1)
    if len(content) > MAX_ANSWERS_BYTES:
        raise errors.InvalidRequest("stdin of a detached run can have 1 MiB: give more as a --file")
    lines = content.decode("utf-8", "replace").split("\n")
    return [each.removesuffix("\r") for each in (lines if lines[-1] else lines[:-1])]


def _read(name: str, most_bytes: int = -1) -> bytes:
    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            return file.read(most_bytes)
    except OSError as error:
        raise errors.InvalidRequest(f"cannot read {name}: {error.strerror}") from None


def _decoded(content: bytes, name: str) -> str:
    """As Python reads a program: UTF-8, or what its first lines declare."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return io.TextIOWrapper(io.BytesIO(content), encoding).read()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"cannot read {name} as a Python program: {error}") from None
