"""`cloche shell`, and what `cloche run` does at a terminal, by the real command in a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import struct
import subprocess
import termios
import time

import pytest
from tests.conftest import CommandLine

from cloche.cli.shell_session import CellSplitter, words_for_readline
from cloche.cli.terminal import choose_drawer, draw_iterm, draw_kitty
from cloche.model import Completions

PATIENCE_SECONDS = 90


class Terminal:
    """A command in a pseudo-terminal of its own, and somebody who types."""

    def __init__(self, *command: str, env: dict[str, str]):
        self.seen = ""
        self._at = 0  # up to where somebody has looked
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execve(command[0], command, env)
        self.resize(24, 80)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> str:
        """What came up to and with the next `text`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := self.seen.find(text, self._at)) < 0:
            assert self._read(deadline), f"{text!r} did not come; last seen: {self.seen[-500:]!r}"
        start, self._at = self._at, found + len(text)
        return self.seen[start : self._at]

    def status(self) -> int:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._read(deadline):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))
        try:
            data = os.read(self._fd, 65536) if ready else b""
        except OSError:  # the other side is closed
            data = b""
        self.seen += data.decode("utf-8", "replace")
        return bool(data)


@pytest.fixture
def terminal(command_line: CommandLine):
    """Opens a terminal in which `cloche ARGS` runs."""
    opened = []

    def open_(*args: str, line: CommandLine = command_line, **env: str) -> Terminal:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        opened.append(Terminal(*line.words(*args), env={**kept, "TERM": "xterm", **env}))
        return opened[-1]

    yield open_
    for each in opened:
        each.close()


@pytest.fixture
def piped(command_line: CommandLine):
    """Runs `cloche shell ARGS` with a script on stdin."""

    def call(script: str, *args: str) -> subprocess.CompletedProcess[str]:
        command = command_line.words("shell", *args)
        return subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )

    return call


def test_python_prompt_keeps_state_takes_blocks_and_leaves_with_ctrl_d(terminal):
    box = terminal("shell")
    box.wait_for(">>> ")
    box.type("x = 6\n")
    box.wait_for(">>> ")
    box.type("def f(n):\n")
    box.wait_for("... ")
    box.type("    return n * 7\n")
    box.wait_for("... ")
    box.type("\n")
    box.wait_for(">>> ")
    box.type("f(x)\n")
    assert "\r\n42\r\n" in box.wait_for(">>> ")
    box.type("1/0\n")
    assert "ZeroDivisionError" in box.wait_for(">>> ")
    box.type("\x04")
    assert box.status() == 0


def test_python_prompt_completes_names_of_the_sandbox(terminal):
    prompt = terminal("shell")
    prompt.wait_for(">>> ")
    prompt.type("import collections; wonderful = collections\n")
    prompt.wait_for(">>> ")
    prompt.type("wonder\t.OrderedD\t.__name__\n")
    prompt.wait_for("'OrderedDict'")
    prompt.wait_for(">>> ")
    prompt.type("if wonderful:\n\tprint('in', 'dented')\n\n")
    prompt.wait_for("in dented")
    prompt.wait_for(">>> ")
    prompt.type("\x04")
    assert prompt.status() == 0


def test_python_prompt_ctrl_c_interrupts_the_program_and_drops_a_half_typed_line(terminal):
    box = terminal("shell")
    box.wait_for(">>> ")
    box.type("kept = 'still here'\n")
    box.wait_for(">>> ")
    box.type("while True: print('go' + 'ing') or __import__('time').sleep(0.01)\n\n")
    box.wait_for("going\r\n")
    box.type("\x03")
    box.wait_for("KeyboardInterrupt\r\n")
    box.wait_for(">>> ")
    box.type("nonsense(")
    box.wait_for("nonsense(")
    box.type("\x03")
    box.type("\n")  # CPython's prompt may see a signal only at the end of the line, if it comes between two keys
    box.wait_for("KeyboardInterrupt\r\n")
    box.wait_for(">>> ")
    box.type("kept\n")
    box.wait_for("'still here'")
    box.wait_for(">>> ")
    box.type("exit(5)\n")
    assert box.status() == 5


def test_python_prompt_keeps_its_history_between_sessions(terminal, own_data_dir):
    own = CommandLine(str(own_data_dir), alone=True)
    for typed in ("3 * 4\n", "\x1b[A\x1b[A\n"):  # the second time: up, up, over the `exit`
        box = terminal("shell", line=own)
        box.wait_for(">>> ")
        box.type(typed)
        box.wait_for("\r\n12\r\n")
        box.wait_for(">>> ")
        box.type("exit\n")
        assert box.status() == 0


def test_a_password_is_asked_without_echo(terminal):
    box = terminal("run", "-c", "import getpass; p = getpass.getpass('pass? '); print(len(p))")
    box.wait_for("pass? ")
    box.type("secret\n")
    box.wait_for("6\r\n")
    assert box.status() == 0
    assert "secret" not in box.seen


def test_an_image_is_shown_inline_where_the_terminal_can(terminal):
    box = terminal("run", "-c", "import matplotlib.pyplot as plt; _ = plt.plot([1])", TERM="xterm-kitty")
    box.wait_for("\x1b_Ga=T,f=100,q=2,m=1;iVBORw0KGgo")
    box.wait_for("\x1b\\")
    assert box.status() == 0
    assert "<Figure" not in box.seen
    assert "--out" not in box.seen


