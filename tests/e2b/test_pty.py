"""Terminals, by E2B's Python SDK."""

from __future__ import annotations

import pytest
from e2b import CommandExitException, SandboxException
from e2b.sandbox.commands.command_handle import PtySize
from e2b_code_interpreter import Sandbox


def shows(box: Sandbox, handle, wanted: str) -> None:
    """Returns once the terminal shows that."""
    shown = ""
    for _, _, data in handle:
        shown += (data or b"").decode()
        if wanted in shown:
            return
    raise AssertionError(f"{wanted!r} was never shown: {shown!r}")


def seen(box: Sandbox, handle, *lines: bytes) -> str:
    """What the terminal shows until its end, after these lines were typed."""
    for line in lines:
        box.pty.send_stdin(handle.pid, line)
    output: list[bytes] = []
    handle.wait(on_pty=output.append)
    return b"".join(output).decode()


def test_a_terminal_has_its_environment_directory_and_size(box: Sandbox):
    terminal = box.pty.create(PtySize(cols=90, rows=30), envs={"A": "123"}, cwd="/tmp")
    shown = seen(box, terminal, b"echo a=$A d=$PWD t=$TERM c=$(tput cols) s=$(stty size)\nexit\n")
    assert "a=123 d=/tmp t=xterm-256color c=90 s=30 90" in shown
    assert "job control" not in shown


def test_a_terminal_can_be_resized(box: Sandbox):
    terminal = box.pty.create(PtySize(cols=80, rows=24))
    box.pty.resize(terminal.pid, PtySize(cols=100, rows=24))
    assert "c=100" in seen(box, terminal, b"echo c=$(tput cols)\nexit\n")


def test_ctrl_c_reaches_the_foreground(box: Sandbox):
    terminal = box.pty.create(PtySize(cols=80, rows=24))
    box.pty.send_stdin(terminal.pid, b"sh -c 'echo re\"\"ady; exec cat'\n")
    shows(box, terminal, "ready")
    box.pty.send_stdin(terminal.pid, b"\x03")
    shows(box, terminal, "user@cloche")
    assert "ended=130" in seen(box, terminal, b"echo ended=$?\nexit\n")


def test_a_terminal_lives_on_when_its_starter_leaves(box: Sandbox):
    terminal = box.pty.create(PtySize(cols=80, rows=24))
    terminal.disconnect()
    again = box.pty.connect(terminal.pid)
    assert again.pid == terminal.pid
    assert "n=42" in seen(box, again, b"echo n=$((6 * 7))\nexit\n")


def test_a_terminal_is_killed_with_its_programs(box: Sandbox):
    terminal = box.pty.create(PtySize(cols=80, rows=24))
    assert box.pty.kill(terminal.pid)
    with pytest.raises(CommandExitException):
        box.commands.run(f"kill -0 {terminal.pid}")
    assert not box.pty.kill(terminal.pid)


def test_unsupported_terminal_operations_are_refused(box: Sandbox):
    terminal = box.pty.create(PtySize(cols=80, rows=24))
    with pytest.raises(SandboxException, match=r"Ctrl\+D"):
        box.commands.close_stdin(terminal.pid)
    with pytest.raises(SandboxException, match="terminal"):
        box.commands.send_stdin(terminal.pid, "x")
    with pytest.raises(SandboxException):
        box.pty.resize(terminal.pid, PtySize(cols=0, rows=1 << 20))
    command = box.commands.run("sleep 60", background=True)
    with pytest.raises(SandboxException, match="terminal"):
        box.pty.resize(command.pid, PtySize(cols=80, rows=24))
