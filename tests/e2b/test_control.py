"""Sandboxes are made, found, listed and ended: E2B's Python SDK, and bare HTTP where a shape matters."""

from __future__ import annotations

import asyncio
import uuid
from urllib.parse import quote, urlencode

import httpx
import pytest
from e2b import SandboxException, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, SandboxNotFoundException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox

NO_SUCH = "i" + "0" * 20


@pytest.fixture(scope="module")
def api(server):
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def stranger(server):
    """Somebody with a key of another owner."""
    admin = {"X-API-Key": server.key}
    made = httpx.post(f"{server.url}/admin/keys", headers=admin, json={"owner": "stranger"}).json()
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": made["key"]}) as client:
        yield client
    httpx.delete(f"{server.url}/admin/keys/{made['id']}", headers=admin)


@pytest.fixture
def create(api):
    """Makes sandboxes by bare HTTP, and ends them."""
    made = []

    def creating(path: str = "/v2/sandboxes", headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
        answer = api.post(path, headers=headers, json={"templateID": "base", **body})
        if answer.status_code == 201:
            made.append(answer.json()["sandboxID"])
        return answer

    yield creating
    for id in made:
        api.delete(f"/sandboxes/{id}")


# -- creation


def test_a_new_sandbox_has_everything_that_clients_read(create):
    made = create()
    assert made.status_code == 201
    body = made.json()
    assert body["sandboxID"].startswith("i") and len(body["sandboxID"]) == 21
    assert body["templateID"].startswith("python@")
    assert body["alias"] == "base"
    assert body["envdAccessToken"] and body["trafficAccessToken"] and body["clientID"]
    assert tuple(map(int, body["envdVersion"].split("."))) >= (0, 6, 4)


def test_its_environment_is_the_one_asked_for_and_names_the_sandbox(server):
    box = Sandbox.create(envs={"GREETING": "grüß dich", "E2B_SANDBOX": "no"}, **server.e2b)
    seen = box.run_code("import os; [os.environ[n] for n in ('GREETING', 'E2B_SANDBOX', 'E2B_SANDBOX_ID')]")
    assert seen.results[0].json == ["grüß dich", "true", box.sandbox_id]
    assert box.commands.run("echo $E2B_TEMPLATE_ID").stdout.startswith("python@")
    box.kill()


def test_code_runs_as_root_commands_as_user_and_both_at_home(server):
    box = Sandbox.create(**server.e2b)
    assert box.run_code("import os; os.getcwd(), os.getuid()").text == "('/home/user', 0)"
    assert box.commands.run("pwd; id -un").stdout == "/home/user\nuser\n"
    box.kill()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"templateID": 1}, "templateID"),
        ({"timeout": "soon"}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -5}, "timeout"),
        ({"timeout": 10**9}, "timeout"),
        ({"timeout": 10**400}, "timeout"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"envVars": {"a=b": "c"}}, "a=b"),
    ],
)
def test_a_bad_request_is_a_400_that_names_the_field(create, body, field):
    answer = create(**body)
    assert answer.status_code == 400
    assert answer.json()["code"] == 400
    assert field in answer.json()["message"]


def test_an_unknown_template_is_a_404_that_lists_the_known_ones(server):
    with pytest.raises(SandboxException, match=r"404: template 'no-such' not found.*python@"):
        Sandbox.create("no-such", **server.e2b)


def test_unsupported_features_are_refused_by_name(server):
    with pytest.raises(SandboxException, match=r"network\.dnsServers is not possible"):
        Sandbox.create(network={"dns_servers": ["1.1.1.1"]}, **server.e2b)


def test_an_mcp_gateway_that_does_not_exist_fails_as_in_e2b(server):
    mark = str(uuid.uuid4())
    with pytest.raises(SandboxException, match="Failed to start MCP gateway"):
        Sandbox.create("base", metadata={"mark": mark}, mcp={"invalid_server": {}}, **server.e2b)
    assert Sandbox.list(SandboxQuery(metadata={"mark": mark}), **server.e2b).next_items() == []


def test_without_a_valid_key_nothing_is_told(server, api, create):
    id = create().json()["sandboxID"]
    for headers in ({"X-API-Key": ""}, {"X-API-Key": "e2b_00"}):
        for method, path in (("GET", f"/sandboxes/{id}"), ("POST", "/v2/sandboxes"), ("GET", "/v2/sandboxes")):
            answer = httpx.request(method, f"{server.url}/e2b{path}", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, 401)
    with pytest.raises(AuthenticationException):
        Sandbox.create(**{**server.e2b, "api_key": "e2b_wrong"})


# -- the same request twice


