"""Uploads, downloads, lists and deletions over a socket, as LibreChat does them, and as somebody hostile would."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.conftest import RunningServer
from tests.librechat.conftest import User, client_with

from cloche.model import MIB

BOUNDARY = "--------------------------f1ce00000000000000000000"


def head(name: str, filename: bytes | None = None, kind: str = "text/csv") -> bytes:
    said = f'Content-Disposition: form-data; name="{name}"'.encode()
    if filename is not None:
        said += b'; filename="' + filename + b'"\r\nContent-Type: ' + kind.encode()
    return f"--{BOUNDARY}\r\n".encode() + said + b"\r\n\r\n"


def form(files: Iterable[tuple[str | bytes, bytes]], **fields: str) -> Iterator[bytes]:
    """As LibreChat's form-data writes it: fields first, names as raw UTF-8, no Content-Length."""
    for name, value in fields.items():
        yield head(name) + value.encode() + b"\r\n"
    for name, content in files:
        yield head("file", name if isinstance(name, bytes) else name.encode()) + content + b"\r\n"
    yield f"--{BOUNDARY}--\r\n".encode()


FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def send(client: httpx2.Client, content: Iterator[bytes], path: str = "/upload") -> httpx2.Response:
    return client.post(path, content=content, headers={**FORM, "user-id": "6630f2a1c0ffee0123456789"})


def upload(client: httpx2.Client, name: str = "data.csv", content: bytes = b"a,b\n", **fields: str) -> tuple[str, str]:
    """(session, file)."""
    answer = send(client, form([(name, content)], **fields))
    assert answer.status_code == 200, answer.text
    (file,) = answer.json()["files"]
    assert file["filename"] == name
    return answer.json()["storage_session_id"], file["fileId"]


# -- what LibreChat does


def test_an_upload_comes_back_under_its_name_and_type(client: httpx2.Client):
    answer = send(client, form([("ordner/data file é 画.csv", b"\x00a,b\r\n--")], kind="user", id="6630f2a1"))
    body = answer.json()
    session = body["storage_session_id"]
    file = body["files"][0]["fileId"]
    same = {"storage_session_id": session, "session_id": session}
    assert body == {
        "message": "success",
        **same,
        "files": [{"filename": "ordner/data file é 画.csv", "fileId": file, **same}],
    }
    assert len(session) == len(file) == 21
    got = client.get(f"/download/{session}/{file}", params={"kind": "user", "id": "6630f2a1"})
    assert got.content == b"\x00a,b\r\n--"
    assert got.headers["content-type"] == "text/csv"
    disposition = "attachment; filename*=UTF-8''ordner%2Fdata%20file%20%C3%A9%20%E7%94%BB.csv"
    assert got.headers["content-disposition"] == disposition
    assert got.headers["x-content-type-options"] == "nosniff"
    only_head = client.head(f"/download/{session}/{file}")
    assert (only_head.content, only_head.headers["content-length"]) == (b"", "8")


def test_the_probe_before_a_turn_says_when_a_file_was_used(client: httpx2.Client):
    session, file = upload(client, content=b"12345")
    body = client.get(f"/sessions/{session}/objects/{file}", params={"kind": "user", "id": "anything"}).json()
    assert body["name"] == f"{session}/{file}.csv"
    assert (body["originalFilename"], body["size"], body["contentType"]) == ("data.csv", 5, "text/csv")
    assert body["readOnly"] is False
    moment = time.strptime(body["lastModified"].partition(".")[0], "%Y-%m-%dT%H:%M:%S")
    assert abs(time.mktime(moment) - time.mktime(time.gmtime())) < 120


def test_every_detail_of_a_list_has_the_fields_of_its_clients(client: httpx2.Client):
    session, file = upload(client, "skills/x/SKILL.md", kind="skill", id="66aa", version="3", read_only="true")

    def listed(detail: str) -> Any:
        (one,) = client.get(f"/files/{session}", params={"detail": detail}).json()
        return one

    assert listed("simple") == f"{session}/{file}.md"
    assert client.get(f"/files/{session}").json() == [listed("simple")]
    assert {"name", "size", "lastModified", "etag"} < set(listed("summary"))
    # agents 2.4: id = file.name.split('/')[1].split('.')[0], name = metadata['original-filename']
    full = listed("full")
    assert full["name"].split("/")[1].split(".")[0] == file
    assert full["metadata"]["original-filename"] == "skills/x/SKILL.md"
    normalized = listed("normalized")
    assert (normalized["id"], normalized["name"], normalized["readOnly"]) == (file, "skills/x/SKILL.md", True)
    assert normalized["storage_session_id"] == normalized["session_id"] == session
    refused = client.get(f"/files/{session}", params={"detail": "all"})
    assert (refused.status_code, refused.json()["error"].partition(":")[0]) == (400, "detail must be one of")


