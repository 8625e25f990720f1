"""The templates that there are. They are built with `cloche template build`, not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.e2b.control_replies import template_detail, template_listed
from cloche.api.e2b.desk import Desk
from cloche.api.e2b.replies import NotOffered, json_reply
from cloche.config import Config
from cloche.engine.engine import default_limits
from cloche.model import Limits, Template


def routes(desk: Desk, config: Config) -> list[BaseRoute]:
    plane = ControlTemplates(desk, config)
    return [
        desk.route("GET", "/templates", plane.list_all),
        desk.route("GET", "/v2/templates", plane.list_all),
        desk.route("GET", "/default-templates", plane.list_all),
        desk.route("GET", "/templates/aliases/{name:path}", plane.exists),
        desk.route("GET", "/templates/{name:path}/tags", plane.tags),
        desk.route("GET", "/templates/{name}", plane.get),
        desk.route("DELETE", "/templates/{name:path}", plane.delete),
    ]


class ControlTemplates:
    def __init__(self, desk: Desk, config: Config):
        self._desk = desk
        self._config = config

    async def list_all(self, request: Request) -> Response:
        self._desk.owner(request)
        by_name = groupby(await self._desk.engine.templates(), lambda each: each.name)
        found = [list(versions) for _, versions in by_name]
        return json_reply([template_listed(each, self._names(each[0]), self._limits(each[0])) for each in found])

    async def get(self, request: Request) -> Response:
        template = await self._named(request)
        versions = [each for each in await self._desk.engine.templates() if each.name == template.name]
        return json_reply(template_detail(versions or [template], self._names(template), self._limits(template)))

    async def exists(self, request: Request) -> Response:
        template = await self._named(request)
        return json_reply({"templateID": template.ref, "public": True})

    async def tags(self, request: Request) -> Response:
        await self._named(request)
        raise NotOffered("templates have no tags on this server: NAME@VERSION names a version for good")

    async def delete(self, request: Request) -> Response:
        template = await self._named(request)
        raise NotOffered(f"delete templates with `cloche template rm {template.ref}` on the server's machine")

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
