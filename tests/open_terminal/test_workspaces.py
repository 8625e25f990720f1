"""Workspaces over a real socket: files, commands, terminals, ports and notebooks, and who sees them."""

from __future__ import annotations

import io
import json
import secrets
import zipfile
from pathlib import Path

import httpx2
import pytest
from tests.conftest import RunningServer, serving, wait_until
from tests.open_terminal.conftest import open_client
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from cloche.model import Template


def test_a_command_returns_its_output(client: httpx2.Client):
    made = client.post("/execute?wait=20", json={"command": "echo $X; pwd; exit 3", "env": {"X": "hello"}}).json()
    assert (made["status"], made["exit_code"], made["cwd"]) == ("done", 3, "/home/user")
    assert "".join(each["data"] for each in made["output"]) == "hello\r\n/home/user\r\n"
    again = client.get(f"/execute/{made['id']}/status?offset={made['next_offset']}").json()
    assert again["output"] == [] and not again["truncated"]


def test_input_reaches_a_command_and_it_can_be_killed(client: httpx2.Client):
    id = client.post("/execute", json={"command": "read line; echo got $line; sleep 100"}).json()["id"]
    assert client.post(f"/execute/{id}/input", json={"input": "a word\\n"}).json() == {"status": "ok"}
    wait_until(lambda: "got a word" in json.dumps(client.get(f"/execute/{id}/status").json()["output"]))
    assert client.delete(f"/execute/{id}").json() == {"status": "killed"}
    ended = client.get(f"/execute/{id}/status?wait=20").json()
    assert (ended["status"], ended["exit_code"]) == ("killed", -15)
    refused = client.post(f"/execute/{id}/input", json={"input": "x"})
    assert (refused.status_code, refused.json()["detail"]) == (400, "Process has already exited")


def test_users_and_chats_do_not_see_each_other(server: RunningServer, client: httpx2.Client, user: str):
    url = server.url + "/open-terminal"
    client.post("/files/write", json={"path": "private.txt", "content": "mine"})
    id = client.post("/execute?wait=20", json={"command": "true"}).json()["id"]
    with open_client(url, server.key, user, "chat-2") as chat:
        assert chat.get("/files/read?path=private.txt").json()["content"] == "mine"
        assert id not in {each["id"] for each in chat.get("/execute").json()}
        assert chat.get(f"/execute/{id}/status").status_code == 404
        chat.post("/files/mkdir", json={"path": "sub"})
        assert chat.post("/files/cwd", json={"path": "sub"}).json() == {"cwd": "/home/user/sub"}
        assert chat.get("/files/cwd").json()["cwd"] == "/home/user/sub"
        assert chat.post("/execute?wait=20", json={"command": "true"}).json()["cwd"] == "/home/user/sub"
    assert client.get("/files/cwd").json()["cwd"] == "/home/user"
    with open_client(url, server.key, "another-" + user, "chat-1") as other:
        assert other.get("/files/read?path=private.txt").status_code == 404
        assert other.get(f"/execute/{id}/status").status_code == 404
    with open_client(url, "wrong", user, "chat-1") as stranger:
        assert stranger.get("/files/list").status_code == 401


def test_a_policy_that_is_not_configured_is_refused(client: httpx2.Client):
    refused = client.get("/p/nowhere/files/list")
    assert refused.status_code == 404 and "open_terminal.policies" in refused.json()["detail"]


def test_files_are_uploaded_viewed_and_archived(client: httpx2.Client):
    sent = client.post("/files/upload?directory=/home/user/up", files={"file": ("a.bin", b"\0\1\2")})
    assert sent.json() == {"path": "/home/user/up/a.bin", "size": 3}
    viewed = client.get("/files/view?path=/home/user/up/a.bin")
    assert viewed.content == b"\0\1\2" and viewed.headers["content-security-policy"] == "sandbox"
    packed = client.post("/files/archive", json={"paths": ["/home/user/up"]})
    assert zipfile.ZipFile(io.BytesIO(packed.content)).read("up/a.bin") == b"\0\1\2"
    assert client.get("/files/search?path=/tmp&query=.zip").json()["results"] == []


