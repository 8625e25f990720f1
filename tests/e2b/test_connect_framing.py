"""Connect-RPC: its frames, its messages, and what becomes of those that are broken. The next request always works."""

from __future__ import annotations

import http.client
import json
import struct
from urllib.parse import urlsplit

import pytest

from cloche import errors
from cloche.api.e2b import connect

STAT = "/filesystem.Filesystem/Stat"
WATCH = "/filesystem.Filesystem/WatchDir"


class Inner(connect.ConnectMessage):
    stdin: bytes | None = None
    exit_code: int = 0


class Outer(connect.ConnectMessage):
    process: Inner | None = None
    include_entry: bool = False
    depth: int = 0
    envs: dict[str, str] = {}


# -- messages and frames, without a server


def test_names_come_in_both_cases_but_the_keys_of_maps_are_the_users_own():
    camel = b'{"process":{"stdin":"YQ==","exitCode":3},"includeEntry":true,"depth":"7","envs":{"my_key":"v"}}'
    snake = b'{"process":{"stdin":"YQ==","exit_code":3},"include_entry":true,"depth":7,"envs":{"my_key":"v"}}'
    wanted = Outer(process=Inner(stdin=b"a", exit_code=3), include_entry=True, depth=7, envs={"my_key": "v"})
    assert connect.decode_message(Outer, camel) == connect.decode_message(Outer, snake) == wanted


@pytest.mark.parametrize("data", [b"", b"{}", b'{"unknown":[1,{"a":2}]}', b'{"depth":null,"process":null}'])
def test_missing_null_and_unknown_fields_take_defaults(data):
    assert connect.decode_message(Outer, data) == Outer()


@pytest.mark.parametrize(
    "data",
    [b"[]", b"{", b'"x"', b"null", b'{"depth":"x"}', b'{"process":[]}', b'{"envs":{"a":1}}', b"\xff", b"[" * 200_000],
)
def test_malformed_messages_are_refused(data):
    with pytest.raises(errors.InvalidRequest):
        connect.decode_message(Outer, data)


def test_frames_are_taken_as_soon_as_they_are_whole():
    sent = connect.encode_frame({"a": 1}) + connect.encode_frame({"b": "é"})
    buffer, taken = bytearray(), []
    for byte in sent:
        buffer.append(byte)
        while (data := connect.take_frame(buffer)) is not None:
            taken.append(json.loads(data))
    assert taken == [{"a": 1}, {"b": "é"}]
    assert not buffer


@pytest.mark.parametrize("head", [b"\x00\xff\xff\xff\xff", b"\x02\x00\x00\x00\x00", b"\x80\x00\x00\x00\x00"])
def test_a_frame_that_cannot_be_is_refused_before_it_has_come(head):
    with pytest.raises(errors.InvalidRequest):
        connect.take_frame(bytearray(head))


def test_the_last_frame_says_how_it_went():
    assert connect.encode_end_frame() == b"\x02\x00\x00\x00\x02{}"
    flags = struct.unpack(">BI", connect.encode_end_frame(errors.FileNotFound("nope"))[:5])[0]
    assert flags == 2
    assert json.loads(connect.encode_end_frame(errors.FileNotFound("nope"))[5:]) == {
        "error": {"code": "not_found", "message": "nope"}
    }


def test_every_code_has_a_status():
    assert all(code in connect.STATUSES for code in connect._CODES.values())
    assert connect.connect_code_of(errors.ProtocolViolation("x")) == "internal"


# -- against a server


class Answer:
    def __init__(self, status: int, kind: str, body: bytes):
        self.status, self.kind, self.body = status, kind, body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def frames(self) -> list[tuple[int, dict]]:
        found, rest = [], self.body
        while rest:
            flags, size = struct.unpack(">BI", rest[:5])
            found.append((flags, json.loads(rest[5 : 5 + size])))
            rest = rest[5 + size :]
        return found


