"""`cloche chat`: a chat in the terminal with a model that runs code."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cloche import errors
from cloche.cli import load_command_config

EXIT_BROKEN_PIPE = 141
EXIT_INTERRUPTED = 130


@click.command("chat")
@click.option("--model", metavar="NAME", help="By default the first that is configured, else cloche/echo.")
@click.option("--file", "files", metavar="PATH", multiple=True, type=click.Path(path_type=Path), help="Attach a file.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Save images and files there.")
@click.option("-c", "--message", metavar="TEXT", help="Send only this message, and end with the answer.")
@click.option("--packages", is_flag=True, help="Let pip, uv and npm install, from this machine's own indexes.")
@click.option("--alone", is_flag=True, help="Use no server, even if one runs.")
def command(
    model: str | None, files: tuple[Path, ...], out: Path | None, message: str | None, packages: bool, alone: bool
) -> None:
    """Chat with a model that can run code in a sandbox: through the server that runs on this machine, or without one.

    Ctrl-C interrupts an answer, Ctrl-D leaves. /help lists the commands.

    Exit status of --message: 0 if it was answered, 1 if the model failed, 125 if Cloche did.
    """
    for each in files:
        if not each.is_file():
            raise errors.InvalidRequest(f"--file {each}: there is no such file")
    try:
        from cloche.cli.chat_session import run_chat  # it takes a while to import: not for `--help`

        config = load_command_config({"packages.enabled": packages or None})
        alone = alone or packages  # which a server's own operator decides there
        sys.exit(run_chat(config, model=model, files=files, out=out, message=message, alone=alone))
    except BrokenPipeError:
        sys.exit(EXIT_BROKEN_PIPE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
