"""The lifecycle API: create, find, list, renew and end sandboxes."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import Conflict, NotSupported, format_timestamp, json_reply
from cloche.api.http import create_unless_disconnected
from cloche.api.opensandbox import lifecycle_schema as wire
from cloche.api.opensandbox.context import OpenSandboxContext
from cloche.api.opensandbox.network_schema import default_policy_within
from cloche.api.opensandbox.registry import ENVIRONMENT_FILE, ENVIRONMENT_FILE_VARIABLE, StoredCreateRequest, TokenPlane
from cloche.api.opensandbox.volumes import link_volumes, provide_volumes
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Limits, SandboxInfo, SandboxSpec, Snapshot
from cloche.network_policy import NetworkPolicy


def lifecycle_routes(api: OpenSandboxContext) -> list[BaseRoute]:
    plane = Lifecycle(api)
    return [
        api.route("POST", "/sandboxes", plane.create),
        api.route("GET", "/sandboxes", plane.list),
        api.route("GET", "/sandboxes/{id}", plane.get),
        api.route("DELETE", "/sandboxes/{id}", plane.delete),
        api.route("PATCH", "/sandboxes/{id}/metadata", plane.change_metadata),
        api.route("POST", "/sandboxes/{id}/renew-expiration", plane.renew),
        api.route("GET", "/sandboxes/{id}/endpoints/{port}", plane.show_endpoint),
    ]


class Lifecycle:
    def __init__(self, api: OpenSandboxContext):
        self._api = api

    async def create(self, request: Request) -> Response:
        owner = self._api.owner(request)
        message = await self._api.decoded(request, wire.decode_create_request)
        if message.snapshot:
            await self._api.engine.snapshots.get(message.snapshot, owner)  # no template of that name will do
        sandbox = await create_unless_disconnected(request, self._api.engine, self._create_sandbox(owner, message))
        return json_reply(wire.encode_created_sandbox(sandbox.info), 202)

    async def get(self, request: Request) -> Response:
        id, owner = request.path_params["id"], self._api.owner(request)
        info = await self._api.engine.describe(id, owner)
        if info.state == "ended":
            info = (await self._api.sandbox(request)).info  # which says when and why
        return json_reply(wire.encode_sandbox_detail(info))

    async def delete(self, request: Request) -> Response:
        await self._api.engine.kill(request.path_params["id"], self._api.owner(request))
        return Response(status_code=204)

    async def list(self, request: Request) -> Response:
        owner, asked = self._api.owner(request), wire.decode_list_query(request.query_params)
        found = [each for each in reversed(self._api.engine.list(owner)) if _sandbox_matches_query(each, asked)]
        items = [wire.encode_sandbox_detail(each) for each in found]
        return json_reply(wire.encode_page(items, page=asked.page, size=asked.size))

    async def change_metadata(self, request: Request) -> Response:
        """A JSON merge patch: null removes a pair."""
        sandbox = await self._api.sandbox(request)
        sandbox.change_metadata(await self._api.decoded(request, wire.decode_metadata_patch))
        return json_reply(wire.encode_sandbox_detail(sandbox.info))

    async def renew(self, request: Request) -> Response:
        """Moves the deadline to that time, also an earlier one; at most to the end of the host's longest lifetime."""
        sandbox = await self._api.sandbox(request)
        moment = await self._api.decoded(request, wire.decode_expiration)
        left = moment - time.time()
        if left <= 0:
            raise errors.InvalidRequest(f"expiresAt: {format_timestamp(moment)} is past; give a time to come")
        if not sandbox.has_deadline and sandbox.over_seconds >= 0:
            raise Conflict(f"sandbox {sandbox.id} never expires, and has run for longer than a lifetime can be here")
        info = sandbox.renew(left)
        assert info.deadline_at is not None
        return json_reply({"expiresAt": format_timestamp(info.deadline_at)})

    async def show_endpoint(self, request: Request) -> Response:
        """The same with and without `use_server_proxy`: there is no other access."""
        sandbox = await self._api.sandbox(request)
        port = wire.parse_port_number(request.path_params["port"])
        place = wire.public_address_of(self._api.public_url, request.headers.get("host", ""))
        token = self._token_for_port(sandbox.id, port, request.query_params.get("expires"))
        return json_reply(wire.encode_endpoint(sandbox.id, port, token, place))

    def _token_for_port(self, id: str, port: int, expires: str | None) -> str:
        if expires is not None:
            if port in wire.TOKEN_HEADERS_BY_PORT:
                raise NotSupported("expires: the endpoints of execd and of the network policy are not signed")
            return self._api.states.signed_token(id, port, wire.parse_expires(expires))
        plane: dict[int, TokenPlane] = {wire.EXECD_PORT: "execd", wire.EGRESS_PORT: "egress"}
        return self._api.states.token(id, plane.get(port, "port"))

    async def _create_sandbox(self, owner: str, request: wire.OpenSandboxCreateRequest) -> Sandbox:
        message = StoredCreateRequest(
            image="" if request.snapshot else request.template,
            snapshot=request.snapshot,
            entrypoint=request.entrypoint,
            extensions=request.extensions,
            renew_seconds=request.renew_seconds,
        )
        spec = SandboxSpec(
            template=request.template,
            env={ENVIRONMENT_FILE_VARIABLE: ENVIRONMENT_FILE, **request.env},
            metadata=request.metadata,
            limits=await self._limits_for_request(owner, request),
            lifetime_seconds=request.timeout_seconds,
            network=self._network_for_request(request),
            owner=owner,
            notes=message.notes,
            volumes=await provide_volumes(self._api.engine.volumes, request.volumes, owner),
        )
        sandbox = await self._api.engine.create(spec)
        try:
            await link_volumes(sandbox, request.volumes)
            if not wire.is_idle_entrypoint(request.entrypoint):
                await sandbox.commands.launch(request.entrypoint)
        except BaseException:
            await sandbox.kill()
            raise
        return sandbox

    def _network_for_request(self, request: wire.OpenSandboxCreateRequest) -> NetworkPolicy | None:
        if request.network is not None or request.snapshot:
            return request.network  # None: the snapshot's own
        return default_policy_within(self._api.engine.networks.bound)

    async def _limits_for_request(self, owner: str, request: wire.OpenSandboxCreateRequest) -> Limits:
        return wire.apply_requested_limits(await self._api.engine.limits_of(request.template, owner), request.limits)


