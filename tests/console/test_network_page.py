"""The network log in the console: what was tried, by which rule, and who sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
from tests.conftest import RunningServer, serving, with_template
from tests.console.conftest import Visiting
from tests.network.neighbour import Neighbour, living_next_door

import cloche
from cloche.model import Template

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def there() -> Iterator[Neighbour]:
    with living_next_door() as neighbour:
        yield neighbour


@pytest.fixture(scope="module")
def console(template: Template, tmp_path_factory: pytest.TempPathFactory, there: Neighbour) -> Iterator[RunningServer]:
    """One whose sandboxes may have a network, unlike that of the other pages."""
    place: Path = with_template(tmp_path_factory.mktemp("networked") / "data", template)
    with serving(place, env=there.variables("*.test:*", "pypi.org", deny=("admin.test",))) as running:
        yield running


@pytest.fixture(scope="module")
def user(console: RunningServer) -> str:
    """A key of somebody who is no admin."""
    made = httpx2.post(
        f"{console.url}/admin/keys",
        headers={"Authorization": f"Bearer {console.key}"},
        json={"owner": "bob", "role": "user"},
        trust_env=False,
    )
    return str(made.json()["key"])


def box_of(console: RunningServer, there: Neighbour, key: str = "") -> cloche.Sandbox:
    policy = {"allow": [there.at("*.test"), there.at("api.test")], "deny": ["other.test"]}
    return cloche.Sandbox(url=console.url, api_key=key or console.key, network=policy)


def lines(page: Page) -> list[list[str]]:
    """The cells of each row, without its time."""
    rows = page.locator("table.network tbody tr").all()
    return [[cell.strip() for cell in row.locator("td").all_inner_texts()[1:]] for row in rows]


def test_each_attempt_shows_its_deciding_rule_live(
    console: RunningServer, there: Neighbour, visiting: Visiting
) -> None:
    with box_of(console, there) as box:
        page = visiting(f"/network?sandbox={box.id}")
        assert "Nothing fits" in page.locator("#network-rows").inner_text()
        box.run(there.fetch("api.test") + there.fetch("other.test"))
        page.locator("table.network").wait_for()  # by itself
        page.locator("tr", has_text="other.test").wait_for()
        denied, allowed = lines(page)
        assert denied[:6] == [
            "denied",
            there.at("other.test"),
            "HTTP",
            "denied by the sandbox's network policy: other.test",
            box.id,
            "local",
        ]
        assert allowed[:4] == ["allowed", there.at("api.test"), "HTTP", f"allow {there.at('*.test')}"]
        assert allowed[6].endswith(" B") and allowed[8].endswith("ms")
        page.goto("/ui/network?verdict=denied&host=OTHER")
        assert [line[:2] for line in lines(page)] == [["denied", there.at("other.test")]]
    page.goto(f"/ui/network?sandbox={box.id}")  # it has ended: the server's own log knows
    assert [line[0] for line in lines(page)] == ["denied", "allowed"]


def test_many_attempts_come_in_pages_and_as_sums_once_the_sandbox_has_ended(
    console: RunningServer, there: Neighbour, visiting: Visiting
) -> None:
    with box_of(console, there) as box:
        box.run("for _ in range(130):\n" + "".join(f"    {line}\n" for line in there.fetch("other.test").splitlines()))
        page = visiting(f"/network?sandbox={box.id}")
        rows = page.locator("table.network tbody tr")
        assert rows.count() == 100
        page.get_by_role("link", name="Older").click()
        page.get_by_role("link", name="Newest").wait_for()
        assert rows.count() == 30
    page.goto(f"/ui/network?sandbox={box.id}")
    sums = [int(each.split()[0]) for each in page.locator(".there .muted").all_inner_texts()]
    assert rows.count() - len(sums) + sum(sums) == 130


def test_a_destination_can_be_checked_against_the_rules(
    console: RunningServer, there: Neighbour, visiting: Visiting
) -> None:
    with box_of(console, there) as box:
        page = visiting(f"/network?sandbox={box.id}")
        assert there.at("*.test") in page.locator("section", has_text="may reach").inner_text()
        said = page.locator("#opinion")
        for place, verdict, rule in (
            (f"http://{there.at('api.test')}/x?y", "would be let through", f"allow {there.at('*.test')}"),
            ("other.test", "denied by the sandbox's network policy", "deny other.test"),
            (there.at("admin.test"), "denied by the operator's network policy: admin.test", "deny admin.test"),
            ("0x7f.1", "127.0.0.1:443", "no rule allows it"),
            ("no host", "not the name of a host", ""),
        ):
            page.get_by_label("Host, host:port or URL").fill(place)
            page.get_by_role("button", name="Ask").click()
            said.get_by_text(verdict).first.wait_for()
            assert rule in said.inner_text()
    page.goto("/ui/network")
    page.get_by_label("Host, host:port or URL").fill("pypi.org")
    page.get_by_role("button", name="Ask").click()
    said.get_by_text("to a sandbox that asks for it").wait_for()


def test_a_user_sees_their_own_attempts_only(
    console: RunningServer, there: Neighbour, visiting: Visiting, user: str
) -> None:
    with box_of(console, there) as of_admin, box_of(console, there, user) as own:
        of_admin.run(there.fetch("api.test"))
        own.run(there.fetch("www.api.test"))
        page = visiting("/network", key=user)
        assert [line[1] for line in lines(page)] == [there.at("www.api.test")]
        assert of_admin.id not in page.content()
        assert "127.0.0.77" not in page.content()  # where names lead is the operator's business
        for id in (of_admin.id, "doesnotexist"):
            page.goto(f"/ui/network?sandbox={id}")
            assert "Nothing fits" in page.locator("#network-rows").inner_text()
            assert "may reach" not in page.locator("main").inner_text()
        page = visiting("/network?owner=bob")
        assert {line[5] for line in lines(page)} == {"bob"}
        page = visiting("/network", phone=True)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
