"""`/v1/containers` with OpenAI's own client. A container is a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI
from tests.conftest import RunningServer, serving
from tests.openai.conftest import client_of


def test_a_container_is_made_shown_listed_and_deleted(client: OpenAI):
    made = client.containers.create(
        name="mine", expires_after={"anchor": "last_active_at", "minutes": 5}, memory_limit="4g"
    )
    assert made.id.startswith("cntr_i") and made.status == "running" and made.name == "mine"
    assert (made.expires_after.minutes, made.memory_limit, made.network_policy.type) == (5, "4g", "disabled")
    assert client.containers.retrieve(made.id).id == made.id
    assert made.id in [each.id for each in client.containers.list()]
    client.containers.delete(made.id)
    assert made.id not in [each.id for each in client.containers.list()]
    for ask in (client.containers.retrieve, client.containers.delete):
        with pytest.raises(openai.NotFoundError, match=f"Container with id '{made.id}' not found"):
            ask(made.id)


def test_an_expired_container_is_listed_as_such_until_it_is_deleted(client: OpenAI, expire: Callable[[str], None]):
    made = client.containers.create(name="short")
    expire(made.id)
    assert client.containers.retrieve(made.id).status == "expired"
    assert {each.id: each.status for each in client.containers.list(name="short")}[made.id] == "expired"
    with pytest.raises(openai.BadRequestError, match="Container is expired"):
        client.containers.files.create(made.id, file=b"x")
    client.containers.delete(made.id)
    assert made.id not in [each.id for each in client.containers.list(name="short")]


def test_every_use_moves_the_end(client: OpenAI, gateway_server: RunningServer):
    made = client.containers.create(name="used")
    url = f"{gateway_server.url}/api/v1/sandboxes/{made.id.removeprefix('cntr_')}"
    headers = {"authorization": f"Bearer {gateway_server.key}"}
    httpx2.post(f"{url}/renew", json={"seconds": 30}, headers=headers)
    before = httpx2.get(url, headers=headers).json()["deadline_at"]
    assert client.containers.retrieve(made.id).last_active_at >= made.created_at
    assert httpx2.get(url, headers=headers).json()["deadline_at"] > before + 1000
    client.containers.delete(made.id)


def test_containers_are_invisible_to_other_owners(client: OpenAI, stranger: OpenAI):
    made = client.containers.create(name="private")
    file = client.containers.files.create(made.id, file=("a.txt", b"secret"))
    assert stranger.containers.list(name="private").data == []
    asked = [
        lambda: stranger.containers.retrieve(made.id),
        lambda: stranger.containers.delete(made.id),
        lambda: stranger.containers.files.list(made.id),
        lambda: stranger.containers.files.create(made.id, file=b"x"),
        lambda: stranger.containers.files.content.retrieve(file.id, container_id=made.id),
        lambda: stranger.containers.files.delete(file.id, container_id=made.id),
        lambda: stranger.responses.create(
            model="cloche/echo", input="x", tools=[{"type": "code_interpreter", "container": made.id}]
        ),
    ]
    for ask in asked:
        with pytest.raises(openai.NotFoundError, match=f"Container with id '{made.id}' not found"):
            ask()
    assert client.containers.retrieve(made.id).status == "running"
    client.containers.delete(made.id)


def test_pages_continue_after_a_deleted_item(stranger: OpenAI):
    made = [stranger.containers.create(name="page").id for _ in range(3)]
    assert [each.id for each in stranger.containers.list(name="page", order="asc", limit=2)] == made
    seen = []
    for container in stranger.containers.list(name="page", limit=1):
        seen.append(container.id)
        stranger.containers.delete(container.id)
    assert seen == made[::-1]


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"name": openai.omit}, "name", "missing_required_parameter"),
        ({"name": "x" * 513}, "name", "string_above_max_length"),
        ({"memory_limit": "2g"}, "memory_limit", "invalid_value"),
        (
            {"expires_after": {"anchor": "last_active_at", "minutes": 0}},
            "expires_after.minutes",
            "integer_below_min_value",
        ),
        (
            {"expires_after": {"anchor": "last_active_at", "minutes": 9999}},
            "expires_after.minutes",
            "integer_above_max_value",
        ),
        ({"expires_after": {"anchor": "created_at", "minutes": 5}}, "expires_after.anchor", "invalid_value"),
        ({"expires_after": {"minutes": 5}}, "expires_after.anchor", "missing_required_parameter"),
        ({"expires_after": 5}, "expires_after", "invalid_type"),
        ({"file_ids": ["file-x"] * 51}, "file_ids", "array_above_max_length"),
        ({"network_policy": {"type": "allowlist", "allowed_domains": ["x.org"]}}, "network_policy", "invalid_value"),
        ({"skills": [{"type": "skill_reference", "skill_id": "x"}]}, "skills", "invalid_value"),
    ],
)
def test_bad_wishes_are_named(client: OpenAI, given: dict, param: str, code: str):
    with pytest.raises(openai.BadRequestError) as refused:
        client.containers.create(**{"name": "bad", **given})
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize("id", ["cntr_x", "cntr_" + "x" * 500, "i" + "x" * 20, "cntr_..%2F..", "cntr_%00"])
def test_strange_ids_are_not_found(client: OpenAI, id: str):
    with pytest.raises(openai.NotFoundError):
        client.containers.retrieve(id)


def test_memory_over_the_maximum_is_refused_and_containers_expire_with_the_server(own_data_dir: Path, tmp_path: Path):
    config = tmp_path / "cloche.toml"
    config.write_text('[limits.maximum]\nmemory_bytes = "4GiB"\n')
    with serving(own_data_dir, env={"CLOCHE_CONFIG": str(config)}) as server, client_of(server) as client:
        tool = {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "16g"}}
        for ask in (
            lambda: client.containers.create(name="big", memory_limit="64g"),
            lambda: client.responses.create(model="cloche/echo", input="x", tools=[tool]),
        ):
            with pytest.raises(openai.BadRequestError, match="'1g', '4g'") as refused:
                ask()
            assert refused.value.param == "memory_limit"
        kept = client.containers.create(name="kept", memory_limit="4g")
        assert kept.memory_limit == "4g"
        file = client.containers.files.create(kept.id, file=("a.txt", b"kept"))
    with serving(own_data_dir) as server, client_of(server, api_key=server.key) as client:
        # What the server's end ended has expired; nobody deleted it.
        assert client.containers.retrieve(kept.id).status == "expired"
        assert client.containers.files.content.retrieve(file.id, container_id=kept.id).read() == b"kept"


def test_a_sandbox_of_another_dialect_is_a_container(client: OpenAI, gateway_server: RunningServer):
    headers = {"authorization": f"Bearer {gateway_server.key}"}
    made = httpx2.post(f"{gateway_server.url}/api/v1/sandboxes", json={}, headers=headers).json()
    container = client.containers.retrieve("cntr_" + made["id"])
    assert container.name == container.id and container.status == "running"
    client.containers.delete(container.id)


@pytest.mark.parametrize("minutes", ["²", "9" * 400, "-1", "0", "", "x"])
def test_metadata_of_another_dialect_is_no_failure(client: OpenAI, gateway_server: RunningServer, minutes: str):
    headers = {"authorization": f"Bearer {gateway_server.key}"}
    body = {"metadata": {"openai.minutes": minutes, "openai.name": "", "openai.session": "\U0001f600"}}
    made = httpx2.post(f"{gateway_server.url}/api/v1/sandboxes", json=body, headers=headers).json()
    container = client.containers.retrieve(f"cntr_{made['id']}")
    assert container.expires_after.minutes in (1, 20) and container.name == container.id
    assert container.id in [each.id for each in client.containers.list(limit=100)]
    client.containers.delete(container.id)
