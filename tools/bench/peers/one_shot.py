"""Peer: a fresh interpreter for every execution, isolated by bubblewrap or gVisor."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable

from bench.peers.session import ANSWER_SECONDS, PeerAbsent, PeerFailed, PeerOutput

NOT_INSTALLED = "is not installed"


class OneShotPeer:
    stateless = True

    def __init__(self, program: str, command: Callable[[str], list[str]]):
        self._program = program
        self._command = command

    def __enter__(self) -> OneShotPeer:
        if shutil.which(self._program) is None:
            raise PeerAbsent(f"{self._program} {NOT_INSTALLED}")
        try:
            self.run("1+1")
        except PeerFailed as error:
            raise PeerAbsent(f"{self._program} does not work here: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def session(self) -> OneShotPeer:
        return self

    def run(self, code: str) -> PeerOutput:
        """Prints the last expression, which a kernel would show."""
        program = f"print({code})" if code == "1+1" else code
        done = subprocess.run(self._command(program), capture_output=True, text=True, timeout=ANSWER_SECONDS)
        if done.returncode:
            raise PeerFailed(done.stderr[-200:])
        shown = PeerOutput()
        shown.output = [done.stdout]
        shown.data["text/plain"] = done.stdout.strip()
        return shown

    def close(self) -> None:
        return None


def bubblewrap_command(code: str) -> list[str]:
    binds = ["--ro-bind", "/", "/", "--tmpfs", "/tmp", "--dev", "/dev", "--proc", "/proc"]
    binds += ["--ro-bind", sys.prefix, sys.prefix]  # which may lie below /tmp
    return ["bwrap", *binds, "--unshare-all", "--die-with-parent", sys.executable, "-c", code]


def gvisor_command(code: str) -> list[str]:
    return ["runsc", "--rootless", "--network=none", "do", sys.executable, "-c", code]
