"""`--notebook FILE`: saves the executed cells as a Jupyter notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cloche import errors

if TYPE_CHECKING:
    from cloche.sdk.backend import BackendSandbox

F = TypeVar("F", bound=Callable[..., Any])


def _check_notebook_path(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """An option's callback: refuses an invalid path before anything runs."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {str(value.absolute().parent)!r}")
    return value


def notebook_option(command: F) -> F:
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    says = "Save the executed cells with their outputs, as a notebook."
    return click.option("--notebook", type=kind, metavar="FILE", callback=_check_notebook_path, help=says)(command)


async def save_notebook(box: BackendSandbox, path: Path) -> None:
    """Saves the notebook; a failure is printed, not raised."""
    from cloche.cli.terminal import print_message  # not for `--help`

    try:
        path.write_bytes(await box.context().notebook())
    except (errors.ClocheError, OSError) as error:
        print_message(f"the notebook was not saved: {error}")
