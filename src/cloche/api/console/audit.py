"""`/ui/audit`: who did what, and when; and whether the log was changed since. For admins."""

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
from cloche.api.console.context import House, Page, Visitor, is_partial
from cloche.store.audit import AuditLine
from cloche.store.audit_reader import Verdict, Wanted, last, verify

ROWS = 100
MAX_PAGES = 100
MAX_TEXT = 200
SHOWN_PROBLEMS = 20
SINCE = {"1h": 3600.0, "24h": 86400.0, "7d": 7 * 86400.0, "all": None}
TIMES = {"1h": "the last hour", "24h": "the last day", "7d": "the last week", "all": "all that is kept"}
FAMILIES = (
    "sandbox", "execution", "command", "terminal", "files", "port", "snapshot", "volume", "build", "template", "key",
    "quota", "admin", "console", "gateway", "librechat", "request", "owner", "audit",
)  # fmt: skip


class Asked(NamedTuple):
    owner: str = ""
    what: str = ""
    sandbox: str = ""
    since: str = "24h"
    page: int = 1

    def query(self, page: int) -> str:
        return urlencode({name: value for name, value in self._replace(page=page)._asdict().items() if value})


class Line(NamedTuple):
    line: AuditLine
    at: str
    iso: str
    bytes: str


class Audit:
    def __init__(self, house: House):
        self._house = house
        self._directory = Path(house.config.data_dir, "audit")

    async def overview(self, request: Request, visitor: Visitor) -> Response:
        asked = asked_of(request.query_params)
        seconds = SINCE[asked.since]
        wanted = Wanted(
            owner=asked.owner or None,
            what=asked.what or None,
            sandbox=asked.sandbox or None,
            since=None if seconds is None else time.time() - seconds,
        )
        await self._house.engine.trail.flushed()
        newest = await self._read(wanted, asked.page * ROWS + 1)
        shown = newest[(asked.page - 1) * ROWS : asked.page * ROWS]
        return self._house.render(
            request,
            visitor,
            "audit_rows.html" if is_partial(request) else "audit.html",
            lines=[_line(each) for each in shown],
            asked=asked,
            newer=asked.query(asked.page - 1) if asked.page > 1 else "",
            older=asked.query(asked.page + 1) if len(newest) > asked.page * ROWS and asked.page < MAX_PAGES else "",
            families=FAMILIES,
            times=TIMES,
            enabled=self._house.config.audit.enabled,
            kept_days=self._house.config.audit.days,
        )

    async def verdict(self, request: Request, visitor: Visitor) -> Response:
        """Asked for by hand: it reads the whole log."""
        await self._house.engine.trail.flushed()
        try:
            found = await asyncio.to_thread(verify, self._directory, self._house.engine.instance.is_live)
        except OSError as error:
            raise _unreadable(error) from None
        return self._house.render(
            request, visitor, "audit_verdict.html", verdict=_short(found), problems=len(found.problems)
        )

    async def _read(self, wanted: Wanted, limit: int) -> list[AuditLine]:
        """The newest first."""
        try:
            return (await asyncio.to_thread(last, self._directory, wanted, limit))[::-1]
        except OSError as error:
            raise _unreadable(error) from None


def asked_of(query: Mapping[str, str]) -> Asked:
    """Raises InvalidRequest for what cannot be asked for."""
    since, page = query.get("since", "24h"), query.get("page", "1")
    if since not in SINCE:
        raise errors.InvalidRequest(f"since must be one of {', '.join(SINCE)}, not {since[:50]!r}")
    if not (page.isascii() and page.isdigit() and len(page) < 4 and 1 <= int(page) <= MAX_PAGES):
        raise errors.InvalidRequest(f"{page[:50]!r} is no page: use a number from 1 to {MAX_PAGES}")
    texts = {name: query.get(name, "").strip()[:MAX_TEXT] for name in ("owner", "what", "sandbox")}
    return Asked(since=since, page=int(page), **texts)


def _line(line: AuditLine) -> Line:
    return Line(
        line=line,
        at=f"{line.at[:10]} {line.at[11:19]} UTC",
        iso=f"{line.at[:19]}Z",
        bytes=format.size(line.bytes) if line.bytes else "",
    )


def _short(verdict: Verdict) -> Verdict:
    shown = {"problems": verdict.problems[:SHOWN_PROBLEMS], "notes": verdict.notes[:SHOWN_PROBLEMS]}
    return msgspec.structs.replace(verdict, **shown)


def _unreadable(error: OSError) -> errors.Unavailable:
    return errors.Unavailable(f"the audit log cannot be read: {error.strerror}")


def pages(house: House) -> list[Page]:
    audit = Audit(house)
    return [Page("/audit", audit.overview, admin=True), Page("/audit/verdict", audit.verdict, admin=True)]
