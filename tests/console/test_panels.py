"""The panels beside the playground's notebook: files, variables, terminals and the chat, in a browser."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.conftest import RunningServer
from tests.console.conftest import PATIENCE_MILLISECONDS, Visiting, log_in
from tests.console.wire import new_key

import cloche

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAADCAIAAAA2iEnWAAAAEElEQVR4nGP4z8AARAwQCgAf7gP9i18U1AAAAABJRU5ErkJggg=="
)
SCRIPT = "try { parent.document.title = 'taken'; } catch { document.body.append('kept out'); }"
HOSTILE_NAMES = [
    "x.constructor",
    "<img src=x onerror=\"document.title='taken'\">.txt",
    "two\nlines.txt",
    "\u202egnp.exe",
    "n" * 250,
]


@pytest.fixture
def box(console: RunningServer) -> Iterator[cloche.Sandbox]:
    with cloche.Sandbox(url=console.url, api_key=console.key) as made:
        yield made


def beside(visiting: Visiting, box: cloche.Sandbox | None, panel: str, **look: bool) -> Page:
    """The playground on that sandbox, with that panel open."""
    page = visiting("/playground" + (f"?sandbox={box.id}" if box is not None else ""), **look)
    page.wait_for_selector("#playground[data-ready]")
    page.locator(f"#panel-tab-{panel}").click()
    page.wait_for_selector(f"#panel-{panel}.panel")
    return page


def shows(place: Locator, text: str) -> None:
    from playwright.sync_api import expect

    expect(place).to_contain_text(text, timeout=PATIENCE_MILLISECONDS)


# --- files


def file_named(page: Page, name: str) -> Locator:
    return page.locator(f'#panel-files .files-name[data-key="/mnt/data/{name}"]')


def looking_into(page: Page, name: str) -> Locator:
    """The dialog that shows the file."""
    file_named(page, name).click()
    return page.locator("dialog.preview[open]")


def drop(page: Page, name: str, content: str) -> None:
    page.evaluate(
        """([name, content]) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([content], name));
            for (const kind of ["dragenter", "dragover", "drop"]) {
                document.body.dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }));
            }
        }""",
        [name, content],
    )


def test_files_are_uploaded_looked_into_downloaded_renamed_and_deleted(visiting: Visiting) -> None:
    page = beside(visiting, None, "files")
    with page.expect_file_chooser() as choosing:
        page.get_by_label("Upload files").click()
    choosing.value.set_files(
        [
            {"name": "prices.csv", "mimeType": "text/csv", "buffer": b'name,price\n"plum, dried",3\n<b>pear</b>,4\n'},
            {"name": "dot.png", "mimeType": "image/png", "buffer": PICTURE},
        ]
    )
    from playwright.sync_api import expect

    cells = looking_into(page, "prices.csv").locator("th, td")
    expect(cells).to_have_text(["name", "price", "plum, dried", "3", "<b>pear</b>", "4"])
    page.keyboard.press("Escape")
    picture = looking_into(page, "dot.png").locator("img")
    expect(picture).to_have_js_property("naturalHeight", 3)
    expect(picture).to_have_js_property("naturalWidth", 2)
    page.keyboard.press("Escape")

    page.locator("#panel-tab-variables").click()
    drop(page, "notes.txt", "dropped <i>here</i>\n")  # wherever it is dropped, the list of files comes up
    shows(looking_into(page, "notes.txt").locator("pre"), "dropped <i>here</i>")
    with page.expect_download() as downloading:
        page.locator("dialog.preview a[download]").click()
    assert downloading.value.path().read_bytes() == b"dropped <i>here</i>\n"
    assert downloading.value.suggested_filename == "notes.txt"
    page.keyboard.press("Escape")
    _move_and_delete(page)


def _move_and_delete(page: Page) -> None:
    page.get_by_label("New directory").click()
    page.locator("dialog[open] input").fill("plans")
    page.keyboard.press("Enter")
    page.get_by_label("Rename notes.txt").click()
    page.locator("dialog[open] input").fill("plans/notes.txt")
    page.keyboard.press("Enter")
    file_named(page, "notes.txt").wait_for(state="detached")
    file_named(page, "plans").click()
    file_named(page, "plans/notes.txt").wait_for()
    page.get_by_label("Delete notes.txt").click()
    page.locator("dialog[open]").get_by_text("Delete", exact=True).click()
    shows(page.locator("#panel-files"), "Nothing here yet")
    page.locator(".files-crumbs").get_by_text("data").click()
    file_named(page, "prices.csv").wait_for()


def test_files_written_by_code_are_listed_automatically(visiting: Visiting, box: cloche.Sandbox) -> None:
    page = beside(visiting, box, "files")
    shows(page.locator("#panel-files"), "Nothing here yet")
    box.run("open('/mnt/data/made.txt', 'w').write('x')")
    file_named(page, "made.txt").wait_for()
    page.get_by_label("Delete made.txt").click()
    page.locator("dialog[open]").get_by_text("Cancel").click()
    assert box.files.exists("/mnt/data/made.txt")


def test_hostile_files_and_names_are_text_or_in_the_frame(visiting: Visiting, box: cloche.Sandbox) -> None:
    for name in HOSTILE_NAMES:
        box.files.write(f"/mnt/data/{name}", "harmless")
    box.files.write("/mnt/data/page.html", f"<p>drawn</p><script>{SCRIPT}</script>")
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>{SCRIPT}</script></svg>'
    box.files.write("/mnt/data/drawing.svg", svg)
    page = beside(visiting, box, "files")
    names = page.locator("#panel-files .files-name")
    shown = set(names.all_inner_texts()) if names.first.wait_for() is None else set()
    assert {*HOSTILE_NAMES[:2], "two\\nlines.txt", "\\u202egnp.exe", "n" * 250} <= shown
    assert page.locator("#panel-files img").count() == 0
    shows(looking_into(page, "x.constructor").locator("pre"), "harmless")
    page.keyboard.press("Escape")
    for name in ("page.html", "drawing.svg"):
        dialog = looking_into(page, name)
        frame = dialog.locator("iframe")
        assert frame.get_attribute("sandbox") == "allow-scripts"
        shows(frame.content_frame.locator("body"), "kept out")
        dialog.get_by_text("Source").click()
        shows(dialog.locator("pre"), "<script>")
        page.keyboard.press("Escape")
    page.get_by_label("Delete two\\nlines.txt", exact=True).click()
    page.locator("dialog[open]").get_by_text("Delete", exact=True).click()
    page.get_by_label("Delete two\\nlines.txt", exact=True).wait_for(state="detached")
    assert not box.files.exists("/mnt/data/two\nlines.txt")
    assert page.title().startswith("Playground")


# --- variables


def test_variables_are_shown_after_each_run_and_when_asked(visiting: Visiting, box: cloche.Sandbox) -> None:
    box.run("import pandas; prices = pandas.DataFrame({'plum': [3, 4], 'pear': [5, 6]}); greeting = '<b>hello</b>'")
    page = beside(visiting, box, "variables")
    panel = page.locator("#panel-variables")
    shows(panel.locator("details[data-name=greeting]"), "<b>hello</b>")
    frame = panel.locator("details[data-name=prices]")
    shows(frame, "2 × 2")
    frame.locator("summary").click()
    shows(frame, "plum, pear")
    frame.get_by_text("Show the table").click()
    shows(page.locator(".pg-output iframe").first.content_frame.locator("table"), "plum")

    page.locator(".pg-cell textarea").last.fill("later = list(range(300))")
    page.locator(".pg-cell textarea").last.press("Shift+Enter")
    shows(panel.locator("details[data-name=later]"), "300")
    box.run("elsewhere = 1")
    panel.get_by_label("Refresh").click()
    panel.locator("details[data-name=elsewhere]").wait_for()
    panel.get_by_label("Filter variables").fill("greet")
    assert panel.locator("details").count() == 1


# --- terminals


def test_a_terminal_is_typed_into_resized_and_kept(visiting: Visiting, box: cloche.Sandbox) -> None:
    page = beside(visiting, box, "terminal")
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if "Policy" in message.text else None)
    page.get_by_text("Open a terminal").click()
    screen = page.locator(".xterm-rows")
    shows(screen, "$")
    page.keyboard.type("printf 'red \\033[38;5;196m%s\\033[0m\\n' $((6*7)); stty size\n")
    shows(screen, "red 42")
    assert screen.get_by_text("42", exact=True).evaluate("each => getComputedStyle(each).color") != "rgb(23, 32, 30)"
    columns = page.locator("#panels").evaluate("each => each.clientWidth")
    page.get_by_label("Wide panels").click()
    assert page.locator("#panels").evaluate("each => each.clientWidth") > columns
    page.locator(".xterm").click()
    rows = screen.locator("> div").count()
    page.set_viewport_size({"width": 1280, "height": 560})
    page.keyboard.type(f"until [ $(stty size | cut -d' ' -f1) -lt {rows} ]; do sleep 0.1; done; echo resi''zed\n")
    shows(screen, "resized")

    page.keyboard.type("kept=yes\n")
    page.reload()
    page.wait_for_selector(".terminal-tabs [data-state=live]")
    page.locator(".xterm").click()
    page.keyboard.type("echo $kept''terday; exit 3\n")
    shows(screen, "yesterday")
    shows(page.locator(".terminal-status"), "exit code 3")
    assert complaints == []


def test_a_flood_in_a_terminal_leaves_the_page_usable(visiting: Visiting, box: cloche.Sandbox) -> None:
    page = beside(visiting, box, "terminal")
    page.get_by_text("Open a terminal").click()
    screen = page.locator(".xterm-rows")
    shows(screen, "$")
    page.evaluate("window.ticks = 0; setInterval(() => (window.ticks += 1), 10)")
    page.keyboard.type("yes 0123456789012345678901234567890123456789 | head -n 200000; echo flood''ed\n")
    shows(screen, "flooded")
    assert page.evaluate("window.ticks") > 10  # it was never out of breath
    page.locator("#panel-tab-files").click()
    shows(page.locator("#panel-files"), "Nothing here yet")
    page.locator("#panel-tab-terminal").click()
    box.kill()
    shows(page.locator(".terminal-status"), "sandbox killed")


# --- chat


def say(page: Page, text: str) -> Locator:
    """Sends it; the answer."""
    page.locator(".chat-field").fill(text)
    page.locator(".chat-field").press("Enter")
    return page.locator(".chat-answer").last


def code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def rests(page: Page) -> None:
    page.locator(".chat-log[aria-busy=false]").wait_for()


def test_a_chat_runs_code_in_the_notebooks_sandbox(visiting: Visiting, box: cloche.Sandbox) -> None:
    box.run("seen = 41")
    page = beside(visiting, box, "chat")
    shows(page.locator("#panel-chat"), "No model is configured")
    assert page.locator(".chat-model").input_value() == "cloche/echo"
    shows(say(page, "Hello **you**"), "Hello you")
    rests(page)
    answer = say(
        page,
        code(
            "seen += 1",
            "print('it is', seen, '<b>bold</b>')",
            "import matplotlib.pyplot as plt",
            "plt.plot([seen]); plt.show()",
            "open('/mnt/data/seen.txt', 'w').write(str(seen))",
            "print('Read [the file](sandbox:/mnt/data/seen.txt), not [that](javascript:alert(1)).')",
        ),
    )
    shows(answer.locator(".chat-said"), "it is 42 <b>bold</b>")
    rests(page)
    shows(answer.locator(".chat-code pre").first, "seen += 1")
    shows(answer.locator(".chat-outputs"), "it is 42")
    picture = answer.locator(".chat-outputs img")
    picture.wait_for()
    assert picture.evaluate("async each => (await each.decode(), each.naturalWidth)") > 100
    assert box.run("seen").text == "42"
    links = answer.locator(".chat-said a")
    assert [links.nth(at).inner_text() for at in range(links.count())] == ["the file"]
    for link in (links.first, answer.locator(".chat-files a")):
        with page.expect_download() as downloading:
            link.click()
        assert downloading.value.path().read_text() == "42"
    answer.get_by_text("Put into a cell").click()
    written = page.locator(".pg-cell textarea").evaluate_all("all => all.map((each) => each.value)")
    assert any(each.startswith("seen += 1") for each in written)
    page.locator("#panel-tab-variables").click()
    shows(page.locator("details[data-name=seen]"), "42")


def test_a_chat_is_stopped_goes_on_and_begins_anew(visiting: Visiting, box: cloche.Sandbox) -> None:
    page = beside(visiting, box, "chat")
    answer = say(page, code("import time", "print('begun')", "while True: time.sleep(0.1)"))
    shows(answer.locator(".chat-outputs"), "begun")  # while it runs
    page.locator("#panel-chat").get_by_text("Stop", exact=True).click()
    shows(answer, "Stopped.")
    shows(answer.locator(".chat-state"), "stopped")
    shows(say(page, code("print('free again')")).locator(".chat-said"), "free again")
    rests(page)
    page.reload()
    shows(page.locator(".chat-answer").first, "Stopped.")
    shows(page.locator(".chat-answer").last.locator(".chat-outputs"), "free again")
    page.get_by_label("New conversation").click()
    assert page.locator(".chat-answer").count() == 0
    shows(page.locator(".chat-empty"), "cloche/echo")
    box.kill()
    answer = say(page, code("print(1)"))
    shows(answer.locator(".panel-error"), "The sandbox has ended")
    rests(page)
    assert page.locator(".chat-field").input_value() == code("print(1)")  # it can be sent again
    page.locator("#pg-state[data-state=ended]").wait_for()
    page.locator(".chat-field").press("Enter")
    shows(page.locator(".chat-said").last, "1")


def test_the_next_user_of_a_browser_sees_nothing_of_the_previous_chat(
    visiting: Visiting, console: RunningServer
) -> None:
    page = beside(visiting, None, "chat")
    shows(say(page, "a question that is nobody else's").locator(".chat-said"), "a question")
    rests(page)
    log_in(page.context, console, new_key(console, "later")["key"])
    page.goto("/ui/playground")
    page.wait_for_selector("#playground[data-ready]")
    if not page.locator("#panel-chat.panel").is_visible():
        page.locator("#panel-tab-chat").click()
    shows(page.locator(".chat-empty"), "cloche/echo")
    assert page.locator(".chat-answer").count() == 0
    assert "nobody else's" not in page.evaluate("JSON.stringify(sessionStorage)")


def test_model_output_is_never_markup_and_bounded(visiting: Visiting) -> None:
    page = beside(visiting, None, "chat")
    texts = [
        "<img src=x onerror=alert(1)> [a](javascript:alert(1)) ![b](data:text/html,x) <https://example.org>",
        "**bold** _it_ `co<b>de` ~~old~~ [ok](https://example.org/x) \\*plain\\*",
        "# Title\n\n- one\n  - deep\n- two\n\n1. first\n2. second\n\n> said\n\n| a | b |\n|--|--|\n| 1 | `x` |",
        "```py\nprint('<script>')\n```",
        *(sign * 60_000 for sign in ("`", "``a", "**a", "[a](", "> ", "- ", "*a_", "|-", "~~a", "# ", "\\", "http://")),
    ]
    made = page.evaluate(
        """async (texts) => {
            const { markdown } = await import("/ui/static/chat-markdown.js");
            return texts.map((text) => {
                const place = document.createElement("div");
                place.append(...markdown(text, (path, label) => label));
                return {
                    html: place.innerHTML.slice(0, 4000),
                    tags: [...new Set([...place.querySelectorAll("*")].map((each) => each.tagName.toLowerCase()))],
                    links: [...place.querySelectorAll("a")].map((each) => each.href).slice(0, 10),
                };
            });
        }""",
        texts,
    )
    known = set("p br a strong em s code pre ul ol li blockquote hr div table thead tbody tr th td span".split())
    assert all(set(each["tags"]) <= known for each in made)
    assert made[0]["links"] == ["https://example.org/"]
    assert "<strong>bold</strong> <em>it</em> <code>co&lt;b&gt;de</code> <s>old</s>" in made[1]["html"]
    assert made[1]["links"] == ["https://example.org/x"] and "*plain*" in made[1]["html"]
    assert {"ul", "ol", "li", "blockquote", "table"} <= set(made[2]["tags"]) and 'role="heading"' in made[2]["html"]
    assert "<li>one<ul><li>deep</li></ul></li>" in made[2]["html"]
    assert made[3]["tags"][:2] == ["pre", "code"] and "&lt;script&gt;" in made[3]["html"]


# --- all of them


@pytest.mark.parametrize(
    "look", [{"phone": True}, pytest.param({"dark": True}, marks=pytest.mark.long)], ids=["phone", "dark"]
)
def test_axe_finds_no_serious_fault_in_a_panel(visiting: Visiting, box: cloche.Sandbox, look: dict[str, bool]) -> None:
    box.run("import sys; greeting = 'hello'; open('/mnt/data/a.csv', 'w').write('x,y\\n1,2\\n')")
    page = beside(visiting, box, "files", **look)
    file_named(page, "a.csv").wait_for()
    faults = _faults(page, "#panels")
    looking_into(page, "a.csv").locator("td").first.wait_for()
    faults += _faults(page, "dialog")
    page.keyboard.press("Escape")
    page.locator("#panel-tab-variables").click()
    page.locator("details[data-name=greeting] summary").click()
    faults += _faults(page, "#panels")
    page.locator("#panel-tab-terminal").click()
    page.get_by_text("Open a terminal").click()
    shows(page.locator(".xterm-rows"), "$")
    faults += _faults(page, "#panels")
    page.locator("#panel-tab-chat").click()
    faults += _faults(page, "#panels")
    say(page, "A [link](https://example.org/) beside text.\n\n" + code("print('long ' * 99)", "import nothing"))
    shows(page.locator(".chat-said").last, "ModuleNotFoundError")
    rests(page)
    assert faults + _faults(page, "#panels") == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def _faults(page: Page, place: str) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, context=place, options={"resultTypes": ["violations"]}).response["violations"]
    grave = [each for each in found if each["impact"] in ("serious", "critical")]
    return [f"{each['id']}: {node['html'][:200]}" for each in grave for node in each["nodes"]]
