"""`cloche chat`, by the real command, with the model `cloche/echo`: with a server and without, piped and typed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_shell import Terminal
from tests.conftest import CommandLine, with_template

from cloche.cli.chat_screen import ChatEventParser, SavedFiles, safe_file_name, safe_text
from cloche.model import Template

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
SHOW = f"from IPython.display import Image, display\ndisplay(Image(bytes.fromhex({PNG.hex()!r})))"


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


class Chat:
    """`cloche chat` in a place."""

    def __init__(self, line: CommandLine, cwd: Path):
        self._line = line
        self._cwd = cwd
        self.env = {**os.environ, "TERM": "dumb", "PYTHONUNBUFFERED": "1"}

    def says(self, message: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self._run("-c", message, *options)

    def hears(self, typed: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self._run(*options, input=typed)

    def terminal(self, *options: str, **env: str) -> Terminal:
        return Terminal(*self._line.words("chat", *options), env={**self.env, **env})

    def _run(self, *options: str, input: str = "") -> subprocess.CompletedProcess[str]:
        words = self._line.words("chat", *options)
        return subprocess.run(words, env=self.env, cwd=self._cwd, input=input, capture_output=True, text=True)


@pytest.fixture
def chat(place_of_server: str, tmp_path: Path) -> Chat:
    """With a server."""
    return Chat(CommandLine(place_of_server, alone=False), tmp_path)


@pytest.fixture
def any_chat(command_line: CommandLine, tmp_path: Path) -> Chat:
    """Without a server, then with one. All else is the same code."""
    return Chat(command_line, tmp_path)


# --- one message


def test_a_message_is_answered_on_stdout_and_its_code_shown_on_stderr(any_chat: Chat):
    said = any_chat.says(fenced("print(6 * 7)"))
    assert (said.stdout, said.returncode) == ("42\n", 0)
    assert said.stderr.splitlines() == ["print(6 * 7)", "42"]


def test_values_and_tracebacks_are_shown_as_output(chat: Chat):
    said = chat.says(fenced("print('a')\n'value'") + "\n" + fenced("1/0"))
    assert "'value'" in said.stderr.splitlines()
    assert "ZeroDivisionError: division by zero" in said.stderr.splitlines()
    assert said.returncode == 0


def test_images_and_new_files_are_saved_once_and_replace_nothing(chat: Chat, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "data.csv").write_text("mine")
    said = chat.says(fenced(f"{SHOW}\nopen('data.csv', 'w').write('a,b')"), "--out", str(out))
    assert said.returncode == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        "data.csv": b"mine",
        "data-2.csv": b"a,b",
        "image-1.png": PNG,
    }
    assert f"saved {out}/data-2.csv" in said.stderr


def test_without_out_files_go_to_a_new_directory_that_is_told(chat: Chat, tmp_path: Path):
    chat.env["TMPDIR"] = str(tmp_path)
    said = chat.says(fenced("open('data.csv', 'w').write('a,b')"))
    (path,) = [line.partition("saved ")[2] for line in said.stderr.splitlines() if "saved " in line]
    assert Path(path).read_text() == "a,b"
    assert Path(path).is_relative_to(tmp_path)


def test_an_attached_file_is_there_for_the_code(chat: Chat, tmp_path: Path):
    (tmp_path / "numbers.txt").write_text("20 22")
    said = chat.says(fenced("print(sum(map(int, open('numbers.txt').read().split())))"), "--file", "numbers.txt")
    assert (said.stdout, said.returncode) == ("42\n", 0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [(["--file", "nothing.txt"], "nothing.txt"), (["--model", "no-such-model"], "no-such-model")],
)
def test_failures_to_start_are_reported_with_status_125(chat: Chat, options: list[str], problem: str):
    said = chat.says("hello", *options)
    assert (said.stdout, said.returncode) == ("", 125)
    assert problem in said.stderr
    assert "Traceback" not in said.stderr


def test_a_program_cannot_steer_the_terminal(chat: Chat):
    said = chat.says(fenced("print('\\x1b]0;owned\\x07', '\\x9b31m', '\\u202e')"))
    assert not set("\x1b\x07\x9b\u202e") & set(said.stdout + said.stderr)
    assert said.returncode == 0


# --- a conversation


def test_a_conversation_keeps_variables_until_a_new_one_begins(chat: Chat):
    typed = [
        fenced("x = 42"),
        fenced("print(x)"),
        "/new",
        fenced("print('x' in globals())"),
        "/nonsense",
        "/quit",
        "no",
    ]
    said = chat.hears("\n".join(typed) + "\n")
    assert said.stdout.splitlines() == ["(no output)", "42", "False"]
    assert "there is no command /nonsense" in said.stderr
    assert said.returncode == 0


def test_files_can_be_attached_listed_and_saved_while_chatting(any_chat: Chat, tmp_path: Path):
    (tmp_path / "in.txt").write_text("hello")
    typed = ["/files", "/file in.txt", "/file nothing.txt", fenced("print(open('in.txt').read())"), "/files"]
    typed += ["/save in.txt", "/save nothing.txt"]
    said = any_chat.hears("\n".join(typed) + "\n", "--out", str(tmp_path / "out"))
    answer, listed = said.stdout.splitlines()
    assert (answer, listed.split()) == ("hello", ["5", "/mnt/data/in.txt"])
    assert (tmp_path / "out/in.txt").read_text() == "hello"
    assert said.stderr.count("nothing.txt") == 2
    assert said.returncode == 0


# --- at a terminal


def test_at_a_terminal_code_and_output_come_as_they_stream(chat: Chat):
    terminal = chat.terminal()
    terminal.wait_for("cloche/echo")
    terminal.wait_for(">>> ")
    terminal.type("```python\n")
    terminal.wait_for("... ")
    terminal.type("print('be' + 'gun', flush=True); input_ = __import__('time').sleep(1); print('ov' + 'er')\n```\n")
    terminal.wait_for("begun")
    terminal.wait_for("over")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.status() == 0
    terminal.close()


def test_ctrl_c_interrupts_the_code_and_the_conversation_goes_on(any_chat: Chat):
    terminal = any_chat.terminal()
    terminal.wait_for(">>> ")
    terminal.type("```python\nprint('be' + 'gun', flush=True)\nwhile True: x = 42\n```\n")
    terminal.wait_for("begun")
    terminal.type("\x03")
    terminal.wait_for(">>> ")
    terminal.type("```python\nprint('x is', x)\n```\n")
    terminal.wait_for("x is 42")
    terminal.wait_for(">>> ")
    terminal.type("/quit\n")
    assert terminal.status() == 0
    terminal.close()


def test_images_are_shown_where_the_terminal_can(chat: Chat, tmp_path: Path):
    terminal = chat.terminal("-c", fenced(SHOW), "--out", str(tmp_path / "out"), TERM="xterm-kitty")
    terminal.wait_for("\x1b_Ga=T")
    assert terminal.status() == 0
    assert (tmp_path / "out/image-1.png").read_bytes() == PNG
    terminal.close()


def test_a_signal_ends_it_in_order(any_chat: Chat, command_line: CommandLine):
    words = command_line.words("chat", "-c", fenced("print('be' + 'gun', flush=True)\nwhile True: pass"))
    with subprocess.Popen(words, env=any_chat.env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "begun\n":
            assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 143


def test_ctrl_c_ends_a_single_message(chat: Chat, place_of_server: str):
    words = CommandLine(place_of_server, alone=False).words("chat", "-c", fenced("print('on')\nwhile True: pass"))
    with subprocess.Popen(words, env=chat.env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "on\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


# --- what a directory cannot do


def test_a_found_configuration_cannot_say_where_messages_go(template: Template, tmp_path: Path):
    """It may have come with somebody's repository."""
    (tmp_path / "cloche.toml").write_text(
        '[[upstream]]\nmodels = ["gpt"]\nbase_url = "http://127.0.0.1:9/v1"\napi_key = "env:HOME"\n'
    )
    place = with_template(tmp_path / "data", template)
    command = [str(Path(sys.executable).with_name("cloche")), "--data-dir", str(place)]
    said = subprocess.run([*command, "chat", "-c", "hello"], cwd=tmp_path, capture_output=True, text=True)
    assert (said.stdout, said.returncode) == ("", 125)
    assert "--config ./cloche.toml" in said.stderr
    named = [*command, "--config", "./cloche.toml", "chat", "-c", "hello"]
    said = subprocess.run(named, cwd=tmp_path, capture_output=True, text=True)
    assert (said.stdout, said.returncode) == ("", 1)  # the model is asked, and is not there
    assert "the answer failed" in said.stderr