def test_old_clients_know_no_kinds(client: httpx2.Client):
    for fields in ({}, {"entity_id": "agent_1"}):
        session, file = upload(client, **fields)
        assert client.get(f"/download/{session}/{file}").status_code == 200
        (listed,) = client.get(f"/files/{session}", params={"detail": "summary", **fields}).json()
        assert listed["name"].startswith(f"{session}/{file}")


def test_a_batch_keeps_slashes_and_reports_each_result(client: httpx2.Client):
    names = ["pptx/SKILL.md", "pptx/../../etc/passwd", "pptx/scripts/x.py"]
    answer = send(client, form([(name, b"x") for name in names], kind="skill", id="66aa", version="3"), "/upload/batch")
    body = answer.json()
    assert (answer.status_code, body["message"], body["succeeded"], body["failed"]) == (200, "partial_success", 2, 1)
    assert [(each["status"], each["filename"]) for each in body["files"]] == [
        ("success", names[0]),
        ("success", names[2]),
        ("error", names[1]),
    ]
    assert ".." in body["files"][2]["error"]
    assert len(client.get(f"/files/{body['session_id']}?kind=skill&id=66aa&version=3").json()) == 2


def test_a_file_is_deleted_by_either_route_and_twice_is_no_error(client: httpx2.Client):
    for route in ("/sessions/{}/objects/{}", "/files/{}/{}"):
        session, file = upload(client)
        for _ in range(2):
            assert client.delete(route.format(session, file)).status_code == 200
        for path in (f"/download/{session}/{file}", f"/sessions/{session}/objects/{file}"):
            assert client.get(path).status_code == 404
        assert client.get(f"/files/{session}").json() == []


# -- who may


def seen(client: httpx2.Client, session: str, file: str, **query: str) -> list[Any]:
    """What somebody gets who knows the ids."""
    paths = (f"/download/{session}/{file}", f"/sessions/{session}/objects/{file}", f"/files/{session}")
    answers = [client.get(path, params=query) for path in paths]
    deleted = [client.delete(path, params=query) for path in (f"/sessions/{session}/objects/{file}", paths[2])]
    return [(each.status_code, each.text) for each in (*answers, deleted[0])]


def test_foreign_files_look_unknown(client: httpx2.Client, stranger: httpx2.Client):
    session, file = upload(client)
    for query in ({}, {"kind": "user", "id": "6630"}):
        nothing = seen(stranger, secrets.token_urlsafe(16)[:21], secrets.token_urlsafe(16)[:21], **query)
        assert seen(stranger, session, file, **query) == nothing
        assert [status for status, _ in nothing] == [404, 404, 200, 404]
    assert client.get(f"/download/{session}/{file}").status_code == 200


def test_users_of_one_librechat_are_told_apart_by_their_tokens_only(user: User, client: httpx2.Client):
    ann, bob, key = user("ann"), user("bob"), {"kind": "user", "id": "ann"}
    session, file = upload(ann, kind="user", id="ann")
    for other in (bob, user("ann", "other-tenant"), client):
        for query in ({}, key, {"kind": "user", "id": file}, {"kind": "agent", "id": "ann"}):
            assert [status for status, _ in seen(other, session, file, **query)] == [404, 404, 200, 404]
            assert other.get(f"/files/{session}", params=query).json() == []
    for query in ({}, key, {"kind": "user", "id": "whoever"}):
        assert ann.get(f"/download/{session}/{file}", params=query).status_code == 200


def test_files_of_agents_and_skills_are_for_all_users_of_a_tenant(user: User):
    ann, bob, far = user("ann"), user("bob"), user("bob", "other-tenant")
    shared = {"kind": "skill", "id": "66aa", "version": "3"}
    session, file = upload(ann, **shared)
    assert bob.get(f"/download/{session}/{file}", params=shared).status_code == 200
    assert far.get(f"/download/{session}/{file}", params=shared).status_code == 404
    for wrong in ({**shared, "version": "4"}, {**shared, "id": "66ab"}, {"kind": "agent", "id": "66aa"}, {}):
        assert bob.get(f"/download/{session}/{file}", params=wrong).status_code == 404


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "group", "id": "x"}, "kind must be one of: skill, agent, user"),
        ({"kind": "agent"}, "id must be 1 to 128 characters"),
        ({"kind": "agent", "id": "a/../b"}, "id must be 1 to 128 characters"),
        ({"kind": "skill", "id": "x"}, "version must be a whole number"),
        ({"kind": "skill", "id": "x", "version": "1e3"}, "version must be a whole number"),
        ({"entity_id": "a\x00b"}, "entity_id must be 1 to 128 characters"),
        ({"kind": "x" * 5000}, "bad_request"),
    ],
)
def test_an_upload_without_a_user_is_refused(client: httpx2.Client, fields: dict[str, str], said: str):
    for path in ("/upload", "/upload/batch"):
        answer = send(client, form([("a.csv", b"a")], **fields), path)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(said)


