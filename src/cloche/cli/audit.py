"""`cloche audit`: prints the audit log of the data directory; a server need not run."""

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
from cloche.cli import load_command_config
from cloche.cli.control import existing_data_dir
from cloche.engine.instance import Instance
from cloche.store.audit import AuditLine
from cloche.store.audit_reader import AuditQuery, AuditVerdict, end_position, read_last, read_lines, verify_log

POLL_SECONDS = 0.5
_SINCE_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@click.group("audit", invoke_without_command=True)
@click.option("--owner", help="Only lines about that owner's objects, or actions of that owner.")
@click.option("--sandbox", metavar="ID", help="Only actions on that sandbox, or in it.")
@click.option("--what", help='Only this action: "execution.ended", or "sandbox" for all actions on sandboxes.')
@click.option("--since", metavar="TIME", help="Only from then on: 30m, 12h, 7d, or 2026-11-16T17:00.")
@click.option("--limit", type=click.IntRange(1), default=1000, help="The newest; by default 1000.")
@click.option("--follow", is_flag=True, help="Continue with new lines.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as stored.")
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
    """Print the audit log: every creation, execution, read and end, with its time and actor."""
    if ctx.invoked_subcommand is not None:
        return
    query = AuditQuery(owner=owner, sandbox=sandbox, what=what, since=None if since is None else parse_since(since))
    for line in _follow_lines(query, limit) if follow else _last_lines(query, limit):
        click.echo(msgspec.json.encode(line).decode() if as_json else format_audit_line(line))


@command.command("verify")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify_command(ctx: click.Context, as_json: bool) -> None:
    """Check whether lines of the log were changed or removed. It is an error if there is no line."""
    verdict = _verify_log()
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


def _verify_log() -> AuditVerdict:
    """Verifies the log. Raises Unavailable; NotFound where there is no line to verify."""
    config = load_command_config()
    directory, run = existing_data_dir(config) / "audit", Instance(Path(config.data_dir, "run"))
    verdict = verify_log(directory, run.is_live) if directory.is_dir() else None
    if verdict is None or not (verdict.lines or verdict.problems):
        raise errors.NotFound(
            f"there is no line of an audit log in {directory}: nothing was verified; name the data directory of a "
            "server with --data-dir"
        )
    return verdict


def _audit_directory() -> Path:
    return Path(load_command_config().data_dir, "audit")


def _last_lines(query: AuditQuery, limit: int) -> list[AuditLine]:
    return read_last(_audit_directory(), query, limit)


def _follow_lines(query: AuditQuery, limit: int) -> Iterator[AuditLine]:
    directory = _audit_directory()
    place = end_position(directory)
    yield from deque((line for line, at in read_lines(directory, query) if at <= place), maxlen=limit)
    while True:
        for line, at in read_lines(directory, AuditQuery(), place):
            place = at
            if query.holds(line):
                yield line
        time.sleep(POLL_SECONDS)


def parse_since(text: str) -> float:
    """Parses the value of --since into seconds since 1970. Raises InvalidRequest."""
    ago = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if ago:
        return max(0.0, time.time() - int(ago[1]) * _SINCE_UNITS[ago[2]])
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        raise errors.InvalidRequest(f"--since {text!r}: give 30m, 12h or 7d, or a time like 2026-11-16T17:00") from None


def format_audit_line(line: AuditLine) -> str:
    """Formats a line for people."""
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
