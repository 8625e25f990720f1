"""What a program draws, writes or says can neither reach the page that shows it nor keep it from answering."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import wait_until
from tests.console.conftest import Visiting
from tests.console.notebooks import Notebook, framed, playing

if TYPE_CHECKING:
    from playwright.sync_api import Locator

ANSWER_SECONDS = 5.0  # of a click while the worst goes on, on a machine that is busy with other tests as well
PAUSE_MILLISECONDS = 3000  # in which the page may do nothing

# Each tries something that a page could do to its own origin, and says whether it could.
TRIES = {
    "cookie": "document.cookie",
    "storage": "localStorage.length",
    "session": "sessionStorage.length",
    "parent": "parent.document.title",
    "top": "top.document.cookie",
    "neighbour": "parent.frames[0].document.title",
    "location": "parent.location.href",
    "navigation": "(top.location.href = '/ui/login', 'went')",
    "popup": "open('/ui/login').closed",
    "alert": "alert('here') ?? (() => { throw new Error('nothing is shown') })()",
    "element": "parent.eval('1')",
    "database": "indexedDB.open('x').name",
    "workers": "navigator.serviceWorker.register('/ui/static/console.js').then(String)",
    "request": "fetch('/ui/api/v1/whoami', {credentials: 'include'}).then((answer) => answer.text())",
    "socket": "loaded(new WebSocket(`ws://${HOST}/ui/api/v1/sandboxes`), 'open')",
    "image": "loaded(Object.assign(new Image(), {src: `http://${HOST}/ui/static/cloche.svg`}))",
    "script": "loaded(added('script', {src: `http://${HOST}/ui/static/theme.js`}))",
    "style": "loaded(added('link', {rel: 'stylesheet', href: `http://${HOST}/ui/static/console.css`}))",
}
HOSTILE = """<p id="told"></p><script>
const HOST = %(host)s, tries = %(tries)s, told = {};
const words = [{kind: 'html', content: 'x'}, {type: 'ended'}, '<img src=x>', NaN, -1, 1e300, null, [9]];
function added(tag, about) {
  const element = Object.assign(document.createElement(tag), about);
  document.head.append(element);
  return element;
}
function loaded(thing, kind = 'load') {
  return new Promise((yes, no) => { thing.addEventListener(kind, yes); thing.addEventListener('error', no); });
}
async function attempt(name, code) {
  try { told[name] = `could: ${await (0, eval)(code)}`; } catch (error) { told[name] = 'refused'; }
}
(async () => {
  for (const [name, code] of Object.entries(tries)) await attempt(name, code);
  for (const word of words) parent.postMessage(word, '*');
  const form = document.createElement('form');
  Object.assign(form, {action: '/ui/logout', method: 'post', target: '_top'});
  document.body.append(form);
  form.submit();
  document.getElementById('told').textContent = JSON.stringify(told);
})();
</script>"""


def show(notebook: Notebook, mime: str, content: str | dict[str, Any]) -> Locator:
    """A cell that has displayed that."""
    cell = notebook.run(f"from IPython.display import display\ndisplay({{{mime!r}: {content!r}}}, raw=True)")
    cell.scroll_into_view_if_needed()
    return cell


def is_unharmed(notebook: Notebook, asked: float = ANSWER_SECONDS) -> None:
    """The page is where it was, logged in, and answers in time."""
    page = notebook.page
    before, begun = notebook.cells.count(), time.monotonic()
    page.locator("#pg-add").press("Enter")  # not by a place on the screen: outputs that come into sight move it
    assert notebook.cells.count() == before + 1
    assert time.monotonic() - begun < asked
    assert re.search(r"/ui/playground\?sandbox=", page.url)
    assert page.evaluate("window.reached === undefined && document.querySelectorAll('script[src]').length < 8")
    assert page.evaluate("fetch('/ui/api/v1/whoami').then((answer) => answer.status)") == 200


def watch(notebook: Notebook) -> None:
    """From here on the page notes for how long it does nothing at most."""
    notebook.page.evaluate(
        """() => {
          let last = performance.now();
          window.longest = 0;
          setInterval(() => {
            const now = performance.now();
            window.longest = Math.max(window.longest, now - last);
            last = now;
          }, 20);
        }"""
    )


def lines_seen(cell: Locator) -> int:
    """The number in the last line that is there."""
    found = re.findall(r"line (\d+) of many", cell.locator(".pg-text").text_content() or "")
    return int(found[-1]) if found else 0


def longest(notebook: Notebook) -> float:
    return float(notebook.page.evaluate("window.longest"))


def test_a_script_in_html_can_reach_nothing_of_the_page(visiting: Visiting) -> None:
    notebook = playing(visiting)
    dialogs: list[str] = []
    notebook.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    host = notebook.page.evaluate("location.host")
    notebook.shows(framed(show(notebook, "text/html", "<i>a neighbour</i>")).locator("i"), "a neighbour")
    cell = show(notebook, "text/html", HOSTILE % {"host": json.dumps(host), "tries": json.dumps(TRIES)})
    told = framed(cell).locator("#told")
    notebook.shows(told, "{")
    found = json.loads(told.inner_text())
    assert found == dict.fromkeys(TRIES, "refused")
    assert dialogs == []
    assert len(notebook.page.context.pages) == 1
    is_unharmed(notebook)


# What a sandbox without a network wants to have outside could be in the address, or in a name at a relay.
CALLING = """<p id="told"></p><script>
const line = new RTCPeerConnection({iceServers: [{urls: 'stun:127.0.0.1:%(port)d'}]});
line.createDataChannel('out');
line.onicegatheringstatechange = () => { document.getElementById('told').textContent = line.iceGatheringState; };
line.createOffer().then((offer) => line.setLocalDescription(offer));
</script>"""


def test_hostile_output_sends_nothing_through_the_viewers_browser(visiting: Visiting) -> None:
    notebook = playing(visiting)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
        outside.bind(("127.0.0.1", 0))
        outside.setblocking(False)
        cell = show(notebook, "text/html", CALLING % {"port": outside.getsockname()[1]})
        notebook.shows(framed(cell).locator("#told"), "complete")  # it has asked whomever it may
        with pytest.raises(BlockingIOError):
            outside.recv(1)
    is_unharmed(notebook)


def test_a_script_in_svg_markdown_or_latex_has_no_rights_either(visiting: Visiting) -> None:
    notebook = playing(visiting)
    reach = "try { parent.reached = 1; top.reached = 1 } catch (e) { document.title = 'refused' }"
    svg = f"""<svg xmlns="http://www.w3.org/2000/svg" width="90" height="40" onload="{reach}"><script>{reach}</script>
    <a href="javascript:{reach}"><text y="20">press</text></a>
    <foreignObject width="9" height="9"><img xmlns="http://www.w3.org/1999/xhtml" src="x:" onerror="{reach}"/>
    </foreignObject></svg>"""
    cell = show(notebook, "image/svg+xml", svg)
    framed(cell).locator("text").click()
    for mime, content in [
        (
            "text/markdown",
            f'# drawn\n<script>{reach}</script><img src="x:" onerror="{reach}">[a](javascript:top.reached=1)',
        ),
        ("text/latex", r"$$drawn \href{javascript:top.reached=1}{x} \htmlStyle{position:fixed}{y}$$"),
        ("application/javascript", f"document.body.append('drawn'); {reach}"),
    ]:
        notebook.shows(framed(show(notebook, mime, content)).locator("body"), "drawn")
    assert notebook.page.locator("script:not([src])").count() == 0
    is_unharmed(notebook)


REACH = "try { parent.reached = 1; top.reached = 1 } catch (e) {}"
VEGA = "application/vnd.vegalite.v5+json"
PLOTLY = "application/vnd.plotly.v1+json"


def hostile_charts(outside: str) -> list[tuple[str, dict[str, Any]]]:
    """Specs that load data, images and maps from outside, link to scripts, and carry markup."""
    link, markup = f"javascript:{REACH}", f'drawn<img src="x:" onerror="{REACH}"><script>{REACH}</script>'
    point = {"mark": {"type": "point", "href": link, "tooltip": {"content": "data"}}}
    data = {"values": [{"a": 1, "url": f"{outside}/mark.png", "href": link, "text": markup}]}
    encoding = {"x": {"field": "a", "type": "quantitative"}, "href": {"field": "href"}, "url": {"field": "url"}}
    code = "constructor.constructor('top.reached = 1')()"
    return [
        (VEGA, {"title": "drawn", "data": data, **point, "encoding": {"x": encoding["x"], "href": encoding["href"]}}),
        (VEGA, {"title": "drawn", "data": data, "mark": "image", "encoding": encoding}),
        (VEGA, {"title": "drawn", "data": {"url": f"{outside}/data.json"}, **point, "encoding": {}}),
        (VEGA, {"title": "drawn", "data": data, "transform": [{"calculate": code, "as": "b"}], "mark": "bar"}),
        (VEGA, {"title": "drawn", "data": data, "mark": "bar", "usermeta": {"embedOptions": {"loader": outside}}}),
        (
            PLOTLY,
            {
                "data": [{"x": [1], "y": [1], "text": [f'<a href="{link}">{markup}</a>'], "mode": "text"}],
                "layout": {
                    "title": {"text": f'<a href="{link}">{markup}</a>'},
                    "images": [{"source": f"{outside}/layer.png", "sizex": 1, "sizey": 1}],
                },
                "config": {"plotlyServerURL": outside, "showSendToCloud": True, "topojsonURL": f"{outside}/"},
            },
        ),
        (PLOTLY, {"data": [{"type": "scattergeo", "lon": [1], "lat": [1]}], "layout": {"title": {"text": "drawn"}}}),
    ]


@pytest.mark.long
def test_a_chart_loads_nothing_from_outside_and_has_no_rights(visiting: Visiting) -> None:
    notebook = playing(visiting)
    with socket.create_server(("127.0.0.1", 0)) as outside:
        outside.setblocking(False)
        for mime, spec in hostile_charts(f"http://127.0.0.1:{outside.getsockname()[1]}"):
            cell = show(notebook, mime, spec)
            framed(cell).locator("svg, canvas, .problem").first.wait_for(state="attached")
            for link in framed(cell).locator("a").all()[:3]:
                link.dispatch_event("click")
        with pytest.raises(BlockingIOError):
            outside.accept()
    is_unharmed(notebook)


def test_output_that_leaves_its_frame_or_floods_the_page_is_taken_out(visiting: Visiting) -> None:
    notebook = playing(visiting)
    away = show(notebook, "text/html", "<script>location.href = '/ui/login'</script>")
    notebook.shows(away, "tried to leave its frame")
    flood = show(
        notebook,
        "text/html",
        "<script>setInterval(() => { for (let i = 0; i < 500; i++) parent.postMessage(i, '*') })</script>",
    )
    notebook.shows(flood, "flooded the page with messages")
    tall = show(
        notebook, "text/html", "<div style='height: 9999999px'></div><script>parent.postMessage(1e9, '*')</script>"
    )
    wait_until(lambda: (tall.locator("iframe").bounding_box() or {"height": 0})["height"] == 4000)
    is_unharmed(notebook)


def test_a_loop_without_end_in_a_frame_does_not_stop_the_page(visiting: Visiting) -> None:
    notebook = playing(visiting)
    show(notebook, "text/html", "spinning<script>setTimeout(() => { for (;;); })</script>")
    watch(notebook)
    is_unharmed(notebook)
    notebook.prints(notebook.run("6 * 7"), "42")
    assert longest(notebook) < PAUSE_MILLISECONDS


def test_words_of_a_program_are_text(visiting: Visiting) -> None:
    notebook = playing(visiting)
    bad = "<img src=x onerror=top.reached=1>"
    notebook.shows(notebook.run(f"print({bad!r})"), bad)
    failed = notebook.run(f"class E(Exception): pass\nE.__name__ = {bad!r}\nraise E({bad!r})", "raised")
    notebook.shows(failed.locator("summary"), f"{bad}: {bad}")
    asks = notebook.start(f"input({bad!r})")
    notebook.shows(asks.locator(".pg-prompt"), bad)
    asks.locator(".pg-input").press("Enter")
    bundle = {bad: "x", "application/json": {bad: bad}}
    odd = notebook.run(f"from IPython.display import display\ndisplay({bundle!r}, raw=True)")
    notebook.shows(odd.locator(".pg-tree"), bad)
    assert notebook.page.locator(".pg-notebook img").count() == 0
    is_unharmed(notebook)


def test_a_hostile_notebook_is_only_shown(visiting: Visiting, tmp_path: Path) -> None:
    notebook = playing(visiting)
    bad = "<img src=x onerror=top.reached=1>"
    shown = [
        {"output_type": "display_data", "data": data} for data in ({"image/png": 5}, {"text/html": None}, {bad: 1})
    ]
    outputs = [
        None,
        5,
        {"output_type": "error", "ename": bad, "traceback": bad},
        {"output_type": "stream", "text": {}},
        *shown,
    ]
    cells = [
        {"cell_type": "code", "source": bad, "outputs": outputs, "execution_count": bad, "metadata": []},
        {"cell_type": bad, "source": None},
        {"cell_type": "markdown", "source": [bad, "drawn"]},
        None,
    ]
    path = tmp_path / "odd.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "cells": cells, "metadata": {"kernelspec": {"language": bad}}}))
    notebook.page.locator("#pg-file").set_input_files(path)
    notebook.shows(notebook.page.locator("#toasts"), f"is written in {bad[:40]}")
    notebook.shows(notebook.cells.nth(0).locator(".pg-output"), bad)
    notebook.shows(framed(notebook.cells.nth(2)).locator("body"), "drawn")
    assert notebook.cells.count() == 4
    with notebook.page.expect_download() as waiting:
        notebook.press("export")
    assert len(json.loads(waiting.value.path().read_text())["cells"]) == 4
    notebook.press("add")
    notebook.prints(notebook.run("6 * 7"), "42")
    is_unharmed(notebook)


@pytest.mark.long
def test_fifty_megabytes_of_output_leave_the_page_alive_and_small(visiting: Visiting) -> None:
    notebook = playing(visiting)
    notebook.run("x = 1")
    watch(notebook)
    cell = notebook.start("line = 'y' * 99\nfor i in range(500_000): print(line)\nprint('the end')")
    notebook.shows(cell, "yyy")
    is_unharmed(notebook)
    notebook.reaches(cell, "ok")
    notebook.shows(cell, "lines are not shown")
    notebook.shows(cell, "output limit")
    long = notebook.run("import sys\nsys.stdout.write('z' * 20_000_000); print()")
    notebook.shows(long, "characters of long lines are not shown")
    assert longest(notebook) < PAUSE_MILLISECONDS
    assert notebook.page.evaluate("document.querySelectorAll('.pg-text *').length") < 10_000
    assert notebook.page.evaluate("document.querySelector('.pg-output').textContent.length") < 1_000_000


@pytest.mark.long
def test_ten_thousand_lines_per_second_can_be_watched_and_stopped(visiting: Visiting) -> None:
    notebook = playing(visiting)
    watch(notebook)
    cell = notebook.start(
        """import time
