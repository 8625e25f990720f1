"""Takes pictures of every page of the console, light and dark, into docs/images.

    make screenshots [ONLY="playground network"]

A `cloche serve` with a data directory that is thrown away, and the template that was built already; then what people
do: keys of several owners, sandboxes with something in them, requests, a build, connections that are allowed and that
are not. All names are made up, and what is reached is a server of this very process.
"""

from __future__ import annotations

import argparse
import http.server
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

import httpx2  # noqa: E402
import msgspec  # noqa: E402
from e2b import Template as ByStep  # noqa: E402
from PIL import Image  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402
from tests.conftest import DATA_DIR, RunningServer, serving, with_template  # noqa: E402
from tests.console.conftest import CHROMIUM, FLAGS, log_in  # noqa: E402
from tests.templates.test_versions import make  # noqa: E402

import cloche  # noqa: E402
from cloche.model import MIB  # noqa: E402
from cloche.templates import Catalogue  # noqa: E402
from cloche.templates import catalogue as catalogues  # noqa: E402

IMAGES = HERE / "docs/images"
SIZE = {"width": 1280, "height": 800}
COLOURS, EXACT = 256, 200  # of a picture: enough for pages, and less than half of the bytes
PATIENCE_MILLISECONDS = 60_000
ADDRESS, PORT = "127.0.0.78", 8080
THEMES = ("light", "dark")
REQUEST = "quarterly-report"
OWNERS = ("ana", "bo", "chen")

PLOT = """\
import numpy as np, matplotlib.pyplot as plt
x = np.linspace(0, 12, 400)
fig, ax = plt.subplots(figsize=(7, 2.6))
for decay in (0.05, 0.15, 0.35):
    ax.plot(x, np.exp(-decay * x) * np.cos(3 * x), label=f"decay {decay}")
ax.legend(); ax.set_xlabel("seconds"); plt.show()"""
TABLE = """\
import pandas as pd
df = pd.read_csv("cities.csv")
df.assign(share=(df.people / df.people.sum()).round(3))"""
QUESTION = "Here is code to run:\n```python\nimport statistics\nprint(statistics.mean([3, 4, 8]))\n```"
BROKEN = "And this:\n```python\nopen('missing.csv').read()\n```"


class Scene(NamedTuple):
    """A server with something on every page."""

    console: RunningServer
    paths: dict[str, str]
    notebooks: dict[str, str]  # by theme, a sandbox in which nothing has run


Prepare = Callable[[Page], None]


# --- what is on the pages


