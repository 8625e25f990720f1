"""The pages of templates: versions, packages, differences and builds."""

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
from cloche.api.console.context import ConsoleContext, ConsolePage, ConsoleVisitor, decode_body, is_partial
from cloche.model import Struct, Template, new_id
from cloche.store.builds import BuiltTemplate, TemplateBuild, TemplateTag
from cloche.telemetry import log
from cloche.templates import Catalogue, Recipe, TemplateProgress, build_template, compare_templates, recipe
from cloche.templates.comparison import TemplateChange

# Template builds started in the console: each in a thread, with a log for its page.

MAX_LINES = 2000
MAX_LINE_CHARACTERS = 500  # characters
KEPT_BUILDS = 8  # that have ended
MAX_BUILDS_AT_ONCE = 2


class HostBuild:
    """One build. Its thread writes, the server's thread reads."""

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
        """Runs the build to its end. `reason` has the error."""
        try:
            self.ref = build_template(catalogue, self.recipe, self._on_progress).ref
            self.state = "ready"
        except (errors.ClocheError, OSError) as error:
            self.reason = str(error)
            self.state = "error"
        self.ended_at = time.time()
        log.info("template.built_in_console", template=self.recipe.name, state=self.state, ref=self.ref)

    def lines_after(self, number: int) -> tuple[list[str], int]:
        """Returns the log lines after that number, and the number of the last."""
        known = self._lines.copy()  # at once, as its thread goes on
        return [text for each, text in known if each > number], known[-1][0] if known else number

    def _on_progress(self, progress: TemplateProgress) -> None:
        self.fraction = self.fraction if progress.fraction is None else progress.fraction
        last = self._lines[-1][0] if self._lines else 0
        self._lines.append((last + 1, f"{progress.phase}: {progress.detail[:MAX_LINE_CHARACTERS]}"))


class HostBuilds:
    """The builds of this server. A build does not outlive it, and leaves nothing behind."""

    def __init__(self, catalogue: Catalogue):
        self._catalogue = catalogue
        self._known: dict[str, HostBuild] = {}

    def start(self, recipe: Recipe) -> HostBuild:
        """Raises Busy where too many builds run."""
        if sum(each.state == "building" for each in self._known.values()) >= MAX_BUILDS_AT_ONCE:
            raise errors.Busy(f"{MAX_BUILDS_AT_ONCE} templates are being built already: wait for one of them")
        self._drop_ended()
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
            raise errors.NotFound(
                f"there is no build {id[:50]!r}: a server knows its own, the last {KEPT_BUILDS}"
            ) from None

    def list(self) -> Sequence[HostBuild]:
        """The newest first."""
        return [*self._known.values()][::-1]

    def _drop_ended(self) -> None:
        ended = [id for id, each in self._known.items() if each.state != "building"]
        for id in ended[: max(len(ended) - KEPT_BUILDS + 1, 0)]:
            del self._known[id]


# Differences between the recipes of two templates, line by line, in the style of a diff.

DiffSign = Literal["+", "-", " "]


class DiffLine(NamedTuple):
    sign: DiffSign
    text: str


class RecipeChanges(NamedTuple):
    key: str  # of template.toml
    lines: list[DiffLine]


def recipe_changes(change: TemplateChange) -> RecipeChanges:
    """For lists, the added and removed values; for tables, the changed keys; otherwise, before and after."""
    return RecipeChanges(change.what, [*_diff_lines(change.before, change.after)])


def _diff_lines(before: Any, after: Any) -> Iterator[DiffLine]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _diff_tables(before, after)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        yield from _diff_lists(list(before), list(after))
    else:
        yield from (DiffLine("-", _show_value(before)), DiffLine("+", _show_value(after)))


def _diff_tables(before: dict[str, Any], after: dict[str, Any]) -> Iterator[DiffLine]:
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) == after.get(key):
            continue
        for sign, table in (("-", before), ("+", after)):
            if key in table:
                yield DiffLine(sign, f"{key} = {_show_value(table[key])}")  # type: ignore[arg-type]  # one of its signs


def _diff_lists(before: list[Any], after: list[Any]) -> Iterator[DiffLine]:
    gone, come = [each for each in before if each not in after], [each for each in after if each not in before]
    yield from (DiffLine("-", _show_value(each)) for each in gone)
    yield from (DiffLine("+", _show_value(each)) for each in come)
    if not gone and not come:
        yield from (DiffLine("-", _show_value(before)), DiffLine("+", _show_value(after)))  # another order


def _show_value(value: Any) -> str:
    return "nothing" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


T = TypeVar("T")

MAX_REF_CHARACTERS = 200
BUILT_SHOWN = 100  # templates that were built by steps
BUILDS_SHOWN = 20  # of one of them
MAX_SIZES = 10_000  # that are remembered
EXAMPLE_RECIPE = """\
name = "geo"
python = ">=3.11"
packages = ["shapely>=2", "numpy"]
imports = ["numpy"]   # once, before the fork: each of these costs every sandbox nothing
"""


class TemplateRefRequest(Struct, forbid_unknown_fields=True):
    ref: str