def test_a_request_that_is_repeated_with_its_key_makes_one_sandbox(create):
    key = {"Idempotency-Key": str(uuid.uuid4())}
    first, second = create(headers=key, timeout=60), create(headers=key, timeout=60)
    assert first.json() == second.json()
    assert create(timeout=60).json()["sandboxID"] != first.json()["sandboxID"]


async def test_repetitions_at_the_same_time_wait_for_the_first(server):
    key = str(uuid.uuid4())
    async with httpx.AsyncClient(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}) as client:
        post = [
            client.post("/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": key})
            for _ in range(5)
        ]
        ids = {answer.json()["sandboxID"] for answer in await asyncio.gather(*post)}
        assert len(ids) == 1
        await client.delete(f"/sandboxes/{ids.pop()}")


def test_a_key_is_for_one_request_only(create):
    key = {"Idempotency-Key": str(uuid.uuid4())}
    assert create(headers=key, timeout=60).status_code == 201
    other = create(headers=key, timeout=61)
    assert (other.status_code, other.json()["code"]) == (409, 409)


def test_a_key_makes_a_new_sandbox_once_the_first_has_ended(api, create):
    key = {"Idempotency-Key": str(uuid.uuid4())}
    first = create(headers=key).json()["sandboxID"]
    api.delete(f"/sandboxes/{first}")
    assert create(headers=key).json()["sandboxID"] != first


def test_a_repeated_request_after_a_failure_is_tried_again(create):
    key = {"Idempotency-Key": str(uuid.uuid4())}
    assert create(headers=key, templateID="no-such").status_code == 404
    assert create(headers=key).status_code == 201


@pytest.mark.parametrize("memory", [True, False])
def test_a_paused_sandbox_hinders_no_creation_with_a_key(api, create, stranger, memory: bool):
    key = {"Idempotency-Key": str(uuid.uuid4())}
    paused = create(headers=key).json()["sandboxID"]
    assert api.post(f"/sandboxes/{paused}/pause", json={"memory": memory}).status_code == 204
    assert create(headers={"Idempotency-Key": str(uuid.uuid4())}).status_code == 201
    other = stranger.post("/v2/sandboxes", headers=key, json={"templateID": "base"})
    assert other.status_code == 201 and paused not in other.text
    assert stranger.delete(f"/sandboxes/{other.json()['sandboxID']}").status_code == 204


def test_the_sdk_sends_its_own_key(server):
    key = str(uuid.uuid4())
    first = Sandbox.create(idempotency_key=key, **server.e2b)
    assert Sandbox.create(idempotency_key=key, **server.e2b).sandbox_id == first.sandbox_id
    first.kill()


# -- one sandbox


def test_a_sandbox_is_described_as_requested(server):
    box = Sandbox.create("code-interpreter-v1", timeout=120, metadata={"a": "b"}, **server.e2b)
    info = Sandbox.get_info(box.sandbox_id, **server.e2b)
    assert (info.sandbox_id, info.metadata, info.state) == (box.sandbox_id, {"a": "b"}, SandboxState.RUNNING)
    assert (info.end_at - info.started_at).total_seconds() == pytest.approx(120, abs=0.01)
    assert (info.cpu_count, info.memory_mb) == (2, 2048)
    assert info.name == "code-interpreter-v1"
    box.kill()


def test_a_killed_sandbox_is_gone_and_the_second_time_says_so(server, api):
    box = Sandbox.create(**server.e2b)
    assert box.kill() is True
    assert box.kill() is False
    assert not box.is_running()
    again = api.delete(f"/sandboxes/{box.sandbox_id}")
    assert again.json()["code"] == 404
    assert f"sandbox {box.sandbox_id} was killed at 20" in again.json()["message"]
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info(box.sandbox_id, **server.e2b)


def test_an_id_with_a_clients_id_behind_it_is_the_same(api, create):
    id = create().json()["sandboxID"]
    assert api.get(f"/sandboxes/{id}-6532622b").json()["sandboxID"] == id


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/sandboxes/{}"),
        ("DELETE", "/sandboxes/{}"),
        ("POST", "/v2/sandboxes/{}/connect"),
        ("POST", "/sandboxes/{}/timeout"),
        ("POST", "/sandboxes/{}/pause"),
        ("GET", "/sandboxes/{}/metrics"),
        ("GET", "/v2/sandboxes/{}/logs"),
        ("PUT", "/sandboxes/{}/network"),
    ],
)
def test_a_foreign_sandbox_answers_like_an_unknown_one(stranger, create, api, method, path):
    id = create().json()["sandboxID"]
    foreign = stranger.request(method, path.format(id), json={"timeout": 1})
    never = stranger.request(method, path.format(NO_SUCH), json={"timeout": 1})
    assert (foreign.status_code, foreign.json()["code"]) == (404, 404)
    assert foreign.text == never.text.replace(NO_SUCH, id)
    assert api.get(f"/sandboxes/{id}").status_code == 200