DOCUMENTS = """
import docx, openpyxl, pptx
from reportlab.pdfgen.canvas import Canvas
document = docx.Document(); document.add_paragraph('a paragraph'); document.save('d.docx')
book = openpyxl.Workbook(); book.active.append(['cell', 2]); book.save('d.xlsx')
show = pptx.Presentation(); slide = show.slides.add_slide(show.slide_layouts[0])
slide.shapes.title.text = 'a title'; show.save('d.pptx')
page = Canvas('d.pdf'); page.drawString(100, 700, 'a page'); page.save()
open('d.rtf', 'wb').write(b'{\\\\rtf1{\\\\fonttbl x;}a \\\\b word\\\\b0 \\\\xff\\'e9\\xff\\\\par}')
open('bad.docx', 'wb').write(b'PK\\xff\\xfe no document')
"""


def test_documents_are_read_as_text_inside_the_workspace(client: httpx2.Client):
    client.post("/files/write", json={"path": "make.py", "content": DOCUMENTS})
    made = client.post("/execute?wait=60", json={"command": "python3 make.py"}).json()
    assert made["exit_code"] == 0, made
    for name, part in {
        "docx": "a paragraph",
        "xlsx": "cell\t2",
        "pptx": "a title",
        "pdf": "a page",
        "rtf": "a word",
    }.items():
        read = client.get(f"/files/read?path=d.{name}")
        assert part in read.json()["content"], read.text
    assert client.get("/files/read?path=bad.docx").status_code == 422
    assert client.get("/files/read?path=d.docx").status_code == 200


def test_a_wrong_argument_is_explained_and_the_next_request_works(client: httpx2.Client):
    for answer in (
        client.get("/files/grep?query=x&max_results=0"),
        client.post("/files/write", json={"path": 1}),
        client.post("/execute", content=b"{"),
        client.get("/files/read"),
    ):
        assert answer.status_code == 422 and answer.json()["detail"][0]["loc"], answer.text
    assert client.get("/files/read?path=none&start_line=null").status_code == 404
    assert client.get("/files/list").status_code == 200


@pytest.mark.long  # it takes the minute that an operation may take
def test_a_search_that_never_ends_is_ended(client: httpx2.Client):
    client.post("/files/write", json={"path": "slow/a.txt", "content": "a" * 60})
    answer = client.get("/files/grep", params={"path": "slow", "query": "(a|aa)+$b|(a+)+c"}, timeout=90)
    assert answer.status_code == 408


def test_a_port_of_the_workspace_is_listed_and_reached(client: httpx2.Client):
    served = "mkdir -p www && echo page > www/index.html && cd www && exec python3 -m http.server 8765 --bind 127.0.0.1"
    client.post("/execute", json={"command": served})
    wait_until(lambda: 8765 in {each["port"] for each in client.get("/ports").json()["ports"]})
    assert client.get("/proxy/8765/index.html").text == "page\n"
    assert client.get("/proxy/8766/").status_code == 404


def test_a_terminal_takes_input_and_ends_with_its_client(server: RunningServer, client: httpx2.Client, user: str):
    id = client.post("/api/terminals").json()["id"]
    assert client.get("/api/terminals/user/output").status_code == 404
    url = f"{server.url.replace('http', 'ws')}/open-terminal/api/terminals/{id}?user_id={user}"
    with connect(url) as socket:
        socket.send(json.dumps({"type": "auth", "token": "wrong"}))
        with pytest.raises(ConnectionClosed):
            socket.recv(20)
        assert socket.close_code == 4001
    with connect(url) as socket:
        socket.send(json.dumps({"type": "auth", "token": server.key}))
        socket.send(json.dumps({"type": "resize", "rows": 33, "cols": 99}))
        socket.send(b"stty size\n")
        assert "33 99" in read_until(socket, "33 99")
        assert "33 99" in client.get("/api/terminals/user/output").json()["output"]
        client.post("/api/terminals/user/input", json={"input": "echo $((40+2))\n"})
        read_until(socket, "42")
        assert [each["id"] for each in client.get("/api/terminals").json()] == [id]
    wait_until(lambda: client.get(f"/api/terminals/{id}").status_code == 404)


def read_until(socket: object, part: str) -> str:
    seen = ""
    while part not in seen:
        seen += socket.recv(20).decode()  # type: ignore[attr-defined]
    return seen


