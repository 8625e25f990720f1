"""What the lifecycle API answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from cloche.api.opensandbox.known import Known
from cloche.api.opensandbox.replies import Json, timestamp
from cloche.model import SandboxInfo

EXECD_PORT = 44772
EGRESS_PORT = 18080
TOKEN_HEADER = "X-EXECD-ACCESS-TOKEN"
EGRESS_HEADER = "OPENSANDBOX-EGRESS-AUTH"
TOKEN_HEADERS = {EXECD_PORT: TOKEN_HEADER, EGRESS_PORT: EGRESS_HEADER}
PREFIX = "/opensandbox/v1"


def created(info: SandboxInfo, known: Known) -> Json:
    reply: Json = {
        "id": info.id,
        "status": {"state": "Running", "lastTransitionAt": timestamp(info.created_at)},
        "createdAt": timestamp(info.created_at),
        "entrypoint": known.entrypoint,
        "metadata": info.metadata,
        **({"extensions": known.extensions} if known.extensions else {}),
    }
    if info.deadline_at is not None:
        reply["expiresAt"] = timestamp(info.deadline_at)
    return reply


def detail(info: SandboxInfo, known: Known) -> Json:
    return {**created(info, known), "image": {"uri": known.image or info.template}}


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
