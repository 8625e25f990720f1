"""`cloche kernel`: Jupyter's programs on this machine run their notebooks in sandboxes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from cloche import errors
from cloche.cli import load_command_config
from cloche.config import Config
from cloche.languages import LANGUAGE_NAMES, LANGUAGES

DEFAULT_NAME = "cloche"
_PROGRAM = "from cloche.cli import main; main(prog_name='cloche')"  # with -P: a notebook's directory has no say in it


@click.group("kernel")
def command() -> None:
    """Install a kernel for Jupyter's programs on this machine: JupyterLab, VS Code, nbclient, papermill."""


@command.command("install")
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the kernel, for programs.")
@click.option("--display-name", help="Name of the kernel, for people.")
@click.option("--lang", type=click.Choice(LANGUAGE_NAMES), default="python", show_default=True)
@click.option("--session", metavar="NAME", help="Run all its notebooks in one sandbox, which keeps its files.")
@click.option("--prefix", type=click.Path(path_type=Path), help="Install below this directory, for all who use it.")
@click.option("--sys-prefix", is_flag=True, help="Install in the environment of this Python.")
def install(
    name: str, display_name: str | None, lang: str, session: str | None, prefix: Path | None, sys_prefix: bool
) -> None:
    """Write a kernelspec, for the user or an environment, that runs each notebook in a sandbox of its own.

    The kernel uses the server of CLOCHE_URL, else the one that runs on this machine, else its own.
    """
    place = kernelspec_directory(name, Path(sys.prefix) if sys_prefix else prefix)
    place.mkdir(parents=True, exist_ok=True)
    spec = make_kernelspec(load_command_config(), display_name, lang, session)
    (place / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
    click.echo(f"installed the kernel {name!r}: {place}")
    if not _has_zmq():
        click.echo("it needs ZeroMQ for Python: pip install pyzmq, into the same environment", err=True)


@command.command("remove")
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the kernel.")
@click.option("--prefix", type=click.Path(path_type=Path), help="As it was installed.")
@click.option("--sys-prefix", is_flag=True, help="As it was installed.")
def remove(name: str, prefix: Path | None, sys_prefix: bool) -> None:
    """Remove a kernelspec that was installed by Cloche."""
    place = kernelspec_directory(name, Path(sys.prefix) if sys_prefix else prefix)
    try:
        spec = json.loads((place / "kernel.json").read_text())
    except (OSError, ValueError):
        raise errors.NotFound(f"there is no kernel in {place}") from None
    if "cloche" not in spec.get("metadata", {}):
        raise errors.InvalidRequest(f"the kernel in {place} was not installed by Cloche")
    shutil.rmtree(place)
    click.echo(f"removed {place}")


@command.command("run", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("connection_file", type=click.Path(path_type=Path))
@click.option("--lang", type=click.Choice(LANGUAGE_NAMES), default="python")
@click.option("--session")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def run(connection_file: Path, lang: str, session: str | None, rest: tuple[str, ...]) -> None:
    """Serve one kernel to a program of Jupyter's, which has made that file and started this process.

    `rest` are ipykernel's own options, which nbclient adds for a kernel that is called python3.
    """
    if not _has_zmq():
        raise errors.Unavailable(
            "a kernel for Jupyter needs ZeroMQ for Python: pip install pyzmq, into the same environment"
        )
    from cloche.cli.kernel_bridge import serve_kernel  # with pyzmq

    serve_kernel(load_command_config(), connection_file, LANGUAGES[lang].kernel_name, session)


def kernelspec_directory(name: str, prefix: Path | None, env: Mapping[str, str] = os.environ) -> Path:
    """The directory of that kernelspec: the user's without a prefix. Raises InvalidRequest for an invalid name."""
    if not name or not all(each.isalnum() or each in "._-" for each in name) or name.startswith("."):
        raise errors.InvalidRequest(f"a kernel's name has letters, digits, '.', '_' and '-', unlike {name!r}")
    if prefix is not None:
        return prefix / "share" / "jupyter" / "kernels" / name
    own = env.get("JUPYTER_DATA_DIR")
    share = Path(env.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return (Path(own) if own else share / "jupyter") / "kernels" / name


def make_kernelspec(config: Config, display_name: str | None, lang: str, session: str | None) -> dict[str, object]:
    """The kernelspec as JSON. Its interrupts are messages: the process that is signalled runs no cells."""
    program = [sys.executable, "-P", "-c", _PROGRAM, "--data-dir", os.path.abspath(config.data_dir)]
    more = ["--session", session] if session else []
    return {
        "argv": [*program, "kernel", "run", "{connection_file}", "--lang", lang, *more],
        "display_name": display_name or f"{LANGUAGES[lang].kernel_title} (Cloche)",
        "language": lang,
        "interrupt_mode": "message",
        "metadata": {"debugger": False, "cloche": {"session": session}},
    }


def _has_zmq() -> bool:
    from importlib.util import find_spec

    return find_spec("zmq") is not None
