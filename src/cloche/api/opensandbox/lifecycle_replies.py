"""What the lifecycle API answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from cloche.api.opensandbox.known import asked_of
from cloche.api.opensandbox.replies import Json, timestamp
from cloche.model import SandboxInfo, SnapshotInfo

EXECD_PORT = 44772
EGRESS_PORT = 18080
TOKEN_HEADER = "X-EXECD-ACCESS-TOKEN"
EGRESS_HEADER = "OPENSANDBOX-EGRESS-AUTH"
TOKEN_HEADERS = {EXECD_PORT: TOKEN_HEADER, EGRESS_PORT: EGRESS_HEADER}
PREFIX = "/opensandbox/v1"
STATES = {"running": "Running", "paused": "Paused", "ended": "Terminated"}
READY = "Ready"


def created(info: SandboxInfo) -> Json:
    asked, paused = asked_of(info.notes), info.state == "paused"
    since = info.paused_at if paused and info.paused_at is not None else info.created_at
    reply: Json = {
        "id": info.id,
        "status": {"state": STATES[info.state], "lastTransitionAt": timestamp(since)},
        "createdAt": timestamp(info.created_at),
        "entrypoint": asked.entrypoint,
        "metadata": info.metadata,
        **({"extensions": asked.extensions} if asked.extensions else {}),
    }
    if info.deadline_at is not None and not paused:  # which stands still meanwhile
        reply["expiresAt"] = timestamp(info.deadline_at)
    return reply


def detail(info: SandboxInfo) -> Json:
    asked = asked_of(info.notes)
    source = {"snapshotId": asked.snapshot} if asked.snapshot else {"image": {"uri": asked.image or info.template}}
    return {**created(info), **source}


def snapshot(info: SnapshotInfo) -> Json:
    """It is whole when it is first told of, or it is not there."""
    reply: Json = {
        "id": info.id,
        "sandboxId": info.sandbox,
        "status": {"state": READY, "reason": "snapshot_ready", "lastTransitionAt": timestamp(info.created_at)},
        "createdAt": timestamp(info.created_at),
    }
    return {**reply, "name": info.name} if info.name else reply


def page(items: Sequence[Json], *, page: int, size: int) -> Json:
    """That page of all items."""
    begin, pages = (page - 1) * size, -(-len(items) // size)
    return {
        "items": items[begin : begin + size],
        "pagination": {
            "page": page,
            "pageSize": size,
            "totalItems": len(items),
            "totalPages": pages,
            "hasNextPage": page < pages,
        },
    }


def endpoint(id: str, port: int, token: str, place: str) -> Json:
    """Without a scheme: clients take that of the lifecycle API."""
    return {
        "endpoint": f"{place}{PREFIX}/sandboxes/{id}/proxy/{port}",
        "headers": {TOKEN_HEADERS[port]: token},
    }


def place_of(public_url: str, host: str) -> str:
    """Where clients reach the server: as its owner says, else as the client did."""
    split = urlsplit(public_url)
    return split.netloc + split.path.rstrip("/") if split.netloc else host
