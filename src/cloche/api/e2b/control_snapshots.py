"""Snapshots of sandboxes: made, listed and removed. A sandbox is made from one as from a template, by id or name."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.e2b.desk import Desk
from cloche.api.e2b.replies import json_reply
from cloche.api.e2b.snapshots_wire import listing, page, shown, wanted_name


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
