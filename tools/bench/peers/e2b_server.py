"""Peer: the server of E2B's sandboxes, from a checkout of code-interpreter: FastAPI before jupyter-server.

A session is a context of one running server, which flatters it: with E2B every sandbox has a server of its
own. It wants Jupyter on port 8888, and a kernel called javascript at its start, for which another ipykernel
stands in.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.peers.gateway import start_jupyter
from bench.peers.session import (
    ANSWER_SECONDS,
    PeerAbsent,
    PeerFailed,
    PeerOutput,
    free_port,
    stop_processes,
    wait_until_up,
)

JUPYTER_PORT = 8888  # it is written in their source
RESULT_MIMES = {"text": "text/plain", "html": "text/html", "png": "image/png"}
UVICORN_OPTIONS = ("--no-access-log", "--no-use-colors", "--timeout-keep-alive", "640")  # as their unit file has it
STAND_IN_CODE = "import types; process = types.SimpleNamespace(chdir=lambda path: None)"


class E2bServerPeer:
    stateless = False

    def __init__(self, checkout: str, *, nodelay: bool = False):
        self._server = Path(checkout) / "template" / "server"
        self._nodelay = nodelay
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> E2bServerPeer:
        if not (self._server / "main.py").is_file():
            raise PeerAbsent("needs a checkout of e2b-dev/code-interpreter: CI_REPO=path")
        if _is_port_taken(JUPYTER_PORT):
            raise PeerAbsent(f"port {JUPYTER_PORT} is taken, and its source names it")
        self._place = tempfile.TemporaryDirectory(prefix="cloche-bench-")
        try:
            self._start_servers(Path(self._place.name))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_processes(*self._processes)
        self._place.cleanup()

    def session(self) -> E2bPeerSession:
        return E2bPeerSession(self._port)

    def _start_servers(self, place: Path) -> None:
        _write_stand_in_kernel(place / "kernels" / "javascript")
        environ = {**os.environ, "JUPYTER_PATH": str(place), "E2B_LOCAL": "1"}
        arguments = [
            f"--port={JUPYTER_PORT}",
            "--ip=127.0.0.1",
            "--IdentityProvider.token=",
            "--ServerApp.disable_check_xsrf=True",
            "--ServerApp.allow_root=True",
            "--no-browser",
            f"--ServerApp.root_dir={place}",
        ]
        self._processes.append(
            start_jupyter(
                "jupyter_server.serverapp:ServerApp", arguments, nodelay=self._nodelay, env=environ, cwd=place
            )
        )
        wait_until_up(f"http://127.0.0.1:{JUPYTER_PORT}/api/status", self._processes[0])
        self._port = free_port()
        command = [sys.executable, "-m", "uvicorn", "main:app", "--port", str(self._port), *UVICORN_OPTIONS]
        nowhere = subprocess.DEVNULL
        self._processes.append(subprocess.Popen(command, cwd=self._server, env=environ, stdout=nowhere, stderr=nowhere))
        wait_until_up(f"http://127.0.0.1:{self._port}/health", self._processes[1])


class E2bPeerSession:
    def __init__(self, port: int):
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        self._id = json.loads(self._request_bytes("POST", "/contexts", {"cwd": tempfile.gettempdir()}))["id"]

    def run(self, code: str) -> PeerOutput:
        shown = PeerOutput()
        for line in self._request_bytes("POST", "/execute", {"code": code, "context_id": self._id}).splitlines():
            said = json.loads(line)
            if said["type"] == "error":
                raise PeerFailed(f"{said.get('name')}: {said.get('value')}")
            if said["type"] == "stdout":
                shown.output.append(said["text"])
            if said["type"] == "result":
                shown.data.update({mime: said[name] for name, mime in RESULT_MIMES.items() if said.get(name)})
        return shown

    def close(self) -> None:
        self._request_bytes("DELETE", f"/contexts/{self._id}", None)
        self._http.close()

    def _request_bytes(self, method: str, path: str, body: object) -> bytes:
        self._http.request(method, path, json.dumps(body), {"content-type": "application/json"})
        answer = self._http.getresponse()
        found = answer.read()
        if answer.status >= 300:
            raise PeerFailed(f"{method} {path}: {answer.status} {found[:200]!r}")
        return found


def _is_port_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _write_stand_in_kernel(place: Path) -> None:
    """Writes a kernelspec that is called javascript."""
    place.mkdir(parents=True)
    lines = f"--IPKernelApp.exec_lines={STAND_IN_CODE}"
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", lines]
    (place / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "js", "language": "javascript"}))
