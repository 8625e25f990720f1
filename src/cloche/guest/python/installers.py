"""Settings of pip and npm in a sandbox, made in their own processes as they start: see `usersite`.

uv uses them, too: see `bin/uv`.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys

from cloche.guest.paths import DOOR_PORT, USER_BASE

USER_ID = 1000
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_INSTALLING = {
    "pip": {"install", "download", "wheel", "index"},
    "npm": {"install", "i", "add", "ci", "update", "exec", "x", "create", "init", "view", "search"},
}
_OWN_INDEX = ("-i", "--index", "--default-index", "--no-index", "-f", "--find-links", "--registry", "--offline")
_HOSTS = {"pip": ("pypi.org", "files.pythonhosted.org"), "npm": ("registry.npmjs.org",)}
_INSTEAD = {"pip": " Use what its template has (`pip list`).", "npm": ""}
_NOTHING = (
    "Cloche: this sandbox has no network and no package index, so nothing can be downloaded.{instead} "
    "Whoever runs this host can allow more: packages.enabled, or a network policy with {hosts}."
)
_REFUSED = (
    "Cloche: the network policy of this sandbox does not allow {hosts}, so nothing can be downloaded from there. "
    "Whoever made the sandbox can allow that; whoever runs this host can set packages.enabled instead."
)
_DOOR = ("127.0.0.1", DOOR_PORT)
_DOOR_SECONDS = 5.0


def prepare_installer(program: str) -> None:
    """In the process of pip or npm."""
    if program.startswith("pip"):
        _hide_environment()
    if not has_index():
        _limit_retries(program)
    elif program.startswith("pip") and _installs_from_host("pip"):  # npm shows what the index says
        _explain_at_exit("pip")
    if os.geteuid() == 0:
        atexit.register(give_to_user, USER_BASE)


def _hide_environment() -> None:
    """pip refuses to put another version before one of a virtual environment.

    So pip is shown none: a directory that
    it cannot write to is then the system's, and it installs for the user.
    """
    sys.base_prefix, sys.base_exec_prefix = sys.prefix, sys.exec_prefix


def has_network() -> bool:
    return any(os.environ.get(name) for name in _PROXIES)


def has_index() -> bool:
    """Whether the host's package index is behind the door: then pip and npm use it, with a network or without."""
    try:
        with open("/etc/pip.conf") as file:
            return "index-url" in file.read()
    except OSError:
        return False


def _limit_retries(program: str) -> None:
    """Limits retries, which would take up to a minute, and explains a failure when the program exits."""
    kind = "pip" if program.startswith("pip") else "npm"
    os.environ.setdefault("PIP_RETRIES", retry_count())
    if not has_network():
        os.environ.setdefault("NPM_CONFIG_FETCH_RETRIES", "0")  # a proxy's refusal it takes for an answer
    if program == "npx" or _installs_from_host(kind):
        _explain_at_exit(kind)


def _installs_from_host(kind: str) -> bool:
    """Whether it fetches something, and from no index of its own choice."""
    return bool(set(sys.orig_argv) & _INSTALLING[kind]) and not names_own_index(sys.orig_argv)


def retry_count() -> str:
    """A proxy's refusal looks to pip and uv like a bad connection, and waiting does not change it. With a network there
    is one more try, for the connections that are bad."""
    return "1" if has_network() else "0"


def names_own_index(words: list) -> bool:
    return any(word.startswith(_OWN_INDEX) for word in words)


def explain_failure(kind: str) -> None:
    """Prints why `pip` (and uv) or `npm` could not download anything, and how to allow it."""
    if has_index():
        _print_index_refusal()
        return
    hosts = [host for host in _HOSTS[kind] if not has_network() or _is_refused(host)]
    if hosts:
        text = _REFUSED if has_network() else _NOTHING
        print(text.format(hosts=" and ".join(hosts), instead=_INSTEAD[kind]), file=sys.stderr)


def _print_index_refusal() -> None:
    """Prints the index's own reason of a recent refusal. pip and uv show its status at most."""
    from http.client import HTTPConnection, HTTPException

    try:
        door = HTTPConnection(*_DOOR, timeout=_DOOR_SECONDS)
        door.request("GET", "/refused")
        answer = door.getresponse()
        if answer.status != 404:
            print(answer.read(4096).decode().strip(), file=sys.stderr)
    except (OSError, HTTPException, UnicodeDecodeError):
        pass  # there is what they say themselves


def _is_refused(host: str) -> bool:
    """Asked only when something has failed already: it makes a line in the network's log."""
    import socket

    try:
        with socket.create_connection(_DOOR, _DOOR_SECONDS) as door:
            door.sendall(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n".encode())
            return door.recv(12).endswith(b" 403")
    except OSError:
        return False


def _explain_at_exit(kind: str) -> None:
    """pip ends by `sys.exit`; the script that starts npm raises SystemExit itself."""

    class Ending(SystemExit):
        def __init__(self, status: object = None) -> None:
            super().__init__(status)
            if status == 1:  # their way to say that they could not do it
                explain_failure(kind)

    def leave(status: object = None) -> None:
        raise Ending(status)

    sys.exit, builtins.SystemExit = leave, Ending  # type: ignore[assignment, misc]  # names that are not for replacing


def give_to_user(*roots: str) -> None:
    """Gives packages that root has installed to `user`, so that it can replace them.

    Works by descriptor, and follows no link.
    """
    try:
        for root in filter(os.path.isdir, roots):
            for _, directories, files, fd in os.fwalk(root):
                os.fchown(fd, USER_ID, USER_ID)
                for name in (*directories, *files):
                    os.chown(name, USER_ID, USER_ID, dir_fd=fd, follow_symlinks=False)
    except OSError:
        pass  # with one identity only, there is nobody to give it to; or a program removes what is there
