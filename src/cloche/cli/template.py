"""`cloche template`: build, list, show, rm."""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec

from cloche import errors
from cloche.cli import configuration
from cloche.cli.progress import showing
from cloche.model import MIB, Template
from cloche.templates import Catalogue, Recipe, build, recipe


@click.group("template")
def command() -> None:
    """Build, list, show and remove templates."""


def catalogue() -> Catalogue:
    config = configuration()
    return Catalogue(config.data_dir, config.aliases)


@command.command("build")
@click.argument("source", metavar="FILE.toml|NAME")
def build_command(source: str) -> None:
    """Build a template from a file, or a built-in one by its name, with the newest packages that fit."""
    chosen = _recipe(source)
    started = time.monotonic()
    with showing(f"building {chosen.name}") as report:
        template = build(catalogue(), chosen, report)
    click.echo(
        f"{template.ref}  Python {template.python_version}, {_size(template)}, {time.monotonic() - started:.0f} s"
    )


def _recipe(source: str) -> Recipe:
    if source in recipe.BUILT_IN:
        return recipe.built_in(source)
    if not source.endswith(".toml") and not Path(source).exists():
        known = ", ".join(recipe.BUILT_IN)
        raise errors.TemplateNotFound(f"{source!r} is neither a file nor a built-in template ({known})")
    return recipe.read(Path(source))


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(as_json: bool) -> None:
    """List every version of every template, the newest of each name first."""
    templates = catalogue().list()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(templates)))
        return
    if not templates:
        click.echo("no templates yet: `cloche template build python` builds the built-in one", err=True)
    for each in templates:
        built = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.created_at))
        packages = f"{len(each.packages)} packages"
        click.echo(f"{each.ref:<36} Python {each.python_version:<8} {packages:<14} {_size(each):>9}  {built}")


@command.command("show")
@click.argument("ref", metavar="NAME[@VERSION]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(ref: str, as_json: bool) -> None:
    """Show one template: interpreter, packages, imports, limits."""
    template = catalogue().resolve(ref)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(template)))
        return
    for name, value in msgspec.structs.asdict(template).items():
        if name == "packages":
            click.echo(f"{name}:")
            for package in value:
                click.echo(f"  {package}")
        else:
            click.echo(f"{name}: {_words(value)}")


@command.command("rm")
@click.argument("refs", metavar="NAME[@VERSION]...", nargs=-1, required=True)
def rm_command(refs: tuple[str, ...]) -> None:
    """Remove versions of templates. NAME alone removes its newest version."""
    for ref in refs:
        click.echo(f"removed {catalogue().remove(ref).ref}")


def _words(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={each}" for key, each in value.items())
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _size(template: Template) -> str:
    return f"{template.size_bytes / MIB:.0f} MiB"
