"""The pages of templates: their versions, what is in them, what differs, how they were built."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cloche import errors
from cloche.api.ui import words
from cloche.api.ui.asking import body_of, is_partial
from cloche.api.ui.house import House, Page, Visitor
from cloche.api.ui.template_builds import HostBuilds
from cloche.model import Struct, Template
from cloche.store.template_builds import Build, BuiltTemplate, LogEntry, Tag
from cloche.templates import Catalogue, difference, recipe

T = TypeVar("T")

MAX_REF = 200
BUILDS_SHOWN = 20  # of one template


class Ref(Struct, forbid_unknown_fields=True):
    ref: str


class Text(Struct, forbid_unknown_fields=True):
    recipe: str


class Version(NamedTuple):
    template: Template
    meant: bool  # by the name alone
    pinned: bool
    in_use: int


class ByStep(NamedTuple):
    """A template that was built by steps, by a client of E2B's SDK."""

    template: BuiltTemplate
    builds: Sequence[Build]
    tags: Sequence[Tag]

    def tags_of(self, build: Build) -> list[str]:
        return [each.tag for each in self.tags if each.build == build.id]


class Templates:
    def __init__(self, house: House):
        self._house = house
        self._engine = house.engine
        self._catalogue = Catalogue(house.config.data_dir, house.config.aliases)
        self._host_builds = HostBuilds(self._catalogue)

    # -- what is shown

    async def list(self, request: Request, visitor: Visitor) -> Response:
        by_name: dict[str, list[Version]] = {}
        for version in await self._versions(visitor):
            by_name.setdefault(version.template.name, []).append(version)
        by_step = [await self._by_step(each) for each in await self._engine.builds.templates(visitor.sees)]
        going_on = self._host_builds.list() if visitor.is_admin else ()
        return self._render(request, visitor, "templates.html", by_name=by_name, by_step=by_step, host_builds=going_on)

    async def show(self, request: Request, visitor: Visitor) -> Response:
        meant = await self._resolved(request.query_params.get("ref", ""))
        versions = [each for each in await self._versions(visitor) if each.template.name == meant.name]
        version = next(each for each in versions if each.template.version == meant.version)
        text = await _in_thread(_recipe_text, meant)
        return self._render(request, visitor, "template.html", version=version, versions=versions, recipe=text)

    async def compare(self, request: Request, visitor: Visitor) -> Response:
        before = await self._resolved(request.query_params.get("before", ""))
        after = await self._resolved(request.query_params.get("after", ""))
        found = await _in_thread(difference, before, after)
        versions = [each.template for each in await self._versions(visitor)]
        return self._render(request, visitor, "template_diff.html", found=found, versions=versions)

    async def show_build(self, request: Request, visitor: Visitor) -> Response:
        """Of a template that was built by steps."""
        template, build = await self._build_meant(request, visitor)
        lines: Sequence[LogEntry] = self._engine.builds.logs(build)
        name = "template_log.html" if is_partial(request) else "template_build.html"
        return self._render(request, visitor, name, template=template, build=build, lines=lines)

    async def show_host_build(self, request: Request, visitor: Visitor) -> Response:
        build = self._host_builds.get(request.path_params["id"])
        name = "template_host_log.html" if is_partial(request) else "template_host_build.html"
        return self._render(request, visitor, name, build=build, lines=[*build.lines])

    def _render(self, request: Request, visitor: Visitor, name: str, **values: Any) -> Response:
        return self._house.render(request, visitor, name, words=words, now=time.time(), **values)

    async def _versions(self, visitor: Visitor) -> Sequence[Version]:
        in_use = Counter(each.template for each in self._engine.known(visitor.sees))
        return await _in_thread(_versions, self._catalogue, in_use)

    async def _resolved(self, ref: str) -> Template:
        return await _in_thread(self._catalogue.resolve, ref[:MAX_REF])

    async def _by_step(self, template: BuiltTemplate) -> ByStep:
        builds = await self._engine.builds.builds(template)
        return ByStep(template, builds[:BUILDS_SHOWN], await self._engine.builds.tags(template))

    async def _built(self, id: str, visitor: Visitor) -> BuiltTemplate:
        """Raises TemplateNotFound, also for somebody else's."""
        owner = visitor.sees or await self._engine.builds.owner_of(id)
        return await self._engine.builds.template(id, owner)

    async def _build_meant(self, request: Request, visitor: Visitor) -> tuple[BuiltTemplate, Build]:
        template = await self._built(request.path_params["template"], visitor)
        return template, await self._engine.builds.build(template, request.path_params["id"])

    # -- what is done

    async def pin(self, request: Request, visitor: Visitor) -> Response:
        template = await _in_thread(self._catalogue.pin, (await body_of(request, Ref)).ref)
        return JSONResponse({"said": f"{template.name} means {template.ref} from now on"})

    async def unpin(self, request: Request, visitor: Visitor) -> Response:
        newest = await _in_thread(self._catalogue.unpin, (await body_of(request, Ref)).ref)
        return JSONResponse({"said": f"The newest version is meant again: {newest.ref if newest else 'none'}"})

    async def remove(self, request: Request, visitor: Visitor) -> Response:
        template = await self._resolved((await body_of(request, Ref)).ref)
        in_use = sum(each.template == template.ref for each in self._engine.known(None))
        if in_use:
            raise errors.InvalidRequest(f"{in_use} sandboxes use {template.ref}: end them first")
        await _in_thread(self._catalogue.remove, f"{template.name}@{template.version}")
        return JSONResponse({"said": f"{template.ref} was removed"})

    async def remove_built(self, request: Request, visitor: Visitor) -> Response:
        template = await self._built(request.path_params["template"], visitor)
        await self._engine.builds.remove(template)
        return JSONResponse({"said": f"{template.name} was removed, with all its builds"})

    async def build(self, request: Request, visitor: Visitor) -> Response:
        parsed = recipe.parse((await body_of(request, Text)).recipe)
        return JSONResponse({"id": self._host_builds.start(parsed).id})


def _versions(catalogue: Catalogue, in_use: Mapping[str, int]) -> Sequence[Version]:
    found: list[Version] = []
    seen: set[str] = set()
    for template in catalogue.list():
        pin = catalogue.pinned(template.name)
        meant = pin == template.version if pin else template.name not in seen
        seen.add(template.name)
        found.append(Version(template, meant, pin == template.version, in_use.get(template.ref, 0)))
    return found


def _recipe_text(template: Template) -> str:
    """Empty where it is gone, or no text."""
    try:
        return Path(template.root, "template.toml").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


async def _in_thread(work: Callable[..., T], *args: Any) -> T:
    """Disks can be slow."""
    return await asyncio.to_thread(work, *args)


def pages(house: House) -> list[Page]:
    templates = Templates(house)
    post = ("POST",)
    return [
        Page("/templates", templates.list),
        Page("/templates/version", templates.show),
        Page("/templates/diff", templates.compare),
        Page("/templates/built/{template}/{id}", templates.show_build),
        Page("/templates/built/{template}/remove", templates.remove_built, post),
        Page("/templates/builds/{id}", templates.show_host_build, admin=True),
        Page("/templates/build", templates.build, post, admin=True),
        Page("/templates/pin", templates.pin, post, admin=True),
        Page("/templates/unpin", templates.unpin, post, admin=True),
        Page("/templates/remove", templates.remove, post, admin=True),
    ]
