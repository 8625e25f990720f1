"""The pages of templates: their versions, what is in them, what differs, how they were built."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cloche import errors
from cloche.api.console import format
from cloche.api.console.context import House, Page, Visitor, body_of, is_partial
from cloche.model import Struct, Template, new_id
from cloche.store.builds import Build, BuiltTemplate, Tag
from cloche.telemetry import log
from cloche.templates import Catalogue, Progress, Recipe, build, difference, recipe
from cloche.templates.comparison import Change

# Builds of templates that were started in the console: each in a thread, its words kept for whoever looks.

MAX_LINES = 2000
MAX_LINE = 500  # characters
KEPT = 8  # that have ended
MAX_AT_ONCE = 2


class HostBuild:
    """One of them. Its thread writes, the server's reads."""

    def __init__(self, recipe: Recipe):
        self.id = new_id("b")
        self.recipe = recipe
        self.started_at = time.time()
        self.ended_at: float | None = None
        self.state: Literal["building", "ready", "error"] = "building"
        self.fraction = 0.0
        self.ref = ""  # what it made
        self.reason = ""  # why it failed
        self._lines: deque[tuple[int, str]] = deque(maxlen=MAX_LINES)  # numbered from 1

    def run(self, catalogue: Catalogue) -> None:
        """To its end. What goes wrong is in `reason`."""
        try:
            self.ref = build(catalogue, self.recipe, self._hear).ref
            self.state = "ready"
        except (errors.ClocheError, OSError) as error:
            self.reason = str(error)
            self.state = "error"
        self.ended_at = time.time()
        log.info("template.built_in_console", template=self.recipe.name, state=self.state, ref=self.ref)

    def lines_after(self, number: int) -> tuple[list[str], int]:
        """What was said since the line of that number, and the number of the last."""
        known = self._lines.copy()  # at once, as its thread goes on
        return [text for each, text in known if each > number], known[-1][0] if known else number

    def _hear(self, progress: Progress) -> None:
        self.fraction = self.fraction if progress.fraction is None else progress.fraction
        last = self._lines[-1][0] if self._lines else 0
        self._lines.append((last + 1, f"{progress.phase}: {progress.detail[:MAX_LINE]}"))


class HostBuilds:
    """Those of this server. None outlives it: then nothing of it is there."""

    def __init__(self, catalogue: Catalogue):
        self._catalogue = catalogue
        self._known: dict[str, HostBuild] = {}

    def start(self, recipe: Recipe) -> HostBuild:
        """Raises Busy where others go on."""
        if sum(each.state == "building" for each in self._known.values()) >= MAX_AT_ONCE:
            raise errors.Busy(f"{MAX_AT_ONCE} templates are being built already: wait for one of them")
        self._make_room()
        started = HostBuild(recipe)
        self._known[started.id] = started
        # A daemon: a server that ends does not wait for a download.
        threading.Thread(target=started.run, args=(self._catalogue,), name="cloche-template", daemon=True).start()
        return started

    def get(self, id: str) -> HostBuild:
        """Raises NotFound."""
        try:
            return self._known[id]
        except KeyError:
            raise errors.NotFound(f"there is no build {id[:50]!r}: a server knows its own, the last {KEPT}") from None

    def list(self) -> Sequence[HostBuild]:
        """The newest first."""
        return [*self._known.values()][::-1]

    def _make_room(self) -> None:
        ended = [id for id, each in self._known.items() if each.state != "building"]
        for id in ended[: max(len(ended) - KEPT + 1, 0)]:
            del self._known[id]


# What differs between the recipes of two templates, line by line, as a reader of diffs has it.

Sign = Literal["+", "-", " "]


class Line(NamedTuple):
    sign: Sign
    text: str


class Changes(NamedTuple):
    key: str  # of template.toml
    lines: list[Line]


def changes_of(change: Change) -> Changes:
    """Of lists, what came and went; of tables, each key that is another one; of all else, before and after."""
    return Changes(change.what, [*_lines(change.before, change.after)])


def _lines(before: Any, after: Any) -> Iterator[Line]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_tables(before, after)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        yield from _of_lists(list(before), list(after))
    else:
        yield from (Line("-", _shown(before)), Line("+", _shown(after)))


def _of_tables(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Line]:
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) == after.get(key):
            continue
        for sign, table in (("-", before), ("+", after)):
            if key in table:
                yield Line(sign, f"{key} = {_shown(table[key])}")  # type: ignore[arg-type]  # one of its signs


def _of_lists(before: list[Any], after: list[Any]) -> Iterator[Line]:
    gone, come = [each for each in before if each not in after], [each for each in after if each not in before]
    yield from (Line("-", _shown(each)) for each in gone)
    yield from (Line("+", _shown(each)) for each in come)
    if not gone and not come:
        yield from (Line("-", _shown(before)), Line("+", _shown(after)))  # another order


