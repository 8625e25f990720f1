"""Runs the peers in their own environment, one after another, and takes down what they say."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cloche.bench.lab import Counts
from cloche.bench.samples import Book
from cloche.model import Struct

HERE = Path(__file__).parent
PATIENCE_SECONDS = 900.0
ADVICE = "make .venv-peers/.stamp, and --peers .venv-peers/bin/python"


class Peer(Struct):
    key: str
    title: str


PEERS = (
    Peer(key="ipykernel", title="ipykernel, jupyter_client"),
    Peer(key="gateway", title="Kernel Gateway"),
    Peer(key="gateway_nodelay", title="Kernel Gateway, TCP_NODELAY forced"),
    Peer(key="e2b_server", title="E2B's in-sandbox server"),
    Peer(key="e2b_server_nodelay", title="E2B's server, TCP_NODELAY forced"),
    Peer(key="autogen_jupyter", title="AutoGen, Jupyter"),
    Peer(key="autogen_local", title="AutoGen, local (stateless)"),
    Peer(key="bubblewrap", title="python under bubblewrap (stateless)"),
    Peer(key="gvisor", title="python under runsc do (stateless)"),
)


class Peers:
    """What was measured of them: in the book as `peer_measure`; and why the others were not."""

    def __init__(self, book: Book):
        self.book = book
        self.versions: dict[str, str] = {}
        self.absent: dict[str, str] = {}

    def measure(
        self,
        python: str,
        checkout: str,
        counts: Counts,
        report: Callable[[str], None],
        among: Sequence[Peer] = PEERS,
    ) -> None:
        """With the interpreter that has them."""
        if shutil.which(python) is None:
            why = f"{python} is not there: {ADVICE}"
            self.absent |= {peer.key: why for peer in among}
            return
        with _shadow() as place:
            for peer in among:
                report(f"measuring {peer.title}")
                self._run(peer, python, place, {"checkout": checkout, "counts": _asked(counts)})

    def _run(self, peer: Peer, python: str, place: str, job: dict[str, Any]) -> None:
        """Whatever becomes of a peer, the others are measured."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CLOCHE_")}
        command = [python, "-W", "ignore", "-m", "cloche.bench.peers.drive"]
        process = subprocess.Popen(
            command,
            env={**environ, "PYTHONPATH": place, "JUPYTER_PLATFORM_DIRS": "1"},
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
                self.take_down(peer.key, json.loads(line))
        if process.returncode and peer.key not in self.absent:
            self.absent[peer.key] = f"its driver ended with status {process.returncode}"

    def take_down(self, peer: str, line: dict[str, Any]) -> None:
        if "absent" in line:
            self.absent[peer] = line["absent"]
        elif "version" in line:
            self.versions[peer] = line["version"]
        elif "failure" in line:
            self.book[f"{peer}_{line['key']}"].failures.append(line["failure"])
        else:
            self.book.add(f"{peer}_{line['key']}", line["value"])


def _end_group(process: subprocess.Popen[str]) -> None:
    """The driver, and whatever it has left: its servers, which it ends itself where it comes to it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _asked(counts: Counts) -> dict[str, Any]:
    return {
        "starts": counts.peer_starts,
        "warm": counts.peer_warm,
        "streams": counts.transfers,
        "kernels": counts.kernels,
        "clients": list(counts.peer_clients),
        "load_seconds": counts.load_seconds,
    }


@contextlib.contextmanager
def _shadow() -> Iterator[str]:
    """A path on which only the drivers are, so that nothing of our environment meets the peers'."""
    with tempfile.TemporaryDirectory(prefix="cloche-bench-") as place:
        package = Path(place) / "cloche" / "bench"
        package.mkdir(parents=True)
        for directory in (package, package.parent):
            (directory / "__init__.py").touch()
        (package / "peers").symlink_to(HERE / "peers")
        (package / "programs.py").symlink_to(HERE / "programs.py")
        yield place
