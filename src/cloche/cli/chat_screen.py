"""The display of a chat: text, code and output as they come, and images where the terminal can show them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple
from urllib.parse import quote

import httpx2
import msgspec

from cloche import errors
from cloche.cli.terminal import STDERR, STDOUT, choose_drawer, print_message, write_all
from cloche.mime_types import EXTENSIONS

# A conversation with a model over the server's `/v1`, in the few calls that every OpenAI client makes.

ECHO_MODEL = "cloche/echo"
QUIET_SECONDS = 120.0  # the server says something every few seconds
UPLOAD_SECONDS = 600.0
INTERRUPTED_TRIES, INTERRUPTED_SECONDS = 3, 0.3
STATUS_NOT_KEPT = 400
END_EVENTS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}

ChatEvent = dict[str, Any]


class ChatContainerFile(NamedTuple):
    id: str
    path: str
    size_bytes: int


class ChatEventParser:
    """Parses the events of a `text/event-stream`, split at any byte."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[ChatEvent]:
        """Yields the events complete so far. Raises ProtocolViolation for anything but a JSON object."""
        start = max(len(self._buffer) - 1, 0)
        self._buffer += data
        while (end := self._buffer.find(b"\n\n", start)) >= 0:
            block, start = bytes(self._buffer[:end]), 0
            del self._buffer[: end + 2]
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines and lines != [b"[DONE]"]:
                yield _decode_object(b"\n".join(lines))


class ChatConversation:
    """A conversation. `container` is the container in which its code ran last, if any did."""

    def __init__(self, client: httpx2.Client, model: str | None):
        self._client = client
        self.model = model or self._first_model()
        self.container: str | None = None
        self._previous: str | None = None  # the last answer
        self._interrupted: str | None = None  # the one after it, without a reported end
        self._unsent: list[str] = []  # ids of files that no answer knows yet

    def attach(self, path: Path) -> None:
        """The model's code finds it in /mnt/data from the next message on. Raises InvalidRequest."""
        try:
            with open(path, "rb") as file:
                sent = {"files": {"file": (path.name, file)}, "data": {"purpose": "user_data"}}
                told = self._request_json("POST", "/v1/files", timeout=UPLOAD_SECONDS, **sent)
        except OSError as error:
            raise errors.InvalidRequest(f"cannot read {path}: {error.strerror}") from None
        self._unsent.append(str(told["id"]))

    def ask(self, text: str) -> Generator[ChatEvent, None, None]:
        """Yields the events of an answer.

        Closing it before the end interrupts the answer and the code that it runs.

        Raises the server's error instead (UpstreamFailed if it is the model's fault), and Unavailable where the
        answer breaks off.
        """
        with _map_http_errors(), self._open_answer(text) as response:
            events = ChatEventParser()
            for chunk in response.iter_raw():
                for event in events.feed(chunk):
                    self._track_event(event)
                    yield event
                    if event.get("type") in END_EVENTS:
                        return
        raise errors.Unavailable("the server broke off in the middle of its answer")

    @contextlib.contextmanager
    def _open_answer(self, text: str) -> Iterator[httpx2.Response]:
        """Continues from an interrupted answer; from the one before, if the server did not keep that."""
        *tries, last = [*[self._interrupted] * INTERRUPTED_TRIES, self._previous]
        for previous in filter(None, tries):
            with self._post_message(text, previous) as response:
                if response.status_code != STATUS_NOT_KEPT:
                    yield _check_response(response)
                    return
            time.sleep(INTERRUPTED_SECONDS)  # it is kept once its code has stopped
        with self._post_message(text, last) as response:
            yield _check_response(response)

    def _post_message(self, text: str, previous: str | None) -> contextlib.AbstractContextManager[httpx2.Response]:
        body = self._request_body(text, previous)
        return self._client.stream("POST", "/v1/responses", json=body, timeout=QUIET_SECONDS)

    def forget(self) -> None:
        """Resets it: the next message begins a new conversation, in a new container."""
        self._previous = self._interrupted = self.container = None
        self._unsent.clear()

    def files(self) -> list[ChatContainerFile]:
        """The files of the container."""
        if self.container is None:
            return []
        told = self._request_json(
            "GET", f"/v1/containers/{quote(self.container, safe='')}/files", params={"limit": 100}
        )
        return [
            ChatContainerFile(str(each["id"]), str(each["path"]), int(each.get("bytes") or 0)) for each in told["data"]
        ]

    @contextlib.contextmanager
    def content(self, container: str, file: str) -> Iterator[Iterator[bytes]]:
        """The content of a container's file. Raises the server's error."""
        path = f"/v1/containers/{quote(container, safe='')}/files/{quote(file, safe='')}/content"
        with _map_http_errors(), self._client.stream("GET", path, timeout=QUIET_SECONDS) as response:
            yield _check_response(response).iter_bytes()

    def _request_body(self, text: str, previous: str | None) -> dict[str, Any]:
        container = {"type": "auto", "file_ids": self._unsent}
        return {
            "model": self.model,
            "input": text,
            "tools": [{"type": "code_interpreter", "container": container}],
            "include": ["code_interpreter_call.outputs", "code_interpreter_call.new_files"],
            "stream": True,
            "stream_options": {"include_outputs": True},
            **({"previous_response_id": previous} if previous else {}),
        }

    def _track_event(self, event: ChatEvent) -> None:
        item = event.get("item")
        if isinstance(item, dict) and item.get("type") == "code_interpreter_call":
            self.container = str(item.get("container_id"))
        kind = str(event.get("type"))
        if kind == "response.created":
            self._interrupted = str(event["response"]["id"])
        if kind in END_EVENTS:
            self._interrupted = None
        if END_EVENTS.get(kind) in ("completed", "incomplete"):
            self._previous = str(event["response"]["id"])
            self._unsent.clear()

    def _first_model(self) -> str:
        try:
            told = self._request_json("GET", "/v1/models")
        except errors.NotFound:
            return ECHO_MODEL
        names = [str(each["id"]) for each in told["data"]]
        return next((name for name in names if name != ECHO_MODEL and not set(name) & set("*?[")), ECHO_MODEL)

    def _request_json(self, method: str, path: str, **options: Any) -> Any:
        with _map_http_errors():
            response = self._client.request(method, path, **options)
        if not response.is_success:
            raise chat_error(response)
        return _decode_object(response.content)


