"""Sessions, and the files of a sandbox as contents."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator

import pytest
from tests.conftest import RunningServer
from tests.jupyter.conftest import JupyterClient, printed

NOTEBOOK = {"cells": [], "metadata": {"a": "ä"}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture(scope="module")
def box(server: RunningServer) -> Iterator[JupyterClient]:
    made = JupyterClient(server, f"/jupyter/in/s-{uuid.uuid4().hex[:8]}")
    with made.http:
        yield made


def test_files_are_saved_listed_read_renamed_and_removed(box: JupyterClient):
    saved = box.http.put("/api/contents/d/a.txt", json={"type": "file", "format": "text", "content": "ä\n"})
    assert (saved.status_code, saved.json()["path"], saved.json()["content"]) == (201, "d/a.txt", None)
    again = box.http.put("/api/contents/d/a.txt", json={"type": "file", "format": "text", "content": "b"})
    assert again.status_code == 200
    raw = base64.b64encode(b"\xff\x00").decode()
    box.http.put("/api/contents/d/raw.bin", json={"type": "file", "format": "base64", "content": raw})
    box.http.put("/api/contents/d/n.ipynb", json={"type": "notebook", "format": "json", "content": NOTEBOOK})
    listed = box.http.get("/api/contents/d").json()
    assert listed["type"] == "directory"
    assert [(each["name"], each["type"]) for each in listed["content"]] == [
        ("a.txt", "file"),
        ("n.ipynb", "notebook"),
        ("raw.bin", "file"),
    ]
    assert box.http.get("/api/contents/d/n.ipynb").json()["content"] == NOTEBOOK
    read = box.http.get("/api/contents/d/raw.bin").json()
    assert (read["format"], read["content"]) == ("base64", raw)
    assert box.http.get("/api/contents/d/a.txt", params={"content": "0"}).json()["content"] is None
    moved = box.http.patch("/api/contents/d/a.txt", json={"path": "e.txt"})
    assert (moved.status_code, moved.json()["path"]) == (200, "e.txt")
    assert box.http.patch("/api/contents/e.txt", json={"path": "d/raw.bin"}).status_code == 409
    assert box.http.delete("/api/contents/e.txt").status_code == 204
    assert box.http.get("/api/contents/e.txt").status_code == 404


def test_untitled_files_and_copies_get_names_of_their_own(box: JupyterClient):
    names = [box.http.post("/api/contents", json={"type": "notebook"}).json()["path"] for _ in range(2)]
    assert names == ["Untitled.ipynb", "Untitled1.ipynb"]
    assert box.http.get("/api/contents/Untitled.ipynb").json()["content"]["nbformat"] == 4
    copied = box.http.post("/api/contents", json={"copy_from": "Untitled.ipynb"}).json()
    assert copied["path"] == "Untitled-Copy.ipynb"
    assert box.http.post("/api/contents", json={"type": "directory"}).json()["type"] == "directory"


def test_kernels_see_the_files_of_their_session(box: JupyterClient):
    box.http.put("/api/contents/seen.txt", json={"type": "file", "format": "text", "content": "of a client"})
    with box.channels(box.start()) as channels:
        assert printed(channels.execute("print(open('seen.txt').read())")) == "of a client\n"


@pytest.mark.parametrize("path", ["../x", "d/../../x", "%2e%2e/x", "d/%2e%2e/%2e%2e/%2e%2e/etc/passwd"])
def test_no_path_leads_out_of_the_directory(box: JupyterClient, path: str):
    for answer in (
        box.http.get(f"/api/contents/{path}"),
        box.http.put(f"/api/contents/{path}", json={"type": "file", "format": "text", "content": "x"}),
        box.http.patch("/api/contents/d", json={"path": path.replace("%2e", ".")}),
        box.http.post("/api/contents", json={"copy_from": path.replace("%2e", ".")}),
    ):
        assert answer.status_code in (400, 404), answer.text


def test_what_cannot_be_shown_is_a_clear_error(box: JupyterClient):
    put = box.http.put
    put("/api/contents/bad.ipynb", json={"type": "file", "format": "text", "content": "{"})
    put("/api/contents/deep.ipynb", json={"type": "file", "format": "text", "content": "[" * 100_000})
    for name in ("bad.ipynb", "deep.ipynb"):
        assert box.http.get(f"/api/contents/{name}").status_code == 400
        assert box.http.get(f"/api/contents/{name}", params={"type": "file"}).status_code == 200
    assert put("/api/contents/x", json={"type": "file", "format": "base64", "content": "?"}).status_code == 400
    assert put("/api/contents/x", json={"type": "file"}).status_code == 400
    with box.channels(box.start()) as channels:
        channels.execute("open('large.bin', 'wb').truncate(1 << 28)")
    assert box.http.get("/api/contents/large.bin").status_code == 413
    assert box.http.get("/api/contents/bad.ipynb", params={"type": "directory"}).status_code == 400


def test_files_need_a_named_sandbox(client: JupyterClient):
    answer = client.http.get("/api/contents")
    assert answer.status_code == 404
    assert "/jupyter/in/NAME" in answer.json()["message"]


def test_a_session_names_the_kernel_of_a_document(client: JupyterClient):
    asked = {"path": "a.ipynb", "name": "a", "type": "notebook", "kernel": {"name": "python3"}}
    made = client.http.post("/api/sessions", json=asked)
    assert made.status_code == 201
    session = made.json()
    assert (session["path"], session["notebook"]["path"], session["kernel"]["name"]) == (
        "a.ipynb",
        "a.ipynb",
        "python3",
    )
    assert client.http.post("/api/sessions", json=asked).json()["id"] == session["id"]
    assert session["id"] in {each["id"] for each in client.http.get("/api/sessions").json()}
    renamed = client.http.patch(f"/api/sessions/{session['id']}", json={"path": "b.ipynb"}).json()
    assert (renamed["path"], renamed["kernel"]["id"]) == ("b.ipynb", session["kernel"]["id"])
    other = client.http.patch(f"/api/sessions/{session['id']}", json={"kernel": {"name": "bash"}}).json()
    assert other["kernel"]["name"] == "bash"
    assert client.http.get(f"/api/kernels/{session['kernel']['id']}").status_code == 404
    assert client.http.delete(f"/api/sessions/{session['id']}").status_code == 204
    assert client.http.get(f"/api/sessions/{session['id']}").status_code == 404
    assert client.http.get(f"/api/kernels/{other['kernel']['id']}").status_code == 404