def test_uploads_and_reads_need_a_key(librechat_server: RunningServer):
    with client_with(librechat_server, {}) as nobody:
        assert send(nobody, form([("a.csv", b"a")])).status_code == 401
        assert nobody.get(f"/files/{'x' * 21}").status_code == 401


# -- bad names


BAD_NAMES = [
    (b"../x", "one that is . or .."),
    (b"a/./b", "one that is . or .."),
    (b"a//b", "an empty part"),
    (b"a/", "an empty part"),
    (b"/etc/passwd", "must be relative"),
    (b"..\\..\\x", "a backslash"),
    (b"a\x00b", "control characters"),
    (b"a\x7fb", "control characters"),
    (b"caf\xe9.csv", "not UTF-8"),
    (b"", "it is empty"),
    (b"x" * 300, "300 characters"),
    ("画".encode() * 100, "255 bytes"),
    (b"/".join([b"d"] * 11), "11 parts"),
    (b"_ptc_history.json", "reserved"),
]


@pytest.mark.parametrize(("name", "said"), BAD_NAMES)
def test_a_bad_name_is_an_error_of_its_own_file(client: httpx2.Client, name: bytes, said: str):
    alone = send(client, form([("good.csv", b"1"), (name, b"2")]))
    assert alone.status_code == 400
    assert said in alone.json()["error"]
    among = send(client, form([(name, b"2" * 100_000), ("good.csv", b"1")]), "/upload/batch").json()
    assert [each["status"] for each in among["files"]] == ["success", "error"]
    assert said in among["files"][1]["error"]
    assert client.get(f"/download/{among['session_id']}/{among['files'][0]['fileId']}").content == b"1"


def test_a_batch_of_bad_names_only_is_an_error(client: httpx2.Client):
    answer = send(client, form([("../x", b"1")]), "/upload/batch")
    assert (answer.status_code, answer.json()["message"], answer.json()["failed"]) == (400, "error", 1)
    assert ".." in answer.json()["error"]


@pytest.mark.parametrize(
    "disposition",
    [
        b"filename*=UTF-8''a%0d%0aset-cookie:%20x=1",
        b"filename=\"fine\"; filename*=UTF-8''a%0aX",
        b'filename="a\nb: c"',
        b'filename="a\rb"',
    ],
)
def test_a_name_cannot_forge_headers(client: httpx2.Client, disposition: bytes):
    part = b'Content-Disposition: form-data; name="file"; ' + disposition + b"\r\n\r\nx\r\n"
    answer = send(client, iter([f"--{BOUNDARY}\r\n".encode(), part, f"--{BOUNDARY}--\r\n".encode()]))
    assert answer.status_code == 400
    assert "error" in answer.json()


def test_a_name_that_is_escaped_is_understood(client: httpx2.Client):
    names = b"filename=e.csv; filename*=UTF-8''d%2F%C3%A9.csv"
    part = b'Content-Disposition: form-data; name="file"; ' + names + b"\r\n\r\nx\r\n"
    body = send(client, iter([f"--{BOUNDARY}\r\n".encode(), part, f"--{BOUNDARY}--\r\n".encode()])).json()
    assert body["files"][0]["filename"] == "d/é.csv"


def test_quotes_semicolons_and_types_cannot_either(client: httpx2.Client):
    name = 'a"; x=y; filename=b\u2028.csv'
    quoted = name.replace('"', '\\"').encode()
    part = head("file", quoted, "text/html;\tcharset=x\x0bset-cookie: y=1") + b"x\r\n"
    body = send(client, iter([part, f"--{BOUNDARY}--\r\n".encode()])).json()
    assert body["files"][0]["filename"] == name
    got = client.get(f"/download/{body['session_id']}/{body['files'][0]['fileId']}")
    assert "set-cookie" not in got.headers
    assert got.headers["content-type"] == "text/csv"  # as the name says
    assert got.headers["content-disposition"].startswith("attachment; filename*=UTF-8''a%22%3B%20x%3Dy")


