"""A server with no room left, as each dialect's client sees it: whose fault it is, and when to come again."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import e2b
import e2b_code_interpreter
import httpx2
import msgspec
import openai
import pytest
from tests.conftest import CommandLine, RunningServer, serving, wait_until
from tests.opensandbox.conftest import CREATE

import cloche
from cloche import errors
from cloche.api.e2b.connect import connect_code_of
from cloche.engine.quotas.occupancy import CapacityInfo

ROOM = {
    "CLOCHE_CAPACITY_SANDBOXES": "2",
    "CLOCHE_CAPACITY_EXECUTIONS": "1",
    "CLOCHE_CAPACITY_QUEUED": "1",
    "CLOCHE_CAPACITY_QUEUED_PER_OWNER": "1",
    "CLOCHE_CAPACITY_QUEUE_SECONDS": "300",
    "CLOCHE_POOL_READY": "1",
}
STATUSES = {"ann": 429, "bob": 503}
"""Ann has one request waiting, which is as many as one may have; with that one, all lines are full for Bob."""


class Tenant(NamedTuple):
    name: str
    url: str
    key: str
    sandbox: str

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=300)

    @property
    def e2b(self) -> dict[str, Any]:
        return {"api_key": self.key, "api_url": f"{self.url}/e2b", "sandbox_url": f"{self.url}/e2b", "retries": 0}


@pytest.fixture(scope="module")
def crowded(bare_dir: str) -> Iterator[RunningServer]:
    with serving(bare_dir, env=ROOM) as running:
        yield running


@pytest.fixture(scope="module")
def admin(crowded: RunningServer) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {crowded.key}"}
    with httpx2.Client(base_url=crowded.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tenants(crowded: RunningServer, admin: httpx2.Client) -> dict[str, Tenant]:
    """Ann and Bob, each with a sandbox: there can be no more."""
    made = {}
    for name in STATUSES:
        key = admin.post("/admin/keys", json={"owner": name}).json()["key"]
        tenant = Tenant(name, crowded.url, key, "")
        with tenant.http() as client:
            sandbox = client.post("/api/v1/sandboxes", json={}).json()["id"]
            if not made:  # the other place is for whoever comes later, though nobody is known yet
                with pytest.raises(httpx2.ReadTimeout):
                    client.post("/api/v1/sandboxes", json={}, timeout=0.5)
                wait_until(lambda: capacity(admin).sandboxes.waiting == 0)
        made[name] = tenant._replace(sandbox=sandbox)
    return made


def capacity(admin: httpx2.Client) -> CapacityInfo:
    return msgspec.json.decode(admin.get("/admin/capacity").content, type=CapacityInfo)


def asked(tenant: Tenant, path: str, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx2.Response]]:
    """A request that goes on in the background, and where its answer will be."""
    answers: list[httpx2.Response] = []

    def ask() -> None:
        with tenant.http() as client:
            answers.append(client.post(path, json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


@pytest.fixture(scope="module")
def no_room(tenants: dict[str, Tenant], admin: httpx2.Client) -> Iterator[dict[str, Tenant]]:
    """One more sandbox of Ann's, and one more execution, is asked for and waits."""
    ann = tenants["ann"]
    with ann.http() as client:
        context = client.post(f"/api/v1/sandboxes/{ann.sandbox}/contexts", json={}).json()["id"]
    run = f"/api/v1/sandboxes/{ann.sandbox}/run"
    asking = [asked(ann, run, {"code": "import time; time.sleep(600)", "timeout_seconds": 600})]
    wait_until(lambda: capacity(admin).executions.in_use == 1)
    asking += [asked(ann, run, {"code": "6*7", "context": context}), asked(ann, "/api/v1/sandboxes", {})]
    wait_until(lambda: capacity(admin).sandboxes.waiting == capacity(admin).executions.waiting == 1)
    yield tenants
    with ann.http() as client:
        assert client.post(f"/api/v1/sandboxes/{ann.sandbox}/contexts/default/interrupt").status_code == 200
        for thread, answers in asking[:2]:
            thread.join(60)
        assert answers[0].json()["text"] == "42"
        assert client.delete(f"/api/v1/sandboxes/{ann.sandbox}").status_code == 204
    asking[2][0].join(60)
    assert asking[2][1][0].status_code == 201
    wait_until(lambda: capacity(admin).executions.in_use == 0)


@pytest.fixture(params=STATUSES)
def tenant(request: pytest.FixtureRequest, no_room: dict[str, Tenant]) -> Tenant:
    return no_room[request.param]


