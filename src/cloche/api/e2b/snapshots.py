"""Snapshots of sandboxes: made, listed and removed. A sandbox is made from one as from a template, by id or name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.e2b.context import Desk
from cloche.api.e2b.replies import NotOffered, bare_id, json_reply, microseconds
from cloche.api.e2b.sandboxes_schema import MAX_PAGE, Json, Position, decode, page_of, page_token, whole_number
from cloche.model import Snapshot, Struct

# What is asked for about snapshots, and what is answered. Pure; raises InvalidRequest and NotOffered.

DEFAULT_TAG = ":default"


class NewSnapshot(Struct):
    """The body of a new snapshot. The names are E2B's."""

    name: str | None = None
    memory: bool | None = None


class SnapshotListing(Struct):
    """Which of an owner's snapshots, from where on."""

    sandbox: str | None = None
    name: str | None = None
    limit: int = MAX_PAGE
    after: Position | None = None


def wanted_name(body: bytes) -> str | None:
    """The name that a new snapshot is to have."""
    asked = decode(body, NewSnapshot)
    if asked.memory:
        raise NotOffered(
            "memory: a snapshot keeps files and environment here, not memory; leave it out, or pause the sandbox, "
            "which keeps its memory"
        )
    return asked.name or None


def listing(query: Mapping[str, str]) -> SnapshotListing:
    """The query of `GET /snapshots`."""
    return SnapshotListing(
        sandbox=bare_id(query["sandboxID"]) if query.get("sandboxID") else None,
        name=query.get("name") or None,
        limit=whole_number("limit", query.get("limit"), 1, MAX_PAGE) or MAX_PAGE,
        after=page_of(query["nextToken"]) if query.get("nextToken") else None,
    )


def page(found: Sequence[Snapshot], asked: SnapshotListing) -> tuple[list[Snapshot], str | None]:
    """One page of them, the newest first, and the token of the next one, if there is more."""
    wanted = [each for each in found if asked.name is None or answers_to(each, asked.name)]
    wanted.sort(key=_position, reverse=True)
    if asked.after is not None:
        wanted = [each for each in wanted if _position(each) < asked.after]
    shown = wanted[: asked.limit]
    return shown, page_token(*_position(shown[-1])) if len(wanted) > len(shown) else None


def answers_to(snapshot: Snapshot, ref: str) -> bool:
    """Whether a snapshot is meant by its id or its name. A name without a tag means those with any tag."""
    ref = ref.removesuffix(DEFAULT_TAG)
    name = (snapshot.name or "").removesuffix(DEFAULT_TAG)
    return ref == snapshot.id or (bool(name) and ref in (name, name.partition(":")[0]))


def shown(snapshot: Snapshot) -> Json:
    return {"snapshotID": snapshot.id, "names": [] if snapshot.name is None else [snapshot.name]}


def _position(snapshot: Snapshot) -> Position:
    return microseconds(snapshot.created_at), snapshot.id


def routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlSnapshots(desk)
    return [
        desk.route("POST", "/sandboxes/{id}/snapshots", plane.create),
        desk.route("GET", "/snapshots", plane.list_page),
    ]


class ControlSnapshots:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def create(self, request: Request) -> Response:
        owner = self._desk.owner(request)
        name = wanted_name(await self._desk.body(request))
        return json_reply(shown(await self._desk.engine.snapshot(self._desk.id(request), owner, name=name)), 201)

    async def list_page(self, request: Request) -> Response:
        owner = self._desk.owner(request)
        asked = listing(request.query_params)
        found, next_token = page(await self._desk.engine.snapshots.list(owner, asked.sandbox), asked)
        return json_reply([shown(each) for each in found], headers={"X-Next-Token": next_token} if next_token else {})