# --- parts


def test_events_are_read_however_they_are_cut():
    stream = b': keep-alive\n\nevent: a\ndata: {"type":"a"}\n\ndata: {"type":"b",\ndata: "x":1}\n\ndata: [DONE]\n\n'
    for size in (1, 2, 3, 7, 1000):
        events = ChatEventParser()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [event for piece in pieces for event in events.feed(piece)] == [{"type": "a"}, {"type": "b", "x": 1}]


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("/mnt/data/a b.csv", "a b.csv"),
        ("../../etc/passwd", "passwd"),
        (".bashrc", "bashrc"),
        ("..", "file"),
        ("", "file"),
        ("a\x1b\n.txt", "a__.txt"),
        ("x" * 300 + ".csv", "x" * 146 + ".csv"),
    ],
)
def test_a_name_stays_in_its_directory(name: str, saved: str):
    assert safe_file_name(name) == saved


def test_saving_has_a_limit_and_follows_no_link(tmp_path: Path):
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    files = SavedFiles(tmp_path, 10)
    assert files.file("a", [b"12345"]) == tmp_path / "a-2"
    with pytest.raises(ValueError, match="only so much"):
        files.file("b", [b"12345", b"6"])
    assert sorted(os.listdir(tmp_path)) == ["a", "a-2"]


def test_text_stays_text():
    assert safe_text("naïve 日本 👩‍💻 a\tb\r\nc\rd") == "naïve 日本 👩‍💻 a\tb\nc\nd"
