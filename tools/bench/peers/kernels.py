"""Peer: a plain ipykernel through jupyter_client, used in the ordinary way."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.peers.session import ANSWER_SECONDS, START_SECONDS, PeerFailed, PeerOutput


class KernelsPeer:
    stateless = False

    def __enter__(self) -> KernelsPeer:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def session(self) -> KernelSession:
        return KernelSession()


class KernelSession:
    """Over ipc, which is the faster of its two transports."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        # Without a file of its own, kernels that start at once meet at the same sockets.
        self._place = tempfile.TemporaryDirectory(prefix="cloche-bench-")
        file = str(Path(self._place.name) / "kernel.json")
        self._manager: Any = KernelManager(transport="ipc", connection_file=file)
        self._manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._client: Any = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_SECONDS)

    def run(self, code: str) -> PeerOutput:
        request = self._client.execute(code)
        shown = PeerOutput()
        while True:
            message = self._client.get_iopub_msg(timeout=ANSWER_SECONDS)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["content"].get("execution_state") == "idle":
                break
            shown.heard(message["msg_type"], message["content"])
        reply = self._client.get_shell_msg(timeout=ANSWER_SECONDS)
        if reply["content"]["status"] != "ok":
            raise PeerFailed(str(reply["content"])[:200])
        return shown

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
        self._place.cleanup()
