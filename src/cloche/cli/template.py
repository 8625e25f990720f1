"""`cloche template`: build, list, show, diff, pin, export, import, rm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from cloche import errors
from cloche.cli import load_command_config
from cloche.cli.progress import show_progress
from cloche.model import MIB, ImageOrigin, Template
from cloche.templates import (
    Catalogue,
    Difference,
    Recipe,
    build_template,
    compare_templates,
    export_template,
    import_archive,
    import_image,
    recipe,
)

# The differences between two versions of a template, in lines for people.


def difference_lines(found: Difference) -> Iterator[str]:
    """One line for each difference: + is added, - is removed, ~ is changed."""
    yield f"{found.before} -> {found.after}"
    if found.same:
        yield "  no difference"
    if found.python is not None:
        yield f"  ~ Python {found.python.before} -> {found.python.after}"
    yield from (f"  + {package}" for package in found.packages_added)
    yield from (f"  - {package}" for package in found.packages_removed)
    yield from (f"  ~ {each.what} {each.before} -> {each.after}" for each in found.packages_changed)
    for change in found.recipe:
        yield f"  ~ template.toml: {change.what} = {_format_json(change.before)} -> {_format_json(change.after)}"
    yield f"  {_format_mib(found.before_bytes)} -> {_format_mib(found.after_bytes)}"


def difference_summary(found: Difference) -> str:
    """One line: the number of differences of each kind, and the change of size."""
    counts = {
        "added": len(found.packages_added),
        "removed": len(found.packages_removed),
        "changed": len(found.packages_changed),
    }
    said = [f"{count} {verb}" for verb, count in counts.items() if count]
    said += [f"Python {found.python.before} -> {found.python.after}"] if found.python else []
    said += [f"template.toml: {', '.join(each.what for each in found.recipe)}"] if found.recipe else []
    grown = (found.after_bytes - found.before_bytes) / MIB
    return f"{', '.join(said) or 'no difference'}, {grown:+.0f} MiB"


def _format_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _format_mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"


@click.group("template")
def command() -> None:
    """Build, compare, pin, move and remove templates."""


def open_catalogue() -> Catalogue:
    config = load_command_config()
    return Catalogue(config.data_dir, config.aliases)


@command.command("build")
@click.argument("source", metavar="FILE.toml|NAME")
def build_command(source: str) -> None:
    """Build a template from a file, or a built-in one by its name, with the newest matching packages."""
    chosen = _find_recipe(source)
    started = time.monotonic()
    with show_progress(f"building {chosen.name}") as report:
        template = build_template(open_catalogue(), chosen, report)
    took = f"{time.monotonic() - started:.0f} s"
    click.echo(f"{template.ref}  Python {template.python_version}, {_template_size(template)}, {took}")


def _find_recipe(source: str) -> Recipe:
    if source in recipe.BUILT_IN_TEMPLATES:
        return recipe.built_in_recipe(source)
    if not source.endswith(".toml") and not Path(source).exists():
        known = ", ".join(recipe.BUILT_IN_TEMPLATES)
        raise errors.TemplateNotFound(f"{source!r} is neither a file nor a built-in template ({known})")
    return recipe.read_recipe(Path(source))


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(as_json: bool) -> None:
    """List every version of every template, the newest of each name first."""
    known = open_catalogue()
    templates = known.list()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(templates)))
        return
    if not templates:
        click.echo("no templates yet: `cloche template build python` builds the built-in one", err=True)
    for each in templates:
        notes = ["pinned"] if known.pinned(each.name) == each.version else []
        notes += [_image_note(each.image)] if each.image else []
        click.echo(_template_line(each, "  ".join(notes)))


def _template_line(template: Template, note: str) -> str:
    built = time.strftime("%Y-%m-%d %H:%M", time.localtime(template.created_at))
    packages = f"{len(template.packages)} packages"
    said = (
        f"{template.ref:<36} Python {template.python_version:<8} {packages:<14} {_template_size(template):>9}  {built}"
    )
    return f"{said}  {note}".rstrip()


@command.command("show")
@click.argument("ref", metavar="NAME[@VERSION]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(ref: str, as_json: bool) -> None:
    """Show one template: interpreter, packages, imports, limits."""
    template = open_catalogue().resolve(ref)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(template)))
        return
    for name, value in msgspec.structs.asdict(template).items():
        if name == "packages":
            click.echo(f"{name}:")
            for package in value:
                click.echo(f"  {package}")
        else:
            click.echo(f"{name}: {_format_field(value)}")


@command.command("history")
@click.argument("name")
def history_command(name: str) -> None:
    """List the versions of one template, newest first, with the changes of each."""
    known = open_catalogue()
    versions = known.versions(name)
    pin = known.pinned(versions[0].name)
    meant = pin or versions[0].version
    for each, before in zip(versions, [*versions[1:], None], strict=True):
        mark = ("pinned" if pin else "in use") if each.version == meant else ""
        click.echo(_template_line(each, mark))
        if before is not None:
            click.echo(f"    {difference_summary(compare_templates(before, each))}")


@command.command("diff")
@click.argument("before", metavar="NAME[@VERSION]")
@click.argument("after", metavar="NAME[@VERSION]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff_command(before: str, after: str, as_json: bool) -> None:
    """Show the differences of the second from the first."""
    known = open_catalogue()
    found = compare_templates(known.resolve(before), known.resolve(after))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    for line in difference_lines(found):
        click.echo(line)


@command.command("pin")
@click.argument("ref", metavar="NAME@VERSION")
def pin_command(ref: str) -> None:
    """Pin NAME to that version, also when newer ones are built, until it is unpinned."""
    template = open_catalogue().pin(ref)
    click.echo(f"{template.name} is {template.ref} from now on")


@command.command("unpin")
@click.argument("name")
def unpin_command(name: str) -> None:
    """Let NAME mean its newest version again."""
    newest = open_catalogue().unpin(name)
    click.echo(f"{name} is {newest.ref if newest else 'none'} from now on, and then each newer build")


@command.command("rollback")
@click.argument("name")
def rollback_command(name: str) -> None:
    """Pin the version before the one that NAME means now."""
    template = open_catalogue().pin_previous(name)
    click.echo(f"{template.name} is {template.ref} from now on: `cloche template unpin {template.name}` undoes it")


@command.command("export")
@click.argument("ref", metavar="NAME[@VERSION]")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def export_command(ref: str, file: Path) -> None:
    """Write a template to one file (tar.gz), for a machine without a registry."""
    template = open_catalogue().resolve(ref)
    with show_progress(f"exporting {template.ref}") as report:
        digest = export_template(template, file, report)
    click.echo(f"{template.ref}  {file.stat().st_size / MIB:.0f} MiB  sha256 {digest}")


@command.command("import")
@click.argument("source", metavar="FILE|DIR", type=click.Path(exists=True, path_type=Path))
@click.option("--name", metavar="NAME", help="The name of the template that an image becomes.")
@click.option("--recipe", "file", metavar="FILE.toml", help="Name, packages, imports, env and limits for an image.")
@click.option("--sha256", metavar="DIGEST", help="Refuse any other file.")
def import_command(source: Path, name: str | None, file: str | None, sha256: str | None) -> None:
    """Add the template of an exported file, or make one of an OCI image.

    An image is an archive of `docker save`, an OCI layout (a directory or an archive), or a directory or archive with
    the files of a root.
    """
    with show_progress(f"importing {source.name}") as report:
        if name is None and file is None:
            if not source.is_file():
                raise errors.InvalidRequest(f"{source} is a directory: give the template a name, with --name")
            template = import_archive(open_catalogue(), source, sha256, report)
        else:
            chosen = _recipe_for_image(name, file)
            template = import_image(open_catalogue(), source, chosen, sha256, report)
    of_image = "" if template.image is None else f", {_image_note(template.image)}"
    click.echo(f"{template.ref}  Python {template.python_version}, {_template_size(template)}{of_image}")


def _recipe_for_image(name: str | None, file: str | None) -> Recipe:
    chosen = recipe.Recipe(name=name or "") if file is None else recipe.read_recipe(Path(file))
    chosen = msgspec.structs.replace(chosen, name=name or chosen.name)
    recipe.check_recipe("--name", chosen)
    return chosen


def _image_note(image: ImageOrigin) -> str:
    python = "" if image.own_python else ", Python of the host"
    return f"from {image.source} ({image.digest[:19]}{python})"


@command.command("rm")
@click.argument("refs", metavar="NAME[@VERSION]...", nargs=-1, required=True)
def rm_command(refs: tuple[str, ...]) -> None:
    """Remove versions of templates. NAME alone removes the version that it means; unpin it first if it is pinned."""
    for ref in refs:
        click.echo(f"removed {open_catalogue().remove(ref).ref}")


def _format_field(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={each}" for key, each in value.items())
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _template_size(template: Template) -> str:
    return f"{template.size_bytes / MIB:.0f} MiB"
