"""Templates in the console: what is in a version, what changed, who may do what, and builds that are followed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
from axe_playwright_python.sync_playwright import Axe
from e2b import Template as ByStep
from tests.conftest import RunningServer
from tests.console.conftest import Visiting
from tests.templates.test_versions import make

from cloche.api.console.templates import MAX_LINES, HostBuild, recipe_changes
from cloche.model import Template
from cloche.templates import Catalogue, Recipe, TemplateProgress
from cloche.templates.comparison import TemplateChange

if TYPE_CHECKING:
    from playwright.sync_api import Page

SEND = """async ([path, json]) => {
  const csrf = document.querySelector("meta[name=csrf]").content;
  const headers = {"X-Cloche-Csrf": csrf, "Content-Type": "application/json"};
  return (await fetch(path, {method: "POST", headers, body: JSON.stringify(json)})).status;
}"""


@pytest.fixture
def geo(console_data: Path) -> Iterator[tuple[Template, Template]]:
    """Two versions of one template, the older first."""
    catalogue = Catalogue(console_data)
    older = make(catalogue, "six==1.0 gone==1.0", 1.0, imports=("json",))
    newer = make(catalogue, "six==2.0 come==1.0", 2.0, imports=("csv",), env={"UNITS": "miles"})
    yield older, newer
    if catalogue.pinned("geo"):
        catalogue.unpin("geo")
    for each in catalogue.list():
        if each.name == "geo":
            catalogue.remove(f"geo@{each.version}")


@pytest.fixture(scope="module")
def user(console: RunningServer) -> str:
    """A key of somebody who is no admin."""
    made = httpx2.post(
        f"{console.url}/admin/keys",
        headers={"Authorization": f"Bearer {console.key}"},
        json={"owner": "templates-user", "role": "user"},
        trust_env=False,
    )
    return str(made.json()["key"])


def start_build(console: RunningServer, key: str, command: str) -> tuple[str, str]:
    """The ids of a template and its build, which goes on."""
    steps = ByStep().from_image("python:3.12").run_cmd(command)
    name = f"built-{uuid.uuid4().hex[:8]}"
    started = ByStep.build_in_background(steps, name, api_key=key, api_url=f"{console.url}/e2b")
    return started.template_id, started.build_id


def test_a_build_log_resumes_after_the_lines_already_shown() -> None:
    build = HostBuild(Recipe(name="geo"))
    assert build.lines_after(0) == ([], 0)
    for number in range(MAX_LINES + 2):
        build._on_progress(TemplateProgress(phase="compile", detail=str(number)))
    lines, heard = build.lines_after(MAX_LINES)
    assert lines == [f"compile: {MAX_LINES}", f"compile: {MAX_LINES + 1}"]
    assert build.lines_after(heard) == ([], heard)
    assert len(build.lines_after(0)[0]) == MAX_LINES  # the oldest have made room


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (["a", "b"], ["b", "c"], ["- a", "+ c"]),
        (["a", "b"], ["b", "a"], ['- ["a", "b"]', '+ ["b", "a"]']),
        ({"A": "1", "B": "2"}, {"B": "3", "C": "4"}, ["- A = 1", "- B = 2", "+ B = 3", "+ C = 4"]),
        (None, {"allow": ["*"]}, ["- nothing", '+ {"allow": ["*"]}']),
        (">=3.11", "3.12", ["- >=3.11", "+ 3.12"]),
    ],
)
def test_changes_of_a_recipe_are_lines(before: object, after: object, lines: list[str]) -> None:
    found = recipe_changes(TemplateChange(what="key", before=before, after=after))
    assert [f"{line.sign} {line.text}" for line in found.lines] == lines


def row_of(page: Page, version: Template) -> str:
    return page.locator("tr", has_text=version.version[:12]).inner_text()


def test_versions_show_their_contents_and_differences(visiting: Visiting, geo: tuple[Template, Template]) -> None:
    older, newer = geo
    page = visiting("/templates")
    assert "current" in row_of(page, newer) and "4.0 KiB" in row_of(page, newer)
    assert "current" not in row_of(page, older)
    page.get_by_role("link", name="Changes", exact=True).click()
    changes = page.locator("table.diff").inner_text().splitlines()
    assert [line.split() for line in changes[1:]] == [
        ["changed", "six", "1.0", "2.0"],
        ["added", "come", "1.0"],
        ["removed", "gone", "1.0"],
    ]
    assert page.locator("#key-imports + ul").inner_text().split() == ["−", "removed:", "json", "+", "added:", "csv"]
    assert "UNITS = miles" in page.locator("#key-env + ul").inner_text()
    page.goto(f"/ui/templates/version?ref={older.ref}")
    page.get_by_label("Find a package").fill("go")
    assert page.locator("#packages li:visible").all_inner_texts() == ["gone\n1.0"]
    page.get_by_text("Its recipe,").click()
    assert 'name = "geo"' in page.locator("pre").inner_text()
    page.goto("/ui/templates?find=GE")
    assert page.locator("section.template h2").all_inner_texts() == ["geo"]


def test_an_admin_pins_unpins_and_removes_versions(visiting: Visiting, geo: tuple[Template, Template]) -> None:
    older, newer = geo
    page = visiting("/templates")
    old, new = (page.locator("tr", has_text=each.version[:12]) for each in geo)
    old.get_by_role("button", name="Pin").click()
    old.get_by_text("pinned").wait_for()
    assert "current" not in new.inner_text()
    assert old.get_by_role("button", name="Remove").is_disabled()
    old.get_by_role("button", name="Unpin").click()
    new.get_by_text("current").wait_for()
    old.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    old.wait_for(state="detached")
    assert not Path(older.root).exists() and Path(newer.root).exists()


def test_a_recipe_that_cannot_be_built_says_why(visiting: Visiting) -> None:
    page = visiting("/templates/new")
    page.get_by_label("Recipe").fill('name = "in-console"\npackages = ["git+https://example.com/x"]\n')
    page.get_by_role("button", name="Build").click()
    assert "is not a package requirement" in page.get_by_role("alert").inner_text()
    page.get_by_label("Recipe").fill('name = "in-console"\npackages = ["pip>9000"]\n')
    page.get_by_role("button", name="Build").click()
    page.locator("#build-state", has_text="failed").wait_for(timeout=120_000)
    assert "pip" in page.locator("#build-state .notice").inner_text()
    page.goto("/ui/templates")
    assert "failed" in page.locator("section", has_text="Builds since the server started").inner_text()


@pytest.mark.long
def test_a_recipe_becomes_a_template_before_ones_eyes(visiting: Visiting) -> None:
    page = visiting("/templates/new")
    page.get_by_label("Recipe").fill('name = "in-console"\n')
    page.get_by_role("button", name="Build").click()
    page.locator("#build-state", has_text="ready").wait_for(timeout=120_000)
    assert "lock: choosing versions" in page.get_by_role("log").inner_text()
    page.get_by_role("link", name="in-console@").click()
    assert "current" in page.locator(".page-head").inner_text()


def test_the_log_of_a_clients_build_is_followed(console: RunningServer, visiting: Visiting) -> None:
    hostile = "echo '<img src=x onerror=alert(1)>'; sleep 2; echo the-end"
    template, build = start_build(console, console.key, hostile)
    page = visiting(f"/templates/built/{template}/{build}")
    page.evaluate("window.sameDocument = true")
    page.locator("#build-state", has_text="ready").wait_for()
    assert page.evaluate("window.sameDocument")
    said = page.get_by_role("log")
    assert "[stdout]: <img src=x onerror=alert(1)>" in said.inner_text()
    assert said.locator("img").count() == 0
    assert said.inner_text().count("[stdout]: the-end") == 1
    assert page.locator("#log-more").count() == 0  # nobody asks for more
    page.goto("/ui/templates")
    page.locator("tr", has_text=template).get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    page.locator("tr", has_text=template).wait_for(state="detached")


def test_a_user_sees_own_builds_only_and_changes_nothing_of_the_servers(
    console: RunningServer, visiting: Visiting, user: str
) -> None:
    of_admin, build = start_build(console, console.key, "echo private")
    own, _ = start_build(console, user, "echo own")
    page = visiting("/templates", key=user)
    listed = page.locator("table.by-step").inner_text()
    assert own in listed and of_admin not in listed
    assert page.get_by_role("button", name="Pin").count() == page.get_by_text("Build a template").count() == 0
    foreign, unknown = (
        page.goto(f"/ui/templates/built/{id}/{build}") and page.locator("main p").first.inner_text().replace(id, "ID")
        for id in (of_admin, "tdoesnotexist")
    )
    assert foreign == unknown
    for path in ("pin", "unpin", "remove", "build"):
        assert page.evaluate(SEND, [f"/ui/templates/{path}", {"ref": "python"}]) == 403
    assert page.evaluate(SEND, [f"/ui/templates/built/{of_admin}/remove", {}]) == 404
    assert of_admin in visiting("/templates").locator("table.by-step").inner_text()


def test_template_pages_fit_a_phone_and_are_accessible(visiting: Visiting, geo: tuple[Template, Template]) -> None:
    page = visiting("/templates", phone=True)
    older, newer = geo
    for path in ("", f"/version?ref={newer.ref}", f"/diff?before={older.ref}&after={newer.ref}", "/new"):
        page.goto(f"/ui/templates{path}")
        assert page.evaluate("document.documentElement.scrollWidth") == 360, path
        found = [each for each in Axe().run(page).response["violations"] if each["impact"] in ("serious", "critical")]
        assert found == [], path
