"""OpenSandbox's bytes, read and written."""

from __future__ import annotations

import json
import re

import pytest

from cloche import errors
from cloche.api.opensandbox import lifecycle_schema
from cloche.api.opensandbox.code import ExecutionFrameEncoder
from cloche.api.opensandbox.commands import parse_environment_lines
from cloche.api.opensandbox.files import expand_pattern
from cloche.api.opensandbox.stream import LineFrames
from cloche.events import Display, Ended, Output, Raised, Started
from cloche.model import Usage


@pytest.mark.parametrize(("given", "cpus"), [("1", 1.0), ("500m", 0.5), ("0.25", 0.25), ("2500m", 2.5)])
def test_cpus_are_read_as_kubernetes_writes_them(given: str, cpus: float):
    assert lifecycle_schema.parse_cpus(given) == cpus


@pytest.mark.parametrize(
    ("given", "size"),
    [("2Gi", 2 * 2**30), ("512Mi", 2**29), ("1G", 10**9), ("1.5M", 1_500_000), ("1048576", 2**20), ("64k", 64_000)],
)
def test_sizes_are_read_as_kubernetes_writes_them(given: str, size: int):
    assert lifecycle_schema.parse_size_bytes(given) == size


@pytest.mark.parametrize("given", ["", "-1", "1e9", "much", "1 m", "9" * 40, "١"])
def test_an_amount_that_is_none_is_refused(given: str):
    with pytest.raises(errors.InvalidRequest):
        lifecycle_schema.parse_cpus(given)
    with pytest.raises(errors.InvalidRequest):
        lifecycle_schema.parse_size_bytes(given)


def test_requests_of_the_python_sdk_are_decoded():
    body = (
        b'{"image":{"uri":"python:3.12"},"timeout":600,"resourceLimits":{"cpu":"500m","memory":"512Mi"},'
        b'"env":{"PYTHON_VERSION":"3.12"},"metadata":{"name":"demo"},"entrypoint":["tail","-f","/dev/null"],'
        b'"networkPolicy":{"egress":[{"action":"deny","target":"*.pypi.org"}]},"secureAccess":false,'
        b'"extensions":{"access.renew.extend.seconds":"300"},"unknown":{"a":[1]}}'
    )
    wanted = lifecycle_schema.decode_create_request(body)
    assert (wanted.template, wanted.timeout_seconds, wanted.renew_seconds) == ("python:3.12", 600, 300)
    assert wanted.entrypoint == ("tail", "-f", "/dev/null")


def test_events_are_frames_of_one_line():
    events = [
        Started(execution="x", count=3),
        Output(stream="stdout", text="a\u2028b\n"),
        Display(data={"text/plain": "1", "image/png": b"\x89P", "application/json": float("nan")}, main=True),
        Display(data={"text/plain": "2"}, id="d", update=True),
        Ended(outcome="ok", usage=Usage(wall_seconds=0.0123)),
    ]
    encoded = re.sub(rb', "timestamp": [0-9]{13}}', b"}", ExecutionFrameEncoder().encode(events))
    assert encoded == (
        b'data: {"type": "execution_count", "execution_count": 3}\n\n'
        b'data: {"type": "stdout", "text": "a\\u2028b\\n"}\n\n'
        b'data: {"type": "result", "results": {"text": "1", "image/png": "iVA=", "application/json": null}}\n\n'
        b'data: {"type": "execution_complete", "execution_time": 12}\n\n'
    )


@pytest.mark.parametrize(
    ("ended", "name"),
    [
        (Ended(outcome="raised"), "ValueError"),
        (Ended(outcome="interrupted"), "ValueError"),
        (Ended(outcome="timed_out", reason="the time limit of 1 s was reached"), "ExecutionTimedOut"),
    ],
)
def test_a_failure_is_one_error_and_no_completion(ended: Ended, name: str):
    events = [Raised(name="ValueError", value="v", traceback="t"), ended]
    encoded = ExecutionFrameEncoder().encode(events)
    assert encoded.count(b"data: ") == 1
    assert f'"ename": "{name}"'.encode() in encoded


def test_an_endpoint_is_where_clients_reach_the_server():
    assert lifecycle_schema.public_address_of("", "box:8000") == "box:8000"
    assert lifecycle_schema.public_address_of("https://code.example.org/", "box:8000") == "code.example.org"
    assert lifecycle_schema.public_address_of("https://example.org:8443/code", "box:8000") == "example.org:8443/code"


def test_extensions_are_bounded():
    body = json.dumps({"image": {"uri": "python"}, "extensions": {"a": "x" * 70_000}}).encode()
    with pytest.raises(errors.InvalidRequest, match="extensions"):
        lifecycle_schema.decode_create_request(body)


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\n", b"c"], ["ab", "c"]),
        ([b"a\n\nb"], ["a", "\n", "b"]),
        ([b"a\r\nb\r", b"\nc\rd\n"], ["a", "b", "c", "d"]),
        ([b"\xc3", b"\xa4\n\xff"], ["\u00e4", "\ufffd"]),
        ([b"x" * 200_000], ["x" * 65536] * 3 + ["x" * 3392]),
    ],
)
def test_output_is_one_frame_for_each_line(chunks: list[bytes], lines: list[str]):
    frames = LineFrames("stdout")
    encoded = b"".join([*(frames.feed(chunk) for chunk in chunks), frames.finish()])
    assert [json.loads(each[6:])["text"] for each in encoded.split(b"\n\n") if each] == lines


def test_an_environment_file_is_read_as_execd_does():
    text = '# no\nA=1\nB=\'two words\nand lines\'\nC="a \\"b\\" \\n"\n =x\nD\nA=2\n'
    assert parse_environment_lines(text) == {"A": "2", "B": "two words\nand lines", "C": 'a "b" \n'}


def test_alternatives_of_a_pattern_are_bounded():
    assert sorted(expand_pattern("*.{py,t{x,s}t}")) == ["*.py", "*.tst", "*.txt"]
    with pytest.raises(errors.InvalidRequest):
        expand_pattern("{a,b}" * 20)