def test_bash_is_a_real_terminal_that_follows_the_users_size(terminal):
    box = terminal("shell", "--lang", "bash")
    box.wait_for("$ ")
    box.type("tty && stty size; whoami\n")
    assert "/dev/pts/" in box.wait_for("24 80")
    box.wait_for("user\r\n")
    box.resize(50, 132)
    # The new size arrives by signals, here and in the sandbox; the shell waits for it, not we.
    box.type('until [ "$(stty size)" = "50 132" ]; do :; done; echo re"sized"\n')
    box.wait_for("resized\r\n")
    box.type('echo loo"ping"; while :; do :; done\n')
    box.wait_for("looping\r\n")  # an interrupt also discards what was typed and is not read yet
    box.type("\x03")
    box.wait_for("^C")
    box.type("exit 9\n")
    assert box.status() == 9


def test_bash_restores_the_users_terminal_when_it_is_ended_by_a_signal(terminal):
    box = terminal("shell", "--lang", "bash")
    before = termios.tcgetattr(box._fd)
    box.wait_for("$ ")
    assert not termios.tcgetattr(box._fd)[3] & termios.ICANON
    os.kill(box._pid, 15)
    assert os.waitstatus_to_exitcode(os.waitpid(box._pid, 0)[1]) == 143
    assert termios.tcgetattr(box._fd)[3] == before[3]


def test_piped_python_runs_cell_by_cell_and_feeds_input(piped):
    block = "x = 3\nfor i in range(2):\n    print(i)\nprint('after')\n"
    done = piped(block + "n = input('name? ')\nbob\nn * x\n1 / 0\nimport sys; sys.exit(4)\n")
    assert done.stdout == "0\n1\nafter\nname? 'bobbobbob'\n"
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert done.returncode == 4


def test_piped_bash_has_both_streams_and_passes_its_exit_code_on(piped):
    done = piped("echo $((6*7)); echo err >&2; exit 5\n", "--lang", "bash")
    assert (done.stdout, done.stderr, done.returncode) == ("42\n", "err\n", 5)


@pytest.mark.skipif(shutil.which("R") is None, reason="there is no R on this host: apt-get install r-base-core")
def test_piped_r_runs_as_a_script(piped):
    done = piped("1 + 1\nquit(status = 5)\n", "--lang", "r")
    assert (done.stdout, done.stderr, done.returncode) == ("[1] 2\n", "", 5)


@pytest.mark.parametrize(
    ("lines", "cells"),
    [
        (["1", "", "2"], ["1", "2"]),
        (["if x:", "    1", "else:", "    2", "", "3"], ["if x:\n    1\nelse:\n    2\n", "3"]),
        (["@f", "def g():", "    pass", "g()"], ["@f\ndef g():\n    pass", "g()"]),
        (["s = '''a", "", "b'''"], ["s = '''a\n\nb'''"]),
        (["f(1,", "2)"], ["f(1,\n2)"]),
        (["await f()", "%timeit x", "!ls", "x?"], ["await f()", "%timeit x", "!ls", "x?"]),
        (["%%bash", "echo 1", "", "2"], ["%%bash\necho 1\n", "2"]),
        (["x = = 1", "nul\0"], ["x = = 1", "nul\0"]),
        (["for x in y:", "    1"], ["for x in y:\n    1"]),
        (["async def f():", "    pass", "await f()"], ["async def f():\n    pass", "await f()"]),
    ],
)
def test_lines_become_cells(lines, cells):
    reading = CellSplitter()
    assert [cell for line in lines for cell in reading.feed(line)] + reading.end() == cells


@pytest.mark.parametrize(
    ("line", "begin", "found", "words"),
    [
        ("a.co", 0, Completions(start=2, end=4, matches=("colour", "cost")), ["a.colour", "a.cost"]),
        ("f(num", 2, Completions(start=2, end=5, matches=("number",)), ["number"]),
        ("%ti", 1, Completions(start=0, end=3, matches=("%time",)), ["time"]),
        ("x", 0, Completions(start=0, end=1, matches=("x\x1b[31m", "xy")), ["xy"]),
        ("x", 0, Completions(start=1, end=1), []),
    ],
)
def test_completions_become_words_of_readline(line: str, begin: int, found: Completions, words: list[str]):
    assert words_for_readline(line, begin, found) == words


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TERM": "xterm-kitty"}, draw_kitty),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, draw_kitty),
        ({"TERM": "xterm-ghostty"}, draw_kitty),
        ({"TERM_PROGRAM": "WezTerm"}, draw_iterm),
        ({"LC_TERMINAL": "iTerm2"}, draw_iterm),
        ({"TERM": "tmux-256color", "TMUX": "/tmp/tmux", "KITTY_WINDOW_ID": "1"}, None),
        ({"TERM": "xterm-256color"}, None),
        ({}, None),
    ],
)
def test_a_terminal_is_known_by_its_environment(environ, expected):
    assert choose_drawer(environ) is expected


def test_kitty_gets_png_in_chunks_and_nothing_else():
    drawn = draw_kitty({"image/png": b"x" * 5000}) or ""
    chunks = drawn.strip().split("\x1b\\")[:-1]
    assert [chunk.partition(";")[0] for chunk in chunks] == ["\x1b_Ga=T,f=100,q=2,m=1", "\x1b_Gm=0"]
    assert all(len(chunk.partition(";")[2]) <= 4096 for chunk in chunks)
    assert draw_kitty({"image/jpeg": b"x", "text/plain": "y"}) is None


def test_iterm_gets_png_or_jpeg():
    assert draw_iterm({"image/jpeg": b"abc"}) == "\x1b]1337;File=inline=1;size=3:YWJj\x07\n"
    assert draw_iterm({"text/plain": "y"}) is None
