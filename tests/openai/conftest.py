"""A gateway before a scripted model, and OpenAI's client on it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.conftest import RunningServer, free_port, serving, wait_until
from tests.openai.schemas import Checked
from tests.openai.upstream import Asked, ScriptedUpstream

UPSTREAM_KEY = "sk-upstream-secret"
"""What the gateway shows the scripted model. No client may ever see it."""

CODE_INTERPRETER = {"type": "code_interpreter", "container": {"type": "auto"}}

CONFIG = """
[[upstream]]
models = ["chat-*"]
base_url = "{url}"
api = "chat"
api_key = "env:TEST_UPSTREAM_KEY"

[[upstream]]
models = ["resp-*"]
base_url = "{url}"
api = "responses"
api_key = "env:TEST_UPSTREAM_KEY"

[[upstream]]
models = ["whole-*"]  # one that cannot stream
base_url = "{url}"
api = "chat"
api_key = "env:TEST_UPSTREAM_KEY"
stream = false

[[upstream]]
models = ["still-*"]  # the same, of the other style
base_url = "{url}"
api = "responses"
api_key = "env:TEST_UPSTREAM_KEY"
stream = false

[[upstream]]
models = ["blind-*"]  # one that sees no pictures
base_url = "{url}"
api = "chat"
api_key = "env:TEST_UPSTREAM_KEY"
vision = false

[[upstream]]
models = ["impatient-*"]
base_url = "{url}"
api = "chat"
timeout_seconds = 0.5

[[upstream]]
models = ["gone-*"]
base_url = "http://127.0.0.1:{closed_port}/v1"
"""
"""Name a model so, and it is served that way. Styles of `upstream.play` are these prefixes."""


@pytest.fixture(scope="session")
def upstream() -> Iterator[ScriptedUpstream]:
    """The scripted model: see tests/openai/upstream.py."""
    with ScriptedUpstream() as running:
        yield running
        check_no_native_tool(running.requests)


def check_no_native_tool(requests: list[Asked]) -> None:
    """The code interpreter itself never reaches an upstream: not as a tool, a choice, an item or something included."""
    for asked in requests:
        body = asked.body
        items = body.get("input") if isinstance(body.get("input"), list) else []
        given = [body.get("tools"), body.get("tool_choice"), body.get("include"), [item.get("type") for item in items]]
        assert "code_interpreter" not in json.dumps([_without_prose(each) for each in given]), asked.path


def _without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_prose(each) for name, each in value.items() if name != "description"}
    return [_without_prose(each) for each in value] if isinstance(value, list) else value


@pytest.fixture(scope="session")
def gateway_config(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with the scripted model behind all styles. Add to a copy of it for other settings."""
    file = tmp_path_factory.mktemp("gateway") / "cloche.toml"
    file.write_text(CONFIG.format(url=upstream.url, closed_port=free_port()))
    return file


@pytest.fixture(scope="session")
def gateway_server(bare_dir: str, gateway_config: Path) -> Iterator[RunningServer]:
    """A server with upstreams, for all tests of a run."""
    env = {"CLOCHE_CONFIG": str(gateway_config), "TEST_UPSTREAM_KEY": UPSTREAM_KEY}
    with serving(bare_dir, env=env) as running:
        yield running


@pytest.fixture(scope="session")
def client(gateway_server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client. All that it receives is checked against OpenAI's published schemas."""
    with client_of(gateway_server) as made:
        yield made


def client_of(server: RunningServer, **options: Any) -> openai.OpenAI:
    """The SDK as a user has it. It never tries again by itself: tests see every answer, and each is checked."""
    given: dict[str, Any] = {"api_key": server.key, "base_url": f"{server.url}/v1", "max_retries": 0, "timeout": 60}
    given["http_client"] = httpx2.Client(transport=Checked())
    return openai.OpenAI(**{**given, **options})


@pytest.fixture(params=["chat", "resp"])
def style(request: pytest.FixtureRequest) -> str:
    """How the gateway speaks to its upstream: every test that takes it runs with both."""
    return str(request.param)


@pytest.fixture
def play(upstream: ScriptedUpstream, style: str) -> Callable[..., str]:
    """`play(leg, leg, ..)` is the name of a model that says this, in the style of the test."""
    return partial(upstream.play, style)


@pytest.fixture(scope="session")
def stranger(gateway_server: RunningServer) -> Iterator[openai.OpenAI]:
    """The client of another owner, who may see nothing of the first one's."""
    headers = {"authorization": f"Bearer {gateway_server.key}"}
    body = {"owner": f"stranger-{secrets.token_hex(4)}", "role": "user", "name": "tests"}
    made = httpx2.post(f"{gateway_server.url}/admin/keys", json=body, headers=headers).json()
    with client_of(gateway_server, api_key=made["key"]) as theirs:
        yield theirs


@pytest.fixture
def expire(gateway_server: RunningServer, client: openai.OpenAI) -> Callable[[str], None]:
    """Lets a container's time run out now: nobody waits for minutes."""

    def expire(container: str) -> None:
        url = f"{gateway_server.url}/api/v1/sandboxes/{container.removeprefix('cntr_')}"
        headers = {"authorization": f"Bearer {gateway_server.key}"}
        httpx2.post(f"{url}/renew", json={"seconds": 0.01}, headers=headers).raise_for_status()
        # Asking for the container itself would count as use.
        wait_until(lambda: httpx2.get(url, headers=headers).json()["state"] == "ended")

    return expire
