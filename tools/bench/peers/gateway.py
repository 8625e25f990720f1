"""Peer: Jupyter Kernel Gateway: kernels by REST, executions over a WebSocket."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import uuid
from typing import Any

from bench.peers.session import ANSWER_SECONDS, PeerFailed, PeerOutput, free_port, stop_processes, wait_until_up

# Jupyter's servers never set it for a kernel's WebSocket, so that an answer of two small writes waits for the client's
# delayed acknowledgement: 40 ms.
NODELAY_PATCH = """
import socket
from tornado.iostream import IOStream
begin = IOStream.__init__
def begin_nodelay(self, socket_given, *given, **named):
    begin(self, socket_given, *given, **named)
    self.set_nodelay(True)
IOStream.set_nodelay = lambda self, _: self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
IOStream.__init__ = begin_nodelay
"""
# By default they drop output beyond 1 MB per second.
UNLIMITED_OPTIONS = [
    "--ZMQChannelsWebsocketConnection.iopub_data_rate_limit=1e12",
    "--ZMQChannelsWebsocketConnection.iopub_msg_rate_limit=1e12",
]


def start_jupyter(application: str, arguments: list[str], *, nodelay: bool, **where: Any) -> subprocess.Popen[bytes]:
    """Starts a server of Jupyter's; with `nodelay`, TCP_NODELAY is forced upon it."""
    module, _, name = application.partition(":")
    program = (NODELAY_PATCH if nodelay else "") + f"from {module} import {name}\n{name}.launch_instance()"
    command = [sys.executable, "-c", program, *arguments, *UNLIMITED_OPTIONS]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **where)


class KernelGatewayPeer:
    stateless = False

    def __init__(self, *, nodelay: bool = False):
        self._nodelay = nodelay
        self.port = free_port()

    def __enter__(self) -> KernelGatewayPeer:
        arguments = [f"--KernelGatewayApp.port={self.port}", "--KernelGatewayApp.ip=127.0.0.1"]
        self._process = start_jupyter("kernel_gateway.gatewayapp:KernelGatewayApp", arguments, nodelay=self._nodelay)
        try:
            wait_until_up(f"http://127.0.0.1:{self.port}/api", self._process)
        except BaseException:
            stop_processes(self._process)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_processes(self._process)

    def session(self) -> GatewaySession:
        return GatewaySession(self.port)


class GatewaySession:
    def __init__(self, port: int):
        import websocket

        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        self._id = json.loads(self._request_bytes("POST", "/api/kernels", b"{}", 201))["id"]
        self._session = uuid.uuid4().hex
        url = f"ws://127.0.0.1:{port}/api/kernels/{self._id}/channels?session_id={self._session}"
        # This client checks UTF-8 in Python, which takes longer than all else: JSON is decoded anyway.
        self._socket: Any = websocket.create_connection(url, timeout=ANSWER_SECONDS, skip_utf8_validation=True)

    def run(self, code: str) -> PeerOutput:
        request = uuid.uuid4().hex
        self._socket.send(json.dumps(self._execute_message(request, code)))
        shown, waiting = PeerOutput(), {"idle", "reply"}
        while waiting:
            message = json.loads(self._socket.recv())
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "execute_reply":
                waiting.discard("reply")
            elif message["content"].get("execution_state") == "idle":
                waiting.discard("idle")
            else:
                shown.heard(message["msg_type"], message["content"])
        return shown

    def close(self) -> None:
        self._socket.close()
        self._request_bytes("DELETE", f"/api/kernels/{self._id}", b"", 204)
        self._http.close()

    def _execute_message(self, request: str, code: str) -> dict[str, Any]:
        return {
            "header": {
                "msg_id": request,
                "msg_type": "execute_request",
                "session": self._session,
                "username": "",
                "version": "5.3",
            },
            "parent_header": {},
            "metadata": {},
            "channel": "shell",
            "content": {"code": code, "silent": False, "store_history": True, "allow_stdin": False},
        }

    def _request_bytes(self, method: str, path: str, body: bytes, status: int) -> bytes:
        self._http.request(method, path, body, {"content-type": "application/json"})
        answer = self._http.getresponse()
        found = answer.read()
        if answer.status != status:
            raise PeerFailed(f"{method} {path}: {answer.status} {found[:200]!r}")
        return found