def _shown(value: Any) -> str:
    return "nothing" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


T = TypeVar("T")

MAX_REF = 200
BUILT_SHOWN = 100  # templates that were built by steps
BUILDS_SHOWN = 20  # of one of them
MAX_SIZES = 10_000  # that are remembered
EXAMPLE = """\
name = "geo"
python = ">=3.11"
packages = ["shapely>=2", "numpy"]
imports = ["numpy"]   # once, before the fork: each of these costs every sandbox nothing
"""


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
    sizes: Mapping[str, int]  # in bytes, by the id of the build

    def tags_of(self, build: Build) -> list[str]:
        return [each.tag for each in self.tags if each.build == build.id]


class Templates:
    def __init__(self, house: House):
        self._house = house
        self._engine = house.engine
        self._catalogue = Catalogue(house.config.data_dir, house.config.aliases)
        self._host_builds = HostBuilds(self._catalogue)
        self._sizes: dict[str, int] = {}  # by snapshot: none of them ever changes

    # -- what is shown

    async def list(self, request: Request, visitor: Visitor) -> Response:
        find = request.query_params.get("find", "").strip().lower()[:MAX_REF]
        by_name: dict[str, list[Version]] = {}
        for version in await self._versions(visitor):
            if find in version.template.name:
                by_name.setdefault(version.template.name, []).append(version)
        built = [each for each in await self._engine.builds.templates(visitor.sees) if _has(each, find)]
        values = {
            "find": find,
            "by_name": by_name,
            "by_step": [await self._by_step(each) for each in built[:BUILT_SHOWN]],
            "left_out": max(len(built) - BUILT_SHOWN, 0),
            "host_builds": self._host_builds.list() if visitor.is_admin else (),
        }
        name = "template_list.html" if is_partial(request) else "templates.html"
        return self._render(request, visitor, name, **values)

    async def show(self, request: Request, visitor: Visitor) -> Response:
        meant = await self._resolved(request.query_params.get("ref", ""))
        versions = [each for each in await self._versions(visitor) if each.template.name == meant.name]
        version = next((each for each in versions if each.template.version == meant.version), None)
        if version is None:
            raise errors.TemplateNotFound(f"{meant.ref} was removed just now")
        packages = [each.partition("==")[::2] for each in meant.packages]
        text = await _in_thread(_recipe_text, meant)
        values = {"version": version, "versions": versions, "packages": packages, "recipe": text}
        return self._render(request, visitor, "template.html", **values)

    async def compare(self, request: Request, visitor: Visitor) -> Response:
        before = await self._resolved(request.query_params.get("before", ""))
        after = await self._resolved(request.query_params.get("after", ""))
        found = await _in_thread(difference, before, after)
        versions = [each.template for each in await self._versions(visitor)]
        changes = [changes_of(each) for each in found.recipe]
        return self._render(request, visitor, "template_diff.html", found=found, changes=changes, versions=versions)

    async def write(self, request: Request, visitor: Visitor) -> Response:
        """A recipe to be changed: that of a template, or an example."""
        ref = request.query_params.get("from", "")
        text = await _in_thread(_recipe_text, await self._resolved(ref)) if ref else EXAMPLE
        return self._render(request, visitor, "template_new.html", ref=ref, recipe=text)

    async def show_build(self, request: Request, visitor: Visitor) -> Response:
        """Of a template that was built by steps."""
        template, build = await self._build_meant(request, visitor)
        said, after = self._engine.builds.logs(build), _after(request)
        name = "template_log.html" if is_partial(request) else "template_build.html"
        values = {"template": template, "build": build, "lines": said[after:], "next": max(after, len(said))}
        return self._render(request, visitor, name, size=await self._size(build), **values)

    async def show_host_build(self, request: Request, visitor: Visitor) -> Response:
        build = self._host_builds.get(request.path_params["id"])
        name = "template_host_log.html" if is_partial(request) else "template_host_build.html"
        lines, heard = build.lines_after(_after(request))
        return self._render(request, visitor, name, build=build, lines=lines, next=heard)

    def _render(self, request: Request, visitor: Visitor, name: str, **values: Any) -> Response:
        return self._house.render(request, visitor, name, words=format, now=time.time(), **values)

    async def _versions(self, visitor: Visitor) -> Sequence[Version]:
        in_use = Counter(each.template for each in self._engine.known(visitor.sees))
        return await _in_thread(_versions, self._catalogue, in_use)

    async def _resolved(self, ref: str) -> Template:
        return await _in_thread(self._catalogue.resolve, ref[:MAX_REF])

    async def _by_step(self, template: BuiltTemplate) -> ByStep:
        builds = (await self._engine.builds.builds(template))[:BUILDS_SHOWN]
        sizes = {each.id: size for each in builds if (size := await self._size(each)) is not None}
        return ByStep(template, builds, await self._engine.builds.tags(template), sizes)

    async def _size(self, build: Build) -> int | None:
        """Of what it made; None where it made nothing yet, or that is gone."""
        if build.snapshot is None:
            return None
        if build.snapshot not in self._sizes:
            found = await self._engine.snapshots.find(build.snapshot, build.owner)
            if found is None:
                return None
            if len(self._sizes) >= MAX_SIZES:
                self._sizes.clear()
            self._sizes[build.snapshot] = found.bytes
        return self._sizes[build.snapshot]

    async def _built(self, id: str, visitor: Visitor) -> BuiltTemplate:
        """Raises TemplateNotFound, also for somebody else's."""
        owner = visitor.sees or await self._engine.builds.owner_of(id)
        return await self._engine.builds.template(id, owner)

    async def _build_meant(self, request: Request, visitor: Visitor) -> tuple[BuiltTemplate, Build]:
        template = await self._built(request.path_params["template"], visitor)
        return template, await self._engine.builds.build(template, request.path_params["id"])

    # -- what is done

    async def pin(self, request: Request, visitor: Visitor) -> Response:
        template = await _in_thread(self._catalogue.pin, (await body_of(request, Ref)).ref[:MAX_REF])
        self._note("template.pinned", visitor, template.ref)
        return JSONResponse({"said": f"{template.name} means {template.ref} from now on"})

    async def unpin(self, request: Request, visitor: Visitor) -> Response:
        name = (await body_of(request, Ref)).ref
        if not recipe.is_name(name):
            raise errors.InvalidRequest(f"{name[:100]!r} is no name of a template")
        newest = await _in_thread(self._catalogue.unpin, name)
        self._note("template.unpinned", visitor, name)
        meant = f"{name} means its newest version again, {newest.ref}" if newest else f"{name} has no version"
        return JSONResponse({"said": meant})

    async def remove(self, request: Request, visitor: Visitor) -> Response:
        template = await self._resolved((await body_of(request, Ref)).ref)
        in_use = sum(each.template == template.ref for each in self._engine.known(None))
        if in_use:
            raise errors.InvalidRequest(f"{template.ref} is in use, by {in_use} of the sandboxes: end them first")
        await _in_thread(self._catalogue.remove, f"{template.name}@{template.version}")
        self._note("template.removed", visitor, template.ref)
        return JSONResponse({"said": f"{template.ref} was removed"})

    async def remove_built(self, request: Request, visitor: Visitor) -> Response:
        template = await self._built(request.path_params["template"], visitor)
        await self._engine.builds.remove(template)
        return JSONResponse({"said": f"{template.name} was removed, with all its builds"})

    async def build(self, request: Request, visitor: Visitor) -> Response:
        parsed = recipe.parse((await body_of(request, Text)).recipe, "the recipe")
        started = self._host_builds.start(parsed)
        self._note("build.started", visitor, started.id)
        return JSONResponse({"id": started.id})

    def _note(self, what: str, visitor: Visitor, id: str) -> None:
        self._engine.trail.note(what, visitor.owner, id=id, about="in the console")