class RecipeRequest(Struct, forbid_unknown_fields=True):
    recipe: str


class TemplateVersionRow(NamedTuple):
    template: Template
    meant: bool  # by the name alone
    pinned: bool
    in_use: int


class SteppedTemplateRow(NamedTuple):
    """A template that was built by steps, by a client of E2B's SDK."""

    template: BuiltTemplate
    builds: Sequence[TemplateBuild]
    tags: Sequence[TemplateTag]
    sizes: Mapping[str, int]  # in bytes, by the id of the build

    def tags_of(self, build: TemplateBuild) -> list[str]:
        return [each.tag for each in self.tags if each.build == build.id]


class TemplatePages:
    def __init__(self, context: ConsoleContext):
        self._context = context
        self._engine = context.engine
        self._catalogue = Catalogue(context.config.data_dir, context.config.aliases)
        self._host_builds = HostBuilds(self._catalogue)
        self._sizes: dict[str, int] = {}  # by snapshot: none of them ever changes

    # -- what is shown

    async def list(self, request: Request, visitor: ConsoleVisitor) -> Response:
        find = request.query_params.get("find", "").strip().lower()[:MAX_REF_CHARACTERS]
        by_name: dict[str, list[TemplateVersionRow]] = {}
        for version in await self._list_versions(visitor):
            if find in version.template.name:
                by_name.setdefault(version.template.name, []).append(version)
        built = [
            each for each in await self._engine.builds.templates(visitor.visible_owner) if _matches_text(each, find)
        ]
        values = {
            "find": find,
            "by_name": by_name,
            "by_step": [await self._describe_built(each) for each in built[:BUILT_SHOWN]],
            "left_out": max(len(built) - BUILT_SHOWN, 0),
            "host_builds": self._host_builds.list() if visitor.is_admin else (),
        }
        name = "template_list.html" if is_partial(request) else "templates.html"
        return self._render_page(request, visitor, name, **values)

    async def show(self, request: Request, visitor: ConsoleVisitor) -> Response:
        meant = await self._resolve_ref(request.query_params.get("ref", ""))
        versions = [each for each in await self._list_versions(visitor) if each.template.name == meant.name]
        version = next((each for each in versions if each.template.version == meant.version), None)
        if version is None:
            raise errors.TemplateNotFound(f"{meant.ref} was removed just now")
        packages = [each.partition("==")[::2] for each in meant.packages]
        text = await _in_thread(_recipe_text, meant)
        values = {"version": version, "versions": versions, "packages": packages, "recipe": text}
        return self._render_page(request, visitor, "template.html", **values)

    async def compare(self, request: Request, visitor: ConsoleVisitor) -> Response:
        before = await self._resolve_ref(request.query_params.get("before", ""))
        after = await self._resolve_ref(request.query_params.get("after", ""))
        found = await _in_thread(compare_templates, before, after)
        versions = [each.template for each in await self._list_versions(visitor)]
        changes = [recipe_changes(each) for each in found.recipe]
        return self._render_page(
            request, visitor, "template_diff.html", found=found, changes=changes, versions=versions
        )

    async def write(self, request: Request, visitor: ConsoleVisitor) -> Response:
        """The editor for a recipe: a template's, or an example."""
        ref = request.query_params.get("from", "")
        text = await _in_thread(_recipe_text, await self._resolve_ref(ref)) if ref else EXAMPLE_RECIPE
        return self._render_page(request, visitor, "template_new.html", ref=ref, recipe=text)

    async def show_build(self, request: Request, visitor: ConsoleVisitor) -> Response:
        """The page of a build by steps."""
        template, build = await self._find_build(request, visitor)
        said, after = self._engine.builds.logs(build), _lines_seen(request)
        name = "template_log.html" if is_partial(request) else "template_build.html"
        values = {"template": template, "build": build, "lines": said[after:], "next": max(after, len(said))}
        return self._render_page(request, visitor, name, size=await self._build_size(build), **values)

    async def show_host_build(self, request: Request, visitor: ConsoleVisitor) -> Response:
        build = self._host_builds.get(request.path_params["id"])
        name = "template_host_log.html" if is_partial(request) else "template_host_build.html"
        lines, next_line = build.lines_after(_lines_seen(request))
        return self._render_page(request, visitor, name, build=build, lines=lines, next=next_line)

    def _render_page(self, request: Request, visitor: ConsoleVisitor, name: str, **values: Any) -> Response:
        return self._context.render(request, visitor, name, words=format, now=time.time(), **values)

    async def _list_versions(self, visitor: ConsoleVisitor) -> Sequence[TemplateVersionRow]:
        in_use = Counter(each.template for each in self._engine.known(visitor.visible_owner))
        return await _in_thread(_read_versions, self._catalogue, in_use)

    async def _resolve_ref(self, ref: str) -> Template:
        return await _in_thread(self._catalogue.resolve, ref[:MAX_REF_CHARACTERS])

    async def _describe_built(self, template: BuiltTemplate) -> SteppedTemplateRow:
        builds = (await self._engine.builds.builds(template))[:BUILDS_SHOWN]
        sizes = {each.id: size for each in builds if (size := await self._build_size(each)) is not None}
        return SteppedTemplateRow(template, builds, await self._engine.builds.tags(template), sizes)

    async def _build_size(self, build: TemplateBuild) -> int | None:
        """The size of the build's snapshot; None where there is none yet, or it is gone."""
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

    async def _find_built(self, id: str, visitor: ConsoleVisitor) -> BuiltTemplate:
        """Raises TemplateNotFound, also for another owner's template."""
        owner = visitor.visible_owner or await self._engine.builds.owner_of(id)
        return await self._engine.builds.template(id, owner)

    async def _find_build(self, request: Request, visitor: ConsoleVisitor) -> tuple[BuiltTemplate, TemplateBuild]:
        template = await self._find_built(request.path_params["template"], visitor)
        return template, await self._engine.builds.build(template, request.path_params["id"])

    # -- what is done

    async def pin(self, request: Request, visitor: ConsoleVisitor) -> Response:
        template = await _in_thread(
            self._catalogue.pin, (await decode_body(request, TemplateRefRequest)).ref[:MAX_REF_CHARACTERS]
        )
        self._audit_action("template.pinned", visitor, template.ref)
        return JSONResponse({"said": f"{template.name} means {template.ref} from now on"})

    async def unpin(self, request: Request, visitor: ConsoleVisitor) -> Response:
        name = (await decode_body(request, TemplateRefRequest)).ref
        if not recipe.is_template_name(name):
            raise errors.InvalidRequest(f"{name[:100]!r} is no name of a template")
        newest = await _in_thread(self._catalogue.unpin, name)
        self._audit_action("template.unpinned", visitor, name)
        meant = f"{name} means its newest version again, {newest.ref}" if newest else f"{name} has no version"
        return JSONResponse({"said": meant})

    async def remove(self, request: Request, visitor: ConsoleVisitor) -> Response:
        template = await self._resolve_ref((await decode_body(request, TemplateRefRequest)).ref)
        in_use = sum(each.template == template.ref for each in self._engine.known(None))
        if in_use:
            raise errors.InvalidRequest(f"{template.ref} is in use, by {in_use} of the sandboxes: end them first")
        await _in_thread(self._catalogue.remove, f"{template.name}@{template.version}")
        self._audit_action("template.removed", visitor, template.ref)
        return JSONResponse({"said": f"{template.ref} was removed"})

    async def remove_built(self, request: Request, visitor: ConsoleVisitor) -> Response:
        template = await self._find_built(request.path_params["template"], visitor)
        await self._engine.builds.remove(template)
        return JSONResponse({"said": f"{template.name} was removed, with all its builds"})

    async def build(self, request: Request, visitor: ConsoleVisitor) -> Response:
        parsed = recipe.parse_recipe((await decode_body(request, RecipeRequest)).recipe, "the recipe")
        started = self._host_builds.start(parsed)
        self._audit_action("build.started", visitor, started.id)
        return JSONResponse({"id": started.id})

    def _audit_action(self, what: str, visitor: ConsoleVisitor, id: str) -> None:
        self._engine.audit_log.record(what, visitor.owner, id=id, about="in the console")