def _sandbox_matches_query(info: SandboxInfo, query: wire.OpenSandboxListQuery) -> bool:
    state = wire.SANDBOX_STATES[info.state]
    return (not query.states or state in query.states) and query.metadata.items() <= info.metadata.items()


# The lifecycle API's pause, resume and snapshots.


def pause_and_snapshot_routes(api: OpenSandboxContext) -> list[BaseRoute]:
    plane = PausesAndSnapshots(api)
    return [
        api.route("POST", "/sandboxes/{id}/pause", plane.pause),
        api.route("POST", "/sandboxes/{id}/resume", plane.resume),
        api.route("POST", "/sandboxes/{id}/snapshots", plane.make_snapshot),
        api.route("GET", "/snapshots", plane.list_snapshots),
        api.route("GET", "/snapshots/{ref:path}", plane.get_snapshot),
        api.route("DELETE", "/snapshots/{ref:path}", plane.remove_snapshot),
    ]


class PausesAndSnapshots:
    """Every operation has finished when it responds: clients never see Pausing, Resuming or Creating."""

    def __init__(self, api: OpenSandboxContext):
        self._api = api
        self._engine = api.engine

    async def pause(self, request: Request) -> Response:
        """Pauses with memory, as `docker pause`."""
        await self._engine.pause(request.path_params["id"], self._api.owner(request))
        return Response(status_code=202)

    async def resume(self, request: Request) -> Response:
        id, owner = request.path_params["id"], self._api.owner(request)
        if (await self._engine.describe(id, owner)).state == "running":
            raise Conflict(f"sandbox {id} is not paused: it runs")
        await self._engine.resume(id, owner)
        return Response(status_code=202)

    async def make_snapshot(self, request: Request) -> Response:
        id, owner = request.path_params["id"], self._api.owner(request)
        name = (await self._api.json_body(request, wire.OpenSandboxSnapshotBody)).name
        info = (await self._engine.snapshot(id, owner, name=name or None)).info
        answer = json_reply(wire.encode_snapshot(info), 202)
        answer.headers["location"] = f"{wire.OPENSANDBOX_PREFIX}/snapshots/{info.id}"
        return answer

    async def list_snapshots(self, request: Request) -> Response:
        owner, asked = self._api.owner(request), wire.decode_snapshot_query(request.query_params)
        found = [
            each
            for each in await self._engine.snapshots.list(owner, asked.sandbox)
            if _snapshot_matches_query(each, asked)
        ]
        items = [wire.encode_snapshot(each.info) for each in found]
        return json_reply(wire.encode_page(items, page=asked.page, size=asked.size))

    async def get_snapshot(self, request: Request) -> Response:
        owner = self._api.owner(request)
        return json_reply(
            wire.encode_snapshot((await self._engine.snapshots.get(request.path_params["ref"], owner)).info)
        )

    async def remove_snapshot(self, request: Request) -> Response:
        await self._engine.snapshots.remove(request.path_params["ref"], self._api.owner(request))
        return Response(status_code=204)


def _snapshot_matches_query(snapshot: Snapshot, query: wire.OpenSandboxSnapshotQuery) -> bool:
    return query.name in (None, snapshot.name) and (not query.states or wire.SNAPSHOT_READY in query.states)
