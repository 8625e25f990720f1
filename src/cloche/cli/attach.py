"""`cloche attach`: shows the output of a detached run."""

from __future__ import annotations

import asyncio
import sys

import click

from cloche.cli import load_command_config

EXIT_BROKEN_PIPE = 141
EXIT_INTERRUPTED = 130


@click.command("attach")
@click.argument("run", metavar="RUN")
@click.option("--after", type=click.IntRange(min=0), default=0, metavar="N", help="Only events after number N.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object at the end.")
@click.option("--events", "form", flag_value="events", help="Print each event as a line of JSON.")
def command(run: str, after: int, form: str | None) -> None:
    """Show the output of a run of `cloche run --detach`, or of any other detached run of the running server.

    Its earlier output comes first, then further output until it ends. Ctrl-C detaches; the run continues.

    Exit status: that of `cloche run`.
    """
    try:
        from cloche.cli import detached  # it takes a while to import: not for `--help`

        sys.exit(asyncio.run(detached.show_run(load_command_config(), run, after, form or "text")))
    except BrokenPipeError:
        sys.exit(EXIT_BROKEN_PIPE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