async def test_a_run_whose_sandbox_is_killed_ends_with_the_reason(server):
    box, started = await AsyncSandbox.create(**server.e2b), asyncio.Event()
    code = "import time; print('on', flush=True); time.sleep(60)"
    running = asyncio.create_task(box.run_code(code, on_stdout=lambda _: started.set()))
    await started.wait()
    await box.kill()
    with pytest.raises(TimeoutException, match="killed while the request was in progress"):
        await running
    assert not await box.is_running()


# -- lists


@pytest.fixture(scope="module")
def three(server):
    """Three sandboxes, the oldest first, that nobody else's list shows."""
    mark = f"a b&c={uuid.uuid4()}"
    made = [Sandbox.create("base", metadata={"mark": mark, "n": str(n)}, **server.e2b) for n in range(2)]
    made.append(Sandbox.create("code-interpreter-v1", metadata={"mark": mark, "n": "2"}, **server.e2b))
    yield mark, [box.sandbox_id for box in made]
    for box in made:
        box.kill()


def listed(server, limit: int | None = None, order: str | None = None, **query: object) -> list[list[str]]:
    """The ids on each page."""
    paginator = Sandbox.list(SandboxQuery(**query), limit=limit, order=order, **server.e2b)
    pages = []
    while paginator.has_next:
        pages.append([each.sandbox_id for each in paginator.next_items()])
    assert paginator.next_token is None
    return pages


def test_lists_are_newest_first_and_can_be_turned(server, three):
    mark, ids = three
    assert listed(server, metadata={"mark": mark}) == [ids[::-1]]
    assert listed(server, metadata={"mark": mark}, order="asc") == [ids]


def test_pages_hold_every_sandbox_once(server, three):
    mark, ids = three
    assert listed(server, 2, metadata={"mark": mark}) == [[ids[2], ids[1]], [ids[0]]]
    assert listed(server, 1, "asc", metadata={"mark": mark}) == [[ids[0]], [ids[1]], [ids[2]]]
    assert listed(server, 3, metadata={"mark": mark}) == [ids[::-1]]


def test_pages_go_on_when_the_sandbox_where_they_stopped_is_gone(server, api):
    mark = str(uuid.uuid4())
    ids = [Sandbox.create(metadata={"mark": mark}, **server.e2b).sandbox_id for _ in range(3)]
    first = api.get("/v2/sandboxes", params={"metadata": f"mark={mark}", "limit": 2})
    for id in ids[1:]:
        api.delete(f"/sandboxes/{id}")
    query = {"metadata": f"mark={mark}", "nextToken": first.headers["x-next-token"]}
    rest = api.get("/v2/sandboxes", params=query)
    assert [each["sandboxID"] for each in rest.json()] == [ids[0]]
    assert "x-next-token" not in rest.headers
    api.delete(f"/sandboxes/{ids[0]}")


def test_every_pair_of_a_filter_must_match(server, three):
    mark, ids = three
    assert listed(server, metadata={"mark": mark, "n": "1"}) == [[ids[1]]]
    assert listed(server, metadata={"mark": mark, "n": "7"}) == [[]]


def test_lists_filter_by_state_template_and_start(server, three):
    mark, ids = three
    middle = Sandbox.get_info(ids[1], **server.e2b)
    assert listed(server, metadata={"mark": mark}, state=[SandboxState.RUNNING]) == [ids[::-1]]
    assert listed(server, metadata={"mark": mark}, state=[SandboxState.PAUSED]) == [[]]
    assert listed(server, metadata={"mark": mark}, started_after=middle.started_at) == [[ids[2], ids[1]]]
    assert listed(server, metadata={"mark": mark}, template=middle.template_id) == [ids[::-1]]
    assert listed(server, metadata={"mark": mark}, template="code-interpreter-v1") == [[ids[2]]]
    assert listed(server, metadata={"mark": mark}, template="unknown") == [[]]


def test_version_1_lists_all_that_run(api, three):
    mark, ids = three
    assert set(ids) <= {each["sandboxID"] for each in api.get("/sandboxes").json()}
    query = {"metadata": quote(urlencode({"mark": mark, "n": "1"}))}
    assert [each["sandboxID"] for each in api.get("/sandboxes", params=query).json()] == [ids[1]]


def test_a_list_shows_nothing_of_other_owners(stranger, three):
    assert stranger.get("/v2/sandboxes").json() == []
    assert stranger.get("/sandboxes").json() == []


def test_a_bad_query_is_a_400_that_names_the_parameter(api):
    for name, value in (("limit", "1000"), ("state", "asleep"), ("nextToken", "?"), ("metadata", "x")):
        answer = api.get("/v2/sandboxes", params={name: value})
        assert answer.status_code == 400
        assert answer.json()["message"].startswith(name)
