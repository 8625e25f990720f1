"""Of the lifecycle API: sandboxes are paused and resumed, and snapshots of them are made and removed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.opensandbox import lifecycle_replies as replies
from cloche.api.opensandbox import lifecycle_wire as wire
from cloche.api.opensandbox.desk import Desk
from cloche.api.opensandbox.replies import Conflict, json_reply
from cloche.model import Snapshot


def routes(desk: Desk) -> list[BaseRoute]:
    plane = Lasting(desk)
    return [
        desk.route("POST", "/sandboxes/{id}/pause", plane.pause),
        desk.route("POST", "/sandboxes/{id}/resume", plane.resume),
        desk.route("POST", "/sandboxes/{id}/snapshots", plane.make_snapshot),
        desk.route("GET", "/snapshots", plane.list_snapshots),
        desk.route("GET", "/snapshots/{ref:path}", plane.get_snapshot),
        desk.route("DELETE", "/snapshots/{ref:path}", plane.remove_snapshot),
    ]


class Lasting:
    """All of it is done when it is answered: nobody ever sees Pausing, Resuming or Creating."""

    def __init__(self, desk: Desk):
        self._desk = desk
        self._engine = desk.engine

    async def pause(self, request: Request) -> Response:
        """With its memory, as `docker pause`."""
        await self._engine.pause(request.path_params["id"], self._desk.owner(request))
        return Response(status_code=202)

    async def resume(self, request: Request) -> Response:
        id, owner = request.path_params["id"], self._desk.owner(request)
        if (await self._engine.describe(id, owner)).state == "running":
            raise Conflict(f"sandbox {id} is not paused: it runs")
        await self._engine.resume(id, owner)
        return Response(status_code=202)

    async def make_snapshot(self, request: Request) -> Response:
        id, owner = request.path_params["id"], self._desk.owner(request)
        name = wire.decode(await self._desk.body(request), wire.NewSnapshot).name
        info = (await self._engine.snapshot(id, owner, name=name or None)).info
        answer = json_reply(replies.snapshot(info), 202)
        answer.headers["location"] = f"{replies.PREFIX}/snapshots/{info.id}"
        return answer

    async def list_snapshots(self, request: Request) -> Response:
        owner, asked = self._desk.owner(request), wire.snapshot_listing(request.query_params)
        found = [each for each in await self._engine.snapshots.list(owner, asked.sandbox) if _matches(each, asked)]
        items = [replies.snapshot(each.info) for each in found]
        return json_reply(replies.page(items, page=asked.page, size=asked.size))

    async def get_snapshot(self, request: Request) -> Response:
        owner = self._desk.owner(request)
        return json_reply(replies.snapshot((await self._engine.snapshots.get(request.path_params["ref"], owner)).info))

    async def remove_snapshot(self, request: Request) -> Response:
        await self._engine.snapshots.remove(request.path_params["ref"], self._desk.owner(request))
        return Response(status_code=204)


def _matches(snapshot: Snapshot, asked: wire.SnapshotListing) -> bool:
    return asked.name in (None, snapshot.name) and (not asked.states or replies.READY in asked.states)