# -- too much


def test_two_hundred_files_are_kept_and_the_next_is_named(client: httpx2.Client):
    names = [f"dir/{number:03}.txt" for number in range(203)]
    body = send(client, form([(name, name.encode()) for name in names]), "/upload/batch").json()
    assert (body["message"], body["succeeded"], body["failed"]) == ("partial_success", 200, 3)
    assert (body["filesLimitReached"], body["maxFiles"]) == (True, 200)
    assert [each["filename"] for each in body["files"]] == names
    assert [each["filename"] for each in body["files"] if each["status"] == "error"] == names[200:]
    listed = client.get(f"/files/{body['session_id']}", params={"detail": "normalized"}).json()
    assert sorted(each["name"] for each in listed) == names[:200]


def peak_bytes(server: RunningServer) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_a_body_over_the_limit_is_refused_in_bounded_memory(librechat_server: RunningServer, client: httpx2.Client):
    def large(size: int, *after: bytes) -> Iterator[bytes]:
        yield head("file", b"large.bin")
        for _ in range(size // MIB):
            yield bytes(MIB)
        yield b"\r\n"
        yield from after
        yield f"--{BOUNDARY}--\r\n".encode()

    upload(client)
    before = peak_bytes(librechat_server)
    refused = send(client, large(151 * MIB))
    assert (refused.status_code, refused.json()["error"]) == (413, "File size limit exceeded")
    among = send(client, large(151 * MIB, head("file", b"small.txt") + b"kept\r\n"), "/upload/batch").json()
    assert [each["status"] for each in among["files"]] == ["success", "error"]
    assert among["files"][1]["error"].startswith("File size limit exceeded")
    assert peak_bytes(librechat_server) - before < 32 * MIB
    assert upload(client)


def test_a_claim_over_the_limit_is_refused_before_anything_is_sent(librechat_server: RunningServer):
    connection = http.client.HTTPConnection(librechat_server.url.removeprefix("http://"), timeout=60)
    connection.putrequest("POST", "/librechat/v1/upload")
    for name, value in {**FORM, "x-api-key": librechat_server.key, "content-length": str(300 * MIB)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    with contextlib.closing(connection), connection.getresponse() as answer:
        assert (answer.status, json.loads(answer.read())["error"]) == (413, "File size limit exceeded")


def contents(server: RunningServer) -> set[str]:
    """What its store holds."""
    environment = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
    (place,) = (each.partition(b"=")[2] for each in environment if each.startswith(b"CLOCHE_DATA_DIR="))
    return {each.name for each in Path(place.decode(), "blobs").iterdir()}


def test_nothing_is_left_of_an_upload_that_failed(librechat_server: RunningServer, client: httpx2.Client):
    upload(client)
    before = contents(librechat_server)
    whole = b"".join(form([("a.csv", b"a" * 1000), ("b.csv", b"b" * 1000)]))
    for sent, said in ((whole[:-30], "closing boundary"), (whole[:-500], "closing boundary"), (b"garbage" * 99, "")):
        answer = send(client, iter([sent]))
        assert (answer.status_code, answer.json()["error"]) == (400, "bad_request")
        assert said in answer.json()["message"]
    assert send(client, form([("a.csv", b"a"), ("../b", b"b")])).status_code == 400
    assert send(client, form([("a.csv", b"a")], kind="nobody"), "/upload/batch").status_code == 400
    assert contents(librechat_server) == before


def test_a_body_that_is_not_a_form_with_files_is_refused(client: httpx2.Client):
    empty = send(client, form([], kind="user"))
    assert (empty.status_code, empty.json()["error"]) == (400, "No files were uploaded")
    plain = client.post("/upload", content=b"{}", headers={"content-type": "application/json"})
    assert (plain.status_code, plain.json()["error"]) == (400, "bad_request")


@pytest.mark.parametrize("id", ["x", "x" * 22, "%2e%2e", "é" * 21, "a.b" * 7, "x" * 20 + "%00", "x" * 5000])
def test_ids_that_nothing_can_have_are_not_found(client: httpx2.Client, id: str):
    for path in (f"/download/{'x' * 21}/{id}", f"/sessions/{id}/objects/{'x' * 21}"):
        assert client.get(path).status_code == 404
        assert client.delete(path.replace("/download/", "/files/")).status_code == 404
    assert client.get(f"/files/{id}").status_code in (400, 404)
