"""The process service, byte by byte."""

from __future__ import annotations

import pytest

from cloche import errors
from cloche.api.e2b import process as wire
from cloche.api.e2b.connect import ConnectRpcError, decode_message
from cloche.engine.commands.jobs import OutputChunk
from cloche.events import Exited


def test_a_recorded_start():
    body = (
        b'{"process":{"cmd":"/bin/bash","args":["-l","-c","echo hi"],"envs":{"E_1":"1"},"cwd":"/tmp"},"stdin":false,'
        b'"pty":{"size":{"cols":80,"rows":24}},"unknown":[1]}'
    )
    asked = decode_message(wire.EnvdStartRequest, body)
    assert (asked.process.cmd, asked.process.args) == ("/bin/bash", ("-l", "-c", "echo hi"))
    assert (asked.process.envs, asked.process.cwd, asked.stdin, asked.tag) == ({"E_1": "1"}, "/tmp", False, None)
    assert asked.pty is not None and wire.terminal_size_of(asked.pty) == (24, 80)


def test_recorded_input():
    asked = decode_message(wire.EnvdSendInputRequest, b'{"process":{"pid":4242},"input":{"stdin":"eA=="}}')
    assert (asked.process.pid, wire.decode_process_input(asked.input)) == (4242, b"x")
    assert wire.decode_process_input(wire.ProcessInput(pty="_-8")) == b"\xff\xef"
    with pytest.raises(errors.InvalidRequest):
        wire.decode_process_input(wire.ProcessInput(stdin="not base64!"))
    with pytest.raises(ConnectRpcError):
        wire.decode_process_input(wire.ProcessInput())


def test_a_recorded_stream_of_input():
    first = decode_message(wire.EnvdStreamInputRequest, b'{"start":{"process":{"pid":4242}}}')
    data = decode_message(wire.EnvdStreamInputRequest, b'{"data":{"input":{"stdin":"YQ=="}}}')
    pause = decode_message(wire.EnvdStreamInputRequest, b'{"keepalive":{}}')
    assert first.start is not None and first.start.process.pid == 4242
    assert data.data is not None and wire.decode_process_input(data.data.input) == b"a"
    assert pause.start is None and pause.data is None


@pytest.mark.parametrize("given", ["SIGNAL_SIGKILL", 9])
def test_signals_by_name_or_number(given):
    assert wire.decode_signal_number(given) == 9
    with pytest.raises(ConnectRpcError):
        wire.decode_signal_number("SIGNAL_UNSPECIFIED")


def test_ends_as_go_tells_them():
    assert wire.encode_end_event(Exited(exit_code=0)) == {
        "event": {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}}
    }
    assert wire.encode_end_event(Exited(exit_code=3))["event"]["end"]["error"] == "exit status 3"
    assert wire.encode_end_event(Exited(exit_code=137, signal=9)) == {
        "event": {"end": {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}}
    }


def test_output_is_base64_in_parts_of_32_kib():
    frames = wire.encode_data_events(OutputChunk(stream="stderr", data=b"\xe2" * 40_000), terminal=False)
    sizes = [len(frame["event"]["data"]["stderr"]) for frame in frames]
    assert len(frames) == 2 and sizes[0] == 43_692
    assert wire.encode_data_events(OutputChunk(stream="stdout", data=b"x"), terminal=True) == [
        {"event": {"data": {"pty": "eA=="}}}
    ]
