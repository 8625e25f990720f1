"""`/ui/audit`: the audit log of actions, and whether it was changed since. For admins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.console import format
from cloche.api.console.context import ConsoleContext, ConsolePage, ConsoleVisitor, is_partial
from cloche.store.audit import AuditLine
from cloche.store.audit_reader import AuditQuery, AuditVerdict, read_last, verify_log

ROWS = 100
MAX_PAGES = 100
MAX_TEXT = 200
SHOWN_PROBLEMS = 20
SINCE = {"1h": 3600.0, "24h": 86400.0, "7d": 7 * 86400.0, "all": None}
SINCE_NAMES = {"1h": "the last hour", "24h": "the last day", "7d": "the last week", "all": "all that is kept"}
EVENT_FAMILIES = (
    "sandbox", "execution", "command", "terminal", "files", "port", "snapshot", "volume", "build", "template", "key",
    "quota", "admin", "console", "gateway", "librechat", "request", "owner", "audit",
)  # fmt: skip


class AuditPageQuery(NamedTuple):
    owner: str = ""
    what: str = ""
    sandbox: str = ""
    since: str = "24h"
    page: int = 1

    def query(self, page: int) -> str:
        return urlencode({name: value for name, value in self._replace(page=page)._asdict().items() if value})


class AuditRow(NamedTuple):
    line: AuditLine
    at: str
    iso: str
    bytes: str


class AuditPages:
    def __init__(self, context: ConsoleContext):
        self._context = context
        self._directory = Path(context.config.data_dir, "audit")

    async def show_overview(self, request: Request, visitor: ConsoleVisitor) -> Response:
        query = decode_audit_query(request.query_params)
        seconds = SINCE[query.since]
        audit_query = AuditQuery(
            owner=query.owner or None,
            what=query.what or None,
            sandbox=query.sandbox or None,
            since=None if seconds is None else time.time() - seconds,
        )
        await self._context.engine.audit_log.wait_flushed()
        newest = await self._read_lines(audit_query, query.page * ROWS + 1)
        shown = newest[(query.page - 1) * ROWS : query.page * ROWS]
        return self._context.render(
            request,
            visitor,
            "audit_rows.html" if is_partial(request) else "audit.html",
            lines=[_audit_row(each) for each in shown],
            asked=query,
            newer=query.query(query.page - 1) if query.page > 1 else "",
            older=query.query(query.page + 1) if len(newest) > query.page * ROWS and query.page < MAX_PAGES else "",
            families=EVENT_FAMILIES,
            times=SINCE_NAMES,
            enabled=self._context.config.audit.enabled,
            kept_days=self._context.config.audit.days,
        )

    async def verdict(self, request: Request, visitor: ConsoleVisitor) -> Response:
        """Verifies the log, on request only: it reads all of it."""
        await self._context.engine.audit_log.wait_flushed()
        try:
            found = await asyncio.to_thread(verify_log, self._directory, self._context.engine.instance.is_live)
        except OSError as error:
            raise _unreadable_log(error) from None
        return self._context.render(
            request, visitor, "audit_verdict.html", verdict=_shorten_verdict(found), problems=len(found.problems)
        )

    async def _read_lines(self, query: AuditQuery, limit: int) -> list[AuditLine]:
        """The newest first."""
        try:
            return (await asyncio.to_thread(read_last, self._directory, query, limit))[::-1]
        except OSError as error:
            raise _unreadable_log(error) from None


def decode_audit_query(query: Mapping[str, str]) -> AuditPageQuery:
    """Raises InvalidRequest for an invalid filter."""
    since, page = query.get("since", "24h"), query.get("page", "1")
    if since not in SINCE:
        raise errors.InvalidRequest(f"since must be one of {', '.join(SINCE)}, not {since[:50]!r}")
    if not (page.isascii() and page.isdigit() and len(page) < 4 and 1 <= int(page) <= MAX_PAGES):
        raise errors.InvalidRequest(f"{page[:50]!r} is no page: use a number from 1 to {MAX_PAGES}")
    texts = {name: query.get(name, "").strip()[:MAX_TEXT] for name in ("owner", "what", "sandbox")}
    return AuditPageQuery(since=since, page=int(page), **texts)


def _audit_row(line: AuditLine) -> AuditRow:
    return AuditRow(
        line=line,
        at=f"{line.at[:10]} {line.at[11:19]} UTC",
        iso=f"{line.at[:19]}Z",
        bytes=format.size(line.bytes) if line.bytes else "",
    )


def _shorten_verdict(verdict: AuditVerdict) -> AuditVerdict:
    shown = {"problems": verdict.problems[:SHOWN_PROBLEMS], "notes": verdict.notes[:SHOWN_PROBLEMS]}
    return msgspec.structs.replace(verdict, **shown)


def _unreadable_log(error: OSError) -> errors.Unavailable:
    return errors.Unavailable(f"the audit log cannot be read: {error.strerror}")


def pages(context: ConsoleContext) -> list[ConsolePage]:
    audit = AuditPages(context)
    return [
        ConsolePage("/audit", audit.show_overview, admin=True),
        ConsolePage("/audit/verdict", audit.verdict, admin=True),
    ]
