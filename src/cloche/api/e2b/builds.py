"""Templates that clients build: asked for, given files, started, watched, tagged and deleted."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.auth import same, token_of
from cloche.api.e2b import builds_wire as wire
from cloche.api.e2b.control_network import policy_for
from cloche.api.e2b.control_wire import whole_number
from cloche.api.e2b.desk import Desk
from cloche.api.e2b.network_wire import Egress
from cloche.api.e2b.replies import json_reply
from cloche.api.e2b.routing import PREFIX
from cloche.api.http import body_chunks
from cloche.config import Config
from cloche.network_policy import NetworkPolicy
from cloche.store.builds import Build, BuiltTemplate

UPLOAD_SECONDS = 3600  # how long an address for an upload can be used


def routes(desk: Desk, config: Config, secret: bytes) -> list[BaseRoute]:
    plane = ControlBuilds(desk, config, secret)
    return [
        desk.route("POST", "/v3/templates", plane.request),
        desk.route("POST", "/templates/tags", plane.assign_tags),
        desk.route("DELETE", "/templates/tags", plane.remove_tags),
        desk.route("PUT", "/template-files/{id}/{hash}", plane.upload),
        desk.route("GET", "/templates/{id}/files/{hash}", plane.file_link),
        desk.route("POST", "/v2/templates/{id}/builds/{build}", plane.start),
        desk.route("GET", "/templates/{id}/builds/{build}/status", plane.status),
        desk.route("GET", "/templates/{id}/builds/{build}/logs", plane.logs),
    ]


class ControlBuilds:
    def __init__(self, desk: Desk, config: Config, secret: bytes):
        self._desk = desk
        self._config = config
        self._secret = secret
        self._builds = desk.engine.builds

    async def request(self, request: Request) -> Response:
        owner = self._desk.owner(request)
        asked = wire.wanted(await self._desk.body(request))
        limits = asked.limits(self._config.limits.default)
        return json_reply(wire.requested(*await self._builds.request(asked.name, asked.tags, owner, limits)), 202)

    async def file_link(self, request: Request) -> Response:
        template, digest = await self._template(request), wire.files_hash(request.path_params["hash"])
        present = await self._builds.files.has(template.owner, digest)
        return json_reply({"present": present, "url": self._upload_url(request, template.id, digest)}, 201)

    async def upload(self, request: Request) -> Response:
        """By whoever was given the address: clients send no key with it."""
        id, digest = request.path_params["id"], wire.files_hash(request.path_params["hash"])
        expires = whole_number("expires", request.query_params.get("expires"), 0, 1 << 40) or 0
        if not same(request.query_params.get("token"), self._token(id, digest, expires)):
            raise errors.Unauthenticated("this address for an upload is none of this server's")
        if time.time() > expires:
            raise errors.Forbidden("this address for an upload is too old: ask for a new one")
        most, owner = self._config.server.upload_bytes, await self._builds.owner_of(id)
        await self._builds.files.put(owner, digest, body_chunks(request, most), most)
        return Response(status_code=200)

    async def start(self, request: Request) -> Response:
        build = await self._build(request)
        plan = wire.plan(await self._desk.body(request))
        network = await self._network(plan.base, build.owner)
        await self._builds.start(build, msgspec.structs.replace(plan, network=network))
        return Response(status_code=202)

    async def status(self, request: Request) -> Response:
        build, page = await self._build(request), wire.page(request.query_params)
        return json_reply(wire.status(build, self._builds.logs(build), page))

    async def logs(self, request: Request) -> Response:
        build = await self._build(request)
        return json_reply({"logs": [wire.entry(each) for each in self._builds.logs(build)[-1000:]]})

    async def assign_tags(self, request: Request) -> Response:
        owner = self._desk.owner(request)
        asked = wire.tagging(await self._desk.body(request))
        build = await self._builds.assign(asked.target, asked.tags, owner)
        return json_reply({"tags": [tag.rpartition(":")[2] for tag in asked.tags], "buildID": build}, 201)

    async def remove_tags(self, request: Request) -> Response:
        owner = self._desk.owner(request)
        asked = wire.untagging(await self._desk.body(request))
        await self._builds.unassign(asked.name, asked.tags, owner)
        return Response(status_code=204)

    async def _template(self, request: Request) -> BuiltTemplate:
        return await self._builds.template(request.path_params["id"], self._desk.owner(request))

    async def _build(self, request: Request) -> Build:
        return await self._builds.build(await self._template(request), request.path_params["build"])

    async def _network(self, base: str, owner: str) -> NetworkPolicy | None:
        """What sandboxes of that template have whose clients ask for nothing."""
        try:
            template = await self._desk.engine.template(base, owner)
        except errors.TemplateNotFound:  # the build will say so
            return None
        return policy_for(Egress(), template, self._desk.engine.networks)

    def _upload_url(self, request: Request, id: str, digest: str) -> str:
        """Where the client has reached us, as far as we can tell."""
        expires = int(time.time()) + UPLOAD_SECONDS
        base = self._config.server.public_url.rstrip("/") or f"{request.url.scheme}://{request.url.netloc}"
        token = self._token(id, digest, expires)
        return f"{base}{PREFIX}/template-files/{id}/{digest}?expires={expires}&token={token}"

    def _token(self, id: str, digest: str, expires: int) -> str:
        return token_of(self._secret, "e2b:template-files", f"{id}:{digest}:{expires}")
