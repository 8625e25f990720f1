"""Descriptors that a program sends to the host: it takes none, and none holds it up."""

from __future__ import annotations

import asyncio
import time

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

LINGER = """
import array, os, socket, struct, threading
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer = server.accept()[0]
client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 15))
client.setblocking(False)
try:
    while True:
        client.send(bytes(1 << 16))
except BlockingIOError:
    pass
channel = socket.socket(fileno=os.dup(3))
head = b'{"fds":1}'
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [client.fileno()]))]
try:
    channel.sendmsg([struct.pack(">II", len(head), 0)], rights)
except OSError as error:
    print("refused", error.errno)
client.close()
"""


async def test_a_socket_that_lingers_when_closed_does_not_hold_up_the_host(box, execute, neighbour):
    began = time.monotonic()
    await execute(box, LINGER)
    await neighbour.notices_nothing()
    assert time.monotonic() - began < 10  # the program chose 15
    assert (await execute(box, "1 + 1")).text == "2"


async def test_lingering_is_not_to_be_had_at_all(box, execute):
    code = """
import socket, struct
with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 15))
    print(struct.unpack("ii", s.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)))
"""
    assert (await execute(box, code)).stdout == "(0, 0)\n"


async def test_the_kernel_channel_takes_no_descriptors(box, execute):
    code = """
import array, os, socket
channel = socket.socket(fileno=os.dup(3))
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 16))]
for _ in range(8):
    channel.sendmsg([b"\\0"], rights)
"""
    assert (await execute(box, code)).outcome in ("raised", "died")
    assert (await execute(box, "1 + 1")).text == "2"


async def test_a_terminal_that_was_closed_inside_leads_to_no_other_terminal(box, neighbour):
    """Descriptors are numbers: the one of a terminal that is gone may be a neighbour's by now."""
    hanging = "trap '' HUP; exec </dev/null >/dev/null 2>&1; sleep 100"
    ours = [await box.commands.launch(["bash", "-c", hanging], pty=(24, 80)) for _ in range(6)]
    while not all(pipe.closed for job in ours for pipe in job._pipes):
        await asyncio.sleep(0.01)
    shell = ["bash", "-c", "while read -r _; do stty size; done"]
    theirs = [await neighbour.sandbox.commands.launch(shell, pty=(24, 80)) for _ in range(6)]
    for job in ours:
        job.resize(11, 22)
    assert [await answer(job) for job in theirs] == ["24 80"] * 6
    for job in (*ours, *theirs):
        job.kill()
        await job.wait()


async def answer(job) -> str:
    """What a shell at a terminal says to an empty line."""
    async with job.listen() as listener:
        await job.send_stdin(b"\n")
        said = b""
        while said.count(b"\n") < 2:
            said += b"".join(event.data for event in await listener.next_events())
    return said.decode().splitlines()[-1].strip()
