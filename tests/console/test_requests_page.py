"""Requests for a model's answer, followed from the list to what each of them did."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from tests.conftest import RunningServer, serving, with_template
from tests.console.conftest import PATIENCE_MILLISECONDS, Visiting, log_in
from tests.console.wire import Insider, Stranger, new_key
from tests.openai.conftest import CODE_INTERPRETER, UPSTREAM_KEY
from tests.openai.upstream import Code, ScriptedUpstream, Text, Usage, WaitFor

from cloche.api.console.requests import MIN_BAR_WIDTH
from cloche.model import Template

expect.set_options(timeout=PATIENCE_MILLISECONDS)

CONFIG = """
[gateway]
capture = true

[[upstream]]
models = ["chat-*"]
base_url = "{url}"
api = "chat"
api_key = "env:TEST_UPSTREAM_KEY"
"""
HOSTILE = "<img src=x onerror=\"document.title='reached'\"><script>document.title='reached'</script>"


def asked(server: RunningServer, text: str, model: str = "cloche/echo", key: str = "") -> dict[str, Any]:
    """The response to that, and the id of the request."""
    id = f"req-{secrets.token_hex(6)}"
    body = {"model": model, "input": text, "tools": [CODE_INTERPRETER]}
    told = Stranger(server).ask("POST", "/v1/responses", body, {"x-api-key": key or server.key, "x-request-id": id})
    return {**told.json(), "request": id}


def code(text: str) -> str:
    return f"```python\n{text}\n```"


def steps(page: Page) -> list[str]:
    return [each.strip() for each in page.locator("table.waterfall .step-name").all_inner_texts()]


def bars(page: Page) -> list[tuple[float, float]]:
    """Where each bar begins and ends on the page, all at one moment of its layout."""
    measure = "bars => bars.map(bar => bar.getBoundingClientRect()).map(box => [box.left, box.right])"
    return [(begin, end) for begin, end in page.locator("svg.bar .whole").evaluate_all(measure)]


def seconds(took: str) -> float:
    """12.3 ms, 1.40 s."""
    number, unit = took.split(" ")
    return float(number) * {"ms": 0.001, "s": 1.0}[unit]


# --- a server that records neither prompts nor code


def test_a_request_is_followed_from_the_list_to_its_linked_records(visiting: Visiting, console: RunningServer) -> None:
    secret = secrets.token_hex(8)
    made = asked(console, code(f"import time; time.sleep(0.3); print('{secret}')"))
    page = visiting("/requests")
    row = page.locator("tr", has=page.get_by_role("link", name=made["request"]))
    assert row.locator(".badge").inner_text() == "ok"
    assert row.locator(".model").inner_text() == "cloche/echo"
    page.keyboard.press("/")
    page.keyboard.type(made["output"][0]["container_id"])
    page.keyboard.press("Enter")
    page.get_by_role("link", name=made["request"]).click()
    assert page.locator("h1").inner_text() == made["request"]
    assert steps(page) == ["Request", "Model call", "Container", "Code", "Follow-up call"]
    assert set(page.locator("tr.step .badge").all_inner_texts()) == {"ok"}
    sandbox = made["output"][0]["container_id"].removeprefix("cntr_")
    links = page.locator(f'a[href="/ui/sandboxes/{sandbox}"]')
    assert links.count() == 3  # the request, the container, the code
    assert made["id"] in page.locator(".facts").inner_text()
    assert " in, " in page.locator(".facts").inner_text()
    assert secret not in page.content()
    assert "not recorded on this server" in page.locator("main").inner_text()


def test_the_waterfall_shows_when_each_step_was(visiting: Visiting, console: RunningServer) -> None:
    made = asked(console, code("import time; time.sleep(0.5)"))
    page = visiting(f"/requests/{made['request']}")
    whole, first, container, ran, second = bars(page)
    assert all(whole[0] - 1 <= begin < end <= whole[1] + 1 for begin, end in (first, container, ran, second))
    narrowest = (whole[1] - whole[0]) * MIN_BAR_WIDTH / 100  # a bar at the very end begins so much earlier
    assert first[0] <= container[0] <= ran[0] <= ran[1] <= second[0] + narrowest + 1
    rows = [page.locator(f"tr.step.{kind} td.num").nth(1).inner_text() for kind in ("execution", "request")]
    took, of_all = seconds(rows[0]), seconds(rows[1])
    assert 0.49 <= took <= of_all
    assert abs((ran[1] - ran[0]) / (whole[1] - whole[0]) - took / of_all) < 0.02


def test_failures_are_explained_in_words(visiting: Visiting, console: RunningServer) -> None:
    made = asked(console, code("1 / 0"))
    page = visiting(f"/requests/{made['request']}")
    assert page.locator("tr.execution .badge").inner_text() == "raised"
    assert "raised an exception" in page.locator("tr.execution th").inner_text()


def test_requests_are_filtered_and_their_owner_sees_no_others(visiting: Visiting, console: RunningServer) -> None:
    key, other = new_key(console, "reader")["key"], new_key(console, "writer")["key"]
    own, foreign = asked(console, "hello", key=key), asked(console, "hello", key=other)
    page = visiting("/requests?since=1h", key)
    assert own["request"] in page.content()
    assert foreign["request"] not in page.content()
    assert "Owner" not in page.locator("thead").inner_text()
    page.get_by_label("Outcome").select_option("!ok")
    page.get_by_text("No request fits").wait_for()
    page.get_by_role("link", name="Show all").click()
    page.get_by_role("combobox", name="Model").fill("no-such-model")
    page.keyboard.press("Enter")
    page.get_by_text("No request fits").wait_for()
    for path in (f"/requests/{foreign['request']}", "/requests/never-was"):
        assert Insider(console, key).page(path).status == 404
    assert foreign["request"] in Insider(console).page("/requests?owner=writer").text
    assert own["request"] not in Insider(console).page("/requests?owner=writer").text


def test_many_requests_come_in_pages(visiting: Visiting, console: RunningServer) -> None:
    key = new_key(console, "many")["key"]
    for _ in range(53):
        asked(console, "hello", key=key)
    page = visiting("/requests", key)
    assert page.locator("tbody tr").count() == 50
    page.get_by_role("link", name="Older").click()
    page.wait_for_url("**before=*")
    assert page.locator("tbody tr").count() == 3
    page.get_by_role("link", name="Newest").click()
    assert page.locator("tbody tr").count() == 50


def test_an_id_that_a_client_has_chosen_is_shown_as_text(visiting: Visiting, console: RunningServer) -> None:
    id = 'a"><b>/../x?y=1#z'
    headers = {"x-api-key": console.key, "x-request-id": id}
    answer = Stranger(console).ask("POST", "/v1/responses", {"model": "cloche/echo", "input": "x"}, headers)
    assert answer.status == 200
    page = visiting("/requests")
    link = page.locator("tbody a").first
    shown = link.inner_text()
    link.click()
    assert page.locator("h1").inner_text() == shown
    assert page.locator("main b").count() == 0


# --- a server that does, before a scripted model


class Gateway(NamedTuple):
    server: RunningServer
    upstream: ScriptedUpstream


@pytest.fixture(scope="module")
def gateway(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    place = tmp_path_factory.mktemp("capturing")
    with ScriptedUpstream() as upstream:
        (place / "cloche.toml").write_text(CONFIG.format(url=upstream.url))
        env = {"CLOCHE_CONFIG": str(place / "cloche.toml"), "TEST_UPSTREAM_KEY": UPSTREAM_KEY}
        with serving(with_template(place / "data", template), env=env) as server:
            yield Gateway(server, upstream)


@pytest.fixture
def look(browser: Browser, gateway: Gateway) -> Iterator[Callable[[str], Page]]:
    """Opens a page of that server, for its admin."""
    contexts: list[BrowserContext] = []

    def visit(path: str) -> Page:
        context = browser.new_context(base_url=gateway.server.url)
        context.set_default_timeout(PATIENCE_MILLISECONDS)
        contexts.append(context)
        log_in(context, gateway.server, gateway.server.key)
        page = context.new_page()
        page.goto(f"/ui{path}")
        return page

    yield visit
    for each in contexts:
        each.close()


def test_code_and_output_are_shown_where_capture_is_on_and_as_nothing_but_text(
    gateway: Gateway, look: Callable[[str], Page]
) -> None:
    model = gateway.upstream.play(
        "chat",
        [Code(f"print({HOSTILE!r})"), Usage(input=1100, output=70, cached=1024)],
        [Text("It is 42."), Usage(input=2000, output=50)],
    )
    made = asked(gateway.server, "What is it?", model)
    page = look(f"/requests/{made['request']}")
    assert page.locator("pre.output").inner_text().strip() == HOSTILE
    assert "print(" in page.locator("pre.code").inner_text()
    page.get_by_text("What the model was asked").first.click()
    assert "What is it?" in page.locator("pre.prompt").first.inner_text()
    assert "reached" not in page.title()
    assert page.locator("main img").count() == 0
    assert "3,100 in, 120 out, 1,024 cached" in page.locator(".facts").inner_text()
    assert [each.inner_text().split("\n")[0] for each in page.locator("tr.model_call .tokens").all()] == [
        "1,100 in, 70 out",
        "2,000 in, 50 out",
    ]
    assert page.locator("tr.model_call svg .waiting").count() == 2
    assert UPSTREAM_KEY not in page.content()


def test_a_request_that_goes_on_is_shown_until_it_ends(gateway: Gateway, look: Callable[[str], Page]) -> None:
    go_on = threading.Event()
    model = gateway.upstream.play("chat", [Code("print(1)")], [WaitFor(go_on), Text("done")])
    made: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: made.append(asked(gateway.server, "?", model)))
    thread.start()
    try:
        page = look(f"/requests?model={model}")
        row = page.locator("tbody tr", has_text="under way")
        expect(row).to_have_count(1)  # the list is kept up to date by itself
        row.get_by_role("link").click()
        assert "so far" in page.locator(".facts").inner_text()
        assert steps(page) == ["Request", "Model call", "Container", "Code"]
    finally:
        go_on.set()
        thread.join()
    expect(page.locator(".page-head .badge")).to_have_text("ok")
    assert steps(page)[-1] == "Follow-up call"
