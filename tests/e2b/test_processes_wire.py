"""The process service, byte by byte."""

from __future__ import annotations

import pytest

from cloche import errors
from cloche.api.e2b import process as wire
from cloche.api.e2b.connect import Refusal, decode
from cloche.engine.commands.jobs import Chunk
from cloche.engine.commands.program import Exited


def test_a_recorded_start():
    body = (
        b'{"process":{"cmd":"/bin/bash","args":["-l","-c","echo hi"],"envs":{"E_1":"1"},"cwd":"/tmp"},"stdin":false,'
        b'"pty":{"size":{"cols":80,"rows":24}},"unknown":[1]}'
    )
    asked = decode(wire.StartRequest, body)
    assert (asked.process.cmd, asked.process.args) == ("/bin/bash", ("-l", "-c", "echo hi"))
    assert (asked.process.envs, asked.process.cwd, asked.stdin, asked.tag) == ({"E_1": "1"}, "/tmp", False, None)
    assert asked.pty is not None and wire.size_of(asked.pty) == (24, 80)


def test_recorded_input():
    asked = decode(wire.SendInputRequest, b'{"process":{"pid":4242},"input":{"stdin":"eA=="}}')
    assert (asked.process.pid, wire.input_of(asked.input)) == (4242, b"x")
    assert wire.input_of(wire.Input(pty="_-8")) == b"\xff\xef"
    with pytest.raises(errors.InvalidRequest):
        wire.input_of(wire.Input(stdin="not base64!"))
    with pytest.raises(Refusal):
        wire.input_of(wire.Input())


def test_a_recorded_stream_of_input():
    first = decode(wire.StreamInputRequest, b'{"start":{"process":{"pid":4242}}}')
    data = decode(wire.StreamInputRequest, b'{"data":{"input":{"stdin":"YQ=="}}}')
    pause = decode(wire.StreamInputRequest, b'{"keepalive":{}}')
    assert first.start is not None and first.start.process.pid == 4242
    assert data.data is not None and wire.input_of(data.data.input) == b"a"
    assert pause.start is None and pause.data is None


@pytest.mark.parametrize("given", ["SIGNAL_SIGKILL", 9])
def test_signals_by_name_or_number(given):
    assert wire.signal_of(given) == 9
    with pytest.raises(Refusal):
        wire.signal_of("SIGNAL_UNSPECIFIED")


def test_ends_as_go_tells_them():
    assert wire.ended(Exited(exit_code=0)) == {
        "event": {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}}
    }
    assert wire.ended(Exited(exit_code=3))["event"]["end"]["error"] == "exit status 3"
    assert wire.ended(Exited(exit_code=137, signal=9)) == {
        "event": {"end": {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}}
    }


def test_output_is_base64_in_parts_of_32_kib():
    frames = wire.data_frames(Chunk(stream="stderr", data=b"\xe2" * 40_000), terminal=False)
    sizes = [len(frame["event"]["data"]["stderr"]) for frame in frames]
    assert len(frames) == 2 and sizes[0] == 43_692
    assert wire.data_frames(Chunk(stream="stdout", data=b"x"), terminal=True) == [{"event": {"data": {"pty": "eA=="}}}]
