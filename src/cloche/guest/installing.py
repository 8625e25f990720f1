"""What pip and npm are told in a sandbox, in their own processes, as they start: see `usersite`."""

from __future__ import annotations

import atexit
import builtins
import os
import sys

USER_BASE = "/home/user/.local"
USER = 1000
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_INSTALLING = {
    "pip": {"install", "download", "wheel", "index"},
    "npm": {"install", "i", "add", "ci", "update", "exec", "x", "create", "init", "view", "search"},
}
_OWN_INDEX = ("-i", "--index-url", "--no-index", "-f", "--find-links", "--registry")
NOTHING = (
    "Cloche: this sandbox has no network and no package index, so nothing can be downloaded. Use what its template "
    "has (`pip list`). Whoever runs this host can allow more: packages.enabled, or a network policy with pypi.org."
)


def prepare(program: str) -> None:
    """In the process of pip or npm."""
    if program.startswith("pip"):
        _see_no_environment()
    if not can_download():
        _give_up_soon(program)
    if os.geteuid() == 0:
        atexit.register(give_to_user, USER_BASE)


def _see_no_environment() -> None:
    """pip refuses to put another version before one of a virtual environment. For pip, then, there is none: what it
    cannot write to is to it the system's, and it installs for the user."""
    sys.base_prefix, sys.base_exec_prefix = sys.prefix, sys.exec_prefix


def can_download() -> bool:
    """Whether this sandbox reaches anything: a network through its proxy, or the host's package index."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    try:
        with open("/etc/pip.conf") as file:
            return "index-url" in file.read()
    except OSError:
        return False


def _give_up_soon(program: str) -> None:
    """Else they try again and again, for up to a minute. When they have failed, they say why."""
    os.environ.setdefault("PIP_RETRIES", "0")
    os.environ.setdefault("NPM_CONFIG_FETCH_RETRIES", "0")
    words = set(sys.orig_argv)
    known = _INSTALLING["pip" if program.startswith("pip") else "npm"]
    if (words & known or program == "npx") and not any(word.startswith(_OWN_INDEX) for word in words):
        _say_at_failure(NOTHING)


def _say_at_failure(text: str) -> None:
    """pip ends by `sys.exit`; the script that starts npm raises SystemExit itself."""

    class Ending(SystemExit):
        def __init__(self, status: object = None) -> None:
            super().__init__(status)
            if status == 1:  # their way to say that they could not do it
                print(text, file=sys.stderr)

    def leave(status: object = None) -> None:
        raise Ending(status)

    sys.exit, builtins.SystemExit = leave, Ending  # type: ignore[assignment, misc]


def give_to_user(*roots: str) -> None:
    """What root has installed for everybody, `user` must be able to replace. By descriptor: no link leads astray."""
    try:
        for root in filter(os.path.isdir, roots):
            for _, directories, files, fd in os.fwalk(root):
                os.fchown(fd, USER, USER)
                for name in (*directories, *files):
                    os.chown(name, USER, USER, dir_fd=fd, follow_symlinks=False)
    except OSError:
        pass  # with one identity only, there is nobody to give it to; or a program removes what is there
