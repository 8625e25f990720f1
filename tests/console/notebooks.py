"""A notebook in the playground, as a visitor uses it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from tests.console.conftest import PATIENCE_MILLISECONDS, Visiting

if TYPE_CHECKING:
    from playwright.sync_api import FrameLocator, Locator, Page


class Notebook:
    """The playground in a page: what is on it, and what one does with it."""

    def __init__(self, page: Page):
        self.page = page
        page.wait_for_selector("#playground[data-ready]")

    @property
    def cells(self) -> Locator:
        return self.page.locator(".pg-sheet:not([hidden]) .pg-cell")

    def write(self, code: str) -> Locator:
        """Writes into the last cell, which is empty; that cell."""
        place = self.cells.count() - 1
        self.cells.nth(place).locator("textarea").fill(code)
        return self.cells.nth(place)

    def start(self, code: str) -> Locator:
        """Begins to run it, in the last cell, behind which there is another one then."""
        cell = self.write(code)
        cell.locator("textarea").press("Shift+Enter")
        return cell

    def run(self, code: str, state: str = "ok") -> Locator:
        """Runs it to its end, which is that one."""
        cell = self.start(code)
        self.reaches(cell, state)
        return cell

    def reaches(self, cell: Locator, state: str) -> None:
        from playwright.sync_api import expect

        expect(cell).to_have_attribute("data-state", state, timeout=PATIENCE_MILLISECONDS)

    def shows(self, place: Locator, text: str) -> None:
        """It comes to have that text in it."""
        from playwright.sync_api import expect

        expect(place).to_contain_text(text, timeout=PATIENCE_MILLISECONDS)

    def prints(self, cell: Locator, text: str) -> None:
        """What it puts out comes to be that, whatever space is in it."""
        from playwright.sync_api import expect

        expect(cell.locator(".pg-output")).to_have_text(text, timeout=PATIENCE_MILLISECONDS)

    def press(self, name: str) -> None:
        """A button of the bar, or of its menu, by its id."""
        button = self.page.locator(f"#pg-{name}")
        if button.evaluate("each => each.closest('details:not([open])') !== null"):
            self.page.locator("#pg-more summary").click()
        button.click()

    def opens(self, language: str) -> None:
        self.page.locator("#pg-language").select_option(language)

    def come_back(self) -> None:
        """As from another tab: the page looks at once how things are, which else it does every few seconds."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    @property
    def sandbox(self) -> str:
        """The id of its sandbox, from the address of the page."""
        return str(self.page.evaluate("new URL(location.href).searchParams.get('sandbox')"))


def framed(cell: Locator) -> FrameLocator:
    """What a cell has drawn, in its frame."""
    return cell.locator("iframe").first.content_frame


def colours_of(picture: Locator) -> int:
    """How many colours are seen there."""
    from PIL import Image

    found = Image.open(io.BytesIO(picture.screenshot())).convert("RGB").getcolors(1 << 24)
    return len(found or [])


def playing(visiting: Visiting, query: str = "", *, phone: bool = False, dark: bool = False) -> Notebook:
    return Notebook(visiting(f"/playground{query}", phone=phone, dark=dark))
