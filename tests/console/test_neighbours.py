"""A page that a program in a sandbox serves, at a name below the console's: to a browser it is of the same site.

By plain HTTP, where a browser says of no request which site made it, and shows the console's cookie to both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright
from tests.conftest import RunningServer, wait_until
from tests.console.conftest import CHROMIUM, FLAGS, PATIENCE_MILLISECONDS
from tests.console.wire import Stranger

import cloche

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

NAME = "console.test"
PORT = 8000
SERVE = f"python3 -m http.server {PORT} --directory /mnt/data/www"
# Each tries something with the session of whoever visits, and says what came of it.
TRIES = {
    "reads": "(await fetch(`${UI}/api/v1/whoami`, {credentials: 'include'})).status",
    "reads a page": "(await fetch(`${UI}/keys`, {credentials: 'include'})).text()",
    "asks blindly": "(await fetch(`${UI}/api/v1/sandboxes`, {...BLIND, method: 'POST', body: '{}'})).type",
    "kills": "(await fetch(`${UI}/sandboxes/kill`, {...BLIND, method: 'POST', body: MINE})).type",
    "logs out": "(await fetch(`${UI}/logout`, {...BLIND, method: 'POST', body: new URLSearchParams('csrf=x')})).type",
    "sets a header": "(await fetch(`${UI}/api/v1/whoami`, {credentials: 'include', headers: {'x-a': 'b'}})).status",
    "frames": "framed(`${UI}/keys`)",
    "frames output": "framed(`${UI}/frame`)",
    "types": "opened(`ws://${HOST}/ui/api/v1/sandboxes/${ID}/contexts/default/terminal`)",
    "shows a picture": "loaded(Object.assign(new Image(), {src: `${UI}/api/v1/whoami`}))",
    "works for it": "(await navigator.serviceWorker.register(`${UI}/static/console.js`)).scope",
    "opens it": "inside(window.open(`${UI}/keys`))",
}
PAGE = """<!doctype html><title>a neighbour</title><p id="told"></p><script type="module">
const HOST = %(host)s, UI = `http://${HOST}/ui`, ID = %(id)s, MINE = JSON.stringify({ids: [ID]});
const tries = %(tries)s, told = {};
const BLIND = {mode: 'no-cors', credentials: 'include'};
function loaded(element, kind = 'load') {
  document.body.append(element);
  return new Promise((yes, no) => Object.assign(element, {[`on${kind}`]: () => yes(kind), onerror: no}));
}
async function framed(src) {
  const frame = Object.assign(document.createElement('iframe'), {src});
  await loaded(frame);
  return frame.contentDocument.title;
}
function opened(address) {
  const line = new WebSocket(address);
  return new Promise((yes, no) => { line.onopen = () => yes('open'); line.onerror = no; });
}
async function inside(other) {
  while (!other.document.title) await new Promise((done) => setTimeout(done, 50)); // until it is there, it is ours
  return other.document.title;
}
for (const [name, code] of Object.entries(tries)) {
  try { told[name] = String(await eval(`(async () => ${code})()`)); } catch (error) { told[name] = 'refused'; }
}
document.cookie = `cloche_session=planted; domain=%(name)s; path=/ui`;
document.getElementById('told').textContent = JSON.stringify(told);
</script>"""


@pytest.fixture(scope="module")
def resolving() -> Iterator[Browser]:
    """A browser for which that name, and all below it, are this machine."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: `apt install chromium`")
    rules = f"--host-resolver-rules=MAP {NAME} 127.0.0.1, MAP *.{NAME} 127.0.0.1"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, rules])
        yield started
        started.close()


def logged_in(browser: Browser, console: RunningServer, host: str) -> tuple[BrowserContext, Page]:
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    page = context.new_page()
    page.goto(f"http://{host}/ui/login")
    page.locator("input[name=key]").fill(console.key)
    page.locator("input[name=key]").press("Enter")
    page.wait_for_url(f"http://{host}/ui/")
    return context, page


def test_a_page_of_a_sandbox_can_do_nothing_with_the_session_of_its_visitor(
    resolving: Browser, console: RunningServer
) -> None:
    host = f"{NAME}:{urlsplit(console.url).port}"
    asked = {"templateID": "base", "timeout": 300}  # one with public traffic, as E2B's clients have it
    made = Stranger(console).ask("POST", "/e2b/sandboxes", asked, {"x-api-key": console.key})
    with cloche.Sandbox.connect(made.json()["sandboxID"], url=console.url, api_key=console.key) as box:
        about = {"host": json.dumps(host), "id": json.dumps(box.id), "name": NAME, "tries": json.dumps(TRIES)}
        box.files.write("/mnt/data/www/index.html", PAGE % about)
        box.run(f"import subprocess; subprocess.Popen('{SERVE}'.split())")
        context, page = logged_in(resolving, console, host)
        neighbour = context.new_page()
        wait_until(lambda: (neighbour.goto(f"http://{PORT}-{box.id}.{host}/") or neighbour).status == 200)
        wait_until(lambda: "{" in neighbour.locator("#told").inner_text())
        found = json.loads(neighbour.locator("#told").inner_text())
        assert found == dict.fromkeys(TRIES, "refused")
        assert box.run("6 * 7").text == "42"
        context.clear_cookies(domain=f".{NAME}")  # the one that was planted
        page.goto(f"http://{host}/ui/keys")
        assert page.url == f"http://{host}/ui/keys"
        context.close()
