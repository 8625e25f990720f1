"""The `sudo` of a sandbox: asks init to run a command as another user. See `init/sudo_server.py`.

It needs no password, as in E2B's sandboxes. The environment is a new one unless asked otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shlex
import signal
import socket
import struct
import sys
import termios
import tty
from typing import NoReturn

from cloche.guest import wire

SUDO_SOCKET = "/run/cloche-sudo"
KEPT_VARIABLES = ("TERM", "COLORTERM", "LANG", "LANGUAGE", "DISPLAY", "TZ")  # and LC_*
# The way out of the sandbox, if there is one, and whom to trust there: they are root's as well. In any case.
NETWORK_VARIABLES = frozenset(
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY NODE_USE_ENV_PROXY SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE "
    "GIT_SSL_CAINFO PIP_CERT NODE_EXTRA_CA_CERTS DENO_CERT CARGO_HTTP_CAINFO AWS_CA_BUNDLE "
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH SYSTEM_WGETRC".split()
)
FORWARDED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
USAGE = """usage: sudo [-EHinSsbkKlvV] [-u user] [-D directory] [--preserve-env[=list]] [VAR=value] [command]
Runs a command as root, or as another user of this sandbox. No password is needed.
"""
SHELL = "/bin/bash"

_FLAGS = {
    "A": "nothing",
    "B": "nothing",
    "E": "keep",
    "H": "home",
    "K": "forget",
    "N": "nothing",
    "P": "nothing",
    "S": "nothing",
    "V": "version",
    "b": "background",
    "e": "edit",
    "h": "help",
    "i": "login",
    "k": "forget",
    "l": "list",
    "n": "nothing",
    "s": "shell",
    "v": "validate",
}
_VALUES = {"C": "nothing", "D": "directory", "R": "root", "T": "nothing", "U": "nothing", "g": "group"}
_VALUES |= {"p": "nothing", "r": "nothing", "t": "nothing", "u": "user"}
_LONG = {
    "askpass": "A",
    "background": "b",
    "bell": "B",
    "chdir": "D",
    "chroot": "R",
    "close-from": "C",
    "command-timeout": "T",
    "edit": "e",
    "group": "g",
    "help": "h",
    "list": "l",
    "login": "i",
    "no-update": "N",
    "non-interactive": "n",
    "other-user": "U",
    "preserve-groups": "P",
    "prompt": "p",
    "remove-timestamp": "K",
    "reset-timestamp": "k",
    "set-home": "H",
    "shell": "s",
    "stdin": "S",
    "user": "u",
    "validate": "v",
    "version": "V",
}


class InvalidCommandLine(Exception):
    """The command line is invalid. The message says why."""


class SudoCommandLine:
    """A parsed command line."""

    def __init__(self, words: list):
        self.asked: dict = {}
        self.kept: list = []
        self.set: dict = {}
        self.command = self._take_options(words)
        while self.command and _is_assignment(self.command[0]):
            name, _, value = self.command.pop(0).partition("=")
            self.set[name] = value

    def _take_options(self, words: list) -> list:
        """Takes the options off; the rest is the command."""
        words = list(words)
        while words and words[0].startswith("-") and words[0] != "-":
            word = words.pop(0)
            if word == "--":
                break
            if word.startswith("--"):
                self._take_long(word[2:], words)
            else:
                self._take_short(word[1:], words)
        return words

    def _take_long(self, word: str, words: list) -> None:
        name, equals, value = word.partition("=")
        if name == "preserve-env":
            if equals:
                self.kept += [each for each in value.split(",") if each]
            else:
                self.asked["keep"] = True
            return
        if name not in _LONG:
            raise InvalidCommandLine(f"unrecognized option '--{name}'")
        self._take_option(_LONG[name], [value] if equals else words)

    def _take_short(self, letters: str, words: list) -> None:
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in _VALUES and letters:
                letters, words = "", [letters]
            self._take_option(letter, words)

    def _take_option(self, letter: str, words: list) -> None:
        if letter in _FLAGS:
            self.asked[_FLAGS[letter]] = True
        elif letter not in _VALUES:
            raise InvalidCommandLine(f"invalid option -- '{letter}'")
        elif not words:
            raise InvalidCommandLine(f"option requires an argument -- '{letter}'")
        else:
            self.asked[_VALUES[letter]] = words.pop(0)

    @property
    def user(self) -> str:
        return self.asked.get("user", "root")

    def argv(self) -> list:
        """The command, in a shell where one was asked for."""
        login, shell = self.asked.get("login"), self.asked.get("shell")
        if not login and not shell:
            return self.command
        words = [SHELL, "-l"] if login else [os.environ.get("SHELL") or SHELL]
        return words + (["-c", shlex.join(self.command)] if self.command else [])

    def environment(self) -> dict:
        """The variables that are passed on."""
        if self.asked.get("keep"):
            return dict(os.environ)
        kept = {*KEPT_VARIABLES, *self.kept}
        return {
            name: value
            for name, value in os.environ.items()
            if name in kept or name.startswith("LC_") or name.upper() in NETWORK_VARIABLES
        }

    def directory(self) -> str:
        if "directory" in self.asked:
            return os.path.abspath(self.asked["directory"])
        if self.asked.get("login"):
            return "/root" if self.user in ("root", "#0") else "/home/user"
        try:
            return os.getcwd()
        except OSError:
            return "/"


def main() -> None:
    """Runs the command and exits with its status."""
    try:
        line = SudoCommandLine(sys.argv[1:])
        said = _answer_locally(line)
    except InvalidCommandLine as error:
        _exit_failing(f"{error}\n{USAGE}")
    if said is not None:
        os._exit(said)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(SUDO_SOCKET)
    except OSError:
        _exit_failing("there is no sudo in this sandbox: its owner runs what needs root as root")
    if line.asked.get("background") and os.fork():
        os._exit(0)
    try:
        _run_command(line, connection)
    except (OSError, wire.WireError) as error:
        _exit_failing(f"the sandbox does not answer: {error}")


def _answer_locally(line: SudoCommandLine) -> int | None:
    """The exit status of a call that runs nothing; None for one that does."""
    asked = line.asked
    for unknown in ("edit", "root"):
        if unknown in asked:
            raise InvalidCommandLine(f"this sudo does not have {'sudoedit' if unknown == 'edit' else '--chroot'}")
    if "group" in asked and asked["group"] not in ("root", "user", "#0", "#1000"):
        raise InvalidCommandLine(f"unknown group {asked['group']}")
    if "help" in asked or "version" in asked:
        sys.stdout.write(USAGE if "help" in asked else "Sudo of Cloche's sandboxes\n")
    elif "list" in asked and not line.command:
        sys.stdout.write("User may run the following commands on cloche:\n    (root, user) NOPASSWD: ALL\n")
    elif "list" in asked:
        sys.stdout.write(shlex.join(line.command) + "\n")
    elif not line.argv() and not asked.keys() & {"validate", "forget"}:
        raise InvalidCommandLine("a command is needed")
    elif line.argv():
        return None
    sys.stdout.flush()
    return 0


def _is_assignment(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier()


def _run_command(line: SudoCommandLine, connection: socket.socket) -> None:
    in_terminal = _has_terminal() and not line.asked.get("background")
    request = {
        "argv": line.argv(),
        "user": line.user,
        "cwd": line.directory(),
        "env": line.environment(),
        "set": line.set,
        "umask": _current_umask(),
        "reset": not line.asked.get("keep"),
        "home": "home" in line.asked or "login" in line.asked or not line.asked.get("keep"),
        "pty": _terminal_size() if in_terminal else None,
    }
    wakeup = _listen_for_signals()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # turned away before we asked: it says why
        wire.send_frame(connection, request, b"", () if in_terminal else _standard_files())
    reader = wire.FrameReader(connection)
    first = reader.next()
    if first is None:
        _exit_failing("the sandbox did not say why the command was not started: try again")
    answer, _, fds = first
    if "started" not in answer:
        _exit_failing(str(answer.get("error")))
    relay = CommandRelay(connection, reader, wakeup, fds[0] if fds else None)
    _exit_like(relay.run())


def _standard_files() -> tuple:
    """Our standard files, /dev/null in the place of a closed one."""
    return tuple(fd if _is_open(fd) else os.open("/dev/null", os.O_RDWR) for fd in (0, 1, 2))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _has_terminal() -> bool:
    """Whether the user sits before us: a terminal in all three, and we are in its foreground."""
    try:
        return all(os.isatty(fd) for fd in (0, 1, 2)) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _terminal_size() -> list:
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    return [rows, columns]


def _listen_for_signals() -> int:
    """A descriptor from which the numbers of the signals that came can be read."""
    wakeup, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    for number in (*FORWARDED_SIGNALS, signal.SIGWINCH):
        signal.signal(number, lambda *_: None)
    return wakeup


class CommandRelay:
    """Relays between the user and the command until it ends. `master` is the command's terminal, if it has one."""

    def __init__(self, connection: socket.socket, reader: wire.FrameReader, wakeup: int, master: int | None):
        self._connection = connection
        self._reader = reader
        self._wakeup = wakeup
        self._master = master
        self._poll = select.poll()
        for fd in (connection.fileno(), wakeup, *(() if master is None else (0, master))):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> int:
        """The command's wait status."""
        if self._master is None:
            return self._relay_until_end()
        before = termios.tcgetattr(0)
        tty.setraw(0)
        try:
            return self._relay_until_end()
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, before)

    def _relay_until_end(self) -> int:
        while True:
            ready = [fd for fd, _ in self._poll.poll()]
            if self._master in ready:
                self._copy_data(self._master, 1)
            if self._master is not None and 0 in ready:
                self._copy_data(0, self._master)
            if self._wakeup in ready:
                self._pass_signals(os.read(self._wakeup, 64))
            if self._connection.fileno() in ready:
                return self._await_status()

    def _copy_data(self, source: int, target: int) -> None:
        try:
            data = os.read(source, 1 << 16)
            while data:
                data = data[os.write(target, data) :]
                if not data:
                    return
        except OSError:  # EIO: the command's side of its terminal was closed
            pass
        self._poll.unregister(source)

    def _pass_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGWINCH:
                wire.send_frame(self._connection, {"signal": number})
            elif self._master is not None:
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", *_terminal_size(), 0, 0))

    def _await_status(self) -> int:
        answer = self._reader.next()
        if answer is None:
            return signal.SIGKILL  # whoever attended to us was killed, and so was the command
        self._drain_terminal()
        return int(answer[0]["status"])

    def _drain_terminal(self) -> None:
        if self._master is not None:
            os.set_blocking(self._master, False)
            try:
                while data := os.read(self._master, 1 << 16):
                    os.write(1, data)
            except OSError:
                pass


def _exit_like(status: int) -> NoReturn:
    """Exits as the command ended, so that a shell sees no difference."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.waitstatus_to_exitcode(status))


def _exit_failing(message: str) -> NoReturn:
    sys.stderr.write(f"sudo: {message.rstrip()}\n")
    sys.stderr.flush()
    os._exit(1)
