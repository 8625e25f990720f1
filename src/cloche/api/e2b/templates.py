"""Templates: the host's, built with `cloche template build`, and those that clients built."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.auth import derive_sandbox_token, secrets_match
from cloche.api.dialect import NotSupported, json_reply
from cloche.api.e2b import templates_schema
from cloche.api.e2b import templates_schema as wire
from cloche.api.e2b.context import E2bContext
from cloche.api.e2b.network import policy_for_new_sandbox
from cloche.api.e2b.network_schema import E2bEgressRequest
from cloche.api.e2b.port_target import E2B_PREFIX
from cloche.api.e2b.sandboxes_schema import encode_host_template, encode_host_template_detail, parse_whole_number
from cloche.api.http import read_body_chunks
from cloche.config import Config
from cloche.engine.sandboxes.pool import default_limits
from cloche.model import Limits, Template
from cloche.network_policy import NetworkPolicy
from cloche.store.builds import BuiltTemplate, TemplateBuild


def template_routes(api: E2bContext, config: Config) -> list[BaseRoute]:
    plane = ControlTemplates(api, config)
    return [
        api.route("GET", "/templates", plane.list_all),
        api.route("GET", "/v2/templates", plane.list_all),
        api.route("GET", "/default-templates", plane.list_all),
        api.route("GET", "/templates/aliases/{name:path}", plane.exists),
        api.route("GET", "/templates/{name:path}/tags", plane.tags),
        api.route("GET", "/templates/{name:path}", plane.get),
        api.route("DELETE", "/templates/{name:path}", plane.delete),
    ]


class ControlTemplates:
    def __init__(self, api: E2bContext, config: Config):
        self._api = api
        self._config = config

    async def list_all(self, request: Request) -> Response:
        owner, builds = self._api.owner(request), self._api.engine.builds
        by_name = groupby(await self._api.engine.templates(), lambda each: each.name)
        found = [list(versions) for _, versions in by_name]
        told = [
            encode_host_template(each, self._names_of_template(each[0]), self._limits_of_template(each[0]))
            for each in found
        ]
        own = [
            templates_schema.encode_listed_template(each, await builds.builds(each))
            for each in await builds.templates(owner)
        ]
        return json_reply([*own, *told])

    async def get(self, request: Request) -> Response:
        if (built := await self._find_built_template(request)) is not None:
            return json_reply(
                templates_schema.encode_template_detail(built, await self._api.engine.builds.builds(built))
            )
        template = await self._find_host_template(request)
        versions = [each for each in await self._api.engine.templates() if each.name == template.name]
        return json_reply(
            encode_host_template_detail(
                versions or [template], self._names_of_template(template), self._limits_of_template(template)
            )
        )

    async def exists(self, request: Request) -> Response:
        if (built := await self._find_built_template(request)) is not None:
            await self._check_tag_exists(built, request.path_params["name"].partition(":")[2])
            return json_reply({"templateID": built.id, "public": False})
        template = await self._find_host_template(request)
        return json_reply({"templateID": template.ref, "public": True})

    async def tags(self, request: Request) -> Response:
        if (built := await self._find_built_template(request)) is not None:
            return json_reply([templates_schema.encode_tag(each) for each in await self._api.engine.builds.tags(built)])
        template = await self._find_host_template(request)
        raise NotSupported(f"{template.name} is a template of the host and has no tags: {template.ref} is one for good")

    async def delete(self, request: Request) -> Response:
        """Deletes a template or a snapshot: clients use the same route for both."""
        if (built := await self._find_built_template(request)) is not None:
            await self._api.engine.builds.remove(built)
            return Response(status_code=204)
        owner, name = self._api.owner(request), request.path_params["name"]
        if await self._api.engine.snapshots.find(name, owner) is not None:
            await self._api.engine.snapshots.remove(name, owner)
            return Response(status_code=204)
        template = await self._find_host_template(request)
        raise NotSupported(f"delete templates with `cloche template rm {template.ref}` on the server's machine")

    async def _find_built_template(self, request: Request) -> BuiltTemplate | None:
        """The caller's own template that the path names, if any."""
        owner = self._api.owner(request)
        try:
            return await self._api.engine.builds.template(request.path_params["name"], owner)
        except errors.TemplateNotFound:
            return None

    async def _check_tag_exists(self, built: BuiltTemplate, tag: str) -> None:
        """Raises TemplateNotFound for an unknown tag."""
        if tag and not await self._api.engine.builds.has_tag(built, tag):
            raise errors.TemplateNotFound(f"the template {built.name!r} has no tag {tag[:200]!r}")

    async def _find_host_template(self, request: Request) -> Template:
        self._api.owner(request)
        return await self._api.engine.template(request.path_params["name"])

    def _names_of_template(self, template: Template) -> Sequence[str]:
        """The template's own name, and its aliases that are not patterns."""
        return [template.name, *_plain_aliases_of(self._config.aliases, template.name)]

    def _limits_of_template(self, template: Template) -> Limits:
        return default_limits(self._config, template)


def _plain_aliases_of(aliases: Mapping[str, str], name: str) -> list[str]:
    return [alias for alias, target in aliases.items() if target == name and not set(alias) & set("*?[")]


