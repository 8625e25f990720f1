"""Examples run with an engine in this process and over a server (`library`)."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` has the README in both worlds, and other pages over a server, where a sandbox is there sooner."""
    for item in items:
        given = getattr(item, "callspec", None)
        if given is None or "page" not in given.params or given.params.get("library") != "embedded":
            continue
        if given.params["page"].name != "README.md":
            item.add_marker(pytest.mark.long)
