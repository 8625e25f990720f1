"""`cloche doctor`: reports the isolation and the limits that this host supports, with advice.

It must work when nothing else does: every failure of a part becomes a line of its report.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable

import click
import msgspec

from cloche import errors
from cloche.cli import load_command_config
from cloche.config import Config, default_data_dir
from cloche.engine.operations.doctor import CheckupSection, collect_checks, missing_requirements, run_checkup
from cloche.isolation.base import HostCheck

_STATE_MARKS = {"enforced": ("ok", "green"), "best effort": ("part", "yellow"), "missing": ("no", "red")}


@click.command("doctor")
@click.option("--deep", is_flag=True, help="Also try every claim of isolation and of limits in real sandboxes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(deep: bool, as_json: bool) -> None:
    """Report the isolation and limits that this host supports. Exit status 0 if sandboxes can run, else 1."""
    wrong, config = _load_or_report_config()
    sections = run_checkup(config, wrong, _token_sections(config))
    missing = missing_requirements(sections)
    if not as_json:
        _print_sections(sections)
    claims = _check_claims(as_json) if deep and not missing else []
    broken = [each.name for each in claims if each.state == "missing"]
    if as_json:
        found = {"can_run": not missing, "missing": missing, "sections": sections, "claims": claims if deep else None}
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        _print_verdict(missing, broken)
    sys.exit(1 if missing or broken else 0)


def _load_or_report_config() -> tuple[list[HostCheck], Config]:
    try:
        return [], load_command_config()
    except errors.InvalidConfig as error:
        bad = HostCheck(
            name="configuration", state="missing", detail=str(error), advice="repair it: nothing starts until then"
        )
        return [bad], Config(data_dir=default_data_dir({}))


def _token_sections(config: Config) -> list[CheckupSection]:
    """The section on LibreChat's tokens; none where no tokens are accepted."""
    from cloche.cli.token_keys import token_key_checks

    found = collect_checks("LibreChat's tokens", lambda: token_key_checks(config))
    return [CheckupSection(title="LibreChat", checks=found)] if found else []


def _check_claims(quiet: bool) -> list[HostCheck]:
    show = (lambda check: None) if quiet else _print_check
    if not quiet:
        click.secho("Claims, each tried in a real sandbox", bold=True)
    return asyncio.run(_examine_claims(load_command_config(), show))


async def _examine_claims(config: Config, show: Callable[[HostCheck], None]) -> list[HostCheck]:
    """Tries all claims and shows each at once. A sandbox that cannot be made is a claim that does not hold."""
    checks = []
    try:
        async for check in _try_claims(config):
            show(check)
            checks.append(check)
    except (errors.ClocheError, OSError) as error:
        checks.append(HostCheck(name="a sandbox runs", state="missing", detail=str(error)))
        show(checks[-1])
    return checks


async def _try_claims(config: Config) -> AsyncIterator[HostCheck]:
    from cloche.cli.progress import show_progress  # here: all else works without an engine
    from cloche.engine.operations.conformance import run_conformance
    from cloche.sdk.assembly import assemble_engine
    from cloche.templates import Catalogue, ensure_template

    with show_progress("building python") as report:
        await asyncio.to_thread(ensure_template, Catalogue(config.data_dir, config.aliases), "python", report)
    async with assemble_engine(config) as engine:
        async for outcome in run_conformance(engine):
            state = "enforced" if outcome.passed else "missing"
            yield HostCheck(name=outcome.name, state=state, detail=outcome.text, advice=outcome.detail)


def _print_sections(sections: list[CheckupSection]) -> None:
    for section in sections:
        click.secho(section.title, bold=True)
        for check in section.checks:
            _print_check(check)
        click.echo()


def _print_check(check: HostCheck) -> None:
    mark, colour = _STATE_MARKS.get(check.state, (check.state, "white"))
    click.echo(f"  {click.style(f'{mark:<4}', fg=colour)}  {check.name:<24}  {_printable_text(check.detail)}")
    if check.advice:
        click.echo(f"        {'':<24}  -> {_printable_text(check.advice)}")


def _printable_text(text: str) -> str:
    """Text from a sandbox cannot steer the terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _print_verdict(missing: list[str], broken: list[str]) -> None:
    if missing:
        click.secho(f"Sandboxes cannot run here; missing: {', '.join(missing)}.", fg="red")
    elif broken:
        click.secho(f"Sandboxes run, but not all claims hold; broken: {', '.join(broken)}.", fg="red")
    else:
        click.secho("Sandboxes can run here.", fg="green")
