"""The lifecycle API: sandboxes are made, found, listed, renewed and ended."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.http import while_wanted
from cloche.api.opensandbox import lifecycle_schema as replies
from cloche.api.opensandbox import lifecycle_schema as wire
from cloche.api.opensandbox.context import Desk
from cloche.api.opensandbox.network_schema import policy_unasked
from cloche.api.opensandbox.registry import Asked
from cloche.api.opensandbox.replies import Conflict, NotOffered, json_reply, timestamp
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Limits, SandboxInfo, SandboxSpec, Snapshot
from cloche.network_policy import NetworkPolicy


def lifecycle_routes(desk: Desk) -> list[BaseRoute]:
    plane = Lifecycle(desk)
    return [
        desk.route("POST", "/sandboxes", plane.create),
        desk.route("GET", "/sandboxes", plane.list),
        desk.route("GET", "/sandboxes/{id}", plane.get),
        desk.route("DELETE", "/sandboxes/{id}", plane.delete),
        desk.route("POST", "/sandboxes/{id}/renew-expiration", plane.renew),
        desk.route("GET", "/sandboxes/{id}/endpoints/{port}", plane.endpoint),
    ]


class Lifecycle:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def create(self, request: Request) -> Response:
        owner = self._desk.owner(request)
        wanted = wire.wanted(await self._desk.body(request))
        if wanted.snapshot:
            await self._desk.engine.snapshots.get(wanted.snapshot, owner)  # no template of that name will do
        sandbox = await while_wanted(request, self._desk.engine, self._make(owner, wanted))
        return json_reply(replies.created(sandbox.info), 202)

    async def get(self, request: Request) -> Response:
        id, owner = request.path_params["id"], self._desk.owner(request)
        info = await self._desk.engine.describe(id, owner)
        if info.state == "ended":
            info = (await self._desk.sandbox(request)).info  # which says when and why
        return json_reply(replies.detail(info))

    async def delete(self, request: Request) -> Response:
        await self._desk.engine.kill(request.path_params["id"], self._desk.owner(request))
        return Response(status_code=204)

    async def list(self, request: Request) -> Response:
        owner, asked = self._desk.owner(request), wire.listing(request.query_params)
        found = [each for each in reversed(self._desk.engine.list(owner)) if _sandbox_matches(each, asked)]
        items = [replies.detail(each) for each in found]
        return json_reply(replies.page(items, page=asked.page, size=asked.size))

    async def renew(self, request: Request) -> Response:
        """To that moment, also an earlier one; at most to the end of the longest life that the host allows."""
        sandbox = await self._desk.sandbox(request)
        moment = wire.expiry(await self._desk.body(request))
        left = moment - time.time()
        if left <= 0:
            raise errors.InvalidRequest(f"expiresAt: {timestamp(moment)} is past; give a time to come")
        info = sandbox.renew(left)
        assert info.deadline_at is not None
        return json_reply({"expiresAt": timestamp(info.deadline_at)})

    async def endpoint(self, request: Request) -> Response:
        """The same with `use_server_proxy` and without: there is no other way in."""
        sandbox = await self._desk.sandbox(request)
        port = wire.port(request.path_params["port"])
        if port not in replies.TOKEN_HEADERS:
            raise NotOffered(
                f"port {port}: only execd's, {replies.EXECD_PORT}, and that of the network policy, "
                f"{replies.EGRESS_PORT}, can be reached by this API yet"
            )
        if "expires" in request.query_params:
            raise NotOffered("expires: this server signs no endpoints; the token in the answer's headers opens it")
        place = replies.place_of(self._desk.public_url, request.headers.get("host", ""))
        token = self._desk.known.token(sandbox.id, "execd" if port == replies.EXECD_PORT else "egress")
        return json_reply(replies.endpoint(sandbox.id, port, token, place))

    async def _make(self, owner: str, wanted: wire.Wanted) -> Sandbox:
        asked = Asked(
            image="" if wanted.snapshot else wanted.template,
            snapshot=wanted.snapshot,
            entrypoint=wanted.entrypoint,
            extensions=wanted.extensions,
            renew_seconds=wanted.renew_seconds,
        )
        spec = SandboxSpec(
            template=wanted.template,
            env=wanted.env,
            metadata=wanted.metadata,
            limits=await self._limits(owner, wanted),
            lifetime_seconds=wanted.timeout_seconds or self._desk.max_seconds,
            network=self._network(wanted),
            owner=owner,
            notes=asked.notes,
        )
        return await self._desk.engine.create(spec)

    def _network(self, wanted: wire.Wanted) -> NetworkPolicy | None:
        if wanted.network is not None or wanted.snapshot:
            return wanted.network  # None: the snapshot's own
        return policy_unasked(self._desk.engine.networks.bound)

    async def _limits(self, owner: str, wanted: wire.Wanted) -> Limits:
        return wire.limited(await self._desk.engine.limits_of(wanted.template, owner), wanted.limits)


def _sandbox_matches(info: SandboxInfo, asked: wire.Listing) -> bool:
    state = replies.STATES[info.state]
    return (not asked.states or state in asked.states) and asked.metadata.items() <= info.metadata.items()


# Of the lifecycle API: sandboxes are paused and resumed, and snapshots of them are made and removed.


def pause_routes(desk: Desk) -> list[BaseRoute]:
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
        found = [
            each for each in await self._engine.snapshots.list(owner, asked.sandbox) if _snapshot_matches(each, asked)
        ]
        items = [replies.snapshot(each.info) for each in found]
        return json_reply(replies.page(items, page=asked.page, size=asked.size))

    async def get_snapshot(self, request: Request) -> Response:
        owner = self._desk.owner(request)
        return json_reply(replies.snapshot((await self._engine.snapshots.get(request.path_params["ref"], owner)).info))

    async def remove_snapshot(self, request: Request) -> Response:
        await self._engine.snapshots.remove(request.path_params["ref"], self._desk.owner(request))
        return Response(status_code=204)


def _snapshot_matches(snapshot: Snapshot, asked: wire.SnapshotListing) -> bool:
    return asked.name in (None, snapshot.name) and (not asked.states or replies.READY in asked.states)
