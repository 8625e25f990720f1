"""The playground's notebook, on real sandboxes and in a real browser."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import nbformat
import pytest
from tests.conftest import RunningServer, wait_until
from tests.console.conftest import PATIENCE_MILLISECONDS, Visiting
from tests.console.notebooks import Notebook, colours_of, framed, playing
from tests.console.wire import new_key

import cloche

FIRST_LOAD_BYTES = 300_000
PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 3, 2]); plt.title('A line')\nplt.show()"


@pytest.fixture
def api(console: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=f"{console.url}/api/v1", headers={"X-API-Key": console.key}, timeout=60)


def test_a_plot_is_seen_and_its_sandbox_is_made_when_it_is_needed(visiting: Visiting, api: httpx.Client) -> None:
    notebook = playing(visiting)
    state = notebook.page.locator("#pg-state")
    assert state.inner_text() == "no sandbox yet"
    examples = notebook.page.locator(".pg-examples")
    examples.get_by_text("a plot").click()
    cell = notebook.cells.nth(0)
    cell.locator("textarea").press("Shift+Enter")
    notebook.reaches(cell, "ok")
    assert not examples.is_visible()
    picture = cell.locator("img.pg-image")
    picture.evaluate("each => each.decode()")
    assert colours_of(picture) > 20  # a line, smooth, and text: not a blank
    notebook.shows(state, "running")
    notebook.shows(notebook.page.locator("#pg-deadline"), "ends in 30m")
    assert api.get(f"/sandboxes/{notebook.sandbox}").json()["metadata"] == {"made_in": "playground"}


def test_a_long_run_streams_and_is_stopped_and_its_state_stays(visiting: Visiting) -> None:
    notebook = playing(visiting)
    stop = notebook.page.locator("#pg-stop")
    assert stop.is_disabled()
    cell = notebook.start("import time\nn = 0\nwhile True:\n    n += 1\n    print('line', n)\n    time.sleep(0.01)")
    after = notebook.start("'this waits'")
    notebook.shows(cell, "line 20")
    assert (cell.get_attribute("data-state"), after.get_attribute("data-state")) == ("running", "waiting")
    stop.click()
    notebook.reaches(cell, "interrupted")
    notebook.reaches(after, "idle")  # what waited is not run
    notebook.prints(notebook.run("n >= 20"), "True")


def test_input_is_asked_for_and_answered(visiting: Visiting) -> None:
    notebook = playing(visiting)
    cell = notebook.start("import getpass\nname = input('Your name? ')\nword = getpass.getpass('Word? ')\n(name, word)")
    notebook.shows(cell.locator(".pg-prompt"), "Your name?")
    notebook.page.keyboard.type("Ada")  # the field has the focus
    notebook.page.keyboard.press("Enter")
    notebook.shows(cell.locator(".pg-prompt"), "Word?")
    assert cell.locator(".pg-input").get_attribute("type") == "password"
    notebook.page.keyboard.type("secret")
    notebook.page.keyboard.press("Enter")
    notebook.reaches(cell, "ok")
    notebook.prints(cell, "Your name? Ada Word? ········ ('Ada', 'secret')")
    ended = notebook.start("input()")
    ended.locator(".pg-input").press("Control+d")
    notebook.reaches(ended, "raised")
    notebook.shows(ended, "EOF when reading a line")


def test_an_error_has_a_folded_traceback_and_stops_later_cells(visiting: Visiting) -> None:
    notebook = playing(visiting)
    notebook.write("def inverse(x):\n    return 1 / x\ninverse(0)")
    notebook.press("add")
    notebook.write("'never'")
    notebook.press("run-all")
    failed, after = notebook.cells.nth(0), notebook.cells.nth(1)
    notebook.reaches(failed, "raised")
    notebook.reaches(after, "idle")
    notebook.shows(failed, "ZeroDivisionError: division by zero")
    trace = failed.locator(".pg-trace")
    assert not trace.is_visible()
    failed.locator("summary").click()
    notebook.shows(trace, "return 1 / x")


def test_contexts_have_languages_and_states_of_their_own(visiting: Visiting) -> None:
    notebook = playing(visiting)
    notebook.run("x = 'Python'")
    notebook.opens("javascript")
    cell = notebook.run("let x = 'JavaScript'; [x, 1 + 1]")
    notebook.prints(cell, '[2]0: "JavaScript"1: 2')
    notebook.opens("bash")
    notebook.prints(notebook.run("x=bash; echo $x; false"), "bash It ended with exit code 1.")
    tabs = notebook.page.locator("#pg-contexts [role=tab]")
    assert tabs.all_inner_texts() == ["python", "javascript", "bash"]
    tabs.nth(2).press("ArrowLeft")
    notebook.shows(notebook.cells.nth(0).locator(".pg-output"), "JavaScript")
    notebook.page.locator("#pg-contexts [role=tab]").nth(0).click()
    notebook.prints(notebook.run("x"), "'Python'")
    notebook.page.locator("#pg-contexts [role=tab]").nth(1).click()
    notebook.press("close-context")
    assert tabs.all_inner_texts() == ["python", "bash"]


def test_a_run_is_undone_and_a_context_forked_and_restarted(visiting: Visiting) -> None:
    notebook = playing(visiting)
    notebook.run("x = 1")
    changed = notebook.run("x = 2")
    notebook.press("undo")
    notebook.reaches(changed, "undone")
    notebook.prints(notebook.run("x"), "1")
    notebook.press("fork-context")
    notebook.shows(notebook.page.locator("#pg-contexts"), "python 2")
    assert notebook.cells.count() == 4
    notebook.prints(notebook.run("x += 10; x"), "11")
    notebook.page.locator("#pg-contexts [role=tab]").nth(0).click()
    notebook.prints(notebook.run("x"), "1")
    notebook.press("restart")
    notebook.page.locator("dialog button[value=yes]").click()
    notebook.shows(notebook.page.locator("#toasts"), "new kernel")
    notebook.shows(notebook.run("x", "raised"), "NameError")
    notebook.run("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
    notebook.run("x = 3")
    assert "cannot be undone" in str(notebook.page.locator("#pg-undo").get_attribute("title"))


def test_a_notebook_is_saved_and_opened_again(visiting: Visiting, tmp_path: Path) -> None:
    notebook = playing(visiting)
    notebook.run(f"print('some text')\n{PLOT}")
    notebook.run("import sys; print('oops', file=sys.stderr); 6 * 7")
    notebook.run("1 / 0", "raised")
    words = notebook.write("# A title")
    words.locator(".pg-kind").click()
    words.locator("textarea").press("Shift+Enter")
    with notebook.page.expect_download() as waiting:
        notebook.press("export")
    path = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(path)
    nbformat.validate(nbformat.read(path, as_version=4))
    kinds = [
        [each["output_type"] for each in cell.get("outputs", [])] for cell in json.loads(path.read_text())["cells"]
    ]
    assert kinds == [["stream", "display_data"], ["stream", "execute_result"], ["error"], [], []]

    other = playing(visiting)
    other.page.locator("#pg-file").set_input_files(path)
    other.shows(other.cells.nth(0), "some text")
    picture = other.cells.nth(0).locator("img.pg-image")
    picture.evaluate("each => each.decode()")
    assert colours_of(picture) > 20
    other.shows(other.cells.nth(1), "42")
    other.shows(other.cells.nth(2), "ZeroDivisionError")
    other.shows(framed(other.cells.nth(3)).locator("h1"), "A title")
    assert other.page.locator("#pg-state").inner_text() == "no sandbox yet"  # nothing was run
    (tmp_path / "no.ipynb").write_text("{}")
    other.page.locator("#pg-file").set_input_files(tmp_path / "no.ipynb")
    other.shows(other.page.locator("#toasts"), "no.ipynb could not be opened: it is no notebook")


RICH: dict[str, tuple[dict[str, Any], str, str]] = {
    "html": ({"text/html": "<table><tr><td>a cell</td></tr></table>"}, "td", "a cell"),
    "markdown": ({"text/markdown": "**bold** and $x^2$"}, "strong", "bold"),
    "latex": ({"text/latex": r"$$\frac{1}{2}$$"}, ".katex-display", "1"),
    "svg": (
        {"image/svg+xml": "<svg xmlns='http://www.w3.org/2000/svg'><text y='20'>drawn</text></svg>"},
        "text",
        "drawn",
    ),
    "plotly": (
        {"application/vnd.plotly.v1+json": {"data": [{"y": [1, 3, 2]}], "layout": {"title": {"text": "A plot"}}}},
        ".plot-container .gtitle",
        "A plot",
    ),
    "vega": (
        {
            "application/vnd.vegalite.v5+json": {
                "data": {"values": [{"a": 1, "b": 2}]},
                "mark": "point",
                "encoding": {"x": {"field": "a", "type": "quantitative", "title": "An axis"}},
            }
        },
        "canvas, svg",
        "",
    ),
}


@pytest.mark.parametrize("kinds", [("html", "markdown", "latex", "svg"), ("plotly", "vega")], ids=["text", "charts"])
def test_every_rich_kind_is_drawn_in_its_frame(visiting: Visiting, kinds: tuple[str, ...]) -> None:
    notebook = playing(visiting)
    for kind in kinds:
        bundle, place, text = RICH[kind]
        cell = notebook.run(f"from IPython.display import display\ndisplay({bundle!r}, raw=True)")
        cell.scroll_into_view_if_needed()
        drawn = framed(cell).locator(place).first
        drawn.wait_for(timeout=PATIENCE_MILLISECONDS)
        assert text in (drawn.text_content() or ""), kind
        assert cell.locator("iframe").get_attribute("sandbox") == "allow-scripts"


def test_values_of_libraries_are_shown_as_jupyter_shows_them(visiting: Visiting) -> None:
    notebook = playing(visiting)
    table = notebook.run("import pandas as pd\npd.DataFrame({'city': ['Oslo', 'Rome'], 'people': [709, 2873]})")
    notebook.shows(framed(table).locator("tbody"), "Oslo")
    tree = notebook.run(
        "from IPython.display import JSON, display\ndisplay({'application/json': {'a': [1, {'b': None}]}}, raw=True)"
    )
    notebook.shows(tree.locator(".pg-tree"), "a: [2]")
    bar = notebook.run("import time\nfor i in range(101): print(f'\\r{i} %', end='')")
    notebook.prints(bar, "100 %")  # a carriage return is one
    shown = notebook.run("h = display('first', display_id=True); h.update('second')")
    notebook.prints(shown, "'second'")
    notebook.press("clear")
    assert notebook.page.locator(".pg-output:not(:empty)").count() == 0


@pytest.mark.parametrize("notices", [True, False], ids=["looking", "running"])
def test_a_sandbox_that_ends_is_told_with_why_and_the_next_run_has_a_new_one(
    visiting: Visiting, api: httpx.Client, notices: bool
) -> None:
    notebook = playing(visiting)
    notebook.run("x = 1")
    first = notebook.sandbox
    api.delete(f"/sandboxes/{first}").raise_for_status()
    if notices:
        notebook.come_back()
    else:
        notebook.shows(notebook.run("x", "lost"), f"Sandbox {first} was killed")
    notebook.shows(notebook.page.locator("#pg-notice"), f"Sandbox {first} has ended: killed by its owner.")
    assert notebook.page.locator("#pg-state").inner_text() == "ended"
    notebook.shows(notebook.run("x", "raised"), "NameError")
    assert notebook.sandbox != first
    assert not notebook.page.locator("#pg-notice").is_visible()


def test_a_sandbox_that_there_is_can_be_looked_into_and_is_renewed(visiting: Visiting, api: httpx.Client) -> None:
    made = api.post("/sandboxes", json={"timeout_seconds": 300}).json()["id"]
    api.post(f"/sandboxes/{made}/run", json={"code": "x = 41; print('from afar')"}).raise_for_status()
    notebook = playing(visiting, f"?sandbox={made}")
    notebook.prints(notebook.cells.nth(0), "from afar")  # what ran is there
    notebook.prints(notebook.run("x + 1"), "42")
    wait_until(lambda: api.get(f"/sandboxes/{made}").json()["deadline_at"] > time.time() + 1500)
    with notebook.page.expect_download() as waiting:
        notebook.press("history")
    saved = nbformat.read(waiting.value.path(), as_version=4)
    assert [each["source"] for each in saved["cells"]] == ["x = 41; print('from afar')", "x + 1"]
    notebook.write("a draft")
    notebook.page.reload()
    again = Notebook(notebook.page)
    assert again.cells.nth(2).locator("textarea").input_value() == "a draft"
    again.prints(again.cells.nth(1), "42")
    again.prints(again.run("x"), "41")
    api.post(f"/sandboxes/{made}/pause", json={}).raise_for_status()
    again.come_back()
    again.shows(again.page.locator("#pg-notice"), "paused")
    again.prints(again.run("x - 1"), "40")
    again.page.get_by_text("Log out").click()
    again.page.wait_for_url("**/ui/login**")
    assert again.page.evaluate("sessionStorage.getItem('cloche.playground.notebook')") is None  # it is for nobody else


def test_a_sandbox_is_forked_with_its_files_and_left_for_a_new_one(visiting: Visiting) -> None:
    notebook = playing(visiting)
    notebook.run("open('/mnt/data/notes.txt', 'w').write('all of it')")
    first = notebook.sandbox
    notebook.press("fork-sandbox")
    link = notebook.page.locator("#pg-notice a")
    other = playing(visiting, str(link.get_attribute("href")).removeprefix("/ui/playground"))
    other.prints(other.run("open('/mnt/data/notes.txt').read()"), "'all of it'")
    assert other.sandbox != first
    notebook.press("new")
    notebook.page.locator("dialog button[value=yes]").click()
    notebook.shows(notebook.page.locator("#pg-state"), "no sandbox yet")
    notebook.shows(notebook.run("open('/mnt/data/notes.txt')", "raised"), "FileNotFoundError")


def test_a_clock_that_is_wrong_does_not_end_a_sandbox_that_is_used(visiting: Visiting, api: httpx.Client) -> None:
    made = api.post("/sandboxes", json={"timeout_seconds": 300}).json()["id"]
    page = visiting("/")
    page.clock.install(time=time.time() - 5 * 3600)
    page.goto(f"/ui/playground?sandbox={made}")
    notebook = Notebook(page)
    notebook.run("1")
    page.clock.run_for(6000)
    notebook.shows(page.locator("#pg-deadline"), "ends in 30m")
    assert api.get(f"/sandboxes/{made}").json()["deadline_at"] > time.time() + 1500


def test_a_server_that_cannot_be_reached_is_told_until_it_can(visiting: Visiting) -> None:
    notebook = playing(visiting)
    notebook.run("x = 1")
    notebook.page.route("**/ui/api/v1/**", lambda route: route.abort())
    notebook.come_back()
    notebook.shows(notebook.page.locator("#pg-state"), "no connection")
    notebook.page.unroute("**/ui/api/v1/**")
    notebook.come_back()
    notebook.shows(notebook.page.locator("#pg-state"), "running")
    notebook.prints(notebook.run("print(x + 1)"), "2")


def test_a_foreign_or_unknown_sandbox_cannot_be_used(visiting: Visiting) -> None:
    notebook = playing(visiting, "?sandbox=i00000000000000000000")
    notebook.shows(notebook.page.locator("#pg-notice"), "there is no sandbox")
    assert notebook.cells.count() == 1


def test_opening_a_foreign_sandbox_is_announced(visiting: Visiting, console: RunningServer) -> None:
    """An admin follows a link. What they paste there is the other's."""
    key = new_key(console, "mallory")["key"]
    with cloche.Sandbox(url=console.url, api_key=key) as theirs:
        notice = playing(visiting, f"?sandbox={theirs.id}").page.locator("#pg-notice")
        notice.get_by_text("belongs to mallory").wait_for()
    with cloche.Sandbox(url=console.url, api_key=console.key) as own:
        notebook = playing(visiting, f"?sandbox={own.id}")
        notebook.shows(notebook.page.locator("#pg-state"), "running")
        assert notebook.page.locator("#pg-notice").is_hidden()


