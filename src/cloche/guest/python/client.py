"""The `python3` of a sandbox: asks init for a fork of an interpreter that has started already.

See `init/warm_python.py`. It is in the way of every start, so it imports only modules that every interpreter
has in memory, and writes its frames by hand. A program that a fork would not reproduce exactly runs in the
real interpreter, and so does everything where init has no room.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import _socket
import posix
import sys

REAL_PYTHON = "/opt/cloche/env/bin/python3"
SOCKET_ADDRESS = b"\0cloche-python"
MAX_EXTRA_FILES = 10  # of the 16 descriptors that a frame can carry
_FLAGS = {"u": "unbuffered", "B": "dont_write_bytecode"}
_INSTALLERS = ("pip", "npm", "npx")  # what they need is prepared when an interpreter starts: see usersite.py
_FORWARDED_SIGNALS = (
    1,
    2,
    3,
    10,
    12,
    14,
    15,
    *range(34, 65),
)  # HUP INT QUIT USR1 USR2 ALRM TERM and those without names


class NeedsRealInterpreter(Exception):
    """A fork would not behave the same."""


class PythonCommandLine:
    """A command line of Python's, as far as a fork can follow it. Raises NeedsRealInterpreter."""

    def __init__(self, words: list):
        self.kind, self.argument, self.rest = "stdin", "", words
        self.flags = dict.fromkeys(_FLAGS.values(), 0)
        while self.rest and self.rest[0].startswith("-") and self.rest[0] != "-":
            if self._parse_option(self.rest[0][1:], self.rest[1:]):
                return
        if self.rest and self.rest[0] != "-":
            self.kind, self.argument = "file", self.rest[0]

    def _parse_option(self, letters: str, after: list) -> bool:
        """Takes one word with options. True if it ends them."""
        for at, letter in enumerate(letters):
            if letter in "cm":
                value = [letters[at + 1 :]] if letters[at + 1 :] else after[:1]
                if not value:
                    raise NeedsRealInterpreter
                self.kind, self.argument = {"c": "command", "m": "module"}[letter], value[0]
                self.rest = ["-" + letter, *(after if letters[at + 1 :] else after[1:])]
                return True
            if letter not in _FLAGS:
                raise NeedsRealInterpreter
            self.flags[_FLAGS[letter]] = 1
        self.rest = after
        return False


def main() -> None:
    """Never returns."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # whoever interrupts means the program, which is not there yet
    try:
        connection, pid, files = _request_fork(sys.argv[1:])
    except (NeedsRealInterpreter, OSError):
        posix.execv(REAL_PYTHON, [REAL_PYTHON, *sys.argv[1:]])
    # From here on there is no way back to the real interpreter: the program would run twice.
    _exit_like(_await_program(connection, pid, files))


def _request_fork(words: list) -> tuple:
    """Returns the connection by which init reports the program's end, the program's pid, and the files passed.

    Raises NeedsRealInterpreter, or OSError, if none was started.
    """
    line = PythonCommandLine(words)
    _read_environment_flags(line)
    files, numbers = _inherited_files()
    if line.kind == "file":
        files.append(_open_program(line.argument))
    elif line.kind == "module" and line.argument.startswith(_INSTALLERS):
        raise NeedsRealInterpreter
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(SOCKET_ADDRESS)
    _send_request(connection, line, files, numbers)
    started = _receive_head(connection)
    if not started.startswith(b'{"started":'):
        raise NeedsRealInterpreter
    return connection, int(started[11:-1]), files


def _read_environment_flags(line: PythonCommandLine) -> None:
    """Reads the two commonest variables of Python; all others are left to the real interpreter."""
    env = posix.environ
    for name, flag in ((b"PYTHONUNBUFFERED", "unbuffered"), (b"PYTHONDONTWRITEBYTECODE", "dont_write_bytecode")):
        if env.get(name):
            if env[name] != b"1":
                raise NeedsRealInterpreter
            line.flags[flag] = 1


def _inherited_files() -> tuple:
    """Descriptors to pass: stdin, stdout, stderr, the working directory, then others of the caller's; their numbers."""
    for fd in (0, 1, 2):
        if posix.isatty(fd) or not posix.fstat(fd):  # raises if it is closed
            raise NeedsRealInterpreter
    try:
        posix.close(posix.open("/dev/tty", posix.O_RDWR | posix.O_CLOEXEC | posix.O_NOCTTY))
        raise NeedsRealInterpreter  # a terminal's signals and job control are for those of its session
    except OSError:
        pass
    extra = [int(name) for name in posix.listdir("/proc/self/fd")]
    extra = [fd for fd in extra if fd > 2 and _is_inherited(fd)]
    if len(extra) > MAX_EXTRA_FILES:
        raise NeedsRealInterpreter
    directory = posix.open(".", posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
    return [0, 1, 2, directory, *extra], extra


def _is_inherited(fd: int) -> bool:
    try:
        return posix.get_inheritable(fd)
    except OSError:
        return False  # that of the listing itself


def _open_program(path: str) -> int:
    """A file with source. One that cannot be read, a directory, an archive or bytecode is for Python itself."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    info = posix.fstat(fd)
    if info.st_mode & 0o170000 != 0o100000 or path.rpartition("/")[2].startswith(_INSTALLERS):
        raise NeedsRealInterpreter
    if not path.endswith(".py") and b"\0" in posix.pread(fd, 1 << 16, max(info.st_size - (1 << 16), 0)):
        raise NeedsRealInterpreter
    return fd


def _send_request(connection: _socket.socket, line: PythonCommandLine, files: list, numbers: list) -> None:
    """Sends one frame of `wire`, without its module. Lists of text are in the body, with NUL between the items."""
    env = [name + b"=" + value for name, value in posix.environ.items()]
    words = [word.encode("utf-8", "surrogateescape") for word in (*line.rest, line.argument, *sys.argv[1:])]
    body = b"\0".join((*words, *env))
    head = '{"kind":"%s","uid":%d,"rest":%d,"words":%d,"env":%d,"numbers":%s,"unbuffered":%d,"dont_write_bytecode":%d,'
    head += '"fds":%d}'
    counts = (len(line.rest), len(sys.argv) - 1, len(env))
    head = head % (line.kind, posix.getuid(), *counts, numbers, *line.flags.values(), len(files))
    data = len(head).to_bytes(4, "big") + len(body).to_bytes(4, "big") + head.encode() + body
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in files)
    sent = connection.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    connection.sendall(data[sent:])


def _await_program(connection: _socket.socket, pid: int, files: list) -> int:
    """The program's wait status. Init kills it when we end first."""
    for number in _FORWARDED_SIGNALS:
        if _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, lambda number, _frame: _signal_program(pid, number))
    for fd in files:  # they are the program's now: a pipe that it closes must be closed
        posix.close(fd)
    try:
        ended = _receive_head(connection)
    except OSError:
        ended = b""
    return int(ended[10:-1]) if ended.startswith(b'{"status":') else _signal.SIGKILL


def _signal_program(pid: int, number: int) -> None:
    """Signals its whole group: a signal to a program (by `timeout`, a shell) is meant for its children, too."""
    try:
        posix.killpg(pid, number)
    except OSError:
        pass


def _receive_head(connection: _socket.socket) -> bytes:
    """The head of a frame; b"" at the end."""
    length = int.from_bytes(_receive_exactly(connection, 8)[:4], "big")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: _socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


def _exit_like(status: int) -> None:
    number = status & 0x7F
    if number:
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        posix.kill(posix.getpid(), number)
    posix._exit(status >> 8 if not number else 128 + number)