begun, n = time.monotonic(), 0
while True:
    for _ in range(100):
        n += 1
        print(f'\\x1b[3{n % 8}mline {n}\\x1b[0m of many')
    time.sleep(max(0, begun + n / 10_000 - time.monotonic()))"""
    )
    notebook.shows(cell, "lines are not shown")
    is_unharmed(notebook)
    wait_until(lambda: lines_seen(cell) > 15_000)
    begun = time.monotonic()
    notebook.page.locator("#pg-stop").click()
    notebook.reaches(cell, "interrupted")
    assert time.monotonic() - begun < 2 * ANSWER_SECONDS
    assert longest(notebook) < PAUSE_MILLISECONDS


@pytest.mark.long
def test_long_names_and_large_values_cost_the_page_nothing(visiting: Visiting) -> None:
    notebook = playing(visiting)
    watch(notebook)
    long = "'n' * 3_000_000"
    failed = notebook.run(f"class E(Exception): pass\nE.__name__ = {long}\nraise E({long})", "raised")
    notebook.shows(failed.locator("summary"), "nnn")
    asks = notebook.start(f"input({long})")
    asks.locator(".pg-input").press("Enter")
    notebook.reaches(asks, "ok")
    bundle = "{'application/json': {'n' * 100_000: [0] * 500_000}}"
    large = notebook.run(f"from IPython.display import display\ndisplay({bundle}, raw=True)")
    large.locator("summary").last.click()
    notebook.shows(large, "499800 more")
    assert len(notebook.page.locator(".pg-notebook").inner_text()) < 100_000
    is_unharmed(notebook)
    assert longest(notebook) < PAUSE_MILLISECONDS


@pytest.mark.long
def test_a_crowd_of_results_is_bounded(visiting: Visiting) -> None:
    notebook = playing(visiting)
    watch(notebook)
    cell = notebook.run(
        """from IPython.display import display, HTML, clear_output
handle = display(HTML('<b>0</b>'), display_id=True)
for i in range(1000): handle.update(HTML(f'<b>{i}</b>'))
for i in range(400): display(HTML(f'<p>{i}</p>'))"""
    )
    notebook.shows(cell, "results are not shown")
    assert cell.locator(".pg-output > *").count() <= 201
    notebook.shows(framed(cell).locator("b"), "999")
    is_unharmed(notebook)
    assert longest(notebook) < PAUSE_MILLISECONDS
