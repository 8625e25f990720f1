"""`/files` of envd, byte by byte: ranges, encodings, forms, and uploads that go wrong. The sandbox always lives on."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import time
from urllib.parse import quote, urlsplit

import httpx2
import pytest
from e2b_code_interpreter import Sandbox
from tests.conftest import serving

LIMIT = 4 << 20


@pytest.fixture
def client(server, box):
    with _client(server, box) as client:
        yield client


def _client(server, box) -> httpx2.Client:
    return httpx2.Client(base_url=f"{server.url}/e2b", headers=_headers(box), timeout=60)


def _headers(box) -> dict[str, str]:
    return {
        "X-Access-Token": box._envd_access_token,
        "E2b-Sandbox-Id": box.sandbox_id,
        "E2b-Sandbox-Port": "49983",
    }


def post(client, path: str | None, content, **headers: str):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    kind = {"Content-Type": "application/octet-stream", **named}
    return client.post("/files", params={} if path is None else {"path": path}, content=content, headers=kind)


# -- reading


def test_a_file_comes_with_its_length_its_name_and_no_rights_for_its_pages(box, client):
    box.files.write("page.html", "<script>")
    answer = client.get("/files", params={"path": "page.html"})
    assert (answer.status_code, answer.text) == (200, "<script>")
    assert answer.headers["content-length"] == "8"
    assert answer.headers["content-disposition"] == "inline; filename=page.html"
    assert answer.headers.get_list("vary") == ["Accept-Encoding", "e2b-sandbox-id, e2b-sandbox-port"]
    assert answer.headers["content-security-policy"] == "sandbox"
    box.files.write("é ü", "")
    empty = client.get("/files", params={"path": "é ü"})
    assert (empty.status_code, empty.headers["content-length"]) == (200, "0")
    assert empty.headers["content-disposition"] == "inline; filename*=utf-8''%C3%A9%20%C3%BC"
    assert client.head("/files", params={"path": "page.html"}).headers["content-length"] == "8"


@pytest.mark.parametrize("size", [10, 3_000_000])
@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [("bytes=2-4", 2, 5), ("bytes=7-", 7, None), ("bytes=-3", -3, None), ("bytes=5-99999999", 5, None)],
)
def test_a_range_is_a_part(box, client, size, asked, start, end):
    content = bytes(index * 7 % 256 for index in range(size))
    box.files.write("f", content)
    answer = client.get("/files", params={"path": "f"}, headers={"Range": asked})
    assert answer.status_code == 206
    assert answer.content == content[start:end]
    assert answer.headers["content-range"].endswith(f"/{size}")
    assert answer.headers["content-length"] == str(len(content[start:end]))


def test_ranges_that_make_no_sense(box, client):
    box.files.write("f", b"0123456789")
    behind = client.get("/files", params={"path": "f"}, headers={"Range": "bytes=10-"})
    assert (behind.status_code, behind.headers["content-range"]) == (416, "bytes */10")
    for nonsense in ("bytes=5-2", "lines=1-2", "bytes=0-1,3-4", "bytes=-"):
        assert client.get("/files", params={"path": "f"}, headers={"Range": nonsense}).status_code == 200
    stale = {"Range": "bytes=0-1", "If-Range": "Mon, 01 Jan 2001 00:00:00 GMT"}
    assert client.get("/files", params={"path": "f"}, headers=stale).content == b"0123456789"


def test_encodings_are_the_clients_choice(box, client):
    box.files.write("f", "text " * 1000)

    def get(accepted: str):
        return client.get("/files", params={"path": "f"}, headers={"Accept-Encoding": accepted})

    assert "content-encoding" not in get("gzip, deflate").headers
    packed = get("identity;q=0, gzip")
    assert (packed.headers["content-encoding"], packed.text) == ("gzip", "text " * 1000)
    refused = get("identity;q=0, br")
    assert (refused.status_code, refused.json()["code"]) == (406, 406)


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ({"path": "/x"}, 404, "path '/x' does not exist"),
        ({"path": "/tmp"}, 400, "is a directory"),
        ({}, 400, "is a directory"),
        ({"path": "a\0b"}, 400, "NUL"),
        ({"path": "/etc/passwd", "username": "bob"}, 401, "invalid username: 'bob'"),
        ({"path": "x" * 5000}, 400, "4096 bytes"),
        ({"path": "~bob/x"}, 400, "whose home"),
    ],
)
def test_errors_of_reading_are_envds(client, query, status, message):
    answer = client.get("/files", params=query)
    assert answer.status_code == answer.json()["code"] == status
    assert message in answer.json()["message"]


# -- writing


def test_a_form_may_have_other_fields_and_names_with_slashes(client, box):
    body = (
        b'--b\r\nContent-Disposition: form-data; name="note"\r\n\r\nignored\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="deep/er/one.txt"\r\n\r\n1\r\n--b-\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="/tmp/two.txt"\r\n\r\n\r\n'
        b"--b--\r\n"
    )
    answer = client.post("/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert [one["path"] for one in answer.json()] == ["/home/user/deep/er/one.txt", "/tmp/two.txt"]
    assert box.files.read("deep/er/one.txt") == "1\r\n--b-"
    assert box.files.read("/tmp/two.txt") == ""


def test_a_form_in_single_bytes_is_the_same_form(client, box):
    body = b'--bo\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n--b\r\n--bo-\r\n--bo--\r\n'
    chunks = (body[at : at + 1] for at in range(len(body)))
    answer = client.post("/files", content=chunks, headers={"Content-Type": "multipart/form-data; boundary=bo"})
    assert answer.status_code == 200
    assert box.files.read("f") == "--b\r\n--bo-"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="cut"\r\n\r\nabc',
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nno name\r\n--b--\r\n',
        ),
        ("multipart/form-data; boundary=b", b"no form at all"),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data", b"x"),
        ("text/plain", b"x"),
        ("application/octet-stream", b"x"),
    ],
)
def test_an_upload_that_makes_no_sense_is_refused(client, box, kind, body):
    answer = client.post("/files", content=body, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["code"]) == (400, 400)
    assert answer.json()["message"]
    assert box.files.list(".") == []


def test_gzip_is_unpacked_also_in_several_members_and_refused_when_broken(client, box):
    packed = gzip.compress(b"one ") + gzip.compress(b"two")
    assert post(client, "f", packed, Content_Encoding="gzip").status_code == 200
    assert box.files.read("f") == "one two"
    for broken in (packed[:-3], b"not gzip", packed + b"rest"):
        assert post(client, "f", broken, Content_Encoding="gzip").status_code == 400
    assert post(client, "f", b"x", Content_Encoding="br").status_code == 400
    assert box.files.read("f") == "one two"


def test_metadata_that_cannot_be_kept_is_refused(client, box):
    for headers in ({"X-Metadata-": "v"}, {"X-Metadata-K": "é".encode()}, {"X-Metadata-K": "v" * 5000}):
        assert client.post("/files?path=f", content=b"", headers=headers).status_code == 400
    assert not box.files.exists("f")


def test_files_are_composed_of_others(client, box):
    box.files.write_files(
        [{"path": "1", "data": "one "}, {"path": "2", "data": "two"}, {"path": "kept", "data": "old"}]
    )
    answer = client.post("/files/compose", json={"source_paths": ["1", "2"], "destination": "kept"})
    assert answer.json() == {"path": "/home/user/kept", "name": "kept", "type": "file"}
    assert box.files.read("kept") == "one two"
    assert [entry.name for entry in box.files.list(".")] == ["kept"]
    missing = client.post("/files/compose", json={"source_paths": ["kept", "none"], "destination": "new"})
    assert (missing.status_code, [entry.name for entry in box.files.list(".")]) == (404, ["kept"])
    for bad in ({}, {"source_paths": [], "destination": "x"}, {"source_paths": ["kept"], "destination": "kept"}):
        assert client.post("/files/compose", json=bad).status_code == 400


def test_a_signed_url_needs_no_token(server, box):
    box.files.write("a b.txt", "signed")
    assert httpx2.get(box.download_url("a b.txt")).text == "signed"
    url = box.upload_url("up.txt")
    assert httpx2.post(url, files={"file": ("ignored", b"uploaded")}).status_code == 200
    assert box.files.read("up.txt") == "uploaded"
    bare = box.upload_url("")
    assert httpx2.post(bare, files={"file": ("x/named.txt", b"named")}).status_code == 200
    assert box.files.read("x/named.txt") == "named"


def test_environment_and_metrics_are_told(server):
    box = Sandbox.create(envs={"A": "b"}, **server.e2b)
    try:
        with _client(server, box) as client:
            assert client.get("/envs").json()["A"] == "b"
            told = client.get("/metrics").json()
            assert told["mem_total"] > told["mem_used"] >= 0
            assert told["disk_total"] >= told["disk_used"] >= 0
            assert client.post("/init", json={}).json()["code"] == 404
    finally:
        box.kill()


# -- uploads that are too much, or that end


@pytest.fixture(scope="module")
def small_server(bare_dir):
    with serving(bare_dir, env={"CLOCHE_SERVER_UPLOAD_BYTES": str(LIMIT)}) as running:
        yield running


def test_an_upload_over_the_limit_is_refused_and_the_connection_lives(small_server):
    box = Sandbox.create(**small_server.e2b)
    try:
        box.files.write("f", "old")
        with _client(small_server, box) as client:
            big = b"x" * (3 * LIMIT)
            chunks = (big[at : at + 65536] for at in range(0, len(big), 65536))
            bomb = gzip.compress(bytes(3 * LIMIT))
            for answer in (
                post(client, "f", big),
                post(client, "f", chunks),
                post(client, "f", bomb, Content_Encoding="gzip"),
                client.post("/files?path=f", files={"file": big}),
            ):
                assert (answer.status_code, answer.json()["code"]) == (413, 413)
                assert str(LIMIT) in answer.json()["message"]
            assert post(client, "g", b"x" * LIMIT).status_code == 200
        assert box.files.read("f") == "old"
        assert [entry.name for entry in box.files.list(".")] == ["f", "g"]
    finally:
        box.kill()


@pytest.mark.parametrize("path", ["kept", "new"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_vanishes_leaves_the_old_file_or_none(server, box, path, chunked):
    box.files.write("kept", "old")
    length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 50000000"
    head = [f"POST /e2b/files?path={quote(path)} HTTP/1.1", "Host: x", "Content-Type: application/octet-stream", length]
    head += [f"{name}: {value}" for name, value in _headers(box).items()]
    with socket.create_connection(urlsplit(server.url).netloc.split(":")) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        piece = b"x" * 1_000_000
        for _ in range(3):
            connection.sendall(b"f4240\r\n" + piece + b"\r\n" if chunked else piece)
    _wait_until(lambda: box.run_code(LEFT_OVER).text == "0")
    assert box.files.read("kept") == "old"
    assert [entry.name for entry in box.files.list(".")] == ["kept"]
    box.files.write(path, "again")
    assert box.files.read(path) == "again"


LEFT_OVER = "import os; sum(os.statvfs(p).f_blocks - os.statvfs(p).f_bfree > 500 for p in ['/home/user'])"


def _wait_until(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_sandbox_that_is_killed_is_not_found_by_its_next_upload(server, box):
    box.kill()
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    connection.request("POST", "/e2b/files?path=f", b"x", {**_headers(box), "Content-Type": "application/octet-stream"})
    answer = connection.getresponse()
    told = json.loads(answer.read())
    assert answer.status == told["code"] == 502
    assert "was not found" in told["message"]
