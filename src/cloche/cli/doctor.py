"""`cloche doctor`: what this host can isolate and limit, how, and what to do where it cannot.

It must work when nothing else does: whatever a part of it meets becomes a line of its report.
"""

from __future__ import annotations

import asyncio
import sys

import click
import msgspec

from cloche import errors
from cloche.cli import configuration
from cloche.config import Config, default_data_dir
from cloche.engine.operations.doctor import Section, attempt, examine, missing_in
from cloche.isolation.base import Check

_MARKS = {"enforced": ("ok", "green"), "best effort": ("part", "yellow"), "missing": ("no", "red")}


@click.command("doctor")
@click.option("--deep", is_flag=True, help="Also try every claim of isolation and of limits in real sandboxes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(deep: bool, as_json: bool) -> None:
    """Say what this host can isolate and limit, and how. Exit status 0 if sandboxes can run, else 1."""
    wrong, config = _configuration()
    sections = examine(config, wrong, _tokens(config))
    missing = missing_in(sections)
    if not as_json:
        _print(sections)
    claims = _deep(as_json) if deep and not missing else []
    broken = [each.name for each in claims if each.state == "missing"]
    if as_json:
        found = {"can_run": not missing, "missing": missing, "sections": sections, "claims": claims if deep else None}
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        _verdict(missing, broken)
    sys.exit(1 if missing or broken else 0)


def _configuration() -> tuple[list[Check], Config]:
    try:
        return [], configuration()
    except errors.InvalidConfig as error:
        bad = Check(
            name="configuration", state="missing", detail=str(error), advice="repair it: nothing starts until then"
        )
        return [bad], Config(data_dir=default_data_dir({}))


def _tokens(config: Config) -> list[Section]:
    """Only where some are accepted."""
    from cloche.cli.serve import checks

    found = attempt("LibreChat's tokens", lambda: checks(config))
    return [Section(title="LibreChat", checks=found)] if found else []


def _deep(quiet: bool) -> list[Check]:
    from cloche.cli.conformance import examine_claims

    show = (lambda check: None) if quiet else _print_check
    if not quiet:
        click.secho("Claims, each tried in a real sandbox", bold=True)
    return asyncio.run(examine_claims(configuration(), show))


def _print(sections: list[Section]) -> None:
    for section in sections:
        click.secho(section.title, bold=True)
        for check in section.checks:
            _print_check(check)
        click.echo()


def _print_check(check: Check) -> None:
    mark, colour = _MARKS.get(check.state, (check.state, "white"))
    click.echo(f"  {click.style(f'{mark:<4}', fg=colour)}  {check.name:<24}  {_printable(check.detail)}")
    if check.advice:
        click.echo(f"        {'':<24}  -> {_printable(check.advice)}")


def _printable(text: str) -> str:
    """What a sandbox said cannot steer the terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _verdict(missing: list[str], broken: list[str]) -> None:
    if missing:
        click.secho(f"Sandboxes cannot run here; what is missing: {', '.join(missing)}.", fg="red")
    elif broken:
        click.secho(f"Sandboxes run, but not all claims hold; broken: {', '.join(broken)}.", fg="red")
    else:
        click.secho("Sandboxes can run here.", fg="green")
