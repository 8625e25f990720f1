"""E2B's JavaScript clients against a server. The tests themselves are in tests/js; this runs them with Node.js."""

from __future__ import annotations

import pytest
from tests import javascript


@pytest.fixture(scope="session")
def node_modules() -> None:
    javascript.install()


@pytest.mark.parametrize("file", sorted(path.name for path in javascript.JS.glob("*.test.mjs")))
def test_the_javascript_client_works_unmodified(file: str, server, node_modules):
    url = f"{server.url}/e2b"
    javascript.run(["node", "--test", file], E2B_API_KEY=server.key, E2B_API_URL=url, E2B_SANDBOX_URL=url)
