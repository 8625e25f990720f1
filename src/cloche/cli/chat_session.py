"""The session of `cloche chat`, after its command line is parsed.

A lazy-import border: `cloche chat --help` loads none of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2

from cloche import errors
from cloche.cli.chat_screen import ChatConversation, ChatScreen, FileCitation, SavedFiles, safe_text
from cloche.cli.control import open_client
from cloche.cli.own_server import find_server
from cloche.cli.session import ENDING_SIGNALS
from cloche.cli.shell_session import raise_system_exit, read_typed_line, readline_history
from cloche.cli.terminal import STDERR, STDOUT, print_message, write_all
from cloche.config import Config

ANSWERED, FAILED = 0, 1
CHAT_HELP = """\
/file PATH  attach a file: the model's code finds it in /mnt/data
/files      list the files in /mnt/data
/save NAME  save one of them here
/new        begin a new conversation
/quit       leave, as Ctrl-D does
A message with ``` continues until the closing ```. Ctrl-C interrupts an answer, and the code that it runs.
"""


def run_chat(
    config: Config, *, model: str | None, files: tuple[Path, ...], out: Path | None, message: str | None, alone: bool
) -> int:
    """Chats until the user leaves. Returns the exit status.

    Raises the errors of `connect_to_server`, and KeyboardInterrupt.
    """
    for each in ENDING_SIGNALS:
        signal.signal(each, raise_system_exit)
    saved = SavedFiles(out, config.limits.default.space_bytes)
    with connect_to_server(config, alone=alone) as client:
        talk = ChatSession(ChatConversation(client, model), saved)
        for path in files:
            talk.conversation.attach(path)
        if message is not None:
            return talk.say(message)
        return _run_conversation(talk, Path(config.data_dir))


def _run_conversation(talk: ChatSession, data_dir: Path) -> int:
    if not os.isatty(0):
        return _message_loop(talk, lambda prompt: _read_piped_line())
    write_all(
        STDERR, f"Chat with {safe_text(talk.conversation.model)}. Ctrl-C interrupts, Ctrl-D leaves, /help helps.\n"
    )
    with readline_history(data_dir / "chat_history"):
        return _message_loop(talk, read_typed_line)


def _message_loop(talk: ChatSession, ask: Callable[[str], str | None]) -> int:
    while True:
        try:
            message = _read_message(ask)
            if message is None or message.strip() == "/quit":
                return ANSWERED
            talk.hear(message)
        except KeyboardInterrupt:
            if not os.isatty(0):
                raise
            write_all(STDOUT, "\n")
        except errors.ClocheError as error:
            print_message(str(error))


def _read_piped_line() -> str | None:
    line = sys.stdin.buffer.readline()
    return line.decode("utf-8", "replace").rstrip("\r\n") if line else None


def _read_message(ask: Callable[[str], str | None]) -> str | None:
    """Reads a line; or several, where a fence is open."""
    lines: list[str] = []
    while not lines or _has_open_fence(lines):
        line = ask("... " if lines else ">>> ")
        if line is None:
            return "\n".join(lines) if lines else None
        lines.append(line)
    return "\n".join(lines)


def _has_open_fence(lines: list[str]) -> bool:
    return sum(line.startswith("```") for line in lines) % 2 == 1


class ChatSession:
    """The conversation of one user with one model."""

    def __init__(self, conversation: ChatConversation, saved: SavedFiles):
        self.conversation = conversation
        self._saved = saved

    def hear(self, message: str) -> None:
        """Handles a message or a command. Raises ClocheError."""
        word, _, rest = message.strip().partition(" ")
        commands: dict[str, Callable[[str], object]] = {
            "/file": self._attach_file,
            "/files": self._list_files,
            "/save": self._save_file,
            "/new": lambda rest: self.conversation.forget(),
            "/help": lambda rest: write_all(STDERR, CHAT_HELP),
        }
        if word in commands:
            commands[word](rest.strip())
        elif word.startswith("/") and "/" not in word[1:] and "\n" not in message:
            raise errors.InvalidRequest(f"there is no command {word}: /help lists the commands")
        elif word:
            self.say(message)

    def say(self, message: str) -> int:
        """Sends a message and shows the answer. Returns the exit status.

        Raises the errors of `ask`, except UpstreamFailed.
        """
        screen = ChatScreen(self._saved)
        try:
            with contextlib.closing(self.conversation.ask(message)) as events:
                for event in events:
                    screen.show(event)
        except errors.UpstreamFailed as error:
            print_message(f"the answer failed: {error}")
        finally:
            screen.end_line()
        for citation in screen.citations:
            self._save_citation(citation)
        return ANSWERED if screen.status == "completed" else FAILED

    def _attach_file(self, path: str) -> None:
        if not path:
            raise errors.InvalidRequest("name a file: /file PATH")
        self.conversation.attach(Path(path).expanduser())
        print_message(f"attached {path}")

    def _list_files(self, rest: str) -> None:
        for each in self.conversation.files():
            write_all(STDOUT, f"{each.size_bytes:>12,}  {safe_text(each.path)}\n")

    def _save_file(self, name: str) -> None:
        for each in self.conversation.files():
            if name and name in (each.path, each.path.removeprefix("/mnt/data/")):
                self._save_citation(FileCitation(str(self.conversation.container), each.id, name))
                return
        raise errors.NotFound(f"there is no file {name!r}: /files lists the files")

    def _save_citation(self, citation: FileCitation) -> None:
        try:
            with self.conversation.content(citation.container, citation.file) as chunks:
                path = self._saved.file(citation.name, chunks)
        except errors.ClocheError as error:
            print_message(f"{citation.name}: {error}")
            return
        if path is not None:
            print_message(f"saved {path}")


@contextlib.contextmanager
def connect_to_server(config: Config, *, alone: bool = False) -> Iterator[httpx2.Client]:
    """A client of a server. Raises as `find_server` does."""
    with find_server(config, alone=alone) as socket, open_client(socket) as client:
        yield client
