"""`cloche shell`: a prompt in a fresh sandbox."""

from __future__ import annotations

import asyncio
import sys

import click

from cloche.cli import configuration

BROKEN_PIPE = 141
INTERRUPTED = 130


@click.command("shell")
@click.option("--lang", type=click.Choice(["python", "bash"]), default="python", show_default=True)
@click.option("--template", default="python", show_default=True, help="NAME or NAME@VERSION.")
def command(lang: str, template: str) -> None:
    """Open a prompt in a fresh sandbox, Python or bash. Ctrl-D leaves it, and nothing of it remains."""
    try:
        sys.exit(_python(template) if lang == "python" else _bash(template))
    except BrokenPipeError:
        sys.exit(BROKEN_PIPE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _python(template: str) -> int:
    from cloche.cli import prompt  # the engine takes a while to import: not for `--help`

    return prompt.serve(configuration(), template)


def _bash(template: str) -> int:
    from cloche.cli import bridge

    return asyncio.run(bridge.bash(configuration(), template))