def chat_error(response: httpx2.Response) -> errors.ClocheError:
    """The exception for an error response of `/v1`."""
    try:
        message = str(_decode_object(response.content)["error"]["message"])
    except (errors.ProtocolViolation, KeyError, TypeError):
        message = f"the server answered with status {response.status_code}"
    kinds = {400: errors.InvalidRequest, 404: errors.NotFound, 413: errors.TooLarge, 503: errors.Unavailable}
    return kinds.get(response.status_code, errors.UpstreamFailed)(message)


def _check_response(response: httpx2.Response) -> httpx2.Response:
    if not response.is_success:
        response.read()
        raise chat_error(response)
    return response


@contextlib.contextmanager
def _map_http_errors() -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        raise errors.Unavailable(f"the server does not answer: {error}") from None


def _decode_object(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise errors.ProtocolViolation("the server sent something that is not a JSON object") from None


# Files and images that a chat saves.
#
# A model names them, so nothing lands outside, and nothing is replaced.

MAX_NAME_CHARACTERS = 150
MAX_TRIES = 10_000


class SavedFiles:
    """Saves into `directory`, or into a new temporary one. It is made when the first file comes.

    Takes `max_bytes` in all: a file of a sandbox may claim any size.
    """

    def __init__(self, directory: Path | None, max_bytes: int):
        self._directory = directory
        self._left_bytes = max_bytes
        self._images: set[bytes] = set()  # digests: a picture that was shown can also be cited as a file
        self._known: set[tuple[str, bytes]] = set()

    def image(self, mime: str, content: bytes) -> Path | None:
        """Saves an image and returns its path. Raises InvalidRequest if it cannot be written."""
        self._images.add(hashlib.sha256(content).digest())
        return self._write_file(f"image-1.{EXTENSIONS.get(mime, 'bin')}", [content])[0]

    def file(self, name: str, chunks: Iterable[bytes]) -> Path | None:
        """Saves a file and returns its path; None for a duplicate.

        Raises InvalidRequest, and the errors of `chunks`.
        """
        path, digest = self._write_file(name, chunks)
        if digest in self._images or (name, digest) in self._known:
            path.unlink()
            return None
        self._known.add((name, digest))
        return path

    def _write_file(self, name: str, chunks: Iterable[bytes]) -> tuple[Path, bytes]:
        digest = hashlib.sha256()
        try:
            path, file = _create_new_file(self._target_directory(), safe_file_name(name))
            with file:
                for chunk in chunks:
                    self._left_bytes -= len(chunk)
                    if self._left_bytes < 0:
                        path.unlink()
                        raise errors.TooLarge(f"not saved: {path.name} (a chat saves only so much in all)")
                    digest.update(chunk)
                    file.write(chunk)
        except OSError as error:
            if isinstance(error, errors.ClocheError):
                raise
            raise errors.InvalidRequest(f"not saved: {safe_file_name(name)} ({error.strerror})") from None
        return path, digest.digest()

    def _target_directory(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="cloche-chat-"))
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory


def safe_file_name(name: str) -> str:
    """The last part of a name, which is visible, printable and not a directory."""
    last = PurePosixPath(name).name.replace("\\", "_")
    kept = "".join(each if each.isprintable() else "_" for each in last).strip().lstrip(".")
    stem, suffix = os.path.splitext(kept)
    return (
        stem[: MAX_NAME_CHARACTERS - len(suffix)] + suffix if len(suffix) < 20 else kept[:MAX_NAME_CHARACTERS]
    ) or "file"


