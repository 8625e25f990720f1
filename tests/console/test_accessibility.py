"""Every page, for whoever reads it another way: by its structure, by the keyboard, in the dark, on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from tests.conftest import RunningServer
from tests.console.conftest import PATIENCE_MILLISECONDS, Visiting
from tests.console.wire import Insider, new_key

expect.set_options(timeout=PATIENCE_MILLISECONDS)

AXE = Axe()
GRAVE = ("serious", "critical")
WHAT_LOOKS_DIFFERENT = ("color-contrast", "scrollable-region-focusable", "link-in-text-block")
PAGES = {
    "start": "/",
    "playground": "/playground",
    "sandboxes": "/sandboxes",
    "sandbox": "/sandboxes/{sandbox}",
    "requests": "/requests",
    "request": "/requests/{request}",
    "templates": "/templates",
    "network": "/network",
    "keys": "/keys?revoked=1&owner=walker",
    "usage": "/usage",
    "audit": "/audit?owner=walker",
    "health": "/health",
    "nothing": "/no-such-page",
}
BUSIEST = ("start", "playground", "sandbox", "keys")  # these have all that the others are made of


@pytest.fixture(scope="module")
def places(console: RunningServer) -> Iterator[dict[str, str]]:
    """Where pages are, with something on each."""
    admin = Insider(console)
    key = new_key(console, "walker", name="cane")
    admin.say("PUT", "/admin/quotas/walker", {"sandboxes": 5, "memory_bytes": 2**33})
    admin.say("DELETE", f"/admin/keys/{new_key(console, 'walker', name='lost')['id']}")
    sandbox = admin.say("POST", "/api/v1/sandboxes", {"metadata": {"a": "b"}}).json()["id"]
    admin.say("POST", f"/api/v1/sandboxes/{sandbox}/run", {"code": "print(1)"})
    asked = {"model": "cloche/echo", "input": "```python\n1/0\n```", "tools": [_TOOL]}
    admin.ask("POST", "/v1/responses", asked, {"x-api-key": key["key"], "x-request-id": "walked"})
    paths = {name: path.format(sandbox=sandbox, request="walked") for name, path in PAGES.items()}
    yield {**paths, "key": key["key"]}
    admin.say("DELETE", f"/api/v1/sandboxes/{sandbox}")


_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}


def faults(page: Page, *rules: str) -> list[str]:
    """What axe finds that keeps somebody out, by all rules or these."""
    options = {"runOnly": list(rules)} if rules else None
    found: list[dict[str, Any]] = AXE.run(page, options=options).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {node['html'][:200]} ({node['failureSummary'][:300]})"
        for each in found
        if each["impact"] in GRAVE
        for node in each["nodes"]
    ]


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def to_the_dark(page: Page) -> None:
    """And to a phone."""
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("getComputedStyle(document.body).backgroundColor === 'rgb(16, 21, 20)'")


def shown(page: Page) -> Page:
    page.locator("h1, [data-playground]").first.wait_for()
    return page


@pytest.mark.parametrize(
    "name", [name if name in BUSIEST else pytest.param(name, marks=pytest.mark.long) for name in PAGES]
)
def test_axe_finds_no_grave_fault_in_light_or_dark_or_on_a_phone(
    visiting: Visiting, places: dict[str, str], name: str
) -> None:
    page = shown(visiting(places[name], places["key"] if name == "usage" else None))  # an admin's has many owners
    assert not faults(page)
    to_the_dark(page)
    assert not faults(page, *WHAT_LOOKS_DIFFERENT)
    assert overflow(page) == 0


def test_the_login_page_is_accessible(visiting: Visiting, console: RunningServer) -> None:
    page = visiting("/")
    page.context.clear_cookies()
    page.goto("/ui/login")
    assert not faults(page)
    assert page.evaluate("document.activeElement.id") == "key"
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    to_the_dark(page)
    assert not faults(page)
    assert overflow(page) == 0


def test_dialogs_of_keys_are_named_and_hold_the_focus(visiting: Visiting) -> None:
    page = shown(visiting("/keys"))
    opener = page.get_by_role("button", name="Add a key")
    opener.press("Enter")
    assert page.evaluate("document.activeElement.closest('dialog')?.id") == "add-key"
    assert not faults(page)
    page.keyboard.press("Escape")
    expect(opener).to_be_focused()
    page.get_by_role("button", name=re.compile("^Quota of")).first.press("Enter")
    page.get_by_role("dialog", name=re.compile("Quota of")).wait_for()
    assert not faults(page)


def test_everything_that_can_be_clicked_is_reached_by_the_tab_key(visiting: Visiting, places: dict[str, str]) -> None:
    for name in ("request", "keys", "audit"):
        page = shown(visiting(places[name]))
        page.evaluate(_COUNT_FOCUS)
        wanted = int(page.evaluate("window.wanted.size"))
        for _ in range(wanted + int(page.locator("[tabindex='0']").count()) + 5):
            page.keyboard.press("Tab")
        left = page.evaluate("[...window.wanted].map((each) => each.outerHTML.slice(0, 120))")
        assert wanted > 8
        assert left == [], name


_COUNT_FOCUS = """() => {
  const all = [...document.querySelectorAll("a[href], button, input, select, textarea, summary")];
  window.wanted = new Set(all.filter((each) => each.checkVisibility() && !each.disabled && each.type !== "hidden"));
  document.addEventListener("focusin", (event) => window.wanted.delete(event.target));
}"""


def test_places_are_reached_by_two_keys_and_the_content_by_one_link(visiting: Visiting) -> None:
    page = visiting("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_url("**/ui/requests")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard shortcuts")
    assert "Requests" in dialog.inner_text()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_the_theme_is_chosen_and_kept(visiting: Visiting) -> None:
    page = visiting("/usage")
    expect(page.locator("nav [aria-current=page]").first).to_have_text("Keys and usage")

    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = background()
    page.get_by_role("button", name=re.compile("^Theme")).click()
    page.get_by_role("button", name=re.compile("^Theme: light")).click()
    assert background() != light
    page.goto("/ui/keys")
    assert background() != light
    page.get_by_role("button", name=re.compile("^Theme: dark")).click()
    assert background() == light


def test_a_phone_opens_the_menu_with_a_button(visiting: Visiting) -> None:
    page = visiting("/usage", phone=True)
    link = page.get_by_role("navigation", name="Console").get_by_role("link", name="Requests")
    expect(link).to_be_hidden()
    menu = page.get_by_role("button", name="Menu")
    menu.click()
    assert menu.get_attribute("aria-expanded") == "true"
    link.click()
    page.wait_for_url("**/ui/requests")
