"""OpenSandbox's JavaScript client against a server. The tests themselves are in tests/js/opensandbox."""

from __future__ import annotations

import pytest
from tests import javascript
from tests.conftest import RunningServer

PLACE = javascript.JS / "opensandbox"


@pytest.mark.long
def test_the_javascript_client_works_unmodified(server: RunningServer):
    place = {
        "CLIENT_MODULES": str(javascript.modules(PLACE)),
        "OPEN_SANDBOX_DOMAIN": server.url.removeprefix("http://") + "/opensandbox",
        "OPEN_SANDBOX_API_KEY": server.key,
    }
    javascript.run(["node", "--test", "client.test.mjs"], cwd=PLACE, **place)
