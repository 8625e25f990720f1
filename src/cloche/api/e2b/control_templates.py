"""The templates that there are: those of the host, built with `cloche template build`, and those that clients built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.e2b import builds_wire
from cloche.api.e2b.control_replies import template_detail, template_listed
from cloche.api.e2b.desk import Desk
from cloche.api.e2b.replies import NotOffered, json_reply
from cloche.config import Config
from cloche.engine.sandboxes.pool import default_limits
from cloche.model import Limits, Template
from cloche.store.builds import BuiltTemplate


def routes(desk: Desk, config: Config) -> list[BaseRoute]:
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
        own = [builds_wire.listed(each, await builds.builds(each)) for each in await builds.templates(owner)]
        return json_reply([*own, *told])

    async def get(self, request: Request) -> Response:
        if (built := await self._built(request)) is not None:
            return json_reply(builds_wire.detail(built, await self._desk.engine.builds.builds(built)))
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
            return json_reply([builds_wire.tag(each) for each in await self._desk.engine.builds.tags(built)])
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
