"""One server and one browser for all tests of the console. Each test has own cookies and own pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import RunningServer, serving, with_template

from cloche.model import Template

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
).split()
PATIENCE_MILLISECONDS = 30_000  # how long a failing test takes


@pytest.fixture(scope="session")
def console_data(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of the server, its own: own keys, own sandboxes."""
    return with_template(tmp_path_factory.mktemp("console") / "data", template)


@pytest.fixture(scope="session")
def console(console_data: Path) -> Iterator[RunningServer]:
    with serving(console_data) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The distribution's Chromium, without a window.

    One for each module: while Playwright is there, its event loop counts as running, and other tests can run none.
    """
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: `apt install chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


Visiting = Callable[..., "Page"]


@pytest.fixture
def visiting(browser: Browser, console: RunningServer) -> Iterator[Visiting]:
    """Opens a page in a browser of its own, logged in with that key: `visiting("/sandboxes", key=..., dark=True)`."""
    contexts: list[BrowserContext] = []

    def visit(path: str = "/", key: str | None = None, *, dark: bool = False, phone: bool = False) -> Page:
        context = browser.new_context(
            base_url=console.url,
            viewport={"width": 360, "height": 740} if phone else {"width": 1280, "height": 800},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        context.set_default_timeout(PATIENCE_MILLISECONDS)
        contexts.append(context)
        log_in(context, console, key or console.key)
        page = context.new_page()
        page.goto(f"/ui{path}")
        return page

    yield visit
    for context in contexts:
        context.close()


@pytest.fixture
def page(visiting: Visiting) -> Page:
    """The start page, for an admin."""
    return visiting()


def log_in(context: BrowserContext, console: RunningServer, key: str) -> None:
    """As the login form does, without waiting for a page."""
    answer = context.request.post(
        "/ui/login", form={"key": key}, headers={"Origin": console.url}, max_redirects=0, fail_on_status_code=False
    )
    assert answer.status == 303, answer.text()
