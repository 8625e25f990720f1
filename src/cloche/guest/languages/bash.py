"""The bash kernel: one interactive shell that stays alive, and this process, which speaks for it.

The shell is interactive because only such a shell drops a running cell at SIGINT and lives on. It reads its
commands from a pipe of this process, never a cell: a cell lies in a file in memory, which the shell
evaluates. So no part of a cell is ever parsed together with the kernel's own commands, and a cell that reads
from stdin finds it empty.

Each report of the shell has the number of the command it answers, and is sent more than once: on the line of
the command, and, since an interrupt drops the rest of that line, on a line of its own. The first of each
number counts.

The shell has a process group of its own: of the host's signals it gets those that this process passes on.
SIGINT between two cells would drop a part of a command line, so it waits for the cell. SIGINT alone is not
enough either: the shell goes on with the cell's next command if the running one has not died of it, for
instance because it was only just forked. So the shell gets a second signal with it; the trap of that signal
drops the cell in any case.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import time

from cloche.guest import wire
from cloche.guest.kernel.channel import Interrupts, KernelChannel
from cloche.guest.kernel.written_files import WrittenFiles
from cloche.guest.languages.interpreter import InterpreterProcess, ignores_interrupts
from cloche.linux.memory_file import open_unnamed_file

# The variables of a shell: their names by `compgen`, their values by expansions that evaluate nothing.
#
# A variable that refers to another (`declare -n`) is not expanded: its subscript could be a command.

MAX_VARIABLES = 1000
MAX_PREVIEW = 200
_FIRST_ELEMENTS = 5  # elements of an array that are shown
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# The shell's own, of which some compute something when they are read.
_SHELL_VARIABLES = re.compile(
    "_|BASH.*|COMP_.*|COPROC|COLUMNS|DIRSTACK|EPOCH.*|EUID|FUNCNAME|GLOBIGNORE|GROUPS|HIST.*|HOSTNAME|HOSTTYPE|IFS|LINENO"
    "|LINES|MACHTYPE|MAILCHECK|MAPFILE|OLDPWD|OPT(ARG|ERR|IND)|OSTYPE|PIPESTATUS|PPID|PS[0-9]|PWD|RANDOM|READLINE_.*"
    "|SECONDS|SHELLOPTS|SHELL|SHLVL|SRANDOM|TERM|UID"
)


def answer_inspect(shell, report_fd: int, ask: object) -> tuple:
    """The frame that answers an `inspect`: header and body."""
    names = [name for name in _ask_lines(shell, f"\\builtin compgen -v >&{report_fd}") if _is_shown(name)]
    arrays = set(_ask_lines(shell, f"\\builtin compgen -A arrayvar >&{report_fd}"))
    # `set -u` makes an expansion of what has no value an error.
    (options,) = _ask_lines(shell, f"\\builtin printf '%s\\n' \"$-\" >&{report_fd}") or [""]
    strict = ("\\builtin set +u\n", "\\builtin set -u\n") if "u" in options else ("", "")
    shown = names[:MAX_VARIABLES]
    told = _ask_lines(shell, strict[0] + "".join(_variable_query(name, report_fd) for name in shown) + strict[1])
    body = [each for line in told if (each := _parse_variable(line, arrays)) and not _is_inherited(each)]
    return {"ev": "inspected", "ask": ask, "more": len(names) - len(shown)}, wire.encode_json(body)


def _ask_lines(shell, script: str) -> list:
    return shell.ask(script).splitlines()


def _is_shown(name: str) -> bool:
    return bool(_VARIABLE_NAME.match(name)) and not _SHELL_VARIABLES.fullmatch(name)


def _variable_query(name: str, report_fd: int) -> str:
    """A line with the name, how many elements, how long, the begin of the value, the first elements."""
    values = f'"${{#{name}[@]}}" "${{#{name}}}" "${{{name}:0:{MAX_PREVIEW}}}" "${{{name}[*]:0:{_FIRST_ELEMENTS}}}"'
    known = f"\\builtin printf '{name} %d %d %q %q\\n' {values} >&{report_fd}"
    return f"[[ -R {name} ]] && \\builtin printf '{name}\\n' >&{report_fd} || {known}\n"


def _parse_variable(line: str, arrays: set) -> dict | None:
    name, *values = line.split(" ", 3)
    if not _VARIABLE_NAME.match(name):
        return None
    if len(values) < 3:
        return {"name": name, "type": "nameref", "preview": "<nameref>"}
    count, length, quoted = values
    if name in arrays or count != "1":
        return {
            "name": name,
            "type": "array",
            "length": int(count),
            "preview": _shorten_text(f"({_last_word(quoted)})"),
        }
    return {"name": name, "type": "string", "length": int(length), "preview": _shorten_text(_first_word(quoted))}


def _first_word(quoted: str) -> str:
    """The first of two words as `printf %q` writes them, in quotes if it needs some."""
    found = re.match(r"\$'(?:[^'\\]|\\.)*'|''|(?:[^\s\\]|\\.)*", quoted)
    text = found.group() if found else ""
    return text if text.startswith("$'") else shlex.quote(re.sub(r"\\(.)", r"\1", text) if text != "''" else "")


def _last_word(quoted: str) -> str:
    begin = re.match(r"(?:\$'(?:[^'\\]|\\.)*'|''|(?:[^\s\\]|\\.)*) ", quoted)
    text = quoted[begin.end() :] if begin else ""
    return text if text.startswith("$'") else re.sub(r"\\(.)", r"\1", text) if text != "''" else ""


def _shorten_text(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_PREVIEW else text[: MAX_PREVIEW - 1] + "…"


def _is_inherited(told: dict) -> bool:
    """Whether it is from the environment that the shell was given, and as it was there."""
    value = os.environ.get(told["name"])
    return (
        value is not None
        and told["type"] == "string"
        and _shorten_text(shlex.quote(value[:MAX_PREVIEW])) == told["preview"]
    )


_BASH_PATHS = ("/bin/bash", "/usr/bin/bash")
_CELL, _REPORT, _STDERR = 60, 61, 62  # descriptors of the shell; low enough for `ulimit -n 64`
# Programs define functions and aliases of any name. An alias is not asked if a name is quoted. A function is not if it
# was unset before, which would spoil `$?`: so a cell's status is told before that, and once more after it, in case the
# cell has made a function of that name.
_UNSET = "\\unset -f builtin unset"
_TELL = f"\\builtin printf '%d %d\\0' {{number}} \"$?\" >&{_REPORT}"
_QUIET = "\\builtin set +o history; \\builtin unset -v PROMPT_COMMAND"  # both are about lines that are read: ours
_DROP = signal.SIGRTMAX  # asks the shell to drop its cell
_NO_CELL = b"\1"
# In a cell `_REPORT` is closed. A trap that the program has for SIGINT is the program's affair.
_TRAP = rf"""{{ \builtin printf '\1' >&{_REPORT}; }} 2>/dev/null ||
{{ [[ $(\builtin trap -p INT) ]] || \builtin kill -INT $$; }}"""
_START = f"{_QUIET} HISTFILE; \\builtin set +o histexpand; \\builtin history -c; {_TELL}\n"
_OPEN = f"</dev/null 2>&{_STDERR} {_CELL}<&- {_REPORT}>&- {_STDERR}>&-"
_EVALUATE = f'{_UNSET}; \\builtin eval "$(</dev/fd/{_CELL})"'
_TELL_LATER = _TELL.replace("%d %d", "%d %d later")
_AFTER = f"{_TELL}; {_UNSET}; {_QUIET}\n{_TELL_LATER}; {_UNSET}; {_TELL_LATER}\n"
_RUN = f"{_EVALUATE} {_OPEN}; {_AFTER}"
_RUN_OURS = f"{_EVALUATE}; {_AFTER}"
_INTERRUPTED = 128 + signal.SIGINT
_SETTLE_SECONDS = 1.0


def find_bash() -> str | None:
    return next((path for path in _BASH_PATHS if os.access(path, os.X_OK)), None)


def main(channel_fd: int, stdout_fd: int, stderr_fd: int, token: str) -> None:
    """Serves one channel in a fresh fork. Never returns: it ends as the shell does."""
    channel = KernelChannel(channel_fd, stdout_fd, stderr_fd, token, Interrupts())
    shell = BashProcess()
    BashKernel(channel, shell).serve()
    os._exit(0)


class BashProcess(InterpreterProcess):
    """A bash that evaluates one text after the other."""

    def __init__(self) -> None:
        self._cell = open_unnamed_file("cell", os.MFD_CLOEXEC)
        commands, self._commands = os.pipe2(os.O_CLOEXEC)
        self._reports, report = os.pipe2(os.O_CLOEXEC)
        command = [find_bash() or _BASH_PATHS[0], "--noprofile", "--norc", "--noediting", "-i"]
        handed = {_CELL: self._cell, _REPORT: report, _STDERR: 2}
        # Its own stderr is nobody's concern: that it has no terminal, prompts. A cell gets the real one.
        super().__init__(command, handed, commands, subprocess.DEVNULL)
        for fd in (commands, report):
            os.close(fd)
        self._told = 0
        self._said = b""
        self.interrupted = self._running = False
        self._send_lines(_START)
        self.ask(f"\\builtin trap -- {shlex.quote(_TRAP)} {int(_DROP)}")

    def run(self, code: bytes) -> int:
        """Evaluates a cell; its exit status. Does not return if the shell ends."""
        self._write_cell(code)
        self._running = True
        if self.interrupted:
            self._signal_cell()
        _, status, later = self._send_lines(_RUN)
        self._await_background()
        if not self.interrupted:
            return status
        self.ask(":")  # a trap that has not run yet does so now, and not in the next cell
        return _INTERRUPTED if later else status

    def ask(self, script: str) -> str:
        """Evaluates a script of the kernel's own; returns its output to `_REPORT`."""
        self._write_cell(script.encode("utf-8", "surrogateescape"))
        return self._send_lines(_RUN_OURS)[0].decode("utf-8", "surrogateescape")

    def interrupt(self) -> None:
        """Interrupts the cell that runs with all that it waits for; or else the next, unless `interrupted` is reset."""
        self.interrupted = True
        if self._running:
            self._signal_cell()

    def _signal_cell(self) -> None:
        """Drops the cell, if the shell is in it. If not it says `_NO_CELL`."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # one at a time
        try:
            os.kill(self.pid, signal.SIGSTOP)  # it goes on when it has got everything
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if self._in_cell():
                os.killpg(self.pid, signal.SIGINT)
            os.kill(self.pid, _DROP)
        finally:
            os.kill(self.pid, signal.SIGCONT)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _await_background(self) -> None:
        """Waits until the cell's background processes ignore SIGINT, as bash arranges after the fork.

        Before that an interrupt of the next cell would end them. The wait is short: a fork that runs does it at once.
        """
        until = time.monotonic() + _SETTLE_SECONDS
        while any(map(self._accepts_interrupts, self._child_pids())) and time.monotonic() < until:
            time.sleep(0.001)

    def _child_pids(self) -> list:
        try:
            with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
                return file.read().split()
        except OSError:
            return []

    def _accepts_interrupts(self, pid: str) -> bool:
        """Whether it is a fork of the shell, of its group, that has done nothing yet."""
        try:
            if os.getpgid(int(pid)) != self.pid or not os.path.samefile(f"/proc/{pid}/exe", f"/proc/{self.pid}/exe"):
                return False
            return not ignores_interrupts(int(pid))
        except OSError:
            return False  # it has ended

    def _in_cell(self) -> bool:
        try:
            return os.stat(f"/proc/{self.pid}/fd/{_REPORT}").st_ino != os.fstat(self._reports).st_ino
        except OSError:
            return True

    def _write_cell(self, content: bytes) -> None:
        os.ftruncate(self._cell, 0)
        written = 0
        while written < len(content):
            written += os.pwrite(self._cell, content[written : written + (1 << 20)], written)

    def _send_lines(self, lines: str) -> tuple:
        """Sends lines to the shell; returns their output to `_REPORT`, the status, and whether it came later."""
        self._told += 1
        try:
            os.write(self._commands, lines.format(number=self._told).encode())
        except BrokenPipeError:
            self.follow()
        while True:
            text, _, last = self._read_report().rpartition(b"\n")
            number, _, said = last.partition(b" ")
            status, _, later = said.partition(b" ")
            if number == b"%d" % self._told and status.isdigit():
                self._running = False
                return text, int(status), bool(later)

    def _read_report(self) -> bytes:
        """Reads up to the NUL that ends a report."""
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        while b"\0" not in self._said:
            ready = {fd for fd, _ in poll.poll()}
            more = os.read(self._reports, 1 << 16) if self._reports in ready else b""
            if not more:
                self.follow()
            if _NO_CELL in more and self._running:
                self._signal_cell()  # it was not there yet, or no longer
            self._said += more.replace(_NO_CELL, b"")
        report, _, self._said = self._said.partition(b"\0")
        return report


class LentFunctions:
    """Functions that call tools, in the shell for as long as one cell runs."""

    def __init__(self, shell: BashProcess, offer: dict | None):
        self._shell = shell
        self._names = offer["names"] if offer else []
        if offer:
            self._before = self._function_definitions()
            shell.ask(offer["define"])
            self._lent = self._function_definitions()

    def take_back(self) -> None:
        """Removes all but those that the program has redefined; restores the functions that had these names before."""
        if not self._names:
            return
        now = self._function_definitions()
        lent = [name for name in self._names if now[name] == self._lent[name]]
        before = "\n".join(self._before[name] for name in lent)
        if lent:
            self._shell.ask(f"\\builtin unset -f {' '.join(lent)}\n{before}")

    def _function_definitions(self) -> dict:
        """The shell's definition of each function."""
        show = "".join(
            f"\\builtin declare -f {name} >&{_REPORT}; \\builtin printf '\\2\\n' >&{_REPORT}\n" for name in self._names
        )
        said = (self._shell.ask(show) + "\n").split("\2\n")
        return {name: said[at] if at < len(said) else "" for at, name in enumerate(self._names)}


