"""A sandbox by OpenSandbox's protocol, spoken by hand: the requests are those that LiteLLM 1.108.4 sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from tests.conftest import RunningServer

CREATE = {
    "image": {"uri": "opensandbox/code-interpreter:v1.1.0"},
    "entrypoint": ["/opt/code-interpreter/code-interpreter.sh"],
    "timeout": 300,
    "resourceLimits": {"cpu": "1", "memory": "2Gi"},
    "networkPolicy": {"defaultAction": "deny", "egress": []},
}
"""As LiteLLM's."""


class Lifecycle:
    """The lifecycle API, with a key."""

    def __init__(self, server: RunningServer, base: str = "/opensandbox/v1"):
        headers = {"OPEN-SANDBOX-API-KEY": server.key, "User-Agent": "litellm/1.108.4"}
        self.http = httpx2.Client(base_url=server.url + base, headers=headers, timeout=60)

    def create(self, **other: Any) -> httpx2.Response:
        return self.http.post("/sandboxes", json={**CREATE, **other})

    def execd(self, id: str) -> Execd:
        answer = self.http.get(f"/sandboxes/{id}/endpoints/44772", params={"use_server_proxy": "false"}).json()
        return Execd(answer["endpoint"], answer["headers"])


class Execd:
    """execd of one sandbox, with its token and without a key."""

    def __init__(self, endpoint: str, headers: dict[str, str]):
        self.endpoint = endpoint
        self.http = httpx2.Client(base_url=f"http://{endpoint}", headers=headers, timeout=60)

    def run(self, code: str, **context: str) -> list[dict[str, Any]]:
        """The events of a run, without their times."""
        with self.stream(code, **context) as answer:
            return list(frames(answer))

    def stream(self, code: str, **context: str) -> Any:
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-cache"}
        body = {"code": code, "context": context or {"language": "python"}}
        return self.http.stream("POST", "/code", json=body, headers=headers)


def frames(answer: httpx2.Response) -> Iterator[dict[str, Any]]:
    assert answer.status_code == 200, answer.read()
    for line in answer.iter_lines():
        if line:
            assert line.startswith("data: ")
            event = json.loads(line.removeprefix("data: "))
            assert isinstance(event.pop("timestamp"), int)
            yield event


def said(events: list[dict[str, Any]], kind: str) -> str:
    return "".join(event["text"] for event in events if event["type"] == kind)


@pytest.fixture(scope="module")
def lifecycle(server: RunningServer) -> Iterator[Lifecycle]:
    made = Lifecycle(server)
    with made.http:
        yield made


@pytest.fixture
def sandbox(lifecycle: Lifecycle) -> Iterator[str]:
    id = lifecycle.create().json()["id"]
    yield id
    lifecycle.http.delete(f"/sandboxes/{id}")


@pytest.fixture
def execd(lifecycle: Lifecycle, sandbox: str) -> Iterator[Execd]:
    made = lifecycle.execd(sandbox)
    with made.http:
        yield made