def test_it_is_used_by_keyboard(visiting: Visiting) -> None:
    notebook = playing(visiting)
    keys = notebook.page.keyboard
    notebook.cells.nth(0).locator("textarea").focus()
    keys.type("def double(number):\nreturn number * 2")  # the second line is indented by itself
    keys.press("Control+Enter")
    notebook.reaches(notebook.cells.nth(0), "ok")
    keys.press("Escape")
    keys.press("b")
    keys.type("dou")
    keys.press("Tab")
    keys.type("(num")
    keys.press("Tab")
    keys.press("Backspace")
    assert notebook.cells.nth(1).locator("textarea").input_value() == "double(numbe"
    keys.press("Control+a")
    keys.type("double(4)")
    keys.press("Shift+Enter")
    notebook.shows(notebook.cells.nth(1), "8")
    assert notebook.cells.count() == 3
    keys.press("Escape")
    keys.press("d")
    keys.press("d")
    assert notebook.cells.count() == 2
    keys.press("Enter")
    keys.press("Escape")
    keys.press("Tab")
    assert notebook.page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Run this cell")


@pytest.mark.parametrize(
    "look", [{"phone": True}, pytest.param({"dark": True}, marks=pytest.mark.long)], ids=["phone", "dark"]
)
def test_it_fits_and_axe_finds_no_serious_fault(visiting: Visiting, look: dict[str, bool]) -> None:
    from axe_playwright_python.sync_playwright import Axe

    notebook = playing(visiting, **look)
    notebook.run("# a comment\nprint('x' * 500)\nraise ValueError('no')", "raised")
    notebook.cells.nth(0).locator("summary").click()
    notebook.opens("bash")
    page = notebook.page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = (
        Axe().run(page, context=".pg-bar, .pg-notebook", options={"resultTypes": ["violations"]}).response["violations"]
    )
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_the_first_load_is_small(visiting: Visiting) -> None:
    page = visiting("/")
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    sizes: list[float] = []
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto("/ui/playground")
    Notebook(page)
    page.wait_for_load_state("networkidle")
    assert len(sizes) > 10
    assert sum(sizes) < FIRST_LOAD_BYTES
