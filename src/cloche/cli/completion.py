"""`cloche completion`: prints the script that completes the command line in a shell."""

from __future__ import annotations

import click
from click import shell_completion

from cloche.cli import main

PROGRAM = "cloche"
VARIABLE = "_CLOCHE_COMPLETE"  # by which click knows that the script calls


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a script that completes commands, options and their values.

    \b
    bash:  eval "$(cloche completion bash)"        in ~/.bashrc
    zsh:   eval "$(cloche completion zsh)"         in ~/.zshrc, after compinit
    fish:  cloche completion fish | source         in ~/.config/fish/config.fish
    """
    kind = shell_completion.get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, PROGRAM, VARIABLE).source())
