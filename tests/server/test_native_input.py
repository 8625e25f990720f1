"""What comes in over `/api/v1` for a process that may not read it, and from clients that say nothing."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.conftest import wait_until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from cloche import errors
from cloche.api.native.commands import open_stdin_queue
from cloche.config import Config
from cloche.engine.commands.program import SandboxProgram
from cloche.model import SandboxSpec
from cloche.sdk.embedded import EmbeddedEngine

MIB = 1 << 20
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def api(server) -> Iterator[httpx2.Client]:
    headers = {"x-api-key": server.key}
    with httpx2.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=PATIENCE_SECONDS) as made:
        yield made


@pytest.fixture(scope="module")
def box(api: httpx2.Client) -> Iterator[str]:
    path = f"/sandboxes/{api.post('/sandboxes', json={}).json()['id']}"
    yield path
    api.delete(path)


@pytest.fixture(scope="module", autouse=True)
def silent(api: httpx2.Client, box: str) -> Iterator[dict[ClientConnection, str]]:
    """Clients that say no more, and what is missed of each. It takes a while until they hear so: the other tests'."""
    with contextlib.ExitStack() as opened:
        clients = {
            opened.enter_context(open_socket(api, f"{box}/{path}")): "the request" for path in ("execute", "process")
        }
        waiting = opened.enter_context(open_socket(api, f"{box}/execute"))
        waiting.send(json.dumps({"code": "1"}))
        assert json.loads(waiting.recv(PATIENCE_SECONDS))["type"] == "accepted"
        yield clients | {waiting: "`start`"}


def open_socket(api: httpx2.Client, path: str) -> contextlib.AbstractContextManager[ClientConnection]:
    url = "ws" + str(api.base_url).rstrip("/").removeprefix("http") + path
    return connect(url, additional_headers={"x-api-key": api.headers["x-api-key"]}, close_timeout=1)


@contextlib.contextmanager
def started(api: httpx2.Client, box: str, **asked: object) -> Iterator[tuple[ClientConnection, str]]:
    with open_socket(api, f"{box}/process") as opened:
        opened.send(json.dumps(asked))
        yield opened, json.loads(opened.recv(PATIENCE_SECONDS))["id"]


def run(api: httpx2.Client, box: str, command: str) -> str:
    return api.post(f"{box}/commands", json={"command": command}).json()["stdout"]


PIPE = {"stdin": True}
TERMINAL = {"terminal": {"rows": 24, "columns": 80}}


@pytest.mark.parametrize("how", [PIPE, TERMINAL], ids=["pipe", "terminal"])
def test_a_signal_is_delivered_while_input_is_unread(api: httpx2.Client, box: str, how: dict):
    size = MIB - 1  # what waits; a pipe takes another one, but a small one where this user has many
    with started(api, box, command="stty raw 2> /dev/null; sleep 600", **how) as (opened, _):
        for at in range(0, size, 100_000):
            opened.send(b"x" * min(100_000, size - at))
        opened.send(json.dumps({"type": "signal", "signal": 9}))
        while (event := json.loads(opened.recv(PATIENCE_SECONDS)))["type"] == "output":
            pass
        assert (event["type"], event["exit_code"]) == ("exited", 137)


def test_an_attached_process_ends_with_its_client_despite_unread_input(api: httpx2.Client, box: str):
    with started(api, box, command="sleep 600", stdin=True, attached=True) as (opened, process):
        for _ in range(2):
            opened.send(b"x" * (MIB - 1))
        opened.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: process not in api.get(f"{box}/processes").text)


def test_a_process_that_never_reads_is_given_up_after_a_while(bare_dir: str):
    async def use(engine: EmbeddedEngine) -> None:
        box = await engine.create(SandboxSpec())
        program = await box.commands.start("sleep 600", stdin=True)
        assert isinstance(program, SandboxProgram)
        async with open_stdin_queue(program) as stdin:
            await stdin.put(b"x" * (4 * MIB), 0.1)
            with pytest.raises(errors.InvalidRequest, match=r"has read none for 0\.1 s"):
                await stdin.put(b"x", 0.1)
        await box.kill()

    started = EmbeddedEngine(Config(data_dir=bare_dir))
    started.open()
    started.call(lambda: use(started))
    started.close()


def test_all_of_a_large_input_arrives_in_order_with_its_end(api: httpx2.Client, box: str):
    with started(api, box, command="sleep 1; sha256sum", stdin=True) as (opened, _):
        for n in range(64):
            opened.send(bytes([n]) * (MIB // 4))
        opened.send(json.dumps({"type": "close_stdin"}))
        said = json.loads(opened.recv(PATIENCE_SECONDS))["text"]
    expected = run(api, box, "python -c 'import sys; [sys.stdout.buffer.write(bytes([n]) * 2**18) for n in range(64)]'"
                   " | sha256sum")  # fmt: skip
    assert said == expected


def test_input_sent_before_a_disconnect_arrives(api: httpx2.Client, box: str):
    process = api.post(f"{box}/processes", json={"command": "head -n1 > typed", "stdin": True}).json()["id"]
    with open_socket(api, f"{box}/processes/{process}/attach") as opened:
        opened.send(b"a line\n")
    wait_until(lambda: process not in api.get(f"{box}/processes").text)
    assert run(api, box, "cat typed") == "a line\n"


def test_input_by_request_is_passed_on_as_it_comes(api: httpx2.Client, box: str):
    process = api.post(f"{box}/processes", json={"command": "wc -c > counted", "stdin": True}).json()["id"]
    stdin = f"{box}/processes/{process}/stdin"
    assert api.put(stdin, content=b"x" * (80 * MIB)).status_code == 204
    assert api.delete(stdin).status_code == 204
    wait_until(lambda: process not in api.get(f"{box}/processes").text)
    assert run(api, box, "cat counted").strip() == str(80 * MIB)


def test_input_by_request_is_not_gathered_for_a_process_that_does_not_read(api: httpx2.Client, box: str):
    process = api.post(f"{box}/processes", json={"command": "sleep 600", "stdin": True}).json()["id"]
    address = urlsplit(str(api.base_url))
    head = f"PUT /api/v1{box}/processes/{process}/stdin HTTP/1.1\r\nhost: x\r\ncontent-length: {60 * MIB}\r\n"
    taken = 0
    with socket.create_connection((address.hostname, address.port)) as raw:
        raw.sendall(f"{head}x-api-key: {api.headers['x-api-key']}\r\n\r\n".encode())
        raw.settimeout(2)  # only a server that takes it all is ever in a hurry
        with pytest.raises(TimeoutError):
            while taken < 60 * MIB:
                taken += raw.send(b"x" * MIB)
    assert taken < 30 * MIB
    api.delete(f"{box}/processes/{process}")


@pytest.mark.parametrize("end", ["", "x"])
def test_a_process_without_stdin_takes_none(api: httpx2.Client, box: str, end: str):
    process = api.post(f"{box}/processes", json={"command": "sleep 600"}).json()["id"]
    refused = api.put(f"{box}/processes/{process}/stdin", content=end)
    assert refused.status_code == 400 and "has no stdin" in refused.text
    api.delete(f"{box}/processes/{process}")


@pytest.mark.long
def test_a_client_that_says_nothing_is_told_to_leave(silent: dict[ClientConnection, str]):
    for each, what in silent.items():
        error = json.loads(each.recv(PATIENCE_SECONDS))["error"]
        assert error["code"] == "invalid_request" and error["message"].startswith(f"{what} did not come within")
        with pytest.raises(ConnectionClosed):
            each.recv(PATIENCE_SECONDS)
