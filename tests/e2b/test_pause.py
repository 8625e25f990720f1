"""Sandboxes are paused and go on: with memory and without, by call, at their timeout, and by whoever uses them."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from e2b import SandboxException, SandboxQuery, SandboxState
from e2b.exceptions import SandboxNotFoundException, TimeoutException
from e2b_code_interpreter import Sandbox
from tests.conftest import serving, wait_until


@pytest.fixture(scope="module")
def api(server):
    with httpx.Client(base_url=f"{server.url}/e2b", headers={"X-API-Key": server.key}, timeout=60) as client:
        yield client


@pytest.fixture
def create(server):
    """Makes sandboxes, and ends them, paused or not."""
    made = []

    def creating(**how) -> Sandbox:
        made.append(Sandbox.create(**how, **server.e2b))
        return made[-1]

    yield creating
    for box in made:
        box.kill()


def sandbox_headers(box: Sandbox, port: int, **more: str) -> dict[str, str]:
    return {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(port), **more}


def state(box: Sandbox) -> SandboxState:
    return box.get_info().state


# -- by call


def test_a_paused_sandbox_goes_on_with_its_variables_and_files(box):
    box.run_code("x = 41")
    box.files.write("kept.txt", "kept")
    token = box._envd_access_token
    assert box.pause() is True
    assert not box.is_running()
    assert state(box) is SandboxState.PAUSED
    again = Sandbox.connect(box.sandbox_id, **server_of(box))
    assert again._envd_access_token == token
    assert box.is_running()
    assert box.run_code("x + 1").text == "42"
    assert box.files.read("kept.txt") == "kept"
    assert state(box) is SandboxState.RUNNING


def server_of(box: Sandbox) -> dict[str, str]:
    config = box.connection_config
    return {"api_key": config.api_key, "api_url": config.api_url, "sandbox_url": config._sandbox_url}


def test_one_that_is_paused_already_is_not_paused_again(box, api):
    assert box.pause() is True
    assert box.pause() is False
    refused = api.post(f"/sandboxes/{box.sandbox_id}/pause")
    assert (refused.status_code, refused.json()["code"]) == (409, 409)
    assert "is paused" in refused.json()["message"]


def test_without_its_memory_it_starts_anew_with_its_files(box, api):
    box.run_code("x = 41")
    box.files.write("kept.txt", "kept")
    assert box.pause(keep_memory=False) is True
    assert not box.is_running()
    assert api.get(f"/sandboxes/{box.sandbox_id}").json()["pauseMode"] == "filesystem"
    box.connect()
    assert box.files.read("kept.txt") == "kept"
    error = box.run_code("x").error
    assert error is not None and error.name == "NameError"
    assert box.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == box.sandbox_id


async def test_a_command_goes_on_where_it_was_and_so_does_its_output(async_box):
    going = await async_box.commands.run("read x; echo got $x", background=True, stdin=True)
    await async_box.pause()
    await async_box.connect()
    await async_box.commands.send_stdin(going.pid, "word\n")
    ended = await going.wait()
    assert ended.stdout == "got word\n"


async def test_a_run_that_a_pause_interrupts_ends_after_it(server, async_box):
    started = asyncio.Event()
    code = "import time; print('on', flush=True); time.sleep(0.5); 6 * 7"
    running = asyncio.create_task(async_box.run_code(code, on_stdout=lambda _: started.set()))
    await started.wait()
    await async_box.pause()
    await async_box.connect()
    assert (await running).text == "42"


async def test_a_run_that_a_pause_without_memory_ends_is_not_waited_for(server, async_box):
    started = asyncio.Event()
    code = "import time; print('on', flush=True); time.sleep(600)"
    running = asyncio.create_task(async_box.run_code(code, on_stdout=lambda _: started.set()))
    await started.wait()
    await async_box.pause(keep_memory=False)
    with pytest.raises(TimeoutException):
        await running


def test_its_boot_is_its_own_and_lasts_as_long_as_its_memory(box, single):
    def boot() -> str:
        return box.files.read("/proc/sys/kernel/random/boot_id")

    first = boot()
    with open("/proc/sys/kernel/random/boot_id") as host:
        assert len(first) == 37 and first != host.read()
    refused = box.commands.run("echo x > /proc/sys/kernel/random/boot_id || echo refused", user="root")
    assert single or refused.stdout == "refused\n"  # with one identity it is the sandbox's own file, and harms no other
    box.pause()
    box.connect()
    assert boot() == first
    box.pause(keep_memory=False)
    box.connect()
    assert boot() != first


# -- what is said of one that is paused


def test_a_paused_sandbox_is_described(create, api):
    box = create(timeout=120, lifecycle={"on_timeout": "pause", "auto_resume": False}, metadata={"a": "b"})
    running = api.get(f"/sandboxes/{box.sandbox_id}").json()
    assert running["lifecycle"] == {"autoResume": False, "onTimeout": "pause"}
    assert "pauseMode" not in running
    box.pause()
    paused = api.get(f"/sandboxes/{box.sandbox_id}").json()
    assert (paused["state"], paused["pauseMode"]) == ("paused", "full")
    same = ("sandboxID", "templateID", "alias", "startedAt", "metadata", "envdAccessToken", "lifecycle", "cpuCount")
    assert {name: paused[name] for name in same} == {name: running[name] for name in same}
    assert running["startedAt"] < paused["endAt"] < running["endAt"]


def test_lists_tell_those_that_run_from_those_that_are_paused(create, server, api):
    mark = {"list": "of-paused"}
    paused_on_disk, awake = create(metadata=mark), create(metadata=mark)
    paused_on_disk.pause()

    def found(*states: SandboxState) -> list[str]:
        query = SandboxQuery(metadata=mark, state=list(states) or None)
        return [each.sandbox_id for each in Sandbox.list(query=query, **server.e2b).next_items()]

    assert found(SandboxState.PAUSED) == [paused_on_disk.sandbox_id]
    assert found(SandboxState.RUNNING) == [awake.sandbox_id]
    assert found() == found(SandboxState.RUNNING, SandboxState.PAUSED) == [awake.sandbox_id, paused_on_disk.sandbox_id]
    version_1 = api.get("/sandboxes", params={"metadata": "list=of-paused"}).json()
    assert [each["sandboxID"] for each in version_1] == [awake.sandbox_id]


def test_operations_on_a_paused_sandbox_report_the_pause(box, api):
    box.pause()
    with pytest.raises(SandboxException, match=r"409: .*paused"):
        box.set_timeout(60)
    for method, path in (("PUT", "network"), ("POST", "refreshes"), ("GET", "metrics")):
        refused = api.request(method, f"/sandboxes/{box.sandbox_id}/{path}", json={})
        assert (refused.status_code, refused.json()["code"]) == (409, 409), path
    assert state(box) is SandboxState.PAUSED


def test_a_paused_sandbox_can_be_killed(box):
    box.pause()
    assert box.kill() is True
    assert box.kill() is False
    with pytest.raises(SandboxNotFoundException):
        box.connect()


def test_one_without_memory_can_be_killed_too(box, api):
    box.pause(keep_memory=False)
    assert box.kill() is True
    assert api.get(f"/sandboxes/{box.sandbox_id}").status_code == 404


def test_old_clients_resume(box, api):
    resumed = api.post(f"/sandboxes/{box.sandbox_id}/resume", json={})
    assert (resumed.status_code, resumed.json()["code"]) == (409, 409)
    box.pause()
    resumed = api.post(f"/sandboxes/{box.sandbox_id}/resume", json={"timeout": 60, "autoPause": False})
    assert resumed.status_code == 201
    assert resumed.json()["envdAccessToken"] == box._envd_access_token
    assert box.is_running()


def test_connecting_says_whether_it_was_paused(box, api):
    path = f"/v2/sandboxes/{box.sandbox_id}/connect"
    assert api.post(path, json={}).status_code == 200
    box.pause()
    assert api.post(path, json={"memory": False}).status_code == 501
    assert api.post(path, json={}).status_code == 201


# -- at its timeout, and by traffic


def test_it_is_paused_at_its_timeout_and_resumes_on_connect(create):
    box = create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": False})
    box.run_code("x = 41")
    box.set_timeout(0)
    wait_until(lambda: state(box) is SandboxState.PAUSED)
    with pytest.raises(TimeoutException, match="is paused"):
        box.run_code("x")
    box.connect()
    assert box.run_code("x + 1").text == "42"


def test_the_pause_at_its_timeout_can_leave_its_memory_behind(create, api):
    box = create(timeout=60, lifecycle={"on_timeout": {"action": "pause", "keep_memory": False}})
    box.files.write("kept.txt", "kept")
    box.set_timeout(0)
    wait_until(lambda: state(box) is SandboxState.PAUSED)
    assert api.get(f"/sandboxes/{box.sandbox_id}").json()["pauseMode"] == "filesystem"
    box.connect()
    assert box.files.read("kept.txt") == "kept"


def test_use_resumes_a_sandbox_created_with_auto_resume(create):
    box = create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.run_code("x = 41")
    for use in (lambda: box.run_code("x + 1").text == "42", lambda: box.commands.run("echo on").stdout == "on\n"):
        box.pause()
        assert use()
    box.pause()
    assert box.is_running()  # the client asks with its token


def test_requests_without_a_token_resume_no_sandbox(create, server, api):
    box = create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.pause()
    asked = httpx.get(f"{server.url}/e2b/health", headers=sandbox_headers(box, 49983))
    assert asked.status_code == 401
    wrong = httpx.post(f"{server.url}/e2b/execute", headers=sandbox_headers(box, 49999), json={"code": "1"})
    assert wrong.status_code == 403
    assert state(box) is SandboxState.PAUSED
    assert api.get(f"/sandboxes/{box.sandbox_id}/metrics").status_code == 409
    assert state(box) is SandboxState.PAUSED


def test_traffic_to_a_port_wakes_it_and_finds_the_program(create, server):
    box = create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.commands.run("python3 -m http.server 8000", background=True)
    page = lambda: httpx.get(server.url, headers=sandbox_headers(box, 8000))  # noqa: E731
    wait_until(lambda: page().status_code == 200)
    box.pause()
    assert page().status_code == 200
    assert state(box) is SandboxState.RUNNING


def test_a_signed_url_finds_a_paused_sandbox(create, server):
    paused_on_disk = create()
    waking = create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    for box in (paused_on_disk, waking):
        box.files.write("f.txt", "kept")
        box.pause()
    assert httpx.get(paused_on_disk.download_url("f.txt")).status_code == 502
    assert httpx.get(waking.download_url("f.txt")).text == "kept"


# -- after a restart of the server


def test_files_tokens_and_settings_outlive_the_server(bare_dir, tmp_path):
    with serving(bare_dir) as first:
        kept = Sandbox.create(network={"allow_public_traffic": False}, metadata={"a": "b"}, **first.e2b)
        kept.files.write("kept.txt", "kept")
        kept.pause()
        due = Sandbox.create(lifecycle={"on_timeout": "pause", "auto_resume": True}, **first.e2b)
        due.files.write("kept.txt", "kept")
    with serving(bare_dir, env={"CLOCHE_API_KEY": first.key}) as second:
        own = {**second.e2b, "api_key": first.key}
        listed = {each.sandbox_id: each for each in Sandbox.list(**own).next_items()}
        assert listed[kept.sandbox_id].state is SandboxState.PAUSED
        assert listed[kept.sandbox_id].metadata == {"a": "b"}
        again = Sandbox.connect(kept.sandbox_id, **own)
        assert again._envd_access_token == kept._envd_access_token
        assert again.files.read("kept.txt") == "kept"
        closed = httpx.get(second.url, headers=sandbox_headers(again, 8000))
        assert (closed.status_code, "traffic access token" in closed.text) == (403, True)
        signed = due.download_url("kept.txt").replace(first.url, second.url)
        assert httpx.get(signed).text == "kept"
        for each in listed:
            Sandbox.kill(each, **own)
