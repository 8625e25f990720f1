"""`cloche run`: runs a program in a fresh sandbox."""

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
from cloche.cli import EXIT_CLOCHE_FAILED, load_command_config
from cloche.cli.network_options import NetworkOptions, network_options, take_network_options
from cloche.cli.notebook import notebook_option
from cloche.config import parse_bytes

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
MAX_ANSWERS_BYTES = 1 << 20


class RunCommandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed command line."""

    code: str
    argv: list[str]
    reads_stdin: bool  # whether stdin is free to feed `input()`
    answers: list[str] | None  # for `input()` of a detached run, which no client answers
    template: str
    env: dict[str, str]
    uploads: list[tuple[Path, str]]
    limits: dict[str, float]
    timeout_seconds: float | None
    out: Path | None
    notebook: Path | None
    form: str  # "text", "json" or "events"
    network: NetworkOptions
    alone: bool  # whether to leave a server that runs aside
    detach: bool  # whether the run continues without this process


class _RunUsageError(click.UsageError):
    """A wrong command line is our failure too: click's own status, 2, could be the program's."""

    exit_code = EXIT_CLOCHE_FAILED


class _RunCliCommand(click.Command):
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _RunUsageError(error.format_message(), error.ctx) from None


def _parse_size_option(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    size = parse_bytes(value) if value is not None else None
    if value is not None and size is None:
        raise click.BadParameter(f'{value!r} is not a size: write bytes, or like "512MiB" or "2g"')
    return size


def _parse_env_option(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for each in values:
        if not each.partition("=")[0] or "=" not in each:
            raise click.BadParameter(f"{each!r} is not NAME=VALUE")
    return {name: value for name, _, value in (each.partition("=") for each in values)}


def _parse_file_options(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[tuple[Path, str]]:
    return [_parse_file_option(each) for each in values]


def _parse_file_option(text: str) -> tuple[Path, str]:
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


@click.command("run", cls=_RunCliCommand)
@click.argument("words", metavar="[FILE | -] [-- ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("-c", "code", metavar="CODE", help="The program itself, instead of a file.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Save images and new files there.")
@notebook_option
@click.option(
    "--file", "uploads", metavar="PATH[:NAME]", multiple=True, callback=_parse_file_options, help="Copy into /mnt/data."
)
@click.option("--env", metavar="K=V", multiple=True, callback=_parse_env_option, help="Set an environment variable.")
@click.option("--template", default="python", show_default=True, help="NAME or NAME@VERSION.")
@click.option("--timeout", "timeout_seconds", type=float, metavar="SECONDS", help="Time limit.  [default: 300]")
@click.option(
    "--memory", metavar="SIZE", callback=_parse_size_option, help='Memory limit, like "512MiB".  [default: 2GiB]'
)
@network_options
@click.option("--json", "form", flag_value="json", help="Print one JSON object at the end.")
@click.option("--events", "form", flag_value="events", help="Print each event as a line of JSON.")
@click.option("--alone", is_flag=True, help="Use no server, even if one runs.")
@click.option("--detach", is_flag=True, help="Leave the run to the server, and print its id: see `cloche attach`.")
def command(words: tuple[str, ...], code: str | None, memory: int | None, form: str | None, **options: Any) -> None:
    """Run Python code in a fresh sandbox, of the server that runs on this machine or else of its own.

    Stdin feeds input(); for --detach all of it is read first, up to 1 MiB, unless it is a terminal. The value of the
    last expression is printed.

    Exit status: the program's own; 1 for an exception, 124 time-out, 125 Cloche failed, 130 interrupted, 137 out of
    memory.
    """
    if options["detach"]:
        _check_detach_options(options, form)
    source, argv = _read_program(words, code)
    ask = RunCommandOptions(
        code=source,
        argv=argv,
        reads_stdin=argv[0] != "-",
        answers=_read_answers() if options["detach"] and argv[0] != "-" and not os.isatty(0) else None,
        form=form or "text",
        limits={"memory_bytes": memory} if memory else {},
        network=take_network_options(options),
        **options,
    )
    sys.exit(_run_for_status(ask))


def _check_detach_options(options: dict[str, Any], form: str | None) -> None:
    """Refuses options that need a client for the whole run."""
    given = {f"--{name}": options[name] for name in ("out", "notebook", "alone", "packages")}
    for name, value in {**given, f"--{form}": form}.items():
        if value:
            raise _RunUsageError(f"--detach and {name} do not go together", click.get_current_context())


def _run_for_status(ask: RunCommandOptions) -> int:
    try:
        from cloche.cli import (  # they take a while to import: not for `--help`, nor a wrong option
            detached,
            run_program,
        )

        return asyncio.run(
            (detached.start_detached if ask.detach else run_program.run_program)(load_command_config(), ask)
        )
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _read_program(words: tuple[str, ...], code: str | None) -> tuple[str, list[str]]:
    """Returns the program and its `sys.argv`."""
    if code is not None:
        return code, ["-c", *words]
    if not words and os.isatty(0):
        raise _RunUsageError("give a FILE, -c CODE, or a program on stdin", click.get_current_context())
    name, *arguments = words or ("-",)
    return _decode_source(_read_input(name), name), [name, *arguments]


def _read_answers() -> list[str]:
    """Returns the lines of our stdin. Raises InvalidRequest for too many."""
    content = _read_input("-", MAX_ANSWERS_BYTES + 1)
    if len(content) > MAX_ANSWERS_BYTES:
        raise errors.InvalidRequest("stdin of a detached run can have 1 MiB: give more as a --file")
    lines = content.decode("utf-8", "replace").split("\n")
    return [each.removesuffix("\r") for each in (lines if lines[-1] else lines[:-1])]


def _read_input(name: str, most_bytes: int = -1) -> bytes:
    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            return file.read(most_bytes)
    except OSError as error:
        raise errors.InvalidRequest(f"cannot read {name}: {error.strerror}") from None


def _decode_source(content: bytes, name: str) -> str:
    """Decodes a program as Python does: UTF-8, or the encoding declared in its first lines."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return io.TextIOWrapper(io.BytesIO(content), encoding).read()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"cannot read {name} as a Python program: {error}") from None