@pytest.fixture
def call(server, box):
    """Sends raw bytes to a method of the sandbox's envd."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    token = {"X-Access-Token": box._envd_access_token, "E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983"}

    def send(path: str, body: bytes, kind: str = "application/json", **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", "/e2b" + path, body, {**token, "Content-Type": kind, **named})
        response = connection.getresponse()
        return Answer(response.status, response.headers["content-type"], response.read())

    yield send
    connection.close()


def lives(call) -> bool:
    return call(STAT, b'{"path":"/home/user"}').json["entry"]["type"] == "FILE_TYPE_DIRECTORY"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_argument"),
        (b'{"path":5}', 400, "invalid_argument"),
        (b'{"path":"/none"}', 404, "not_found"),
        (b'{"path":"/a\\u0000b"}', 400, "invalid_argument"),
        (b'{"path":"~bob/x"}', 400, "invalid_argument"),
    ],
)
def test_a_bad_unary_call_gets_the_protocols_own_error(call, body, status, code):
    answer = call(STAT, body)
    assert (answer.status, answer.kind, answer.json["code"]) == (status, "application/json", code)
    assert answer.json["message"]
    assert lives(call)


@pytest.mark.parametrize("kind", ["application/proto", "text/plain", "application/grpc", ""])
def test_another_codec_is_refused_with_the_ones_there_are(call, kind):
    assert call(STAT, b"{}", kind).status == 415
    assert lives(call)


def test_a_compressed_message_is_refused(call):
    answer = call(STAT, b"\x1f\x8b", Content_Encoding="gzip")
    assert (answer.status, answer.json["code"]) == (501, "unimplemented")
    assert lives(call)


GOOD = connect.encode_frame({"path": "/home/user"})


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_argument"),
        (b"\x00\x00", "invalid_argument"),
        (GOOD[:-1], "invalid_argument"),
        (b"\x00\xff\xff\xff\xff" + b"x" * 100, "invalid_argument"),
        (b"\x01" + GOOD[1:], "unimplemented"),
        (b"\x02" + GOOD[1:], "invalid_argument"),
        (GOOD + GOOD, "invalid_argument"),
        (connect.encode_frame({"path": 7}), "invalid_argument"),
        (connect.encode_frame({"path": "/none"}), "not_found"),
    ],
)
def test_a_bad_stream_ends_with_the_error_in_its_last_frame(call, body, code):
    answer = call(WATCH, body, "application/connect+json")
    assert (answer.status, answer.kind) == (200, "application/connect+json")
    ((flags, end),) = answer.frames
    assert (flags, end["error"]["code"]) == (2, code)
    assert lives(call)


def test_a_stream_ends_when_its_clients_time_is_up_and_says_that_it_lives_before(call):
    answer = call(WATCH, GOOD, "application/connect+json", Connect_Timeout_Ms="1500", Keepalive_Ping_Interval="1")
    *told, (flags, end) = answer.frames
    assert told[0] == (0, {"start": {}})
    assert (0, {"keepalive": {}}) in told
    assert (flags, end["error"]["code"]) == (2, "deadline_exceeded")


def test_a_timeout_that_is_no_number_is_refused(call):
    answer = call(WATCH, GOOD, "application/connect+json", Connect_Timeout_Ms="soon")
    assert answer.frames[0][1]["error"]["code"] == "invalid_argument"


def test_an_unknown_method_is_not_there(call):
    assert call("/filesystem.Filesystem/Format", b"{}").status == 404
    assert call("/init", b"{}").status == 404
    assert lives(call)


def test_a_user_that_does_not_exist_is_refused(call):
    answer = call(STAT, b'{"path":"/"}', Authorization="Basic Ym9iOg==")
    assert (answer.status, answer.json) == (401, {"code": "unauthenticated", "message": "invalid username: 'bob'"})
    assert call(STAT, b'{"path":"/"}', Authorization="Basic !").status == 401
