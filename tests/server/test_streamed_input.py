"""A stream of input is as long as its process wants it, and ends with its sandbox."""

from __future__ import annotations

import base64
import http.client
import json
import struct
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
from e2b_code_interpreter import Sandbox
from tests.conftest import RunningServer, serving

MIB = 1 << 20


def frame(message: object) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", 0, len(data)) + data


def headers_for(box: Sandbox) -> dict[str, str]:
    return {
        "E2b-Sandbox-Id": box.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": box._envd_access_token or "",
        "Content-Type": "application/connect+json",
    }


def stream_input(server: RunningServer, box: Sandbox, frames: Iterator[bytes]) -> httpx2.Response:
    url = f"{server.url}/e2b/process.Process/StreamInput"
    return httpx2.post(url, headers=headers_for(box), content=frames, timeout=30)


def test_it_can_have_more_than_an_upload(own_data_dir):
    with serving(own_data_dir, env={"CLOCHE_SERVER_UPLOAD_BYTES": str(MIB)}) as server:
        box = Sandbox.create(**server.e2b)
        counting = box.commands.run("wc -c", background=True, stdin=True)

        def frames() -> Iterator[bytes]:
            yield frame({"start": {"process": {"pid": counting.pid}}})
            for _ in range(12):
                yield frame({"data": {"input": {"stdin": base64.b64encode(b"a" * (MIB // 4)).decode()}}})

        answer = stream_input(server, box, frames())
        assert (answer.status_code, answer.content[-2:]) == (200, b"{}")
        box.commands.close_stdin(counting.pid)
        assert counting.wait().stdout == f"{3 * MIB}\n"
        box.kill()


def test_a_silent_one_ends_with_its_sandbox(server):
    box = Sandbox.create(**server.e2b)
    reading = box.commands.run("cat", background=True, stdin=True)
    first = frame({"start": {"process": {"pid": reading.pid}}})
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    connection.putrequest("POST", "/e2b/process.Process/StreamInput")
    for name, value in {**headers_for(box), "Content-Length": str(len(first) + 1)}.items():
        connection.putheader(name, value)
    connection.endheaders(first)
    box.kill()
    answer = connection.getresponse()
    assert answer.status == 502 and b"was not found" in answer.read()
    connection.close()
