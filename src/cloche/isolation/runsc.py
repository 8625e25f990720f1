"""gVisor's program `runsc`: where it is, how old it is, how it is called, and the OCI bundle of a sandbox."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from cloche import errors
from cloche.guest.paths import HOST_DIRECTORY
from cloche.isolation.base import HostCheck

INSTALL_ADVICE = (
    "install runsc, and have it on the PATH: from gVisor's own packages (gvisor.dev), or "
    "`go install gvisor.dev/gvisor/runsc@latest`; Debian's is of 2024"
)
OLD_DAYS = 365  # then there have been fixes for walls that it does not have
_VERSION_SECONDS = 20.0
_FLAGS = (
    "--ignore-cgroups",  # the host makes them, see `GvisorBackend`
    "--network=none",  # loopback only: everything else comes through doors
    "--platform=systrap",  # needs no KVM
    "--host-uds=open",  # programs can connect to the sockets in HOST_DIRECTORY, and make none there
    "--overlay2=none",  # all that can be written to is the tmpfs that init mounts
)
# Init mounts the sandbox's space, becomes the users, and acts on their files; then it keeps `capabilities.CELL`.
_CAPABILITIES = (
    "CAP_SYS_ADMIN",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_SYS_CHROOT",
    "CAP_SYS_NICE",
    "CAP_SYS_PTRACE",
    "CAP_NET_BIND_SERVICE",
)
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")


class Runsc:
    """A program found by `find_runsc`."""

    def __init__(self, path: str, version: str):
        self.path = path
        self.version = version

    @property
    def built_on(self) -> datetime.date | None:
        """The day in its version, `release-20260905.0`; None where it has none."""
        found = re.search(r"\b(20\d\d)(\d\d)(\d\d)\b", self.version)
        try:
            return datetime.date(*map(int, found.groups())) if found else None
        except ValueError:
            return None

    def command(self, state: Path, *words: str) -> list[str]:
        """The command line, with the directory where it keeps track of its sandboxes."""
        return [self.path, f"--root={state}", *_FLAGS, *words]


def find_runsc() -> Runsc:
    """Raises IsolationUnavailable, with what to install."""
    path = shutil.which("runsc")
    if path is None:
        raise errors.IsolationUnavailable(f"the backend gvisor needs gVisor's program runsc: {INSTALL_ADVICE}")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise errors.IsolationUnavailable(f"{path} does not run: {error}; {INSTALL_ADVICE}") from None
    version = re.search(r"version (\S+)", done.stdout)
    return Runsc(path, version[1] if version else "unknown")


def check_runsc(today: datetime.date) -> HostCheck:
    """The line of `cloche doctor`."""
    try:
        found = find_runsc()
    except errors.IsolationUnavailable as error:
        return HostCheck(name="runsc", state="missing", detail=str(error), advice=INSTALL_ADVICE)
    built_on = found.built_on
    if built_on is None:
        detail = f"{found.path}, version {found.version}, of unknown age"
        return HostCheck(name="runsc", state="best effort", detail=detail, advice=INSTALL_ADVICE)
    days = (today - built_on).days
    detail = f"{found.path}, version {found.version}, {days} days old"
    old = days > OLD_DAYS
    return HostCheck(
        name="runsc",
        state="best effort" if old else "enforced",
        detail=detail,
        advice=f"it misses fixes: {INSTALL_ADVICE}" if old else "",
    )


class SandboxBundle:
    """The OCI bundles of the sandboxes of one template: they differ in the directory of the host's sockets."""

    def __init__(self, root: Path, binds: list[tuple[str, str]], command: list[str], env: dict[str, str]):
        self._root = root
        self._binds = binds
        self._command = command
        self._env = env

    def write(self, bundle: Path, sockets: Path) -> None:
        """Writes `config.json` into the directory `bundle`."""
        (bundle / "config.json").write_text(json.dumps(self._config(sockets)))

    def _config(self, sockets: Path) -> dict[str, Any]:
        return {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": self._command,
                "env": [f"{name}={value}" for name, value in self._env.items()],
                "cwd": "/",
                "capabilities": {kind: list(_CAPABILITIES) for kind in ("bounding", "effective", "permitted")},
                "noNewPrivileges": True,
                "rlimits": [{"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
            },
            "root": {"path": str(self._root), "readonly": True},
            "hostname": "cloche",
            "mounts": self._mounts(sockets),
            "linux": {"namespaces": [{"type": kind} for kind in _NAMESPACES]},
        }

    def _mounts(self, sockets: Path) -> list[dict[str, Any]]:
        own = [_mount("/proc", "proc"), _mount("/dev", "tmpfs"), _mount("/dev/pts", "devpts")]
        temporary = {**_mount("/tmp", "tmpfs"), "options": ["mode=1777", "nosuid", "nodev"]}
        binds = [_bind(source, f"/{name}", "ro") for source, name in self._binds]
        return [*own, temporary, *binds, _bind(str(sockets), HOST_DIRECTORY, "ro")]


def _mount(place: str, kind: str) -> dict[str, Any]:
    return {"destination": place, "type": kind, "source": kind, "options": ["nosuid", "noexec"]}


def _bind(source: str, place: str, access: str) -> dict[str, Any]:
    options = ["rbind", access, "nosuid", "nodev"]
    return {"destination": place, "type": "bind", "source": source, "options": options}
