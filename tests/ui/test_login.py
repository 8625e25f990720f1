"""In and out of the console, and what a stranger finds there."""

from __future__ import annotations

from tests.ui.conftest import Visiting


def test_who_is_logged_in_sees_the_start_page(visiting: Visiting) -> None:
    page = visiting()
    assert page.locator("h1").inner_text() == "Welcome"
