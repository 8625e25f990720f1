"""What `cloche chat` does once its command line is understood."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from cloche import errors
from cloche.cli.chat_screen import ChatScreen, Citation, Conversation, SavedFiles, safe
from cloche.cli.chat_server import reached
from cloche.cli.session import ENDING_SIGNALS
from cloche.cli.shell_session import history, leave, prompted
from cloche.cli.terminal import STDERR, STDOUT, say, write
from cloche.config import Config

ANSWERED, FAILED = 0, 1
HELP = """\
/file PATH  attach a file: the model's code finds it in /mnt/data
/files      list the files in /mnt/data
/save NAME  save one of them here
/new        begin a new conversation
/quit       leave, as Ctrl-D does
A message with ``` goes on until the closing ```. Ctrl-C interrupts an answer, and the code that it runs.
"""


def chat(
    config: Config, *, model: str | None, files: tuple[Path, ...], out: Path | None, message: str | None, alone: bool
) -> int:
    """Until the user leaves. Gives the exit status. Raises what `reached` does, and KeyboardInterrupt."""
    for each in ENDING_SIGNALS:
        signal.signal(each, leave)
    saved = SavedFiles(out, config.limits.default.space_bytes)
    with reached(config, alone=alone) as client:
        talk = Talk(Conversation(client, model), saved)
        for path in files:
            talk.conversation.attach(path)
        if message is not None:
            return talk.say(message)
        return _converse(talk, Path(config.data_dir))


def _converse(talk: Talk, data_dir: Path) -> int:
    if not os.isatty(0):
        return _loop(talk, lambda prompt: _piped())
    write(STDERR, f"Chat with {safe(talk.conversation.model)}. Ctrl-C interrupts, Ctrl-D leaves, /help helps.\n")
    with history(data_dir / "chat_history"):
        return _loop(talk, prompted)


def _loop(talk: Talk, ask: Callable[[str], str | None]) -> int:
    while True:
        try:
            message = _message(ask)
            if message is None or message.strip() == "/quit":
                return ANSWERED
            talk.hear(message)
        except KeyboardInterrupt:
            if not os.isatty(0):
                raise
            write(STDOUT, "\n")
        except errors.ClocheError as error:
            say(str(error))


def _piped() -> str | None:
    line = sys.stdin.buffer.readline()
    return line.decode("utf-8", "replace").rstrip("\r\n") if line else None


def _message(ask: Callable[[str], str | None]) -> str | None:
    """A line; or several, where a fence is open."""
    lines: list[str] = []
    while not lines or _is_open(lines):
        line = ask("... " if lines else ">>> ")
        if line is None:
            return "\n".join(lines) if lines else None
        lines.append(line)
    return "\n".join(lines)


def _is_open(lines: list[str]) -> bool:
    return sum(line.startswith("```") for line in lines) % 2 == 1


class Talk:
    """One user and one model."""

    def __init__(self, conversation: Conversation, saved: SavedFiles):
        self.conversation = conversation
        self._saved = saved

    def hear(self, message: str) -> None:
        """A message, or a command. Raises ClocheError."""
        word, _, rest = message.strip().partition(" ")
        commands: dict[str, Callable[[str], object]] = {
            "/file": self._attach,
            "/files": self._list,
            "/save": self._save,
            "/new": lambda rest: self.conversation.forget(),
            "/help": lambda rest: write(STDERR, HELP),
        }
        if word in commands:
            commands[word](rest.strip())
        elif word.startswith("/") and "/" not in word[1:] and "\n" not in message:
            raise errors.InvalidRequest(f"there is no command {word}: /help lists those that there are")
        elif word:
            self.say(message)

    def say(self, message: str) -> int:
        """Shows the answer. Gives the exit status that it means. Raises what `ask` does, but for models."""
        screen = ChatScreen(self._saved)
        try:
            with contextlib.closing(self.conversation.ask(message)) as events:
                for event in events:
                    screen.show(event)
        except errors.UpstreamFailed as error:
            say(f"the answer failed: {error}")
        finally:
            screen.end_line()
        for citation in screen.citations:
            self._keep(citation)
        return ANSWERED if screen.status == "completed" else FAILED

    def _attach(self, path: str) -> None:
        if not path:
            raise errors.InvalidRequest("say which: /file PATH")
        self.conversation.attach(Path(path).expanduser())
        say(f"attached {path}")

    def _list(self, rest: str) -> None:
        for each in self.conversation.files():
            write(STDOUT, f"{each.size_bytes:>12,}  {safe(each.path)}\n")

    def _save(self, name: str) -> None:
        for each in self.conversation.files():
            if name and name in (each.path, each.path.removeprefix("/mnt/data/")):
                self._keep(Citation(str(self.conversation.container), each.id, name))
                return
        raise errors.NotFound(f"there is no file {name!r}: /files lists those that there are")

    def _keep(self, citation: Citation) -> None:
        try:
            with self.conversation.content(citation.container, citation.file) as chunks:
                path = self._saved.file(citation.name, chunks)
        except errors.ClocheError as error:
            say(f"{citation.name}: {error}")
            return
        if path is not None:
            say(f"saved {path}")
