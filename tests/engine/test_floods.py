"""Guests that send more than anybody can take: the loop is shared, and so is the memory."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc

import pytest

from cloche.engine.executions import kernel
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Display, Truncated
from cloche.guest import wire
from cloche.isolation.channel import FRAMES_PER_TURN, HostChannel

pytestmark = pytest.mark.asyncio(loop_scope="session")

FRAMES = 5000


class Flood:
    """A channel with many frames in its socket, then its end."""

    def __init__(self, data: bytes) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, len(data))
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(data))
        theirs.setblocking(False)
        assert theirs.send(data) == len(data)
        theirs.close()
        self.numbers: list[int] = []
        self.closed = ""
        self.pause_at = -1
        self.channel = HostChannel(ours, self._on_frame, self._on_closed)

    def _on_frame(self, header, body, fds) -> None:
        self.numbers.append(header["n"])
        if header["n"] == self.pause_at:
            self.channel.pause()

    def _on_closed(self, why: str) -> None:
        self.closed = why


def many_frames() -> bytes:
    return b"".join(wire.encode_frame({"n": number}) for number in range(FRAMES))


async def test_others_get_their_turn_while_frames_are_handled():
    flood = Flood(many_frames())
    most = before = 0
    while not flood.closed:
        await asyncio.sleep(0)
        most, before = max(most, len(flood.numbers) - before), len(flood.numbers)
    assert most <= FRAMES_PER_TURN
    assert flood.numbers == list(range(FRAMES))
    assert "other side closed" in flood.closed


async def test_a_pause_holds_also_for_frames_that_have_been_read():
    flood = Flood(many_frames())
    flood.pause_at = 100
    while 100 not in flood.numbers:
        await asyncio.sleep(0)
    paused_at = len(flood.numbers)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(flood.numbers) == paused_at < FRAMES
    assert flood.channel.pump() and len(flood.numbers) > paused_at
    flood.channel.resume()
    while not flood.closed:
        await asyncio.sleep(0)
    assert flood.numbers == list(range(FRAMES))


async def test_pumping_comes_to_all_frames():
    flood = Flood(many_frames())
    while flood.channel.pump():
        pass
    assert flood.numbers == list(range(FRAMES)) and flood.closed


async def test_a_header_that_would_become_a_million_objects_is_not_parsed():
    head = b'{"n":[' + b"[]," * 300_000 + b"0]}"
    ours, theirs = socket.socketpair()
    closed: list[str] = []
    channel = HostChannel(ours, lambda header, body, fds: None, closed.append)
    theirs.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(theirs, wire.FRAME_PREFIX.pack(len(head), 0) + head)
    theirs.close()
    while not closed:
        await asyncio.sleep(0)
    assert "too many values" in closed[0] and channel.closed


FLOODING = """
import socket, struct, subprocess, time
import cloche.guest.kernel.kernel as kernel
run = {run}
flood = subprocess.Popen(["yes"])
channel = socket.socket(fileno=3)
try:
    for first in range(10**6, 10**6 + 6000, 1000):
        frames = []
        for mark in range(first, first + 1000):
            header = b'{{"ev":"cleared","wait":true,"run":"%s","mark":%d}}' % (run, mark)
            frames.append(struct.pack(">II", len(header), 0) + header)
        channel.sendall(b"".join(frames))
finally:
    channel.detach()
    flood.kill()
    flood.wait()
"""


@pytest.mark.parametrize(
    ("run", "most_bytes"),
    [
        ('b"of no execution"', 1 << 20),
        # Each of these may have a mark that must be looked for in what two pipes hold.
        ("kernel.prepared[0]._run.encode()", FRAMES_PER_TURN * 2 * (64 << 10) + (1 << 20)),
    ],
)
async def test_marked_frames_and_a_flood_of_output_leave_the_loop_to_others(box: Sandbox, run: str, most_bytes: int):
    execution = box.context().execute(FLOODING.format(run=run), timeout_seconds=60)
    result = asyncio.create_task(execution.result())
    most = before = 0
    while not result.done():
        await asyncio.sleep(0)
        read = bytes_read(execution)
        most, before = max(most, read - before), read
    assert (await result).outcome == "ok"
    assert 0 < most <= most_bytes
    assert (await box.context().execute("1").result()).text == "1"


def bytes_read(execution: Execution) -> int:
    outlet = execution._outlet
    return outlet._limit - outlet._room + sum(outlet._dropped.values())


JSONS = {
    "lists": b"[" + b"[]," * 100_000 + b"0]",
    "nested lists": b"[" + b"[[[[[[1]]]]]]," * 20_000 + b"0]",
    "dicts": b"[" + b'{"":{}},' * 40_000 + b"0]",
    "keys": b"{" + b",".join(b'"%x":[]' % number for number in range(40_000)) + b"}",
    "texts": b"[" + b'"ab",' * 60_000 + b"0]",
    "one wide character": b'"' + b"x" * 300_000 + '\U0001f600"'.encode(),
    "numbers": json.dumps([number / 7 for number in range(20_000)]).encode(),
}


@pytest.mark.parametrize("kind", JSONS)
async def test_the_memory_of_json_is_never_underestimated(kind: str):
    content = JSONS[kind]
    rated = kernel.estimate_parsed_bytes([("application/json", content)])
    tracemalloc.start()
    parsed = kernel.decode_part("application/json", content)
    used, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert parsed and used <= rated + 4096
    if kind == "numbers":
        assert rated < 5 * len(content)  # a figure of 8 MiB can be shown


async def test_json_that_grows_in_memory_is_dropped_and_a_large_figure_is_not(box: Sandbox):
    code = """
from IPython.display import display
for _ in range(3):
    display({"application/json": [[]] * 1_000_000}, raw=True)
display({"application/json": [number / 7 for number in range(300_000)]}, raw=True)
display({"application/json": [float("nan"), "\\ud800"]}, raw=True)
"""
    events = [event async for event in box.context().execute(code)]
    shown = [event.data["application/json"] for event in events if isinstance(event, Display)]
    assert [len(value) for value in shown] == [300_000, 2]
    (dropped,) = (event for event in events if isinstance(event, Truncated))
    assert dropped.stream == "display" and dropped.dropped_bytes > 9_000_000