# Template builds by clients: requested, given files, started, watched, tagged and deleted.

UPLOAD_SECONDS = 3600  # how long an address for an upload can be used


def build_routes(api: E2bContext, config: Config, secret: bytes) -> list[BaseRoute]:
    plane = ControlBuilds(api, config, secret)
    return [
        api.route("POST", "/v3/templates", plane.request),
        api.route("POST", "/templates/tags", plane.assign_tags),
        api.route("DELETE", "/templates/tags", plane.remove_tags),
        api.route("PUT", "/template-files/{id}/{hash}", plane.upload),
        api.route("GET", "/templates/{id}/files/{hash}", plane.file_link),
        api.route("POST", "/v2/templates/{id}/builds/{build}", plane.start),
        api.route("GET", "/templates/{id}/builds/{build}/status", plane.status),
        api.route("GET", "/templates/{id}/builds/{build}/logs", plane.logs),
    ]


class ControlBuilds:
    def __init__(self, api: E2bContext, config: Config, secret: bytes):
        self._api = api
        self._config = config
        self._secret = secret
        self._builds = api.engine.builds

    async def request(self, request: Request) -> Response:
        owner = self._api.owner(request)
        message = await self._api.decoded(request, wire.decode_build_request)
        limits = message.limits(self._config.limits.default)
        return json_reply(
            wire.encode_requested_build(*await self._builds.request(message.name, message.tags, owner, limits)), 202
        )

    async def file_link(self, request: Request) -> Response:
        template, digest = await self._template_from_path(request), wire.check_files_hash(request.path_params["hash"])
        present = await self._builds.files.has(template.owner, digest)
        return json_reply({"present": present, "url": self._upload_url(request, template.id, digest)}, 201)

    async def upload(self, request: Request) -> Response:
        """Stores uploaded files. The signed URL authorizes it: clients send no key."""
        id, digest = request.path_params["id"], wire.check_files_hash(request.path_params["hash"])
        expires = parse_whole_number("expires", request.query_params.get("expires"), 0, 1 << 40) or 0
        if not secrets_match(request.query_params.get("token"), self._upload_token(id, digest, expires)):
            raise errors.Unauthenticated("this address for an upload is none of this server's")
        if time.time() > expires:
            raise errors.Forbidden("this address for an upload is too old: ask for a new one")
        most, owner = self._config.server.upload_bytes, await self._builds.owner_of(id)
        await self._builds.files.put(owner, digest, read_body_chunks(request, most), most)
        return Response(status_code=200)

    async def start(self, request: Request) -> Response:
        build = await self._build_from_path(request)
        plan = await self._api.decoded(request, wire.decode_build_plan)
        network = await self._default_network_policy(plan.base, build.owner)
        await self._builds.start(build, msgspec.structs.replace(plan, network=network))
        return Response(status_code=202)

    async def status(self, request: Request) -> Response:
        build, page = await self._build_from_path(request), wire.decode_log_query(request.query_params)
        return json_reply(wire.encode_build_status(build, self._builds.logs(build), page))

    async def logs(self, request: Request) -> Response:
        build = await self._build_from_path(request)
        return json_reply({"logs": [wire.encode_log_entry(each) for each in self._builds.logs(build)[-1000:]]})

    async def assign_tags(self, request: Request) -> Response:
        owner = self._api.owner(request)
        message = await self._api.decoded(request, wire.decode_tag_request)
        build = await self._builds.assign(message.target, message.tags, owner)
        return json_reply({"tags": [tag.rpartition(":")[2] for tag in message.tags], "buildID": build}, 201)

    async def remove_tags(self, request: Request) -> Response:
        owner = self._api.owner(request)
        message = await self._api.decoded(request, wire.decode_untag_request)
        await self._builds.unassign(message.name, message.tags, owner)
        return Response(status_code=204)

    async def _template_from_path(self, request: Request) -> BuiltTemplate:
        return await self._builds.template(request.path_params["id"], self._api.owner(request))

    async def _build_from_path(self, request: Request) -> TemplateBuild:
        return await self._builds.build(await self._template_from_path(request), request.path_params["build"])

    async def _default_network_policy(self, base: str, owner: str) -> NetworkPolicy | None:
        """The network policy of that template's sandboxes when their clients request none."""
        try:
            template = await self._api.engine.template(base, owner)
        except errors.TemplateNotFound:  # the build will say so
            return None
        return policy_for_new_sandbox(E2bEgressRequest(), template, self._api.engine.networks)

    def _upload_url(self, request: Request, id: str, digest: str) -> str:
        """The upload URL, at the address by which the client reached this server, as far as known."""
        expires = int(time.time()) + UPLOAD_SECONDS
        base = self._config.server.public_url.rstrip("/") or f"{request.url.scheme}://{request.url.netloc}"
        token = self._upload_token(id, digest, expires)
        return f"{base}{E2B_PREFIX}/template-files/{id}/{digest}?expires={expires}&token={token}"

    def _upload_token(self, id: str, digest: str, expires: int) -> str:
        return derive_sandbox_token(self._secret, "e2b:template-files", f"{id}:{digest}:{expires}")
