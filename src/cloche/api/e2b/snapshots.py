"""Snapshots of sandboxes: create, list and remove.

A snapshot's id or name serves as a template for new sandboxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.dialect import Json, NotSupported, decode_json_body, json_reply, to_microseconds
from cloche.api.e2b.context import E2bContext
from cloche.api.e2b.port_target import strip_client_id
from cloche.api.e2b.sandboxes_schema import (
    MAX_PAGE_SIZE,
    Position,
    decode_page_token,
    encode_page_token,
    parse_whole_number,
)
from cloche.model import Snapshot, Struct

# Snapshots on the wire: requests and responses. Pure; raises InvalidRequest and NotSupported.

DEFAULT_TAG = ":default"


class E2bSnapshotBody(Struct):
    """The body of a new snapshot. The names are E2B's."""

    name: str | None = None
    memory: bool | None = None


class E2bSnapshotQuery(Struct):
    """The filter and start of a list of an owner's snapshots."""

    sandbox: str | None = None
    name: str | None = None
    limit: int = MAX_PAGE_SIZE
    after: Position | None = None


def decode_snapshot_name(body: bytes) -> str | None:
    """The requested name of a new snapshot."""
    message = decode_json_body(body, E2bSnapshotBody)
    if message.memory:
        raise NotSupported(
            "memory: a snapshot keeps files and environment here, not memory; leave it out, or pause the sandbox, "
            "which keeps its memory"
        )
    return message.name or None


def decode_snapshot_query(query: Mapping[str, str]) -> E2bSnapshotQuery:
    """The query of `GET /snapshots`."""
    return E2bSnapshotQuery(
        sandbox=strip_client_id(query["sandboxID"]) if query.get("sandboxID") else None,
        name=query.get("name") or None,
        limit=parse_whole_number("limit", query.get("limit"), 1, MAX_PAGE_SIZE) or MAX_PAGE_SIZE,
        after=decode_page_token(query["nextToken"]) if query.get("nextToken") else None,
    )


def select_snapshot_page(found: Sequence[Snapshot], query: E2bSnapshotQuery) -> tuple[list[Snapshot], str | None]:
    """One page, newest first, and the token of the next page, if any."""
    wanted = [each for each in found if query.name is None or matches_snapshot_ref(each, query.name)]
    wanted.sort(key=_snapshot_position_of, reverse=True)
    if query.after is not None:
        wanted = [each for each in wanted if _snapshot_position_of(each) < query.after]
    shown = wanted[: query.limit]
    return shown, encode_page_token(*_snapshot_position_of(shown[-1])) if len(wanted) > len(shown) else None


def matches_snapshot_ref(snapshot: Snapshot, ref: str) -> bool:
    """Whether `ref` is the snapshot's id or name. A name without a tag matches every tag."""
    ref = ref.removesuffix(DEFAULT_TAG)
    name = (snapshot.name or "").removesuffix(DEFAULT_TAG)
    return ref == snapshot.id or (bool(name) and ref in (name, name.partition(":")[0]))


def encode_snapshot(snapshot: Snapshot) -> Json:
    return {"snapshotID": snapshot.id, "names": [] if snapshot.name is None else [snapshot.name]}


def _snapshot_position_of(snapshot: Snapshot) -> Position:
    return to_microseconds(snapshot.created_at), snapshot.id


def snapshot_routes(api: E2bContext) -> list[BaseRoute]:
    plane = ControlSnapshots(api)
    return [
        api.route("POST", "/sandboxes/{id}/snapshots", plane.create),
        api.route("GET", "/snapshots", plane.list_page),
    ]


class ControlSnapshots:
    def __init__(self, api: E2bContext):
        self._api = api

    async def create(self, request: Request) -> Response:
        owner = self._api.owner(request)
        name = await self._api.decoded(request, decode_snapshot_name)
        return json_reply(
            encode_snapshot(await self._api.engine.snapshot(self._api.sandbox_id(request), owner, name=name)), 201
        )

    async def list_page(self, request: Request) -> Response:
        owner = self._api.owner(request)
        query = decode_snapshot_query(request.query_params)
        found, next_token = select_snapshot_page(await self._api.engine.snapshots.list(owner, query.sandbox), query)
        return json_reply(
            [encode_snapshot(each) for each in found], headers={"X-Next-Token": next_token} if next_token else {}
        )
