"""Kernels: their life over HTTP, and cells over a WebSocket."""

from __future__ import annotations

import json

import pytest
from tests.conftest import wait_until
from tests.jupyter.conftest import Channels, JupyterClient, contents, printed


def test_a_kernel_is_started_listed_and_ended(client: JupyterClient):
    made = client.http.post("/api/kernels")
    assert made.status_code == 201
    id = made.json()["id"]
    assert made.json() | {"last_activity": ""} == {
        "id": id,
        "name": "python3",
        "last_activity": "",
        "execution_state": "idle",
        "connections": 0,
    }
    assert id in {each["id"] for each in client.http.get("/api/kernels").json()}
    assert client.http.get(f"/api/kernels/{id}").json()["id"] == id
    assert client.http.delete(f"/api/kernels/{id}").status_code == 204
    assert client.http.get(f"/api/kernels/{id}").status_code == 404


def test_a_cell_gives_its_outputs_in_order(channels: Channels):
    got = channels.execute("print('a'); display('b'); print('c'); 1 + 1")
    kinds = [each["msg_type"] for each in got]
    assert kinds == [
        *("status", "execute_input", "stream", "display_data", "stream"),
        *("execute_result", "execute_reply", "status"),
    ]
    assert contents(got, "execute_result")[0] == {"execution_count": 1, "data": {"text/plain": "2"}, "metadata": {}}
    assert contents(got, "execute_reply")[0]["status"] == "ok"
    assert contents(channels.execute("_ + 1"), "execute_result")[0]["data"] == {"text/plain": "3"}


def test_an_error_aborts_the_cells_that_wait(channels: Channels):
    ids = [channels.send("execute_request", {"code": code}) for code in ("import time; time.sleep(.1); 1/0", "2", "3")]
    failed = channels.until_idle(ids[0])
    assert contents(failed, "error")[0]["ename"] == "ZeroDivisionError"
    assert contents(failed, "execute_reply")[0]["status"] == "error"
    for id in ids[1:]:
        assert contents(channels.until_idle(id), "execute_reply")[0]["status"] == "aborted"
    assert contents(channels.execute("4"), "execute_reply")[0]["status"] == "ok"


def test_displays_are_updated_and_cleared(channels: Channels):
    got = channels.execute(
        "from IPython.display import *\nh = display('a', display_id='d')\nh.update('b')\nclear_output(wait=True)"
    )
    assert contents(got, "display_data")[0]["transient"] == {"display_id": "d"}
    assert contents(got, "update_display_data")[0]["data"]["text/plain"] == "'b'"
    assert contents(got, "clear_output") == [{"wait": True}]


