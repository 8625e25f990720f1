"""Sandboxes in the console: what the list and their own pages say, and what can be done there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from tests.conftest import RunningServer, wait_until
from tests.console.conftest import Visiting
from tests.console.notebooks import Notebook

from cloche.api.console.sandbox_list import PAGE_ROWS, SandboxPageQuery, decode_sandbox_query, explain_ending
from cloche.model import SandboxSpec
from cloche.store.base import HOST_DIED_REASON, SHUT_DOWN_REASON, RecordState, SandboxRecord

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

HOSTILE = '"><img src=x onerror="document.title=1"><script>document.title="taken"</script>'
UNKNOWN = "i" + "0" * 20
MANY = 500
PACKED_BYTES = 40_000  # of a refresh of the list, with a hundred rows: ten times less than they are
MORPH_MILLISECONDS = 400  # 40 on a quiet machine


class Client:
    """Somebody who makes sandboxes, as clients do."""

    def __init__(self, url: str, key: str):
        self.key = key
        self._http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)

    def make(self, **asked: Any) -> str:
        return str(self.ask("POST", "/api/v1/sandboxes", {"timeout_seconds": 600, **asked})["id"])

    def ask(self, method: str, path: str, body: object = None) -> Any:
        answer = self._http.request(method, path, json=body)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def end_all(self) -> None:
        for each in self.ask("GET", "/api/v1/sandboxes"):
            self.ask("DELETE", f"/api/v1/sandboxes/{each['id']}")
        self._http.close()


Someone = Callable[..., Client]


@pytest.fixture
def someone(console: RunningServer) -> Iterator[Someone]:
    """A new owner with a key; the admin of this server is another."""
    admin, made = Client(console.url, console.key), []

    def new(owner: str) -> Client:
        key = admin.ask("POST", "/admin/keys", {"owner": owner, "role": "user", "name": "", "expires_at": None})["key"]
        made.append(Client(console.url, key))
        return made[-1]

    yield new
    for each in made:
        each.end_all()


def row(page: Page, id: str) -> Locator:
    return page.locator(f'tr[data-id="{id}"]')


def act(page: Page, id: str, name: str) -> None:
    row(page, id).get_by_role("button", name=f"{name} {id}").click()


def confirm(page: Page, name: str) -> None:
    page.locator("dialog[open]").get_by_role("button", name=name, exact=True).click()


def test_one_that_is_killed_in_the_list_says_so_there_and_on_its_own_page(someone: Someone, visiting: Visiting) -> None:
    mine = someone("list-kill")
    gone, kept = mine.make(), mine.make()
    page = visiting("/sandboxes", key=mine.key)
    act(page, gone, "Kill")
    confirm(page, "Kill")
    page.locator("#toasts").get_by_text(f"{gone} was killed").wait_for()
    row(page, gone).get_by_text("Killed by its owner, in the console").wait_for()
    assert row(page, gone).get_attribute("data-state") == "ended"
    assert row(page, gone).get_by_role("button").count() == 0
    assert row(page, kept).get_attribute("data-state") == "running"
    assert [each["id"] for each in mine.ask("GET", "/api/v1/sandboxes")] == [kept]
    page.goto(f"/ui/sandboxes/{gone}")
    assert page.locator(".notice.ended").inner_text().startswith("Killed by its owner, in the console")


def test_pause_resume_and_renew_show_in_the_row(someone: Someone, visiting: Visiting) -> None:
    mine = someone("list-acts")
    id = mine.make()
    page = visiting("/sandboxes", key=mine.key)
    act(page, id, "Pause")
    row(page, id).get_by_text("stands still").wait_for()
    assert mine.ask("GET", f"/api/v1/sandboxes/{id}")["state"] == "paused"
    act(page, id, "Resume")
    row(page, id).get_by_role("button", name=f"Renew {id}").wait_for()
    assert mine.ask("GET", f"/api/v1/sandboxes/{id}")["state"] == "running"
    act(page, id, "Renew")
    page.locator("dialog[open] input").fill("120")
    confirm(page, "Renew")
    row(page, id).get_by_text(re.compile(r"^1h 59m$|^2h 0m$")).wait_for()


def test_the_deadline_counts_down_between_two_looks_at_the_server(someone: Someone, visiting: Visiting) -> None:
    mine = someone("list-clock")
    id = mine.make()
    page = visiting("/sandboxes", key=mine.key)
    page.get_by_label("Live", exact=True).uncheck()  # the page alone goes on counting
    left = row(page, id).locator("[data-left]")
    seen = [left.inner_text()]
    wait_until(lambda: left.inner_text() != seen[-1])
    assert seconds_of(left.inner_text()) < seconds_of(seen[0])
    assert int(float(left.get_attribute("data-left") or 0)) >= seconds_of(left.inner_text())


def seconds_of(text: str) -> int:
    return sum(int(count) * {"h": 3600, "m": 60, "s": 1}[unit] for count, unit in re.findall(r"(\d+)([hms])", text))


def test_several_are_chosen_kept_through_a_refresh_and_killed_at_once(someone: Someone, visiting: Visiting) -> None:
    mine = someone("list-many")
    ids = [mine.make() for _ in range(3)]
    page = visiting("/sandboxes", key=mine.key)
    for id in ids[:2]:
        row(page, id).get_by_role("checkbox").check()
    row(page, ids[1]).get_by_role("button", name="Pause").focus()
    with page.expect_response(lambda answer: "/ui/sandboxes" in answer.url and "hx-request" in answer.request.headers):
        later = mine.make()
    row(page, later).wait_for()
    assert [row(page, id).get_by_role("checkbox").is_checked() for id in (*ids, later)] == [True, True, False, False]
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == f"Pause {ids[1]}"
    assert page.locator("[data-chosen-count]").inner_text() == "2 chosen"
    page.locator("[data-kill-chosen]").click()
    confirm(page, "Kill")
    page.locator("#toasts").get_by_text("2 killed").wait_for()
    for id in ids[:2]:
        row(page, id).get_by_text("Killed by its owner, in the console").wait_for()
    assert {each["id"] for each in mine.ask("GET", "/api/v1/sandboxes")} == {ids[2], later}
    assert page.locator("[data-chosen]").is_hidden()


def test_those_that_ended_say_why(someone: Someone, visiting: Visiting) -> None:
    mine = someone("list-ends")
    expired, killed = mine.make(timeout_seconds=1), mine.make()
    mine.ask("DELETE", f"/api/v1/sandboxes/{killed}")
    page = visiting("/sandboxes", key=mine.key)
    row(page, expired).get_by_text("Its deadline passed").wait_for()
    row(page, killed).get_by_text("Killed by its owner").wait_for()
    page.goto(f"/ui/sandboxes/{expired}")
    assert "Renew it before its deadline" in page.locator(".notice.ended").inner_text()
    page.goto("/ui/sandboxes?state=ended&text=deadline+passed")
    assert [each.get_attribute("data-id") for each in page.locator("tbody tr").all()] == [expired]


def test_a_user_sees_their_own_and_an_admin_all_with_their_owners(someone: Someone, visiting: Visiting) -> None:
    ada, ben = someone("ada-lists"), someone("ben-lists")
    hers, his = ada.make(), ben.make()
    page = visiting("/sandboxes", key=ada.key)
    assert row(page, hers).count() == 1 and row(page, his).count() == 0
    assert page.locator("select[name=owner]").count() == 0
    page = visiting("/sandboxes?owner=ben-lists")
    assert row(page, his).locator(".owner").inner_text() == "ben-lists" and row(page, hers).count() == 0
    act(page, his, "Kill")
    confirm(page, "Kill")
    row(page, his).get_by_text("Killed by an admin (local), in the console").wait_for()


def test_a_foreign_sandbox_is_answered_as_one_that_never_was(
    someone: Someone, visiting: Visiting, console: RunningServer
) -> None:
    ada, ben = someone("ada-asks"), someone("ben-has")
    his = ben.make()
    page = visiting("/sandboxes", key=ada.key)
    csrf = page.locator("meta[name=csrf]").get_attribute("content") or ""
    headers = {"Origin": console.url, "X-Cloche-Csrf": csrf}

    def answer(id: str, method: str, what: str) -> tuple[int, str]:
        accept = {"Accept": "text/html" if method == "GET" else "*/*"}
        got = page.context.request.fetch(f"/ui/sandboxes/{id}{what}", method=method, headers={**headers, **accept})
        return got.status, re.sub(r"req_\w+", "REQ", got.text()).replace(id, "ID")

    acts = [("POST", f"/{name}") for name in ("pause", "resume", "renew", "kill", "processes/p1/kill")]
    for method, what in [("GET", ""), *acts]:
        foreign = answer(his, method, what)
        assert foreign == answer(UNKNOWN, method, what)
        assert foreign[0] == 404
    assert ben.ask("GET", f"/api/v1/sandboxes/{his}")["state"] == "running"


def test_several_that_are_foreign_are_not_killed(someone: Someone, visiting: Visiting, console: RunningServer) -> None:
    ada, ben = someone("ada-kills"), someone("ben-lives")
    his, hers = ben.make(), ada.make()
    page = visiting("/sandboxes", key=ada.key)
    csrf = page.locator("meta[name=csrf]").get_attribute("content") or ""
    headers = {"Origin": console.url, "X-Cloche-Csrf": csrf}
    answer = page.context.request.post("/ui/sandboxes/kill", data={"ids": [his, hers]}, headers=headers)
    assert answer.json()["said"].startswith("1 killed; 1 not: ")
    assert ben.ask("GET", f"/api/v1/sandboxes/{his}")["state"] == "running"


def test_names_that_a_client_chose_are_text_and_nothing_else(someone: Someone, visiting: Visiting) -> None:
    mine = someone("list-hostile")
    id = mine.make(metadata={HOSTILE[:30]: HOSTILE, "name": HOSTILE})
    command = f"echo '{HOSTILE}' > /dev/null; sleep 600"
    mine.ask("POST", f"/api/v1/sandboxes/{id}/processes", {"command": command})
    page = visiting("/sandboxes", key=mine.key)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.reload()
    assert HOSTILE[:20] in row(page, id).inner_text()
    page.goto(f"/ui/sandboxes/{id}")
    page.get_by_role("region", name="Table of commands").get_by_text("sleep 600").wait_for()
    assert page.locator("dl.pairs-all").inner_text().count(HOSTILE) == 2
    assert page.locator("main img, main script").count() == 0
    assert page.title() == f"{id} · Cloche"
    page.goto("/ui/sandboxes?text=" + "%22%3E%3Cscript%3E&template=%22%3E%3Cimg%20src=x%3E")
    assert page.locator("main img, main script").count() == 0
    assert not faults


def test_a_sandbox_page_shows_its_properties_and_processes(someone: Someone, visiting: Visiting) -> None:
    mine = someone("page-facts")
    id = mine.make(metadata={"run": "seven"}, limits={"processes": 77})
    mine.ask("POST", f"/api/v1/sandboxes/{id}/processes", {"command": "exec python3 -m http.server 8123"})
    page = visiting(f"/sandboxes/{id}", key=mine.key)
    page.locator(".badge", has_text="8123").wait_for()
    for text in ("page-facts", "run\nseven", "Processes\n77", "nothing but its own loopback", "http.server"):
        assert text in page.locator("main").inner_text()
    assert page.locator(f'a[href="/ui/playground?sandbox={id}"]').is_visible()
    assert page.get_by_text("Audit log").count() == 0
    page.get_by_role("button", name="Kill process").click()
    confirm(page, "Kill")
    page.get_by_text("None beside the kernels").wait_for()
    page = visiting(f"/sandboxes/{id}")
    page.get_by_role("button", name="Show who did what").click()
    page.get_by_role("region", name="Audit log of this sandbox").get_by_text("sandbox.created").wait_for()


def test_typed_filters_narrow_the_list_and_stay_in_the_address(someone: Someone, visiting: Visiting) -> None:
    mine = someone("list-finds")
    one, other = mine.make(metadata={"run": "alpha"}), mine.make(metadata={"run": "beta"})
    page = visiting("/sandboxes", key=mine.key)
    page.locator("input[type=search]").fill("run=alp")
    row(page, other).wait_for(state="detached")
    assert row(page, one).is_visible() and "text=run%3Dalp" in page.url
    page.locator("input[type=search]").fill("nothing is like this")
    page.get_by_text("No sandbox fits.").wait_for()
    page.goto("/ui/sandboxes?sort=age&reverse=1")
    assert [each.get_attribute("data-id") for each in page.locator("tbody tr").all()] == [one, other]


def test_a_list_that_cannot_be_refreshed_says_that_it_is_old(someone: Someone, visiting: Visiting) -> None:
    mine = someone("list-old")
    id = mine.make()
    page = visiting("/sandboxes", key=mine.key)
    page.route("**/ui/sandboxes?*", lambda route: route.abort())
    page.get_by_role("link", name="Running").click()
    page.locator("#toasts").get_by_text("The server cannot be reached").wait_for()
    page.locator("#sandbox-rows[data-stale]").wait_for()
    assert row(page, id).is_visible()
    page.unroute("**/ui/sandboxes?*")
    page.get_by_role("link", name="Paused").click()
    row(page, id).wait_for(state="detached")
    assert page.locator("#sandbox-rows[data-stale]").count() == 0


def test_invalid_queries_are_refused_in_words(visiting: Visiting) -> None:
    page = visiting("/sandboxes?sort=colour")
    assert "Sandboxes cannot be sorted by 'colour'" in page.locator("main").inner_text()


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [
        ("expired", "its deadline passed", "Its deadline passed"),
        ("killed", SHUT_DOWN_REASON, "The server stopped"),
        ("killed", "the key was revoked", "The key was revoked"),
        ("lost", HOST_DIED_REASON, "The server died"),
        ("lost", None, "The server died"),
        ("lost", "its init died (signal 9)", "Its first process died"),
        ("lost", "its files could not be read", "It broke"),
    ],
)
def test_every_way_to_end_has_words(state: RecordState, reason: str | None, says: str) -> None:
    spec = SandboxSpec(owner="x", template="python@1")
    record = SandboxRecord(id=UNKNOWN, spec=spec, state=state, instance="h", created_at=1.0, end_reason=reason)
    ending = explain_ending(record)
    assert ending.headline == says and ending.detail


def test_a_list_address_restores_its_filters() -> None:
    for asked in (
        SandboxPageQuery(),
        SandboxPageQuery(state="ended", text="a&b=c", page=3),
        SandboxPageQuery(sort="cpu", reverse=True, owner="x+y"),
    ):
        query = dict(httpx2.URL("http://x" + asked.link(page=asked.page)).params)
        assert decode_sandbox_query(query) == asked
    assert SandboxPageQuery(page=7).link(state="paused") == "/ui/sandboxes?state=paused"


def test_on_a_phone_a_refresh_keeps_where_one_was(someone: Someone, visiting: Visiting) -> None:
    mine = someone("list-phone")
    ids = [mine.make() for _ in range(8)]
    page = visiting("/sandboxes", key=mine.key, phone=True)
    row(page, ids[0]).scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    mine.ask("DELETE", f"/api/v1/sandboxes/{ids[0]}")
    row(page, ids[0]).get_by_text("Killed by its owner").wait_for()
    assert before > 500 and abs(page.evaluate("scrollY") - before) < 150  # rows that ended are a little lower
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.long
def test_a_list_of_five_hundred_stays_usable(someone: Someone, visiting: Visiting, console: RunningServer) -> None:
    room = Client(console.url, console.key).ask("GET", "/admin/capacity")["sandboxes"]
    if room["capacity"] - room["in_use"] < 1.2 * MANY:
        pytest.skip(f"this host has room for {room['capacity']} sandboxes only")
    mine = someone("list-crowd")
    ids = [mine.make(metadata={"number": str(number)}) for number in range(MANY)]
    page = visiting("/sandboxes", key=mine.key)
    assert page.locator("tbody tr").count() == PAGE_ROWS
    assert f"1–{PAGE_ROWS} of {MANY}" in page.locator(".pager").inner_text()
    took, size = page.evaluate(MEASURE)
    assert sorted(took)[len(took) // 2] < MORPH_MILLISECONDS
    assert size < PACKED_BYTES
    page.get_by_role("link", name="Next").click()
    page.get_by_text("page 2 of 5").wait_for()
    page.locator("input[type=search]").fill(ids[3])
    page.get_by_text("1–1 of 1").wait_for()
    act(page, ids[3], "Kill")
    confirm(page, "Kill")
    row(page, ids[3]).get_by_text("Killed by its owner, in the console").wait_for()


# How long a refresh keeps the page busy, some times, and how many bytes it took.
MEASURE = """async () => {
  const place = document.getElementById("sandbox-rows"), took = [];
  for (let time = 0; time < 5; time++) {
    const text = await (await fetch(place.dataset.liveUrl, { headers: { "HX-Request": "true" } })).text();
    const began = performance.now();
    Idiomorph.morph(place, text, { morphStyle: "innerHTML" });
    place.getBoundingClientRect();
    took.push(performance.now() - began);
  }
  const loaded = performance.getEntriesByType("resource").filter((each) => each.name.endsWith("/ui/sandboxes"));
  return [took, Math.max(...loaded.map((each) => each.encodedBodySize))];
}"""


def test_actions_stay_visible_with_long_names(someone: Someone, visiting: Visiting) -> None:
    mine = someone("an-owner-with-quite-a-long-name-of-its-own")
    id = mine.make()
    page = visiting("/sandboxes?owner=an-owner-with-quite-a-long-name-of-its-own")
    kill = row(page, id).get_by_role("button", name=f"Kill {id}").bounding_box()
    table = page.locator(".table").bounding_box()
    assert kill is not None and table is not None
    assert kill["x"] + kill["width"] <= table["x"] + table["width"] <= 1280


def test_an_admin_opens_anybodys_sandbox_in_the_playground(someone: Someone, visiting: Visiting) -> None:
    id = someone("played-with").make()
    page = visiting(f"/sandboxes/{id}")
    page.get_by_role("link", name="Open in the playground").click()
    notebook = Notebook(page)
    notebook.prints(notebook.run("print(6 * 7)"), "42")
    page.locator("#panel-tab-chat").click()
    page.locator("#panel-chat textarea").fill("```python\n1\n```")
    page.locator("#panel-chat textarea").press("Enter")
    notebook.shows(page.locator("#panel-chat"), "This sandbox is another owner's")
