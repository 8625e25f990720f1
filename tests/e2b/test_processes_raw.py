"""What the SDKs do not use of the process service: tags, keepalives, and a client of one's own."""

from __future__ import annotations

import base64
import http.client
import json
import struct
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from e2b_code_interpreter import Sandbox


class Client:
    """Connect over HTTP, by hand."""

    def __init__(self, box: Sandbox, server):
        self._address = urlsplit(server.url)
        self._headers = {
            "E2b-Sandbox-Id": box.sandbox_id,
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": box._envd_access_token or "",
        }

    def _post(self, method: str, body: bytes, kind: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=30)
        connection.request(
            "POST", f"/e2b/process.Process/{method}", body, {**self._headers, "Content-Type": kind, **headers}
        )
        return connection.getresponse()

    def ask(self, method: str, message: Any) -> tuple[int, Any]:
        with self._post(method, json.dumps(message).encode(), "application/json", {}) as response:
            return response.status, json.loads(response.read())

    def frames(self, method: str, message: Any, **headers: str) -> Iterator[tuple[int, Any]]:
        data = json.dumps(message).encode()
        body = struct.pack(">BI", 0, len(data)) + data
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with self._post(method, body, "application/connect+json", named) as response:
            while head := response.read(5):
                flags, size = struct.unpack(">BI", head)
                yield flags, json.loads(response.read(size))


def test_tags_keepalives_and_ends(box: Sandbox, server):
    client = Client(box, server)
    frames = client.frames("Start", {"process": {"cmd": "cat"}, "tag": "mine"}, Keepalive_Ping_Interval="1")
    assert next(frames)[1]["event"]["start"]["pid"] > 1
    assert next(frames) == (0, {"event": {"keepalive": {}}})
    status, listed = client.ask("List", {})
    assert status == 200 and [each["tag"] for each in listed["processes"]] == ["mine"]
    # Without `stdin` there is a pipe.
    data = base64.b64encode(b"\xff\xfe").decode()
    assert client.ask("SendInput", {"process": {"tag": "mine"}, "input": {"stdin": data}}) == (200, {})
    assert (0, {"event": {"data": {"stdout": data}}}) in frames
    assert client.ask("SendSignal", {"process": {"tag": "mine"}, "signal": "SIGNAL_SIGTERM"}) == (200, {})
    ends = [frame for frame in frames if "keepalive" not in frame[1].get("event", {})]
    assert ends[0][1]["event"]["end"]["status"] == "signal: terminated" and ends[1] == (2, {})


def test_errors_have_connects_shape_and_the_next_call_works(box: Sandbox, server):
    client = Client(box, server)
    assert client.ask("SendInput", {"process": {"pid": 4242}, "input": {"stdin": ""}}) == (
        404,
        {"code": "not_found", "message": "process with pid 4242 not found"},
    )
    for method, message in (
        ("SendSignal", {"process": {"pid": "x"}}),
        ("SendSignal", []),
        ("Update", {"process": {"pid": -1}}),
        ("CloseStdin", {}),
    ):
        status, body = client.ask(method, message)
        assert status in (400, 404) and set(body) == {"code", "message"}
    for message in ({}, {"process": {"cmd": ""}}, {"process": {"cmd": "a\0"}}, {"process": {"cmd": "x" * 200_000}}):
        ((flags, body),) = client.frames("Start", message)
        assert flags == 2 and body["error"]["code"] == "invalid_argument"
    assert [
        frame[1]["event"]["end"]["exitCode"]
        for frame in client.frames("Start", {"process": {"cmd": "nope"}})
        if "end" in frame[1].get("event", {})
    ] == [127]


def test_input_before_its_process_is_named_is_refused(box: Sandbox, server):
    client = Client(box, server)
    ((flags, body),) = client.frames("StreamInput", {"data": {"input": {"stdin": "YQ=="}}})
    assert flags == 2 and "send `start` first" in body["error"]["message"]