@contextmanager
def neighbour() -> Iterator[None]:
    """A web server that sandboxes may reach."""

    class Hello(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "18000")
            self.end_headers()
            self.wfile.write(b"x" * 18_000)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((ADDRESS, PORT), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def variables() -> dict[str, str]:
    return {
        "CLOCHE_NETWORK_ALLOW": "*.example.com:*,pypi.org,files.pythonhosted.org",
        "CLOCHE_NETWORK_DENY": "admin.example.com",
        "CLOCHE_NETWORK_INTERNAL": ADDRESS,
        "CLOCHE_NETWORK_HOSTS": f"api.example.com={ADDRESS} data.example.com={ADDRESS}",
        "CLOCHE_GATEWAY_CAPTURE": "true",
    }


def say(
    console: RunningServer,
    method: str,
    path: str,
    asked: dict[str, Any],
    key: str = "",
    more: dict[str, str] | None = None,
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key or console.key}", **(more or {})}
    answer = httpx2.request(
        method, f"{console.url}{path}", json=asked, headers=headers, timeout=120, trust_env=False
    ).raise_for_status()
    found: dict[str, Any] = answer.json() if answer.content else {}
    return found


def keys(console: RunningServer) -> dict[str, str]:
    made = {}
    for owner in OWNERS:
        asked = {"name": f"{owner}'s laptop", "owner": owner, "role": "user"}
        made[owner] = str(say(console, "POST", "/admin/keys", asked)["key"])
    say(console, "PUT", "/admin/quotas/ana", {"sandboxes": 20, "memory_bytes": 32 << 30})
    return made


def fetch(*names: str) -> str:
    tries = "".join(f"get('http://{name}:{PORT}/')\n" for name in names)
    return (
        "import urllib.request\n"
        "def get(url):\n"
        "    try: return len(urllib.request.urlopen(url, timeout=20).read())\n"
        "    except OSError as error: return error\n" + tries
    )


def sandboxes(console: RunningServer, owners: dict[str, str]) -> str:
    """Some that run, one that is paused and some that ended; the id of one with a past."""
    policy = {"allow": ["*.example.com:*", "pypi.org"], "deny": ["internal.example.com"]}
    for owner in OWNERS:
        box = cloche.Sandbox(url=console.url, api_key=owners[owner], network=policy, metadata={"purpose": "report"})
        box.run(fetch("api.example.com", "internal.example.com", "tracker.example.net", "data.example.com"))
        if owner == "chen":
            box.run("kept = list(range(1_000_000))")
            box.pause()
    cloche.Sandbox(url=console.url, api_key=owners["bo"]).kill()
    own = cloche.Sandbox(url=console.url, api_key=console.key, network=policy, metadata={"ticket": "4711"})
    own.run("total = sum(i * i for i in range(3_000_000)); words = ['lorem'] * 200_000")
    own.run(fetch("api.example.com", "admin.example.com"))
    return own.id


def notebook(console: RunningServer) -> str:
    box = cloche.Sandbox(url=console.url, api_key=console.key, metadata={"purpose": "notebook"})
    box.files.write("/mnt/data/cities.csv", b"city,people\nLagos,15946000\nLima,11204000\nOslo,717710\n")
    box.files.write("/mnt/data/notes.md", b"# Notes\n\nThree cities.\n")
    return box.id


def requests(console: RunningServer, owners: dict[str, str]) -> str:
    """The id of one."""
    tool = {"type": "code_interpreter", "container": {"type": "auto"}}
    for text, key, id in ((BROKEN, owners["bo"], "nightly-4"), (QUESTION, owners["ana"], REQUEST)):
        asked = {"model": "cloche/echo", "input": text, "tools": [tool]}
        say(console, "POST", "/v1/responses", asked, key, {"X-Request-Id": id})
    return REQUEST


def templates(console: RunningServer, data: Path) -> None:
    """Two versions that look real, and one that a client built."""
    older = "numpy==2.3.4 shapely==2.1.0 pyproj==3.7.1 pandas==2.3.3"
    newer = "numpy==2.4.0 shapely==2.1.2 pandas==2.3.3 rasterio==1.4.3"
    catalogue = Catalogue(data)
    first = make(catalogue, older, 1_793_000_000.0, imports=("numpy",))
    second = make(catalogue, newer, 1_794_000_000.0, imports=("numpy", "shapely"), env={"UNITS": "miles"})
    for each, size in ((first, 431 * MIB), (second, 467 * MIB)):
        catalogues.write_template(msgspec.structs.replace(each, size_bytes=size), Path(each.root))
    steps = ByStep().from_image("python:3.12").run_cmd("mkdir ~/app && echo ready > ~/app/state")
    ByStep.build(steps, "report-worker", api_key=console.key, api_url=f"{console.url}/e2b")


def set_scene(console: RunningServer, data: Path) -> Scene:
    owners = keys(console)
    sandbox = sandboxes(console, owners)
    templates(console, data)
    request = requests(console, owners)
    geo = [f"{each.name}@{each.version}" for each in Catalogue(data).list() if each.name == "geo"]
    return Scene(
        console,
        {
            "audit": "/audit",  # early, before each picture has left a login in it
            "start": "/",
            "playground": "/playground?sandbox=",
            "requests": "/requests",
            "request": f"/requests/{request}",
            "templates": "/templates",
            "template": "/templates/version?ref=python",
            "template-changes": f"/templates/diff?before={geo[1]}&after={geo[0]}",
            "network": "/network",
            "keys": "/keys",
            "usage": "/usage",
            "health": "/health",
            "sandboxes": "/sandboxes",  # late, so that their curves have a past
            "sandbox": f"/sandboxes/{sandbox}",
        },
        {theme: notebook(console) for theme in THEMES},
    )


# --- before a picture is taken


def run_cells(page: Page) -> None:
    """In the playground: a table and a plot."""
    page.wait_for_selector("#playground[data-ready]")
    for code in (TABLE, PLOT):
        cell = page.locator(".pg-cell").last
        number = page.locator(".pg-cell").count() - 1
        cell.locator("textarea").fill(code)
        cell.locator("textarea").press("Shift+Enter")
        page.locator(".pg-cell").nth(number).and_(page.locator("[data-state=ok]")).wait_for()
    page.locator(".pg-cell img").first.wait_for()
    page.evaluate("window.scrollTo(0, 0)")


PREPARE: dict[str, Prepare] = {"playground": run_cells}


# --- the pictures


def picture(browser: Browser, scene: Scene, name: str, theme: str) -> bytes:
    context = browser.new_context(
        base_url=scene.console.url,
        viewport=SIZE,  # type: ignore[arg-type]  # a dict of those two
        color_scheme="dark" if theme == "dark" else "light",
        reduced_motion="reduce",
        locale="en-GB",
        timezone_id="UTC",
    )
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    try:
        if name != "login":
            log_in(context, scene.console, scene.console.key)
        page = context.new_page()
        place = scene.paths.get(name, "/login")
        page.goto(f"/ui{place}{scene.notebooks[theme] if place.endswith('sandbox=') else ''}")
        page.wait_for_load_state("networkidle")
        PREPARE.get(name, lambda page: None)(page)
        return page.screenshot(animations="disabled", caret="hide")
    finally:
        context.close()


def compact(png: bytes) -> bytes:
    """With few colours: the most frequent as they are, so that a red word on a grey page stays red."""
    with Image.open(io.BytesIO(png)) as opened:
        image = opened.convert("RGB")
    found = sorted(image.getcolors(1 << 24) or [], reverse=True)[:EXACT]
    frequent = [part for _, colour in found for part in colour]  # type: ignore[union-attr]  # three parts each
    between = image.quantize(COLOURS - EXACT, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(frequent + between)
    made = io.BytesIO()
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
    return made.getvalue()


def take_all(scene: Scene, only: list[str]) -> None:
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name in ("login", *scene.paths):
            for theme in THEMES if not only or name in only else ():
                taken = compact(picture(browser, scene, name, theme))
                place = IMAGES / f"console-{name}-{theme}.png"
                place.write_bytes(taken)
                print(f"{place.relative_to(HERE)}  {len(taken) // 1024} KiB", flush=True)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of pages: playground, network, ...")
    only = parser.parse_args().only
    if CHROMIUM is None:
        sys.exit("there is no Chromium here: `apt install chromium`")
    template = Catalogue(DATA_DIR).resolve("python")
    with tempfile.TemporaryDirectory() as directory, neighbour():
        data = with_template(Path(directory) / "data", template, template.imports)
        with serving(data, env=variables(), log=Path(directory) / "server.log") as console:
            take_all(set_scene(console, data), only)


if __name__ == "__main__":
    main()
