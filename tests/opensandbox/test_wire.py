"""OpenSandbox's bytes, read and written."""

from __future__ import annotations

import json

import pytest

from cloche import errors
from cloche.api.opensandbox import execd, lifecycle_schema
from cloche.events import Display, Ended, Output, Raised, Started
from cloche.model import Usage

AT = 1794805992000


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
    assert execd.ExecutionFrameEncoder().encode(events, AT) == (
        b'data: {"type": "execution_count", "execution_count": 3, "timestamp": 1794805992000}\n\n'
        b'data: {"type": "stdout", "text": "a\\u2028b\\n", "timestamp": 1794805992000}\n\n'
        b'data: {"type": "result", "results": {"text": "1", "image/png": "iVA=", "application/json": null}, '
        b'"timestamp": 1794805992000}\n\n'
        b'data: {"type": "execution_complete", "execution_time": 12, "timestamp": 1794805992000}\n\n'
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
    encoded = execd.ExecutionFrameEncoder().encode(events, AT)
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
