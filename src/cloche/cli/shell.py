"""`cloche shell`: opens a prompt in a fresh sandbox, or in one of a server."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from cloche.cli import load_command_config
from cloche.cli.network_options import NetworkOptions, network_options, take_network_options
from cloche.cli.notebook import notebook_option
from cloche.config import Config

if TYPE_CHECKING:
    from cloche.sdk.backend import BackendSandbox


class TerminalProgram(NamedTuple):
    """A program whose prompt is the sandbox's own, and how it runs stdin as a script where there is no terminal."""

    interactive: tuple[str, ...]
    script: tuple[str, ...]


TERMINAL_PROGRAMS = {
    "bash": TerminalProgram(("bash", "-i"), ("bash", "-s")),
    "r": TerminalProgram(("R", "--quiet", "--no-save"), ("R", "--no-echo", "--no-save")),
    "java": TerminalProgram(("jshell",), ("jshell", "-s", "-")),
}
EXIT_BROKEN_PIPE = 141
EXIT_INTERRUPTED = 130


@click.command("shell")
@click.argument("id", required=False)
@click.option("--lang", type=click.Choice(["python", *TERMINAL_PROGRAMS]), default="python", show_default=True)
@click.option("--template", default="python", show_default=True, help="NAME or NAME@VERSION.")
@notebook_option
@network_options
@click.option("--alone", is_flag=True, help="Use no server, even if one runs.")
def command(id: str | None, lang: str, template: str, alone: bool, notebook: Path | None, **options: Any) -> None:
    """Open a prompt, Python, bash, R or Java, in a fresh sandbox, which is removed afterwards, or in sandbox ID of a
    server.

    Ctrl-D leaves it.
    """
    network = take_network_options(options)
    if id is not None and network.given:
        raise click.UsageError("--allow, --deny, --secret and --packages are for a fresh sandbox")
    if notebook is not None and lang != "python":
        raise click.UsageError("--notebook is for Python: a terminal has no cells")
    try:
        sys.exit(_open_prompt(load_command_config(), id, lang, template, network, alone, notebook))
    except BrokenPipeError:
        sys.exit(EXIT_BROKEN_PIPE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _open_prompt(
    config: Config,
    id: str | None,
    lang: str,
    template: str,
    network: NetworkOptions,
    alone: bool,
    notebook: Path | None,
) -> int:
    from cloche.cli import session, shell_session  # these take a while to import: not for `--help`

    box: AbstractAsyncContextManager[BackendSandbox]
    if id is not None:
        box = session.attach_sandbox(config, id)
    else:
        box = session.open_sandbox(config, template, limits=_shell_limits(config, lang), network=network, alone=alone)
    return (
        shell_session.run_python_prompt(config, box, notebook)
        if lang == "python"
        else asyncio.run(shell_session.run_terminal_program(box, TERMINAL_PROGRAMS[lang]))
    )


def _shell_limits(config: Config, lang: str) -> dict[str, float]:
    """The maximum of this host: the user has Ctrl-C."""
    most = config.limits.maximum
    limits: dict[str, float] = {"output_bytes": most.output_bytes}
    return limits if lang != "python" else {**limits, "execution_seconds": most.execution_seconds}
