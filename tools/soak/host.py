"""The server under test: a process of its own, on a data directory of its own, which can be killed and started anew."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, NamedTuple

import httpx2
import msgspec

from cloche.templates import Catalogue, catalogue, ensure_template

HISTORY_BYTES = 128 << 10
STOP_SECONDS = 60.0
START_SECONDS = 120.0


class Owner(NamedTuple):
    name: str
    key: str


class Host:
    """`cloche serve`. Its url and keys stay the same when it is started anew."""

    def __init__(self, place: Path, template_dir: str, owners: int):
        self.data_dir = place / "data"
        self.log = place / "server.log"
        self.admin = "e2b_" + secrets.token_hex(20)
        self.owners: list[Owner] = []
        self.starts = 0
        self._wanted = owners
        self._port = 0
        self._link_template(template_dir)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Until it is ready. The first start makes the owners' keys. Raises RuntimeError when it ends before."""
        command = [Path(sys.executable).with_name("cloche"), "serve", "--port", str(self._port)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("CLOCHE_", "CODEAPI_"))}
        environ |= {"CLOCHE_DATA_DIR": str(self.data_dir), "CLOCHE_API_KEY": self.admin}
        # What ran in a sandbox is kept in memory, up to a bound. It is small here, so that it is reached in the first
        # minutes: memory that grows after that is a leak.
        environ["CLOCHE_HISTORY_SANDBOX_BYTES"] = str(HISTORY_BYTES)
        with open(self.log, "a") as log:
            self._process = subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.data_dir.parent
            )
        self._port = _ready_port(self._process.stdout)
        self.starts += 1
        if not self.owners:
            self.owners = [self._owner(f"tenant{number}") for number in range(self._wanted)]

    def kill(self) -> None:
        """As a power cut would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """As an operator would; its exit status."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def _owner(self, name: str) -> Owner:
        made = httpx2.post(
            f"{self.url}/admin/keys", headers={"authorization": f"Bearer {self.admin}"}, json={"owner": name}
        )
        return Owner(name, made.raise_for_status().json()["key"])

    def _link_template(self, template_dir: str) -> None:
        """The built template is large and read-only: its trees are linked, not copied."""
        template = ensure_template(Catalogue(template_dir), "python")
        version = self.data_dir / "templates/python" / template.version
        version.mkdir(parents=True)
        for each in Path(template.root).iterdir():
            if each.is_dir():
                (version / each.name).symlink_to(each.resolve())
            else:
                shutil.copy(each, version)
        catalogue.write_template(msgspec.structs.replace(template), version)


def _ready_port(said: IO[str] | None) -> int:
    assert said is not None
    until = time.monotonic() + START_SECONDS
    for line in said:
        if line.startswith("ready "):
            return int(line.split()[1].rsplit(":", 1)[1])
        if time.monotonic() > until:
            break
    raise RuntimeError("the server ended before it was ready")