def _read_versions(catalogue: Catalogue, in_use: Mapping[str, int]) -> Sequence[TemplateVersionRow]:
    found: list[TemplateVersionRow] = []
    seen: set[str] = set()
    for template in catalogue.list():
        pin = catalogue.pinned(template.name)
        meant = pin == template.version if pin else template.name not in seen
        seen.add(template.name)
        found.append(TemplateVersionRow(template, meant, pin == template.version, in_use.get(template.ref, 0)))
    return found


def _matches_text(template: BuiltTemplate, text: str) -> bool:
    return any(text in each.lower() for each in (template.name, template.id, template.owner))


def _recipe_text(template: Template) -> str:
    """Empty where the file is gone, or no text."""
    try:
        return Path(template.root, "template.toml").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _lines_seen(request: Request) -> int:
    """The number of log lines that the page has."""
    said = request.query_params.get("after", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) <= 9 else 0


async def _in_thread(work: Callable[..., T], *args: Any) -> T:
    """Runs work that reads disks in a thread."""
    return await asyncio.to_thread(work, *args)


def pages(context: ConsoleContext) -> list[ConsolePage]:
    templates = TemplatePages(context)
    post = ("POST",)
    return [
        ConsolePage("/templates", templates.list),
        ConsolePage("/templates/version", templates.show),
        ConsolePage("/templates/diff", templates.compare),
        ConsolePage("/templates/new", templates.write, admin=True),
        ConsolePage("/templates/built/{template}/{id}", templates.show_build),
        ConsolePage("/templates/built/{template}/remove", templates.remove_built, post),
        ConsolePage("/templates/builds/{id}", templates.show_host_build, admin=True),
        ConsolePage("/templates/build", templates.build, post, admin=True),
        ConsolePage("/templates/pin", templates.pin, post, admin=True),
        ConsolePage("/templates/unpin", templates.unpin, post, admin=True),
        ConsolePage("/templates/remove", templates.remove, post, admin=True),
    ]
