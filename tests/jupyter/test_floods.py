"""Messages that would cost the server much: what waits for a kernel, and what each answer repeats, is bounded."""

from __future__ import annotations

import json
import uuid

from tests.jupyter.conftest import JupyterClient

MIB = 1 << 20
STOPPED = """
import os, signal, threading
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
input()
"""


def memory_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))


def test_code_that_waits_for_a_kernel_is_bounded(client: JupyterClient):
    with client.channels(client.start()) as channels:
        running = channels.send("execute_request", {"code": "input()", "allow_stdin": True})
        channels.until(running, "input_request")
        waiting = [channels.send("execute_request", {"code": "#" + "x" * 8 * MIB}) for _ in range(6)]
        refused = channels.until(waiting[-1], "execute_reply")[-1]["content"]
        assert refused["status"] == "error" and "too much code" in refused["evalue"]
        channels.send("input_reply", {"value": "go on"}, "stdin")
        channels.until_idle(running)
        assert channels.execute("1 + 1")[-1]["content"] == {"execution_state": "idle"}


def test_a_header_that_each_answer_would_repeat_is_refused(client: JupyterClient):
    with client.channels(client.start()) as channels:
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "kernel_info_request", "session": "x" * MIB}
        channels.socket.send(json.dumps({"header": header, "content": {}, "channel": "shell"}))
        id = channels.send("kernel_info_request", {})
        assert channels.receive()["parent_header"]["msg_id"] == id


def test_answers_that_a_program_does_not_take_are_bounded(server, client: JupyterClient):
    with client.channels(client.start()) as channels:
        running = channels.send("execute_request", {"code": STOPPED, "allow_stdin": True})
        channels.until(running, "input_request")
        before = memory_bytes(server.process.pid)
        for _ in range(60):
            channels.send("input_reply", {"value": "x" * 3 * MIB}, "stdin")
        channels.ask("comm_info_request", {})  # all of them have arrived
        assert memory_bytes(server.process.pid) - before < 64 * MIB
