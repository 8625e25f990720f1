"""`cloche audit`: who did what, from the log in the data directory; a server need not run."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import click
import msgspec

from cloche import errors
from cloche.cli import configuration
from cloche.cli.control import existing
from cloche.engine.instance import Instance
from cloche.store.audit import AuditLine
from cloche.store.audit_reader import Verdict, Wanted, end_of, last, lines, verify

POLL_SECONDS = 0.5
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@click.group("audit", invoke_without_command=True)
@click.option("--owner", help="Only what is theirs, or was done by them.")
@click.option("--sandbox", metavar="ID", help="Only what was done to that sandbox, or in it.")
@click.option("--what", help='Only such things: "execution.ended", or "sandbox" for all that happens to sandboxes.')
@click.option("--since", metavar="TIME", help="Only from then on: 30m, 12h, 7d, or 2026-11-16T17:00.")
@click.option("--limit", type=click.IntRange(1), default=1000, help="The newest; by default 1000.")
@click.option("--follow", is_flag=True, help="Go on with what is done from now on.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as they are.")
@click.pass_context
def command(
    ctx: click.Context,
    owner: str | None,
    sandbox: str | None,
    what: str | None,
    since: str | None,
    limit: int,
    follow: bool,
    as_json: bool,
) -> None:
    """Say who made, ran, read and ended what, and when."""
    if ctx.invoked_subcommand is not None:
        return
    wanted = Wanted(owner=owner, sandbox=sandbox, what=what, since=None if since is None else moment(since))
    for line in _following(wanted, limit) if follow else _last(wanted, limit):
        click.echo(msgspec.json.encode(line).decode() if as_json else shown(line))


@command.command("verify")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify_command(ctx: click.Context, as_json: bool) -> None:
    """Say whether lines of the log were changed or removed; where there is no line, that is no good news."""
    verdict = _verdict()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(verdict)).decode())
    else:
        for note in verdict.notes:
            click.echo(f"note: {note}", err=True)
        for problem in verdict.problems:
            click.echo(problem)
    if verdict.problems:
        ctx.exit(1)
    if not as_json:
        click.echo(f"{verdict.lines} lines in {verdict.files} files: each is followed by the one that it should be")


def _verdict() -> Verdict:
    """Raises Unavailable; NotFound where there is nothing to look at."""
    config = configuration()
    directory, run = existing(config) / "audit", Instance(Path(config.data_dir, "run"))
    try:
        verdict = verify(directory, run.is_live) if directory.is_dir() else None
    except OSError as error:
        raise _unreadable(error) from None
    if verdict is None or not (verdict.lines or verdict.problems):
        raise errors.NotFound(f"there is no line of an audit log in {directory}: nothing was verified")
    return verdict


def _directory() -> Path:
    return Path(configuration().data_dir, "audit")


def _last(wanted: Wanted, limit: int) -> list[AuditLine]:
    try:
        return last(_directory(), wanted, limit)
    except OSError as error:
        raise _unreadable(error) from None


def _following(wanted: Wanted, limit: int) -> Iterator[AuditLine]:
    directory = _directory()
    try:
        place = end_of(directory)
        yield from deque((line for line, at in lines(directory, wanted) if at <= place), maxlen=limit)
        while True:
            for line, at in lines(directory, Wanted(), place):
                place = at
                if wanted.holds(line):
                    yield line
            time.sleep(POLL_SECONDS)
    except OSError as error:
        raise _unreadable(error) from None


def moment(text: str) -> float:
    """When that is. Raises InvalidRequest."""
    ago = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if ago:
        return max(0.0, time.time() - int(ago[1]) * _UNITS[ago[2]])
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        raise errors.InvalidRequest(f"--since {text!r}: give 30m, 12h or 7d, or a time like 2026-11-16T17:00") from None


def shown(line: AuditLine) -> str:
    """A line for people."""
    who = f"{line.by or '-'} ({line.key})"
    named = [line.sandbox and f"sandbox={line.sandbox}", line.id and f"id={line.id}"]
    told = [
        line.owner and line.owner != line.by and f"of={line.owner}",
        line.outcome and f"outcome={line.outcome}",
        line.about and f"about={line.about!r}",
        line.bytes and f"bytes={line.bytes}",
        line.count > 1 and f"times={line.count}",
    ]
    return " ".join([line.at[:23] + "Z", f"{line.what:<18}", who, *(str(each) for each in (*named, *told) if each)])


def _unreadable(error: OSError) -> errors.Unavailable:
    return errors.Unavailable(f"the audit log cannot be read: {error}")
