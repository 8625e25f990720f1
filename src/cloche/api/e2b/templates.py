"""The templates that there are: those of the host, built with `cloche template build`, and those that clients built."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.auth import same, token_of
from cloche.api.e2b import templates_schema
from cloche.api.e2b import templates_schema as wire
from cloche.api.e2b.context import Desk
from cloche.api.e2b.network import policy_for
from cloche.api.e2b.network_schema import Egress
from cloche.api.e2b.replies import PREFIX, NotOffered, json_reply
from cloche.api.e2b.sandboxes_schema import template_detail, template_listed, whole_number
from cloche.api.http import body_chunks
from cloche.config import Config
from cloche.engine.sandboxes.pool import default_limits
from cloche.model import Limits, Template
from cloche.network_policy import NetworkPolicy
from cloche.store.builds import Build, BuiltTemplate


def template_routes(desk: Desk, config: Config) -> list[BaseRoute]:
    plane = ControlTemplates(desk, config)
    return [
        desk.route("GET", "/templates", plane.list_all),
        desk.route("GET", "/v2/templates", plane.list_all),
        desk.route("GET", "/default-templates", plane.list_all),
        desk.route("GET", "/templates/aliases/{name:path}", plane.exists),
        desk.route("GET", "/templates/{name:path}/tags", plane.tags),
        desk.route("GET", "/templates/{name:path}", plane.get),
        desk.route("DELETE", "/templates/{name:path}", plane.delete),
    ]


class ControlTemplates:
    def __init__(self, desk: Desk, config: Config):
        self._desk = desk
        self._config = config

    async def list_all(self, request: Request) -> Response:
        owner, builds = self._desk.owner(request), self._desk.engine.builds
        by_name = groupby(await self._desk.engine.templates(), lambda each: each.name)
        found = [list(versions) for _, versions in by_name]
        told = [template_listed(each, self._names(each[0]), self._limits(each[0])) for each in found]
        own = [templates_schema.listed(each, await builds.builds(each)) for each in await builds.templates(owner)]
        return json_reply([*own, *told])

    async def get(self, request: Request) -> Response:
        if (built := await self._built(request)) is not None:
            return json_reply(templates_schema.detail(built, await self._desk.engine.builds.builds(built)))
        template = await self._named(request)
        versions = [each for each in await self._desk.engine.templates() if each.name == template.name]
        return json_reply(template_detail(versions or [template], self._names(template), self._limits(template)))

    async def exists(self, request: Request) -> Response:
        if (built := await self._built(request)) is not None:
            await self._check_tag(built, request.path_params["name"].partition(":")[2])
            return json_reply({"templateID": built.id, "public": False})
        template = await self._named(request)
        return json_reply({"templateID": template.ref, "public": True})

    async def tags(self, request: Request) -> Response:
        if (built := await self._built(request)) is not None:
            return json_reply([templates_schema.tag(each) for each in await self._desk.engine.builds.tags(built)])
        template = await self._named(request)
        raise NotOffered(f"{template.name} is a template of the host and has no tags: {template.ref} is one for good")

    async def delete(self, request: Request) -> Response:
        """Clients delete snapshots as if they were templates."""
        if (built := await self._built(request)) is not None:
            await self._desk.engine.builds.remove(built)
            return Response(status_code=204)
        owner, name = self._desk.owner(request), request.path_params["name"]
        if await self._desk.engine.snapshots.find(name, owner) is not None:
            await self._desk.engine.snapshots.remove(name, owner)
            return Response(status_code=204)
        template = await self._named(request)
        raise NotOffered(f"delete templates with `cloche template rm {template.ref}` on the server's machine")

    async def _built(self, request: Request) -> BuiltTemplate | None:
        """The caller's own that the path names."""
        owner = self._desk.owner(request)
        try:
            return await self._desk.engine.builds.template(request.path_params["name"], owner)
        except errors.TemplateNotFound:
            return None

    async def _check_tag(self, built: BuiltTemplate, tag: str) -> None:
        """Raises TemplateNotFound for a tag that it does not have."""
        if tag and not await self._desk.engine.builds.has_tag(built, tag):
            raise errors.TemplateNotFound(f"the template {built.name!r} has no tag {tag[:200]!r}")

    async def _named(self, request: Request) -> Template:
        self._desk.owner(request)
        return await self._desk.engine.template(request.path_params["name"])

    def _names(self, template: Template) -> Sequence[str]:
        """Its own name, and the aliases that stand for it and are no patterns."""
        return [template.name, *_plain(self._config.aliases, template.name)]

    def _limits(self, template: Template) -> Limits:
        return default_limits(self._config, template)


def _plain(aliases: Mapping[str, str], name: str) -> list[str]:
    return [alias for alias, target in aliases.items() if target == name and not set(alias) & set("*?[")]


# Templates that clients build: asked for, given files, started, watched, tagged and deleted.

UPLOAD_SECONDS = 3600  # how long an address for an upload can be used


def build_routes(desk: Desk, config: Config, secret: bytes) -> list[BaseRoute]:
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
