"""sudo inside a sandbox of E2B's: it works, it keeps to the sandbox, and nobody can harm init by it."""

from __future__ import annotations

import pytest
from e2b import CommandExitException
from e2b.sandbox.commands.command_handle import PtySize
from e2b_code_interpreter import Sandbox
from tests.conftest import embedding

import cloche


def said(box: Sandbox, command: str, **options) -> str:
    return box.commands.run(command, **options).stdout


def test_a_command_runs_as_root_with_the_callers_files_and_directory(box: Sandbox, single: bool):
    assert said(box, "sudo id -un; cd /tmp; sudo pwd; echo in | sudo cat; sudo sh -c 'echo err >&2' 2>&1") == (
        "root\n/tmp\nin\nerr\n"
    )
    assert said(box, "echo kept | sudo tee /root/x; sudo cat /root/x") == "kept\nkept\n"
    if not single:
        with pytest.raises(CommandExitException):
            box.commands.run("cat /root/x")


def test_exit_codes_and_signals_are_the_commands(box: Sandbox):
    assert said(box, "sudo sh -c 'exit 7'; echo $?; sudo sh -c 'kill -TERM $$'; echo $?; sudo nope; echo $?") == (
        "7\n143\n127\n"
    )


def test_the_environment_is_a_new_one(box: Sandbox):
    variables = {"FOO": "bar"}
    assert said(box, "sudo env | grep -c FOO || true", envs=variables) == "0\n"
    assert (
        said(box, 'sudo sh -c "echo [\\$FOO] \\$HOME \\$USER \\$SUDO_USER"', envs=variables) == "[] /root root user\n"
    )
    assert said(box, "sudo -E sh -c 'echo $FOO'", envs=variables) == "bar\n"
    assert said(box, "sudo --preserve-env=FOO sh -c 'echo $FOO'", envs=variables) == "bar\n"
    assert said(box, "sudo A=b sh -c 'echo $A'") == "b\n"


def test_the_sandboxs_own_variables_stay_behind_too(server):
    box = Sandbox.create(**server.e2b, envs={"SECRET": "1"})
    try:
        assert said(box, "sudo sh -c 'echo [$SECRET]'; echo $SECRET") == "[]\n1\n"
    finally:
        box.kill()


def test_flags_that_people_use(box: Sandbox):
    assert said(box, "sudo -n -S -H -- id -un; sudo -u user id -un; sudo -u '#0' id -un") == "root\nuser\nroot\n"
    assert said(box, "sudo -i pwd; sudo -i echo 'a  b'; sudo -s echo c; sudo -D /etc pwd") == "/root\na  b\nc\n/etc\n"
    assert "NOPASSWD: ALL" in said(box, "sudo -v && sudo -k && sudo -l")
    assert said(box, "umask 077; sudo sh -c umask; sudo sudo id -u") == "0077\n0\n"
    for wrong in ("sudo", "sudo -u nobody id", "sudo --nope id", "sudo -u"):
        with pytest.raises(CommandExitException, match="sudo: "):
            box.commands.run(wrong)


def test_a_cell_may_use_it_though_it_is_root(box: Sandbox):
    assert box.run_code("!sudo -u user id -un").logs.stdout == ["user\n"]


def test_a_command_ends_with_its_caller(box: Sandbox):
    command = box.commands.run("sudo sh -c 'echo up; exec sleep 4321'", background=True)
    for stdout, _, _ in command:
        if stdout:
            break
    command.kill()
    left = said(box, "for _ in $(seq 50); do pgrep -x sleep >/dev/null || { echo gone; break; }; sleep 0.1; done")
    assert left == "gone\n"


def test_an_interactive_shell_has_a_terminal_of_its_own(box: Sandbox):
    terminal = box.pty.create(PtySize(cols=91, rows=24))
    box.pty.send_stdin(terminal.pid, b"sudo bash\n")
    shown = until(box, terminal, "root@cloche")
    box.pty.send_stdin(terminal.pid, b"echo $(id -un) $(stty size) $(tty); sh -c 'echo re\"\"ady; exec cat'\n")
    shown += until(box, terminal, "ready")
    box.pty.send_stdin(terminal.pid, b"\x03")
    shown += until(box, terminal, "root@cloche")
    box.pty.send_stdin(terminal.pid, b"exit 5\n")
    shown += until(box, terminal, "user@cloche")
    box.pty.send_stdin(terminal.pid, b"echo code=$?; exit\n")
    shown += until(box, terminal, "code=5")
    assert "root 24 91 /dev/pts/1" in shown and "job control" not in shown


def until(box: Sandbox, terminal, wanted: str) -> str:
    """What the terminal shows, up to that."""
    shown = ""
    for _, _, data in terminal:
        shown += (data or b"").decode()
        if wanted in shown:
            return shown
    raise AssertionError(f"{wanted!r} was never shown: {shown!r}")


def test_root_by_sudo_has_no_more_rights_than_root(box: Sandbox):
    rows = "grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status"
    assert said(box, f"sudo {rows}") == said(box, rows, user="root")
    with pytest.raises(CommandExitException):
        box.commands.run("sudo cat /proc/1/environ")
    with pytest.raises(CommandExitException):
        box.commands.run("sudo mount -t tmpfs x /tmp")


HOSTILE = """
import array, json, os, socket, struct, sys
def connect():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("/run/cloche-sudo")
    connection.settimeout(20)
    return connection
def frame(value, body=b""):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack(">II", len(data), len(body)) + data + body
def answer(data, fds=()):
    with connect() as connection:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            connection.sendmsg([data], rights)
            return connection.recv(4096)[8:].decode()
        except OSError as error:
            return type(error).__name__
good = {"argv": ["id"], "user": "root", "cwd": "/", "env": {}, "umask": 18, "reset": True, "pty": None}
print(answer(struct.pack(">II", 1 << 31, 1 << 31)))
print(answer(frame(b"not json")))
print(answer(frame([1, 2])))
print(answer(frame({})))
print(answer(frame({**good, "argv": [1]})))
print(answer(frame({**good, "argv": ["a\\0b"]})))
print(answer(frame({**good, "env": {"A=": "b"}})))
print(answer(frame({**good, "cwd": 7})))
print(answer(frame({**good, "user": ["root"]})))
print(answer(frame({**good, "pty": [1, -1]})))
print(answer(frame({**good, "fds": 99})))
print(answer(frame(good)))
print(answer(frame({**good, "fds": 16}), [0] * 16))
idle = [connect() for _ in range(40)]
half = [connect() for _ in range(10)]
for connection in half:
    try:
        connection.send(b"\\0\\0")
    except OSError:
        pass
print("done")
sys.stdout.flush()
__import__("time").sleep(60)
"""


def test_no_request_can_harm_init_through_its_socket(box: Sandbox):
    box.commands.run("cat > hostile.py <<'END'\n" + HOSTILE + "\nEND")
    command = box.commands.run("python3 hostile.py", background=True, timeout=120)
    output = ""
    for stdout, stderr, _ in command:
        assert not stderr
        output += stdout or ""
        if "done" in output:
            break
    assert "uid=" not in output and output.count("\n") == 14
    # While forty connections say nothing, init starts commands, and others' sudo works as soon as there is room.
    assert said(box, "echo here") == "here\n"
    command.kill()
    assert said(box, "for _ in $(seq 100); do sudo echo again 2>/dev/null && break; sleep 0.1; done") == "again\n"


def test_the_library_s_sandboxes_have_none(bare_dir: str):
    with embedding(bare_dir), cloche.Sandbox() as box:
        result = box.commands.run("sudo id")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no sudo in this sandbox" in result.stderr
