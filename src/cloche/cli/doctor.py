"""`cloche doctor`: what this host can isolate and limit, how, and what to do where it cannot.

It must work when nothing else does: whatever a part of it meets becomes a line of its report.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import click
import msgspec

from cloche import errors
from cloche.cli import configuration
from cloche.config import Config, default_data_dir
from cloche.isolation.base import Check
from cloche.model import GIB, Struct

NEEDED = frozenset(
    {"platform", "kernel", "namespaces", "seccomp", "trial", "configuration", "data directory", "Python"}
)
"""Without these there is no sandbox. All else makes it stronger, faster or easier."""

TRIAL_SECONDS = 30
COMFORTABLE_BYTES = 2 * GIB
_TRIAL = """
from cloche.linux import namespaces as n, syscalls
syscalls.unshare(n.NEWUSER | n.NEWNS | n.NEWPID | n.NEWNET | n.NEWIPC | n.NEWUTS)
syscalls.set_hostname("trial")
"""
_MARKS = {"enforced": ("ok", "green"), "best effort": ("part", "yellow"), "missing": ("no", "red")}


class Section(Struct):
    title: str
    checks: list[Check]


@click.command("doctor")
@click.option("--deep", is_flag=True, help="Also try every claim of isolation and of limits in real sandboxes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(deep: bool, as_json: bool) -> None:
    """Say what this host can isolate and limit, and how. Exit status 0 if sandboxes can run, else 1."""
    sections = examine()
    missing = [
        each.name for part in sections for each in part.checks if each.state == "missing" and each.name in NEEDED
    ]
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


def examine() -> list[Section]:
    """Everything that can be said without making a sandbox. Never raises for what it finds."""
    wrong, config = _configuration()
    return [
        Section(title=f"Isolation and limits (backend {config.backend})", checks=_isolation(config)),
        Section(title="Python interpreters", checks=_attempt("Python", _pythons)),
        Section(title="Templates", checks=_attempt("templates", lambda: _templates(config))),
        Section(title="Networks of sandboxes", checks=_attempt("network", lambda: _networks(config))),
        *_tokens(config),
        Section(title="Places", checks=[*wrong, *_attempt("data directory", lambda: _places(config))]),
        Section(title="Leftovers", checks=_attempt("leftovers", lambda: _leftovers(config))),
    ]


def _attempt(name: str, produce: Callable[[], Iterable[Check]]) -> list[Check]:
    """What `produce` finds; what stops it, as a line of the report."""
    try:
        return list(produce())
    except (
        errors.ClocheError,
        OSError,
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        ValueError,
    ) as error:
        return [Check(name=name, state="missing", detail=f"could not be examined: {type(error).__name__}: {error}")]


def _configuration() -> tuple[list[Check], Config]:
    try:
        return [], configuration()
    except errors.InvalidConfig as error:
        bad = Check(
            name="configuration", state="missing", detail=str(error), advice="repair it: nothing starts until then"
        )
        return [bad], Config(data_dir=default_data_dir({}))


def _isolation(config: Config) -> list[Check]:
    if config.backend != "namespaces":
        return [Check(name="walls", state="missing", detail=f"{config.backend} has none", advice="use namespaces")]
    refused = _attempt("platform", _platform)
    return refused or [*_attempt("kernel", _probe), *_attempt("trial", _trial)]


def _platform() -> Iterable[Check]:
    from cloche.isolation.probe import refuse_unless_possible

    try:
        refuse_unless_possible()
    except errors.IsolationUnavailable as error:
        yield Check(name="platform", state="missing", detail=str(error))


def _probe() -> list[Check]:
    from cloche.isolation.probe import checks

    return checks()


def _trial() -> Iterable[Check]:
    """Settings may allow what a container's seccomp profile or AppArmor then refuse: so it is tried."""
    command = [sys.executable, "-I", "-c", _TRIAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    if done.returncode == 0:
        yield Check(name="trial", state="enforced", detail="namespaces were made, with rights inside them")
        return
    why = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
    advice = "inside a container, let its seccomp and AppArmor profiles allow unshare and mount; or see `namespaces`"
    yield Check(name="trial", state="missing", detail=f"namespaces cannot be made: {why}", advice=advice)


def _pythons() -> Iterable[Check]:
    from cloche.templates import pythons

    found = list(pythons.find())
    for each in found:
        yield Check(name=f"Python {each.version}", state="enforced", detail=each.path)
    if not found:
        advice = "install Python 3.10 or newer (`uv python install` does)"
        yield Check(name="Python", state="missing", detail="none that a template can be built on", advice=advice)


def _templates(config: Config) -> Iterable[Check]:
    from cloche.templates import Catalogue

    built = Catalogue(config.data_dir, config.aliases).list()
    for each in built:
        detail = f"Python {each.python_version}, {len(each.packages)} packages"
        usable = os.access(each.python, os.X_OK)
        advice = "" if usable else f"its interpreter is gone ({each.python}): build it again"
        yield Check(name=each.ref, state="enforced" if usable else "missing", detail=detail, advice=advice)
    if not any(each.name == "python" for each in built):
        advice = "the first sandbox builds it; or do it now: cloche template build python"
        yield Check(name="python", state="best effort", detail="not built yet", advice=advice)


def _networks(config: Config) -> Iterable[Check]:
    from cloche.cli.doctor_network import checks

    return checks(config)


def _tokens(config: Config) -> list[Section]:
    """Only where some are accepted."""
    from cloche.cli.token_keys import checks

    found = _attempt("LibreChat's tokens", lambda: checks(config))
    return [Section(title="LibreChat", checks=found)] if found else []


def _places(config: Config) -> Iterable[Check]:
    there = _nearest(Path(config.data_dir))
    writable = _can_write(there)
    detail = config.data_dir if there == Path(config.data_dir) else f"{config.data_dir} (not there yet)"
    advice = "" if writable else f"{there} cannot be written: set CLOCHE_DATA_DIR, or mend its rights"
    yield Check(name="data directory", state="enforced" if writable else "missing", detail=detail, advice=advice)
    free = shutil.disk_usage(there).free
    enough = free >= COMFORTABLE_BYTES
    yield Check(
        name="disk space",
        state="enforced" if enough else "best effort",
        detail=f"{free / GIB:.1f} GiB free",
        advice="" if enough else "a template takes about 1 GiB: make room, or set CLOCHE_DATA_DIR",
    )


def _leftovers(config: Config) -> Iterable[Check]:
    from cloche.cli.doctor_leftovers import checks

    return checks(config)


def _can_write(directory: Path) -> bool:
    """Tried, since rights alone do not tell: root has them all, also on a read-only file system."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _nearest(path: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    return next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))


def _deep(quiet: bool) -> list[Check]:
    from cloche.cli.claims import examine_claims

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
