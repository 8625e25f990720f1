"""Bad input is refused in the protocol's own shape, and the sandbox lives on."""

from __future__ import annotations

import json
import socket
import struct
from urllib.parse import urlsplit

import httpx
import pytest
from e2b import AuthenticationException, SandboxNotFoundException
from e2b_code_interpreter import Sandbox

OVER_BYTES = 300_000_000


@pytest.fixture(scope="module")
def box(server):
    box = Sandbox.create(**server.e2b)
    yield box
    assert box.run_code("6 * 7").text == "42"  # whatever was done to it
    box.kill()


def envd(box: Sandbox) -> dict[str, str]:
    return {
        "E2b-Sandbox-Id": box.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": box._envd_access_token or "",
    }


def code_server(box: Sandbox) -> dict[str, str]:
    return {**envd(box), "E2b-Sandbox-Port": "49999"}


def test_without_a_key_nothing_is_made(server):
    answer = httpx.post(f"{server.url}/e2b/v2/sandboxes", json={"templateID": "base"})
    assert answer.status_code == 401
    assert answer.json()["code"] == 401
    assert "key" in answer.json()["message"]


def test_a_wrong_key_is_refused_as_the_client_expects(server):
    with pytest.raises(AuthenticationException):
        Sandbox.create(**{**server.e2b, "api_key": "e2b_" + "f" * 40})


def test_a_sandbox_that_never_was_is_not_found(server):
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect("i" + "0" * 20, **server.e2b)
    answer = httpx.get(f"{server.url}/e2b/sandboxes/i{'0' * 20}", headers={"X-API-Key": server.key})
    assert (answer.status_code, answer.json()["code"]) == (404, 404)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"templateID": 5}', b"[" * 100_000])
def test_a_body_that_is_no_request_is_a_400_that_says_why(server, body):
    headers = {"X-API-Key": server.key, "Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/e2b/v2/sandboxes", content=body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, 400)
    assert answer.json()["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"code": 5}', b"{}", b'{"code": "1", "env_vars": []}'])
def test_an_execution_that_is_none_is_a_422(server, box, body):
    answer = httpx.post(f"{server.url}/e2b/execute", content=body, headers=code_server(box))
    assert answer.status_code == 422
    assert answer.json()["detail"]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00\x00",
        struct.pack(">BI", 0, 100) + b'{"process": {"cmd": "true"}}',
        struct.pack(">BI", 0, 5) + b"hello",
        struct.pack(">BI", 0, 2**32 - 1),
        struct.pack(">BI", 1, 2) + b"{}",
    ],
    ids=["nothing", "half a head", "half a frame", "no JSON", "four gigabytes", "compressed"],
)
def test_a_broken_connect_frame_is_an_error_of_connect(server, box, frame):
    headers = {**envd(box), "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
    answer = httpx.post(f"{server.url}/e2b/process.Process/Start", content=frame, headers=headers)
    assert said(answer)["code"] in ("invalid_argument", "resource_exhausted", "unimplemented")


def said(answer: httpx.Response) -> dict[str, str]:
    """The error, wherever the protocol lets it stand: in the body, or in the end frame of a stream."""
    if answer.headers["content-type"].startswith("application/json"):
        return answer.json()
    flags, size = struct.unpack_from(">BI", answer.content)
    assert flags == 2
    return json.loads(answer.content[5 : 5 + size])["error"]


def test_an_upload_over_the_limit_is_refused_and_nothing_is_written(server, box):
    def chunks():
        for _ in range(OVER_BYTES // 1_000_000):
            yield b"x" * 1_000_000

    url = f"{server.url}/e2b/files?path=/home/user/over.bin"
    for content, extra in ((chunks(), {}), (b"", {"Content-Length": str(OVER_BYTES)})):
        headers = {**envd(box), "Content-Type": "application/octet-stream", **extra}
        answer = refused(url, content, headers)
        assert answer["code"] == 413
        assert "limit" in answer["message"]
    assert not box.files.exists("/home/user/over.bin")


def refused(url: str, content, headers: dict[str, str]) -> dict[str, object]:
    """What the server says to an upload, also if it says so before it has read everything."""
    at = urlsplit(url)
    lines = [f"POST {at.path}?{at.query} HTTP/1.1", f"Host: {at.netloc}", *(f"{k}: {v}" for k, v in headers.items())]
    if "Content-Length" not in headers:
        lines.append("Transfer-Encoding: chunked")
    with socket.create_connection((at.hostname, at.port)) as connection:
        connection.settimeout(60)
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        try:
            for chunk in content or ():
                connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.rstrip().endswith(b"}"):
            got = connection.recv(65536)
            if not got:
                break
            answer += got
    return json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])


def test_a_client_that_vanishes_during_an_upload_leaves_the_old_file(server, box):
    box.files.write("/home/user/kept.txt", "as it was")
    at = urlsplit(server.url)
    head = [
        "POST /e2b/files?path=/home/user/kept.txt HTTP/1.1",
        f"Host: {at.netloc}",
        "Content-Type: application/octet-stream",
        "Content-Length: 10000000",
        *(f"{name}: {value}" for name, value in envd(box).items()),
    ]
    with socket.create_connection((at.hostname, at.port)) as connection:
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + b"y" * 1_000_000)
    assert box.files.read("/home/user/kept.txt") == "as it was"


@pytest.mark.parametrize("method", ["get", "post"])
def test_a_path_that_does_not_exist_says_so(server, method):
    answer = httpx.request(method, f"{server.url}/e2b/nothing/here", headers={"X-API-Key": server.key})
    assert (answer.status_code, answer.json()["code"]) == (404, 404)