def refused(tenant: Tenant, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    """The body of an answer that says no, and when to come again."""
    with tenant.http() as client:
        answer = client.post(path, json=body, headers=headers or {})
    assert answer.status_code == STATUSES[tenant.name], answer.text
    assert 1 <= int(answer.headers["retry-after"]) <= 300
    return answer


def test_our_own_api_says_it_with_a_code_and_seconds(tenant: Tenant):
    code = {"ann": "quota_exceeded", "bob": "busy"}[tenant.name]
    for path, body in (("/sandboxes", {}), (f"/sandboxes/{tenant.sandbox}/run", {"code": "1"})):
        error = refused(tenant, f"/api/v1{path}", body).json()["error"]
        assert error["code"] == code and error["retry_after_seconds"] >= 1


def test_our_library_raises_the_engines_error(tenant: Tenant):
    kind = {"ann": errors.QuotaExceeded, "bob": errors.Busy}[tenant.name]
    with pytest.raises(kind, match="try again in") as raised:
        cloche.Sandbox(url=tenant.url, api_key=tenant.key)
    assert raised.value.retry_after_seconds is not None
    with pytest.raises(kind, match="running executions"):
        cloche.Sandbox.connect(tenant.sandbox, url=tenant.url, api_key=tenant.key).run("1")


def test_e2b_clients_raise_their_own_error(tenant: Tenant):
    kind = {"ann": e2b.RateLimitException, "bob": e2b.ServiceBusyException}[tenant.name]
    with pytest.raises(kind, match="try again in"):
        e2b.Sandbox.create(**tenant.e2b)
    answer = refused(tenant, "/e2b/sandboxes", {"templateID": "base"}, {"x-api-key": tenant.key})
    assert answer.json()["code"] == STATUSES[tenant.name]
    assert "should-retry" not in answer.headers  # so that clients try again, after those seconds


def test_e2b_code_is_refused_before_its_stream_begins(tenant: Tenant):
    box = e2b_code_interpreter.Sandbox.connect(tenant.sandbox, **tenant.e2b)
    with pytest.raises(e2b.SandboxException, match=rf"{STATUSES[tenant.name]} .*running executions"):
        box.run_code("1")


@pytest.mark.parametrize("error", [errors.Busy("full"), errors.QuotaExceeded("much")], ids=["full", "much"])
def test_over_a_stream_e2b_clients_do_not_take_it_for_a_sandbox_that_has_ended(error: errors.ClocheError):
    assert connect_code_of(error) == "resource_exhausted"  # they raise RateLimitException


def test_openai_clients_raise_their_own_error(tenant: Tenant):
    kind = {"ann": openai.RateLimitError, "bob": openai.InternalServerError}[tenant.name]
    client = openai.OpenAI(base_url=f"{tenant.url}/v1", api_key=tenant.key, max_retries=0)
    with pytest.raises(kind, match="try again in") as raised:
        client.containers.create(name="x")
    said = {"ann": ("requests", "rate_limit_exceeded"), "bob": ("server_error", "server_error")}[tenant.name]
    assert (raised.value.type, raised.value.code) == said
    assert int(raised.value.response.headers["retry-after"]) >= 1


def test_librechat_is_told_in_the_words_that_it_knows(tenant: Tenant):
    body = {"lang": "py", "code": "print(1)"}
    answer = refused(tenant, "/librechat/v1/exec", body, {"x-api-key": tenant.key}).json()
    assert answer["error"] == {"ann": "rate_limited", "bob": "too_many_programs"}[tenant.name]
    assert answer["retry_after_seconds"] >= 1 and "try again" in answer["message"]


def test_opensandbox_is_told_with_a_code(tenant: Tenant):
    answer = refused(tenant, "/opensandbox/v1/sandboxes", CREATE, {"open-sandbox-api-key": tenant.key}).json()
    assert answer["code"] == {"ann": "SANDBOX::RATE_LIMITED", "bob": "SANDBOX::AT_CAPACITY"}[tenant.name]


def test_the_operator_sees_the_usage(no_room: dict[str, Tenant], admin: httpx2.Client, bare_dir: str):
    info = capacity(admin)
    assert (info.sandboxes.capacity, info.sandboxes.in_use, info.sandboxes.waiting) == (2, 2, 1)
    assert (info.executions.capacity, info.executions.in_use, info.executions.waiting) == (1, 1, 1)
    assert info.sandboxes.because == "configured" and info.memory.enough and info.running == 2
    metrics = admin.get("/metrics").text
    assert 'cloche_capacity_in_use{what="sandboxes"} 2.0' in metrics
    assert 'cloche_capacity_waiting{what="executions"} 1.0' in metrics
    listed = subprocess.run(CommandLine(bare_dir, alone=False).words("ps"), capture_output=True, text=True, check=True)
    assert "2/2 sandboxes, 1/1 executions, 2 waiting" in listed.stdout


def test_only_an_admin_is_told_of_all_that(no_room: dict[str, Tenant]):
    with no_room["bob"].http() as client:
        assert client.get("/admin/capacity").status_code == 403