def _create_new_file(directory: Path, name: str) -> tuple[Path, IO[bytes]]:
    """Creates a file: `name`, else `name-2.ext`, and so on; `image-1.png` is followed by `image-2.png`."""
    stem, suffix = os.path.splitext(name)
    for number in range(1, MAX_TRIES):
        tried = f"image-{number}" if stem == "image-1" else stem if number == 1 else f"{stem}-{number}"
        path = directory / (tried + suffix)
        try:
            return path, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")
        except FileExistsError:
            continue
    raise errors.InvalidRequest(f"not saved: {name} ({directory} has too many of that name)")


TextStyle = Literal["text", "dim", "output"]

_DATA_URL = re.compile(r"data:(image/[a-z+]{1,20});base64,", re.ASCII)
_DELTA_STYLES: dict[str, TextStyle] = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "text",
    "response.code_interpreter_call_code.delta": "dim",
    "response.reasoning_summary_text.delta": "dim",
    "response.reasoning_text.delta": "dim",
    "response.code_interpreter_call_output.delta": "output",
}
# Control characters except tab and newline, and marks that change the text direction: they could fake output.
_HIDDEN_CHARACTERS = [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SAFE_TRANSLATION = {**dict.fromkeys(_HIDDEN_CHARACTERS, "\N{REPLACEMENT CHARACTER}"), 0x2028: "\n", 0x2029: "\n"}


class FileCitation(NamedTuple):
    """A file that an answer cites."""

    container: str
    file: str
    name: str


class ChatScreen:
    """Feed it the events of one answer. Its text goes to stdout, all else to stderr: an answer can be piped."""

    def __init__(self, files: SavedFiles):
        self._files = files
        self._draw = choose_drawer(os.environ) if os.isatty(STDOUT) else None
        self._dims = os.isatty(STDERR)
        self._manner: TextStyle | None = None
        self._in_line = False
        self._citations: dict[FileCitation, None] = {}
        self.status: str | None = None  # how it ended

    @property
    def citations(self) -> list[FileCitation]:
        return list(self._citations)

    def show(self, event: ChatEvent) -> None:
        kind = str(event.get("type"))
        if kind in _DELTA_STYLES:
            self._write_text(_DELTA_STYLES[kind], str(event.get("delta", "")))
        elif kind == "response.output_text.annotation.added":
            self._note_citation(event.get("annotation"))
        elif kind == "response.output_item.done":
            self._show_item(event.get("item"))
        elif kind in END_EVENTS:
            self._finish_answer(END_EVENTS[kind], event.get("response"))

    def end_line(self) -> None:
        """Ends the current line, so that the next output begins a new one."""
        if self._in_line:
            self._in_line = False
            write_all(STDOUT if self._manner == "text" else STDERR, "\n")

    def _write_text(self, manner: TextStyle, text: str) -> None:
        if manner != self._manner:
            self.end_line()
            self._manner = manner
        shown = safe_text(text)
        if not shown:
            return
        self._in_line = not shown.endswith("\n")
        if manner == "dim" and self._dims:
            shown = f"\x1b[2m{shown}\x1b[22m"
        write_all(STDOUT if manner == "text" else STDERR, shown)

    def _note_citation(self, annotation: Any) -> None:
        if isinstance(annotation, dict) and annotation.get("type") == "container_file_citation":
            named = (str(annotation.get(name, "")) for name in ("container_id", "file_id", "filename"))
            self._citations[FileCitation(*named)] = None

    def _show_item(self, item: Any) -> None:
        if not isinstance(item, dict) or item.get("type") != "code_interpreter_call":
            return
        for output in item.get("outputs") or []:
            if output.get("type") == "image":
                self._show_image(str(output.get("url", "")))

    def _show_image(self, url: str) -> None:
        match = _DATA_URL.match(url)
        if match is None:
            return
        self.end_line()
        content = base64.b64decode(url[match.end() :])
        drawn = self._draw({match[1]: content}) if self._draw else None
        if drawn is not None:
            write_all(STDOUT, drawn)
        try:
            print_message(f"saved {self._files.image(match[1], content)}")
        except errors.InvalidRequest as error:
            print_message(str(error))

    def _finish_answer(self, status: str, response: Any) -> None:
        self.status = status
        self.end_line()
        response = response if isinstance(response, dict) else {}
        if status == "failed":
            print_message(f"the answer failed: {(response.get('error') or {}).get('message', 'no reason was given')}")
        elif status == "incomplete":
            print_message(
                f"the answer is incomplete: {(response.get('incomplete_details') or {}).get('reason', 'unknown')}"
            )


def safe_text(text: str) -> str:
    """Text of a model or its programs, made unable to steer the terminal."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(_SAFE_TRANSLATION)
