"""Questions about code that do not wait for the running cell: completion, documentation, whether code is whole.

They come over a socket of their own ("attend" in `cloche.guest.wire`), where one thread of the kernel waits for them. A
kernel that was never asked has neither: idle sandboxes have no thread, and IPython's completer is imported when it is
first needed. An answer may run code of the program (a property, a `__dir__`), as in every notebook.
"""

from __future__ import annotations

import os
import socket
import sys
from _signal import SIG_BLOCK, pthread_sigmask, valid_signals  # type: ignore[import-not-found]  # see `channel`
from _thread import allocate_lock, stack_size, start_new_thread
from typing import Any

from cloche.guest import wire

MAX_MATCHES = 1000
MAX_TEXT = 100_000  # characters of a documentation
MAX_MATCH = 1000  # of a completion
STACK_BYTES = 2 << 20
END_SECONDS = 0.25  # for the thread to end; one that runs code of the program may take longer

_open: list = []  # the assistant of this process that has a socket


def _close_in_forked_child() -> None:
    while _open:
        _open.pop().abandon()


os.register_at_fork(after_in_child=_close_in_forked_child)


class CodeAssistant:
    """The kernel's end. `attend` and `dismiss` are the main thread's."""

    def __init__(self, shell: Any):
        self._shell = shell
        self._sock: Any = None
        self._ended: Any = None  # a lock that the thread holds

    def attend(self, fd: int) -> None:
        """Answers questions from that socket from now on, and no longer those from the one before it."""
        self.dismiss()
        self._sock = sock = socket.socket(fileno=fd)
        os.set_inheritable(fd, False)
        self._ended = ended = allocate_lock()
        ended.acquire()
        _open.append(self)
        before = stack_size(STACK_BYTES)
        try:
            start_new_thread(self._serve, (sock, ended))
        except RuntimeError:  # no room for a thread: the host hears that the socket is closed
            self._sock.close()
        finally:
            stack_size(before)

    def dismiss(self) -> None:
        """Ends the thread and closes the socket, which tells the host."""
        if self._sock is None:
            return
        if self in _open:
            _open.remove(self)
        sock, self._sock = self._sock, None
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._ended.acquire(timeout=END_SECONDS)
        sock.close()

    def abandon(self) -> None:
        """In a forked child: closes the descriptor, without a word to the host. There is no thread."""
        sock, self._sock = self._sock, None
        if sock is not None:
            try:
                os.close(sock.detach())
            except OSError:
                pass

    def _serve(self, sock: Any, ended: Any) -> None:
        try:
            pthread_sigmask(SIG_BLOCK, valid_signals())  # signals are the main thread's
            reader = wire.FrameReader(sock)
            while True:
                frame = reader.next()
                if frame is None:
                    return
                wire.send_frame(sock, *self._answer(*frame[:2]))
        except (OSError, wire.WireError):
            pass
        finally:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            ended.release()

    def _answer(self, header: dict, body: bytes) -> tuple:
        try:
            code = body.decode("utf-8", "surrogatepass")
            cursor = min(int(header.get("cursor", len(code))), len(code))
            found = _QUESTIONS[header["do"]](self._shell, code, cursor, header)
            return {"ask": header.get("ask")}, wire.encode_json(found)
        except BaseException as error:  # noqa: BLE001 - code of the program may raise anything
            return {"ask": header.get("ask"), "problem": type(error).__name__}, b""


def complete_code(shell: Any, code: str, cursor: int, _header: dict) -> dict:
    """The completions at the cursor, which all replace the same characters."""
    completer = shell.load_completer()
    module = sys.modules[type(completer).__module__]
    with module.provisionalcompleter():
        found = []
        for each in module.rectify_completions(code, completer.completions(code, cursor)):
            found.append(each)
            if len(found) >= MAX_MATCHES:
                break
    if not found:
        return {"start": cursor, "end": cursor, "matches": [], "types": []}
    start, texts = found[0].start, [_plain(each.text, MAX_MATCH) for each in found]
    if code[start : start + 1] == "." and all(text.startswith(".") for text in texts):  # attributes are names alone
        start, texts = start + 1, [text[1:] for text in texts]
    types = [_plain(each.type or "", MAX_MATCH) for each in found]
    return {"start": start, "end": found[0].end, "matches": texts, "types": types}


def describe_code(shell: Any, code: str, cursor: int, header: dict) -> dict:
    """The documentation of the name at the cursor; with `detail`, its source too."""
    from IPython.utils.tokenutil import token_at_cursor

    name = token_at_cursor(code, cursor)
    try:
        bundle = shell.object_inspect_mime(name, detail_level=1 if header.get("detail") else 0)
    except KeyError:
        return {"found": False, "text": ""}
    return {"found": True, "text": _plain(bundle["text/plain"], MAX_TEXT)}


def check_code(shell: Any, code: str, _cursor: int, _header: dict) -> dict:
    """Whether a cell is whole: "complete", "incomplete" with the indentation of the next line, or "invalid"."""
    status, indent = shell.input_transformer_manager.check_complete(code)
    return {"status": str(status), "indent": int(indent or 0)}


def _plain(text: Any, most: int) -> str:
    return str(text)[:most].encode("utf-8", "backslashreplace").decode()


_QUESTIONS = {"complete": complete_code, "describe": describe_code, "check": check_code}
