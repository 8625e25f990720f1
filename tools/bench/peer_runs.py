"""Runs the peers in their own environment, one after another, and records their results."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cloche.bench import programs
from cloche.bench.lab import SampleCounts
from cloche.bench.samples import SampleBook
from cloche.model import Struct

TOOLS_DIRECTORY = Path(__file__).parent.parent  # all that a driver finds of ours: nothing of Cloche
PATIENCE_SECONDS = 900.0
PEERS_ADVICE = "make .venv-peers/.stamp, and --peers .venv-peers/bin/python"


class PeerInfo(Struct):
    key: str
    title: str


PEERS = (
    PeerInfo(key="ipykernel", title="ipykernel, jupyter_client"),
    PeerInfo(key="gateway", title="Kernel Gateway"),
    PeerInfo(key="gateway_nodelay", title="Kernel Gateway, TCP_NODELAY forced"),
    PeerInfo(key="e2b_server", title="E2B's in-sandbox server"),
    PeerInfo(key="e2b_server_nodelay", title="E2B's server, TCP_NODELAY forced"),
    PeerInfo(key="autogen_jupyter", title="AutoGen, Jupyter"),
    PeerInfo(key="autogen_local", title="AutoGen, local (stateless)"),
    PeerInfo(key="bubblewrap", title="python under bubblewrap (stateless)"),
    PeerInfo(key="gvisor", title="python under runsc do (stateless)"),
)

PEER_PROGRAMS = {
    "one": programs.ONE,
    "frame": programs.FRAME,
    "png": programs.PLOT,
    "stream": programs.STREAM,
}


class PeerMeasurements:
    """Results of the peers, in the book as `peer_measure`; and the reasons why others were not measured."""

    def __init__(self, book: SampleBook):
        self.book = book
        self.versions: dict[str, str] = {}
        self.absent: dict[str, str] = {}

    def measure(
        self,
        python: str,
        checkout: str,
        counts: SampleCounts,
        report: Callable[[str], None],
        among: Sequence[PeerInfo] = PEERS,
    ) -> None:
        """Measures with the interpreter that has the peers installed."""
        if shutil.which(python) is None:
            why = f"{python} is not there: {PEERS_ADVICE}"
            self.absent |= {peer.key: why for peer in among}
            return
        job = {"checkout": checkout, "counts": _job_counts(counts), "programs": PEER_PROGRAMS}
        for peer in among:
            report(f"measuring {peer.title}")
            self._run_peer(peer, python, job)

    def _run_peer(self, peer: PeerInfo, python: str, job: dict[str, Any]) -> None:
        """Runs one peer. Its failure does not stop the others."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CLOCHE_")}
        command = [python, "-W", "ignore", "-m", "bench.peers.drive"]
        process = subprocess.Popen(
            command,
            env={**environ, "PYTHONPATH": str(TOOLS_DIRECTORY), "JUPYTER_PLATFORM_DIRS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(json.dumps({"peer": peer.key, **job}), timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired as late:
            said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
            self.absent[peer.key] = f"it took more than {PATIENCE_SECONDS:g} s"
        finally:
            _end_group(process)
        for line in said.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # what a program of the peer's says, say
                self.record_line(peer.key, json.loads(line))
        if process.returncode and peer.key not in self.absent:
            self.absent[peer.key] = f"its driver ended with status {process.returncode}"

    def record_line(self, peer: str, line: dict[str, Any]) -> None:
        if "absent" in line:
            self.absent[peer] = line["absent"]
        elif "version" in line:
            self.versions[peer] = line["version"]
        elif "failure" in line:
            self.book[f"{peer}_{line['key']}"].failures.append(line["failure"])
        else:
            self.book.add(f"{peer}_{line['key']}", line["value"])


def _end_group(process: subprocess.Popen[str]) -> None:
    """Kills the driver and its leftover processes: servers that it did not end itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _job_counts(counts: SampleCounts) -> dict[str, Any]:
    return {
        "starts": counts.peer_starts,
        "warm": counts.peer_warm,
        "streams": counts.transfers,
        "stream_bytes": programs.STREAM_BYTES,
        "kernels": counts.kernels,
        "clients": list(counts.peer_clients),
        "load_seconds": counts.load_seconds,
    }