class BashKernel:
    def __init__(self, channel: KernelChannel, shell: BashProcess):
        self._channel = channel
        self._shell = shell
        self._written = WrittenFiles()
        self._count = 0
        signal.signal(signal.SIGINT, lambda *_: shell.interrupt())

    def serve(self) -> None:
        self._channel.send({"ev": "ready"})
        while True:
            self._shell.await_frame(self._channel)
            frame = self._channel.receive()
            if frame is None:
                return
            header, body = frame
            if header.get("do") == "execute":
                self._execute_cell(header, body)
            elif header.get("do") == "configure":
                self._set_variables(header.get("env") or {})
            elif header.get("do") == "inspect":
                self._channel.send(*answer_inspect(self._shell, _REPORT, header.get("ask")))

    def _execute_cell(self, header: dict, body: bytes) -> None:
        run = header["run"]
        self._count += 1
        self._shell.interrupted = False
        self._channel.send({"ev": "started", "run": run, "count": self._count})
        self._shell.set_oom_score(b"1000")
        self._written.start()
        before = self._shell.cpu_seconds
        status = self._run_cell(header, body)
        for info in self._written.changed():
            self._channel.send({"ev": "wrote", "run": run, "file": info})
        outcome = "interrupted" if self._shell.interrupted and status == _INTERRUPTED else "ok"
        used = {"cpu": max(self._shell.cpu_seconds - before, 0.0), "rss": self._shell.peak_bytes}
        self._shell.set_oom_score(b"0")
        self._channel.post({"ev": "ended", "run": run, "outcome": outcome, "exit": status & 0xFF, **used})

    def _run_cell(self, header: dict, body: bytes) -> int:
        """Runs a cell with its variables and directory, which last as long as it does. Its exit status."""
        env = self._valid_variables(header.get("env") or {})
        home, inside = self._change_directory(header.get("cwd"))
        if header.get("cwd") and inside is None:
            os.write(2, f"bash: cannot work in {header['cwd']!r}\n".encode("utf-8", "backslashreplace"))
            return 1
        saved = self._export_variables(env)
        tools = LentFunctions(self._shell, header.get("tools"))
        status = self._shell.run(body)
        tools.take_back()
        if env:
            self._shell.ask(f"\\builtin unset -v {' '.join(env)}\n{saved}")
        if inside is not None:
            self._shell.ask(f"[[ $PWD == {shlex.quote(inside)} ]] && \\builtin cd -- {shlex.quote(home)}")
        return status

    def _valid_variables(self, env: dict) -> dict:
        """A shell's variables have names of letters, digits and `_`: of others it is said that they are left out."""
        for name in env:
            if not _VARIABLE_NAME.match(name):
                os.write(2, f"bash: {name!r} cannot be a variable of a shell\n".encode("utf-8", "backslashreplace"))
        return {name: value for name, value in env.items() if _VARIABLE_NAME.match(name)}

    def _change_directory(self, cwd: str | None) -> tuple:
        """Goes there: where the shell was, and where it is now; None for the latter if it cannot go there."""
        if not cwd:
            return "", None
        there = f"\\builtin cd -- {shlex.quote(cwd)} && \\builtin printf '%s\\n' \"$PWD\" >&{_REPORT}"
        home = self._shell.ask(f"\\builtin printf '%s\\n' \"$PWD\" >&{_REPORT}")
        return home, self._shell.ask(there) or None

    def _export_variables(self, env: dict) -> str:
        """Sets variables; returns the commands that restore their former values."""
        if not env:
            return ""
        saved = self._shell.ask(f"\\builtin declare -p {' '.join(env)} >&{_REPORT}")
        self._set_variables(env)
        return saved

    def _set_variables(self, env: dict) -> None:
        named = {name: value for name, value in env.items() if _VARIABLE_NAME.match(name)}
        self._shell.ask("\n".join(f"\\builtin export {name}={shlex.quote(value)}" for name, value in named.items()))
