"""Clients that stop waiting for a sandbox: each dialect's line is as if they had never come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
from tests.conftest import RunningServer, serving, wait_until
from tests.opensandbox.conftest import CREATE

from cloche.engine.quotas.occupancy import CapacityInfo, Occupancy

pytestmark = pytest.mark.long

CREATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/api/v1/sandboxes", {}),
    "e2b": ("/e2b/sandboxes", {"templateID": "base"}),
    "openai": ("/v1/containers", {"name": "x"}),
    "librechat": ("/librechat/v1/exec", {"lang": "py", "code": "print(1)"}),
    "opensandbox": ("/opensandbox/v1/sandboxes", CREATE),
}

PROGRAM = {"code": "print(1)", "tools": [{"name": "f", "description": "", "parameters": {"type": "object"}}]}
WAITING: dict[str, tuple[str, dict[str, Any]]] = {
    **CREATIONS,
    "librechat's tools": ("/librechat/v1/exec/programmatic", PROGRAM),
}


@pytest.fixture(scope="module")
def crowded(bare_dir: str) -> Iterator[RunningServer]:
    room = {"CLOCHE_CAPACITY_SANDBOXES": "1", "CLOCHE_CAPACITY_QUEUE_SECONDS": "300", "CLOCHE_POOL_READY": "0"}
    with serving(bare_dir, env=room) as running:
        yield running


@pytest.fixture(scope="module")
def client(crowded: RunningServer) -> Iterator[httpx2.Client]:
    headers = dict.fromkeys(("x-api-key", "open-sandbox-api-key"), crowded.key)
    headers["authorization"] = f"Bearer {crowded.key}"
    with httpx2.Client(base_url=crowded.url, headers=headers, timeout=60) as made:
        yield made


def sandboxes(client: httpx2.Client) -> Occupancy:
    return msgspec.json.decode(client.get("/admin/capacity").content, type=CapacityInfo).sandboxes


@pytest.mark.parametrize("dialect", CREATIONS)
def test_a_client_that_leaves_the_line_takes_no_place(client: httpx2.Client, dialect: str):
    held = client.post("/api/v1/sandboxes", json={}).json()["id"]
    path, body = CREATIONS[dialect]
    with pytest.raises(httpx2.TimeoutException):
        client.post(path, json=body, timeout=0.3)
    wait_until(lambda: sandboxes(client).waiting == 0)
    assert sandboxes(client).in_use == 1
    client.delete(f"/api/v1/sandboxes/{held}")
    wait_until(lambda: sandboxes(client).in_use == 0)


@pytest.mark.parametrize("dialect", WAITING)
def test_an_owner_erased_while_waiting_is_told_and_leaves_nothing(client: httpx2.Client, dialect: str):
    """E2B's has a key for repetitions, whose creation no single client can end; nor can one end a program."""
    held = client.post("/api/v1/sandboxes", json={}).json()["id"]
    key = client.post("/admin/keys", json={"owner": "waiter"}).json()["key"]
    headers = {**dict.fromkeys(("x-api-key", "open-sandbox-api-key"), key), "authorization": f"Bearer {key}"}
    path, body = WAITING[dialect]
    answers: list[httpx2.Response] = []

    def ask() -> None:
        headers["idempotency-key"] = "once"
        answers.append(httpx2.post(f"{client.base_url}{path}", headers=headers, json=body, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: sandboxes(client).waiting == 1)
    assert client.delete("/admin/owners/waiter").is_success
    asking.join(60)
    assert (answers[0].status_code, sandboxes(client).waiting) == (401, 0)
    assert "no longer valid" in answers[0].text and answers[0].json()
    client.delete(f"/api/v1/sandboxes/{held}")
    wait_until(lambda: sandboxes(client).in_use == 0)
    again = client.delete("/admin/owners/waiter").json()
    assert (again["removed"], again["sandboxes_ended"]) == ({}, 0)
