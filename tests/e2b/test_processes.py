"""Commands, by E2B's Python SDK."""

from __future__ import annotations

import time

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)
from e2b_code_interpreter import Sandbox


def test_output_and_exit_code(box: Sandbox):
    result = box.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)
    with pytest.raises(CommandExitException) as caught:
        box.commands.run("echo before; exit 3")
    assert (caught.value.exit_code, caught.value.stdout, caught.value.error) == (3, "before\n", "exit status 3")


def test_a_command_that_a_signal_ended(box: Sandbox):
    with pytest.raises(CommandExitException) as caught:
        box.commands.run("kill -KILL $$")
    assert (caught.value.exit_code, caught.value.error) == (-1, "signal: killed")


def test_bytes_that_are_no_text_are_not_lost(box: Sandbox):
    assert box.commands.run("printf 'a%.0s' $(seq 8191); printf '\\xe2'").stdout == "a" * 8191 + "\ufffd"
    assert box.commands.run("printf 'é%.0s' $(seq 50000)").stdout == "é" * 50000


def test_output_of_many_megabytes_comes_whole(box: Sandbox):
    assert len(box.commands.run("head -c 12000000 /dev/zero | tr '\\0' x").stdout) == 12_000_000


def test_callbacks_hear_output_while_it_comes(box: Sandbox):
    heard: list[tuple[str, str]] = []
    box.commands.run(
        "echo one; echo two >&2",
        on_stdout=lambda text: heard.append(("out", text)),
        on_stderr=lambda text: heard.append(("err", text)),
    )
    assert sorted(heard) == [("err", "two\n"), ("out", "one\n")]


def test_users_homes_and_directories(box: Sandbox):
    where = "id -un; echo $HOME $USER $LOGNAME; pwd"
    assert box.commands.run(where).stdout == "user\n/home/user user user\n/home/user\n"
    assert box.commands.run(where, user="root").stdout == "root\n/root root root\n/home/user\n"
    assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    box.commands.run("mkdir below")
    assert box.commands.run("pwd", cwd="below").stdout == "/home/user/below\n"
    assert box.commands.run("pwd", cwd="~/below").stdout == "/home/user/below\n"


def test_an_invalid_user_or_directory_is_refused(box: Sandbox):
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody'"):
        box.commands.run("true", user="nobody")
    with pytest.raises(InvalidArgumentException, match="cwd '/not/there' does not exist"):
        box.commands.run("true", cwd="/not/there")
    with pytest.raises(InvalidArgumentException, match="is not a directory"):
        box.commands.run("true", cwd="/usr/bin/env")
    with pytest.raises(InvalidArgumentException):
        box.commands.run("true", envs={"A=": "1"})
    assert box.commands.run("echo still here").stdout == "still here\n"


def test_environment_of_sandbox_and_call(server):
    box = Sandbox.create(**server.e2b, envs={"A": "sandbox", "B": "sandbox"})
    try:
        assert box.commands.run("echo $A $B", envs={"B": "call"}).stdout == "sandbox call\n"
        assert box.commands.run("echo $A $B").stdout == "sandbox sandbox\n"
    finally:
        box.kill()


def test_a_login_shell_keeps_the_path(box: Sandbox):
    assert box.commands.run("which python3").stdout == "/opt/cloche/front/bin/python3\n"
    assert box.commands.run("python3 -c 'import numpy; print(1)'").stdout == "1\n"


def test_a_background_command_is_listed_connected_to_and_killed(box: Sandbox):
    command = box.commands.run("echo here; sleep 60", background=True, envs={"A": "1"}, cwd="/tmp")
    (listed,) = [each for each in box.commands.list() if each.pid == command.pid]
    assert (listed.cmd, listed.args[-1], listed.envs, listed.cwd) == (
        "/bin/bash",
        "echo here; sleep 60",
        {"A": "1"},
        "/tmp",
    )
    again = box.commands.connect(command.pid)
    assert again.pid == command.pid
    assert box.commands.run(f"kill -0 {command.pid}").exit_code == 0
    assert box.commands.kill(command.pid)
    with pytest.raises(CommandExitException):
        box.commands.run(f"kill -0 {command.pid}")
    for handle in (command, again):
        with pytest.raises(CommandExitException) as caught:
            handle.wait()
        assert caught.value.error == "signal: killed"
    assert not box.commands.kill(command.pid)


def test_a_command_lives_on_when_its_starter_leaves(box: Sandbox):
    command = box.commands.run("read line; echo got $line", background=True, stdin=True)
    command.disconnect()
    other = box.commands.connect(command.pid)
    box.commands.send_stdin(command.pid, "it\n")
    assert other.wait().stdout == "got it\n"


def test_the_exit_is_remembered_for_late_clients(box: Sandbox):
    command = box.commands.run("exit 4", background=True)
    with pytest.raises(CommandExitException):
        command.wait()
    with pytest.raises(CommandExitException) as caught:
        box.commands.connect(command.pid).wait()
    assert caught.value.exit_code == 4


def test_a_process_that_does_not_exist(box: Sandbox):
    with pytest.raises(NotFoundException, match="process with pid 999999 not found"):
        box.commands.connect(999_999)
    assert not box.commands.kill(999_999)
    with pytest.raises(SandboxException):
        box.commands.send_stdin(999_999, "x")


def test_stdin_is_fed_and_closed(box: Sandbox):
    command = box.commands.run("cat", background=True, stdin=True)
    command.send_stdin("one ")
    command.send_stdin(b"two")
    command.close_stdin()
    assert command.wait().stdout == "one two"


def test_a_stream_of_input(box: Sandbox):
    command = box.commands.run("wc -c", background=True, stdin=True)
    box.commands.stream_input(command.pid, (b"x" * 100_000 for _ in range(20)))
    command.close_stdin()
    assert command.wait().stdout.strip() == "2000000"


def test_without_stdin_there_is_nothing_to_read_and_nothing_to_write_to(box: Sandbox):
    assert box.commands.run("cat").stdout == ""
    command = box.commands.run("sleep 60", background=True)
    with pytest.raises(SandboxException, match="stdin"):
        command.send_stdin("x")
    command.kill()


def test_a_time_limit_kills_the_command(box: Sandbox):
    with pytest.raises(TimeoutException):
        box.commands.run("sleep 4242", timeout=1)
    ends = time.monotonic() + 10
    while "sleep 4242" in box.commands.run("ps axo args").stdout.replace("ps axo args", ""):
        assert time.monotonic() < ends
    assert box.commands.list() == []


def test_children_that_keep_the_pipes_do_not_keep_the_caller(box: Sandbox):
    assert box.commands.run("sleep 60 & echo done").stdout == "done\n"


def test_killing_the_sandbox_is_reported_to_waiting_clients(server):
    box = Sandbox.create(**server.e2b)
    command = box.commands.run("sleep 60", background=True)
    box.kill()
    with pytest.raises(TimeoutException, match="sandbox was killed or reached its end of life"):
        command.wait()
    with pytest.raises(TimeoutException):
        box.commands.run("true")
