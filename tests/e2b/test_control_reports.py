"""Metrics, logs, templates, and what E2B has and this server does not."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from e2b import Template
from e2b_code_interpreter import Sandbox

NO_SUCH = "i" + "0" * 20
MIB = 1 << 20


@pytest.fixture(scope="module")
def api(server):
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def box(server):
    made = Sandbox.create(**server.e2b)
    yield made
    made.kill()


# -- metrics


def test_a_new_sandbox_has_a_sample_at_once(server):
    box = Sandbox.create(**server.e2b)
    (sample, *_) = box.get_metrics()
    assert sample.cpu_count == 2
    assert 0 <= sample.cpu_used_pct <= 100
    assert sample.mem_total == 2048 * MIB
    assert sample.disk_total == 1024 * MIB
    box.kill()


@pytest.mark.long
def test_samples_follow_the_usage_of_the_sandbox(server):
    box = Sandbox.create(**server.e2b)
    before = box.get_metrics()[-1]
    box.run_code("open('/home/user/big', 'wb').write(bytes(50 << 20)); held = bytearray(80 << 20)")
    deadline = time.monotonic() + 60
    while (now := box.get_metrics()[-1]).disk_used < 50 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 50 * MIB <= now.disk_used - before.disk_used < 70 * MIB
    assert 75 * MIB <= now.mem_used - before.mem_used < 120 * MIB
    box.kill()


def test_a_window_shows_the_samples_taken_in_it(box):
    now = datetime.now(UTC)
    assert box.get_metrics(start=now - timedelta(hours=1), end=now + timedelta(hours=1)) == box.get_metrics()
    assert box.get_metrics(start=now - timedelta(hours=2), end=now - timedelta(hours=1)) == []
    assert box.get_metrics(start=now + timedelta(hours=1)) == []


def test_a_bad_window_is_named(api, box):
    answer = api.get(f"/sandboxes/{box.sandbox_id}/metrics?start=yesterday")
    assert (answer.status_code, answer.json()["message"][:5]) == (400, "start")


def test_the_newest_samples_of_many_come_at_once(api, box):
    answer = api.get("/sandboxes/metrics", params={"sandbox_ids": f"{box.sandbox_id},{NO_SUCH}"})
    assert list(answer.json()["sandboxes"]) == [box.sandbox_id]
    assert answer.json()["sandboxes"][box.sandbox_id]["memTotal"] == 2048 * MIB
    assert api.get("/sandboxes/metrics").status_code == 400


# -- logs


def test_logs_tell_a_sandboxs_life_also_when_it_is_over(server, api):
    box = Sandbox.create(**server.e2b)
    box.run_code("print('a secret')")
    box.kill()
    old = api.get(f"/sandboxes/{box.sandbox_id}/logs").json()
    lines = [json.loads(each["line"])["message"] for each in old["logs"]]
    assert lines[0].startswith("sandbox created from python@")
    assert lines[-1] == "sandbox ended: killed by its owner"
    assert "secret" not in str(old)
    entries = api.get(f"/v2/sandboxes/{box.sandbox_id}/logs").json()["logs"]
    assert [each["message"] for each in entries] == lines
    assert entries == old["logEntries"]
    assert set(entries[0]) == {"timestamp", "level", "message", "fields"}


def test_logs_can_be_narrowed(server, api):
    box = Sandbox.create(**server.e2b)
    box.kill()

    def found(**query: object) -> list[str]:
        entries = api.get(f"/v2/sandboxes/{box.sandbox_id}/logs", params=query).json()["logs"]
        return [each["fields"]["event"] for each in entries]

    made, ended = "sandbox.created", "sandbox.ended"
    later = int(time.time() * 1000) + 60_000
    assert found() == [made, ended]
    assert found(direction="backward") == [ended, made]
    assert found(direction="backward", cursor=later, limit=1) == [ended]
    assert found(cursor=later) == []
    assert found(search="ended") == [ended]
    assert found(level="warn") == []
    assert found(limit=0) == []


def test_logs_of_none_are_not_found(api):
    assert api.get(f"/sandboxes/{NO_SUCH}/logs").status_code == 404


# -- templates


@pytest.mark.parametrize("path", ["/templates", "/v2/templates", "/default-templates"])
def test_templates_are_listed_with_their_names(api, path):
    (python,) = [each for each in api.get(path).json() if "python" in each["names"]]
    assert {"base", "code-interpreter-v1"} <= set(python["aliases"])
    assert python["templateID"].startswith("python@")
    assert (python["buildStatus"], python["public"]) == ("ready", True)


def test_a_template_is_told_by_any_of_its_names(api):
    ids = {api.get(f"/templates/{name}").json()["templateID"] for name in ("python", "base", "code-interpreter-v1")}
    assert len(ids) == 1
    assert api.get(f"/templates/{ids.pop()}").json()["builds"][0]["status"] == "ready"


def test_the_sdk_reports_whether_a_template_exists(server):
    own = {"api_key": server.key, "api_url": f"{server.url}/e2b"}
    assert Template.exists("base", **own)
    assert not Template.exists("no-such", **own)


# -- what is not there yet


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/templates"),
        ("POST", "/v2/templates"),
        ("PATCH", "/v2/templates/python"),
        ("GET", "/templates/python/tags"),
        ("DELETE", "/templates/python"),
        ("POST", "/secrets"),
        ("GET", "/secrets/a"),
        ("GET", "/teams"),
    ],
)
def test_unsupported_routes_answer_in_e2bs_shape(api, box, method, path):
    answer = api.request(method, path.format(box.sandbox_id), json={})
    assert (answer.status_code, answer.json()["code"]) == (501, 501)
    assert len(answer.json()["message"]) > 20
    assert answer.headers["should-retry"] == "false"


def test_unsupported_routes_are_listed_but_need_a_key(server):
    assert httpx.get(f"{server.url}/e2b/secrets").status_code == 401