def _versions(catalogue: Catalogue, in_use: Mapping[str, int]) -> Sequence[Version]:
    found: list[Version] = []
    seen: set[str] = set()
    for template in catalogue.list():
        pin = catalogue.pinned(template.name)
        meant = pin == template.version if pin else template.name not in seen
        seen.add(template.name)
        found.append(Version(template, meant, pin == template.version, in_use.get(template.ref, 0)))
    return found


def _has(template: BuiltTemplate, text: str) -> bool:
    return any(text in each.lower() for each in (template.name, template.id, template.owner))


def _recipe_text(template: Template) -> str:
    """Empty where it is gone, or no text."""
    try:
        return Path(template.root, "template.toml").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _after(request: Request) -> int:
    """How many lines of a log the page has."""
    said = request.query_params.get("after", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) <= 9 else 0


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
        Page("/templates/new", templates.write, admin=True),
        Page("/templates/built/{template}/{id}", templates.show_build),
        Page("/templates/built/{template}/remove", templates.remove_built, post),
        Page("/templates/builds/{id}", templates.show_host_build, admin=True),
        Page("/templates/build", templates.build, post, admin=True),
        Page("/templates/pin", templates.pin, post, admin=True),
        Page("/templates/unpin", templates.unpin, post, admin=True),
        Page("/templates/remove", templates.remove, post, admin=True),
    ]