def test_a_figure_is_a_png_in_base64(channels: Channels):
    got = channels.execute("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
    data = contents(got, "display_data")[0]["data"]
    assert data["image/png"].startswith("iVBOR")
    assert not [mime for mime in data if "cloche" in mime]


def test_input_is_asked_of_the_client_that_runs_the_cell(channels: Channels):
    id = channels.send("execute_request", {"code": "print('hello', input('who? '))", "allow_stdin": True})
    question = channels.until(id, "input_request")[-1]
    assert question["channel"] == "stdin"
    assert question["content"] == {"prompt": "who? ", "password": False}
    channels.send("input_reply", {"value": "me", "status": "ok"}, "stdin")
    assert printed(channels.until_idle(id)) == "hello me\n"
    refused = channels.execute("input()", allow_stdin=False)
    assert contents(refused, "error")[0]["ename"] == "StdinNotImplementedError"


@pytest.mark.parametrize("by", ["http", "message"])
def test_an_interrupt_stops_the_cell_and_keeps_the_state(client: JupyterClient, kernel: str, by: str):
    with client.channels(kernel) as channels:
        channels.execute("x = 5")
        id = channels.send("execute_request", {"code": "print('on', flush=True)\nwhile True: pass"})
        channels.until(id, "stream")
        if by == "http":
            assert client.http.post(f"/api/kernels/{kernel}/interrupt").status_code == 204
        else:
            channels.send("interrupt_request", {}, "control")
        assert contents(channels.until_idle(id), "error")[0]["ename"] == "KeyboardInterrupt"
        assert contents(channels.execute("x"), "execute_result")[0]["data"] == {"text/plain": "5"}


def test_a_restart_loses_the_state_and_keeps_the_client(client: JupyterClient, kernel: str):
    with client.channels(kernel) as channels:
        channels.execute("x = 5")
        assert client.http.post(f"/api/kernels/{kernel}/restart").status_code == 200
        got = channels.execute("x")
        assert contents(got, "error")[0]["ename"] == "NameError"
        assert contents(got, "execute_input")[0]["execution_count"] == 1


def test_delete_ends_a_busy_kernel(client: JupyterClient):
    """Clients that time out send nothing else."""
    kernel = client.start()
    with client.channels(kernel) as channels:
        channels.until(channels.send("execute_request", {"code": "print(1)\nwhile True: pass"}), "stream")
        boxes = {each["id"] for each in _sandboxes(client)}
        assert client.http.delete(f"/api/kernels/{kernel}").status_code == 204
        assert len({each["id"] for each in _sandboxes(client)} & boxes) < len(boxes)
        assert client.http.delete(f"/api/kernels/{kernel}").status_code == 404


def test_kernel_info_is_told_while_a_cell_runs(channels: Channels):
    id = channels.send("execute_request", {"code": "print(1)\nwhile True: pass"})
    channels.until(id, "stream")
    about = channels.ask("kernel_info_request", {})
    assert about["protocol_version"] == "5.3"
    assert about["language_info"]["name"] == "python"
    channels.ask("interrupt_request", {}, "control")


def test_kernels_of_a_named_session_share_its_files(server, client: JupyterClient):
    named = JupyterClient(server, "/jupyter/in/project")
    one, two = named.start(), named.start(name="bash")
    with named.channels(one) as first, named.channels(two) as second:
        first.execute("open('shared.txt', 'w').write('of one')")
        assert printed(second.execute("cat shared.txt")) == "of one"
    assert named.http.delete(f"/api/kernels/{one}").status_code == 204
    with named.channels(two) as second:
        assert printed(second.execute("cat shared.txt")) == "of one"


def test_variables_and_directory_are_those_of_the_request(client: JupyterClient):
    asked = {"name": "python3", "env": {"A": "b", "KERNEL_WORKING_DIR": "/mnt/data/sub", "KERNEL_USERNAME": "u"}}
    with client.channels(client.start(**asked)) as channels:
        got = channels.execute("import os; print(os.getcwd(), os.environ['A'], 'KERNEL_USERNAME' in os.environ)")
    assert printed(got) == "/mnt/data/sub b False\n"


def test_a_key_is_taken_in_each_place_where_clients_put_it(server, client: JupyterClient):
    bare = type(client.http)(base_url=server.url + "/jupyter")
    assert bare.get("/api/kernels").status_code == 401
    assert bare.get("/api/kernels", headers={"Authorization": "token wrong"}).status_code == 401
    assert bare.get("/api/kernels", params={"token": server.key}).status_code == 200
    assert bare.get("/api/kernels", headers={"Authorization": f"Bearer {server.key}"}).status_code == 200


def test_a_login_with_the_key_as_password(server, client: JupyterClient):
    browser = type(client.http)(base_url=server.url + "/jupyter")
    xsrf = browser.get("/login").cookies["_xsrf"]
    wrong = browser.post("/login", data={"_xsrf": xsrf, "password": "wrong"})
    assert wrong.status_code == 401
    assert browser.post("/login", data={"password": server.key}).status_code == 403
    assert browser.post("/login", data={"_xsrf": xsrf, "password": server.key}).status_code == 302
    assert browser.get("/api/kernels").status_code == 200
    assert browser.post("/api/kernels").status_code == 401  # as another site's page would send it
    assert browser.get("/api/kernels", headers={"Origin": "https://elsewhere.example"}).status_code == 401
    made = browser.post("/api/kernels", headers={"X-XSRFToken": xsrf})
    assert made.status_code == 201
    assert browser.delete(f"/api/kernels/{made.json()['id']}", headers={"X-XSRFToken": xsrf}).status_code == 204


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://8080-ia.localhost"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "same-site"},
        {"Cookie": "_xsrf=planted; _xsrf=own"},
    ],
)
def test_a_login_of_another_site_is_refused(server, client: JupyterClient, headers: dict[str, str]):
    browser = type(client.http)(base_url=server.url + "/jupyter")
    sent = {"Cookie": "_xsrf=planted", **headers}
    for planted in ("planted", "own"):
        answer = browser.post("/login", data={"_xsrf": planted, "password": server.key}, headers=sent)
        assert answer.status_code == 403


@pytest.mark.parametrize(
    "sent", ["", "{", "[]", json.dumps({"header": 1}), b"", b"\x00" * 7, b"\xff" * 100, b"\x00\x00\x00\x01" * 9]
)
def test_a_malformed_message_is_dropped_and_the_next_one_works(client: JupyterClient, kernel: str, sent: str | bytes):
    for v1 in (False, True):
        with client.channels(kernel, v1=v1) as channels:
            channels.socket.send(sent)
            assert contents(channels.execute("1"), "execute_reply")[0]["status"] == "ok"


def test_outputs_of_a_cell_reach_all_clients(client: JupyterClient, kernel: str):
    with client.channels(kernel) as one, client.channels(kernel) as two:
        id = one.send("execute_request", {"code": "print('for all')"})
        assert printed(two.until_idle(id)) == "for all\n"
        assert not contents(one.until(id, "execute_reply"), "input_request")
    wait_until(lambda: bool(client.http.get(f"/api/kernels/{kernel}").json()["connections"] == 0))


def _sandboxes(client: JupyterClient) -> list[dict[str, str]]:
    found = client.http.get(
        client.server.url + "/api/v1/sandboxes?state=running", headers={"x-api-key": client.server.key}
    )
    return list(found.json())
