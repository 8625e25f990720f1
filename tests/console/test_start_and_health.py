"""The first page, the page of the server's health, and `cloche ui`, which leads there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
from tests.conftest import RunningServer, wait_until
from tests.console.conftest import Visiting

from cloche.api.console.health import explain_verdict
from cloche.engine.operations.health import HealthVerdict

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CLOCHE = Path(sys.executable).with_name("cloche")


@pytest.fixture(scope="module")
def user_key(console: RunningServer) -> Iterator[str]:
    """Of an owner with one sandbox; the admin has none."""
    headers = {"Authorization": f"Bearer {console.key}"}
    asked = {"owner": "starter", "role": "user", "name": "", "expires_at": None}
    key = str(httpx2.post(f"{console.url}/admin/keys", json=asked, headers=headers).json()["key"])
    own = {"Authorization": f"Bearer {key}"}
    made = httpx2.post(f"{console.url}/api/v1/sandboxes", json={"timeout_seconds": 900}, headers=own).json()
    yield key
    httpx2.delete(f"{console.url}/api/v1/sandboxes/{made['id']}", headers=own)


def text_of(page: Page) -> str:
    return page.locator("main").inner_text()


def test_the_first_page_shows_sandboxes_and_connection_help_and_never_a_key(
    visiting: Visiting, console: RunningServer, user_key: str
) -> None:
    page = visiting("/", key=user_key)
    assert page.locator(".now .figure").first.inner_text() == "1"
    assert page.locator(".newest li").count() == 1
    for address in ("/v1", "/e2b", "/mcp", "/librechat/v1", "/opensandbox/v1"):
        assert page.locator(".url code", has_text=f"{console.url}{address}").count()
    said = page.content()
    assert user_key not in said and console.key not in said and said.count("YOUR_KEY") > 5
    assert "Health" not in page.locator(".now").inner_text()
    page.locator(".newest a.mono").click()
    page.locator("h1.id").wait_for()


def test_an_admin_sees_room_and_health_on_the_first_page(visiting: Visiting, user_key: str) -> None:
    page = visiting("/")
    assert re.search(r"Room\s+\d+ of \d+ places", page.locator(".now").inner_text())
    assert "A program last ran" in page.locator("[data-health-line]").inner_text()
    assert "starter" in page.locator(".newest").inner_text()


def test_a_copy_button_copies_the_text_beside_it(visiting: Visiting, console: RunningServer, user_key: str) -> None:
    page = visiting("/", key=user_key)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the settings for E2B SDKs").click()
    page.get_by_role("button", name="Copy the settings for E2B SDKs").get_by_text("Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines()[1] == f"export E2B_API_URL={console.url}/e2b"


def test_health_shows_an_admin_the_load_and_the_doctors_report(visiting: Visiting, console_data: Path) -> None:
    page = visiting("/health")
    said = text_of(page)
    for part in ("All is well.", "In the queue", "Memory", "Kept free", "free of", "Nurseries and pools", "SQLite"):
        assert part in said
    assert re.search(r"python@\w+\s+ready", said)
    assert page.locator("#doctor .checks").count() == 0  # only when it is asked
    page.get_by_role("button", name="Ask the doctor").click()
    page.locator("#doctor").get_by_text("Sandboxes can run here.").wait_for()
    assert "seccomp" in page.locator("#doctor").inner_text()
    page.get_by_role("button", name="Measure").click()
    page.get_by_role("region", name="What takes room").get_by_text("templates", exact=True).wait_for()
    with page.expect_response(lambda answer: answer.url.endswith("/ui/health")):
        pass  # a refresh leaves what was asked for where it is
    assert "seccomp" in page.locator("#doctor").inner_text()
    assert str(console_data) in text_of(page)


def test_health_tells_a_user_the_verdict_and_nothing_of_the_host(
    visiting: Visiting, console: RunningServer, console_data: Path, user_key: str
) -> None:
    page = visiting("/health", key=user_key)
    assert text_of(page).split("Live")[-1].strip().startswith("All is well.")
    for part in (str(console_data), "Nurseries", "SQLite", "doctor"):
        assert part not in page.content()
    for path in ("doctor", "disk"):
        assert page.context.request.get(f"/ui/health/{path}", fail_on_status_code=False).status == 403


def test_errors_are_explained_in_words_even_unexpected_ones() -> None:
    known, other = (HealthVerdict(ok=False, why=why, age_seconds=9.0) for why in ("nursery_failed", "no_such_code"))
    assert explain_verdict(known).startswith("The process that sandboxes are forked from")
    assert "no_such_code" in explain_verdict(other)
    assert explain_verdict(HealthVerdict(ok=True, why="", age_seconds=1.0)) == ""


def cloche_ui(place: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "CLOCHE_DATA_DIR": str(place), **env}
    return subprocess.run([CLOCHE, "ui", *options], env=given, capture_output=True, text=True, timeout=60, check=False)


def test_cloche_ui_prints_a_link_that_opens_the_console_once(
    browser: Browser, console: RunningServer, console_data: Path
) -> None:
    done = cloche_ui(console_data)
    assert done.returncode == 0, done.stderr
    link = done.stdout.strip()
    assert link.startswith(f"{console.url}/ui/login#")
    for says in ("Welcome", "Log in"):
        context = browser.new_context()
        page = context.new_page()
        page.goto(link)
        page.get_by_role("heading", name=says).first.wait_for()
        if says != "Welcome":
            page.get_by_text("This link was used already").wait_for()
        context.close()


def test_cloche_ui_opens_a_browser_if_told_to(console_data: Path, console: RunningServer, tmp_path: Path) -> None:
    opened, script = tmp_path / "opened", tmp_path / "browser"
    script.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    script.chmod(0o755)
    done = cloche_ui(console_data, "--open", BROWSER=f"{script} %s")
    assert done.returncode == 0, done.stderr
    wait_until(opened.exists)
    wait_until(lambda: opened.read_text() == done.stdout.strip())


def test_cloche_ui_without_a_server_says_so(tmp_path: Path) -> None:
    done = cloche_ui(tmp_path)
    assert (done.returncode, done.stdout) == (125, "")
    assert "no server runs in the data directory" in done.stderr


def test_login_links_are_not_given_over_the_network(console: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {console.key}"}
    answer = httpx2.post(f"{console.url}/ui/login/links", headers=headers)
    assert answer.status_code == 404
