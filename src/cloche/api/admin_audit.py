"""`/admin/audit`: who did what. For admins."""

from __future__ import annotations

import asyncio
import math
from datetime import datetime
from pathlib import Path

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.http import Dialect, Edge
from cloche.api.system import json_reply
from cloche.store.audit_reader import Wanted, last

MAX_LIMIT = 10_000
MAX_MOMENT = 253402300799.0  # the end of the year 9999: the log has four digits for it
FILTERS = ("owner", "sandbox", "what", "since", "limit")


class AdminAudit:
    def __init__(self, dialect: Dialect, directory: Path, gatekeeper: Gatekeeper):
        self._directory = directory
        self._gatekeeper = gatekeeper
        self.routes = [Route("/admin/audit", Edge(dialect, self.list), methods=["GET"])]

    async def list(self, request: Request) -> Response:
        """What was done a second ago may not be there yet."""
        self._gatekeeper.admit_admin(request)
        wanted, limit = decode(request.query_params)
        try:
            found = await asyncio.to_thread(last, self._directory, wanted, limit)
        except OSError as error:
            raise errors.Unavailable(f"the audit log cannot be read: {error.strerror}") from None
        return json_reply({"lines": found})


def decode(query: QueryParams) -> tuple[Wanted, int]:
    """Raises InvalidRequest."""
    unknown = [name for name in query if name not in FILTERS]
    if unknown:
        raise errors.InvalidRequest(f"{unknown[0][:100]!r} is no filter: there are {', '.join(FILTERS)}")
    limit = query.get("limit", "1000")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= MAX_LIMIT):
        raise errors.InvalidRequest(f"limit must be a number from 1 to {MAX_LIMIT}, not {limit[:100]!r}")
    since = query.get("since")
    wanted = Wanted(
        owner=query.get("owner"),
        sandbox=query.get("sandbox"),
        what=query.get("what"),
        since=None if since is None else _moment(since),
    )
    return wanted, int(limit)


def _moment(text: str) -> float:
    try:
        at = float(text) if text.replace(".", "", 1).isdigit() else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        at = math.nan
    if not 0 <= at <= MAX_MOMENT:
        raise errors.InvalidRequest(
            f"since must be seconds since 1970, or like 2026-11-16T17:00:00Z, not {text[:100]!r}"
        )
    return at
