"""`--notebook FILE`: what ran, for Jupyter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cloche import errors

if TYPE_CHECKING:
    from cloche.sdk.backend import Sandbox

F = TypeVar("F", bound=Callable[..., Any])


def _place(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Wrong places are told before anything runs."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {str(value.absolute().parent)!r}")
    return value


def notebook_option(command: F) -> F:
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    says = "Save what ran, with its outputs, as a notebook."
    return click.option("--notebook", type=kind, metavar="FILE", callback=_place, help=says)(command)


async def save_notebook(box: Sandbox, path: Path) -> None:
    """Says so where it cannot."""
    from cloche.cli.terminal import say  # not for `--help`

    try:
        path.write_bytes(await box.context().notebook())
    except (errors.ClocheError, OSError) as error:
        say(f"the notebook was not saved: {error}")