def test_a_notebook_is_run_cell_by_cell_and_keeps_its_outputs(client: httpx2.Client):
    cells = [
        {"cell_type": "code", "id": name, "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for name, source in {"a": "x = 20", "b": ["print('hi')\n", "x + 1"]}.items()
    ]
    whole = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    client.post("/files/write", json={"path": "n.ipynb", "content": json.dumps(whole)})
    id = client.post("/notebooks", json={"path": "n.ipynb"}).json()["id"]
    assert client.post(f"/notebooks/{id}/execute", json={"cell_index": 0}).json()["status"] == "ok"
    ran = client.post(f"/notebooks/{id}/execute", json={"cell_index": 1}).json()
    assert [each["output_type"] for each in ran["outputs"]] == ["stream", "execute_result"]
    saved = json.loads(client.get("/files/read?path=n.ipynb").json()["content"])
    assert saved["cells"][1]["execution_count"] == ran["execution_count"]
    failed = client.post(f"/notebooks/{id}/execute", json={"cell_index": 0, "source": "1/0"}).json()
    assert (failed["status"], failed["outputs"][0]["ename"]) == ("error", "ZeroDivisionError")
    assert client.post(f"/notebooks/{id}/execute", json={"cell_index": 9}).status_code == 400
    assert client.delete(f"/notebooks/{id}").json() == {"status": "stopped"}
    assert client.get(f"/notebooks/{id}").status_code == 404


def test_a_skill_of_the_home_directory_is_found(client: httpx2.Client):
    text = "---\nname: tidy\ndescription: >\n  Cleans\n  up.\n---\n# How\n"
    client.post("/files/write", json={"path": ".agents/skills/tidy/SKILL.md", "content": text})
    client.post("/files/write", json={"path": ".agents/skills/tidy/run.py", "content": ""})
    assert [each["description"] for each in client.get("/skills").json()] == ["Cleans up."]
    read = client.get("/skills/read?name=tidy").json()
    assert (read["content"], read["resources"]) == ("# How", ["run.py"])
    assert client.get("/skills/read?name=other").status_code == 404


def test_a_workspace_is_found_again_after_a_pause(server: RunningServer, user: str):
    own = {"X-API-Key": server.key}
    name = f"sleepy-{secrets.token_hex(4)}"
    with open_client(server.url + "/open-terminal", server.key, name) as sleepy:
        sleepy.post("/files/write", json={"path": "kept.txt", "content": "still here"})
        listed = httpx2.get(f"{server.url}/api/v1/sandboxes", headers=own).json()
        [id] = [each["id"] for each in listed if each["metadata"].get("open_terminal") == name]
        assert httpx2.post(f"{server.url}/api/v1/sandboxes/{id}/pause", headers=own, json={}).status_code == 200
        assert sleepy.get("/files/read?path=kept.txt").json()["content"] == "still here"


@pytest.mark.long
def test_a_policy_has_a_workspace_of_its_own_with_its_network(template: Template, data_dir: str, tmp_path: Path):
    settings = tmp_path / "cloche.toml"
    policy = '[open_terminal.policies.online]\nallow = ["a.example:443"]\n'
    settings.write_text(f'[network]\nallow = ["*:*"]\n\n[open_terminal]\ninfo = "of tests"\n\n{policy}')
    with serving(data_dir, env={"CLOCHE_CONFIG": str(settings)}) as server:
        key, name = {"X-API-Key": server.key}, f"user-{secrets.token_hex(4)}"
        with open_client(server.url + "/open-terminal", server.key, name) as client:
            assert client.get("/info").json() == {"info": "of tests"}
            assert "/info" in client.get("/openapi.json").json()["paths"]
            client.post("/p/online/files/write", json={"path": "f.txt", "content": "of the policy"})
            assert client.get("/p/online/files/read?path=f.txt").json()["content"] == "of the policy"
            assert client.get("/files/read?path=f.txt").status_code == 404
        listed = httpx2.get(f"{server.url}/api/v1/sandboxes", headers=key).json()
        own = [each["id"] for each in listed if each["metadata"].get("open_terminal") == name]
        shown = [httpx2.get(f"{server.url}/api/v1/sandboxes/{id}/network", headers=key).text for id in own]
        assert [("a.example" in each) for each in shown].count(True) == 1 and len(shown) == 2
