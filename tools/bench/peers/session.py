"""The interface of every peer: sessions in which code runs."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any, Protocol

START_SECONDS = 60.0
ANSWER_SECONDS = 120.0


class PeerFailed(Exception):
    """The peer gave no answer, or a wrong one."""


class PeerAbsent(Exception):
    """The peer cannot be measured here; the message is the reason."""


class PeerOutput:
    """The output of an execution, until its end."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.output: list[str] = []

    @property
    def stdout(self) -> str:
        return "".join(self.output)

    def heard(self, kind: str, content: dict[str, Any]) -> None:
        """Takes a message of Jupyter's protocol. Raises PeerFailed for an error."""
        if kind == "error":
            raise PeerFailed(f"{content.get('ename')}: {content.get('evalue')}")
        if kind == "stream":
            self.output.append(content["text"])
        self.data.update(content.get("data", {}))


class PeerSession(Protocol):
    """One sandbox, or the peer's nearest equivalent."""

    def run(self, code: str) -> PeerOutput:
        """Runs code to the end. Raises PeerFailed."""

    def close(self) -> None: ...


class BenchPeer(Protocol):
    """Use with `with`, which starts the parts shared by its sessions and raises PeerAbsent where it cannot."""

    stateless: bool  # whether a session is one execution

    def __enter__(self) -> BenchPeer: ...

    def __exit__(self, *_: object) -> None: ...

    def session(self) -> PeerSession: ...


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    """Waits until the URL responds. Raises PeerAbsent."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise PeerAbsent(f"{url} did not come up")


def stop_processes(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
