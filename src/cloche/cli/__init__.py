"""The command `cloche`. Each subcommand is a module of its own, loaded only when it is used."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from cloche import errors
from cloche.config import Config, load_config
from cloche.telemetry import LogFormat, LogLevel, configure_logging

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_CLOCHE_FAILED = 125  # exit status, apart from any that a program is likely to use
EXIT_INTERRUPTED = 130

COMMAND_GROUPS = {
    "Run code": {
        "run": "Run a program in a new sandbox.",
        "attach": "Show the output of a detached run.",
        "shell": "Open a prompt, Python, bash, R or Java, in a sandbox.",
        "chat": "Chat with a model that can run code, in the terminal.",
        "kernel": "Install a kernel for Jupyter's programs on this machine.",
    },
    "Serve": {
        "serve": "Serve sandboxes over HTTP: E2B, OpenAI, LibreChat, MCP and more.",
        "mcp": "Serve one agent over stdin and stdout (MCP).",
        "ui": "Print a login link for the console of the running server.",
        "logs": "Print log events of the running server.",
    },
    "Sandboxes": {
        "ps": "List sandboxes.",
        "kill": "End sandboxes.",
        "pause": "Pause sandboxes.",
        "resume": "Resume paused sandboxes.",
        "fork": "Create sandboxes with the files of another one.",
        "snapshot": "Save the files of a sandbox as a template.",
        "snapshots": "List snapshots.",
    },
    "Tenants": {
        "key": "Add, list, rotate and revoke API keys.",
        "quota": "Show and set the quotas of owners and keys.",
        "usage": "Print the usage of owners and keys.",
        "owner": "Remove all data of an owner.",
        "audit": "Print or verify the audit log.",
    },
    "Host": {
        "template": "Build, list, compare, pin, export and remove templates.",
        "doctor": "Report the isolation and limits that this host supports.",
        "config": "Print the configuration and the source of each value.",
        "gc": "Remove unneeded data from the data directory.",
        "completion": "Print the completion script for bash, zsh or fish.",
        "bench": "Measure times and memory against a plain ipykernel.",
    },
}
"""Groups of commands, each with one line of help. The module `cloche.cli.<name>` has the click command as `command`."""

COMMANDS = tuple(name for group in COMMAND_GROUPS.values() for name in group)


class LazyCommands(click.Group):
    """A group that imports `cloche.cli.<name>` when that command is used; help and completion import none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return _load_command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, group in COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in group.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # here: for a shell's request only

        texts = [item for group in COMMAND_GROUPS.values() for item in group.items()]
        found = [CompletionItem(name, help=text) for name, text in texts if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except errors.ClocheError as error:
            click.echo(f"cloche: {error}", err=True)
            ctx.exit(EXIT_CLOCHE_FAILED)
        except OSError as error:
            options = ctx.ensure_object(GlobalOptions)
            if error.errno == errno.EPIPE or options.log_level == "info":  # click ends quietly after the first
                raise
            click.echo(f"cloche: {options.explain_os_error(error)}", err=True)
            ctx.exit(EXIT_CLOCHE_FAILED)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


@functools.cache
def _load_command(name: str) -> click.Command:
    return add_global_options(importlib.import_module(f"cloche.cli.{name}").command)


class GlobalOptions:
    """The options of every command. Of one that is given twice, before and after the command, the last counts."""

    def __init__(self) -> None:
        self.config_file: str | None = None
        self.flags: dict[str, str] = {}  # of the configuration, by their keys
        self.log_format: LogFormat = "console"
        self.log_level: LogLevel = "warning"
        self._data_dir = ""  # once the configuration is loaded

    def set(self, name: str, value: Any) -> None:
        if name == "verbose":
            self.log_level = "info" if value else "warning"
        elif name in ("config_file", "log_format"):
            setattr(self, name, value)
        else:
            self.flags[name] = value
        configure_logging(self.log_format, self.log_level)

    def load_config(self, more: Mapping[str, Any]) -> Config:
        """The configuration, with a command's own flags by their keys. Raises InvalidConfig."""
        config = load_config(self.config_file, flags={**self.flags, **more})
        self._data_dir = config.data_dir
        return config

    def explain_os_error(self, error: OSError) -> str:
        """The cause and a remedy of an error that a command did not expect."""
        explained = errors.explain_data_dir_error(self._data_dir, error) if self._data_dir else None
        return str(explained or f"{error}; `cloche -v` prints the traceback")


def _set_global_option(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """An option's callback."""
    if value is not None:
        ctx.find_root().ensure_object(GlobalOptions).set(str(param.name), value)


GLOBAL_OPTIONS = tuple(
    click.Option(names, expose_value=False, callback=_set_global_option, **attributes)
    for names, attributes in (
        (["--config", "config_file"], {"type": click.Path(), "help": "Configuration file, instead of ./cloche.toml."}),
        # The code that reads the file reports errors, with Cloche's own message.
        (["--data-dir"], {"type": click.Path(readable=False), "help": "Directory of templates and records."}),
        (["--backend"], {"help": 'Isolation of sandboxes: "namespaces", "gvisor", or "plain-unsafe" for none at all.'}),
        (["--log", "log_format"], {"type": click.Choice(["console", "json"]), "help": "Form of log lines."}),
        (["-v", "--verbose"], {"is_flag": True, "default": None, "help": "Log more than warnings."}),
    )
)


def add_global_options(command: click.Command) -> click.Command:
    """Adds them to a command and its subcommands."""
    command.params.extend(GLOBAL_OPTIONS)
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        add_global_options(each)
    return command


@click.group(cls=LazyCommands, params=list(GLOBAL_OPTIONS), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cloche", prog_name="cloche")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run untrusted code in isolated, pre-warmed sandboxes."""
    _occupy_streams()
    options = ctx.ensure_object(GlobalOptions)
    configure_logging(options.log_format, options.log_level)


def _occupy_streams() -> None:
    """Opens /dev/null for a closed stdin, stdout or stderr: a file opened later must not get its number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


def load_command_config(flags: Mapping[str, Any] | None = None) -> Config:
    """Loads the configuration of the running command, with its own flags by their keys. Raises InvalidConfig."""
    options = click.get_current_context().find_root().ensure_object(GlobalOptions)
    return options.load_config(flags or {})
