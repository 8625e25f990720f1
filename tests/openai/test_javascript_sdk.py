"""OpenAI's JavaScript client against a gateway. The tests themselves are in tests/js/openai."""

from __future__ import annotations

import pytest
from tests import javascript
from tests.conftest import RunningServer


@pytest.mark.parametrize("file", sorted(path.name for path in (javascript.JS / "openai").glob("*.test.mjs")))
def test_the_javascript_client_works_unmodified(file: str, gateway_server: RunningServer):
    javascript.install()
    place = {"OPENAI_BASE_URL": f"{gateway_server.url}/v1", "OPENAI_API_KEY": gateway_server.key}
    javascript.run(["node", "--test", f"openai/{file}"], **place)
