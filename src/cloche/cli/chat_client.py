"""A conversation with a model, over the server's `/v1`: what any client of OpenAI's does, in a few calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx2
import msgspec

from cloche import errors

ECHO = "cloche/echo"
QUIET_SECONDS = 120.0  # the server says something every few seconds
UPLOAD_SECONDS = 600.0
INTERRUPTED_TRIES, INTERRUPTED_SECONDS = 3, 0.3
NOT_KEPT = 400
ENDS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}

Event = dict[str, Any]


class ContainerFile(NamedTuple):
    id: str
    path: str
    size_bytes: int


class EventsIn:
    """Events out of a `text/event-stream`, however it is cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Event]:
        """Raises ProtocolViolation for what is no JSON object."""
        start = max(len(self._buffer) - 1, 0)
        self._buffer += data
        while (end := self._buffer.find(b"\n\n", start)) >= 0:
            block, start = bytes(self._buffer[:end]), 0
            del self._buffer[: end + 2]
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines and lines != [b"[DONE]"]:
                yield _object(b"\n".join(lines))


class Conversation:
    """`container` is where its code ran last, as far as any did."""

    def __init__(self, client: httpx2.Client, model: str | None):
        self._client = client
        self.model = model or self._first_model()
        self.container: str | None = None
        self._previous: str | None = None  # the last answer
        self._interrupted: str | None = None  # the one after it, of which the end was not heard
        self._unsent: list[str] = []  # ids of files that no answer knows yet

    def attach(self, path: Path) -> None:
        """The model's code finds it in /mnt/data from the next message on. Raises InvalidRequest."""
        try:
            with open(path, "rb") as file:
                sent = {"files": {"file": (path.name, file)}, "data": {"purpose": "user_data"}}
                told = self._json("POST", "/v1/files", timeout=UPLOAD_SECONDS, **sent)
        except OSError as error:
            raise errors.InvalidRequest(f"cannot read {path}: {error.strerror}") from None
        self._unsent.append(str(told["id"]))

    def ask(self, text: str) -> Generator[Event, None, None]:
        """The events of an answer. Whoever stops before the end interrupts it, and the code that it runs.

        Raises what the server answers instead (UpstreamFailed if it is the model's fault), and Unavailable where it
        breaks off.
        """
        with _broken_off(), self._answer(text) as response:
            events = EventsIn()
            for chunk in response.iter_raw():
                for event in events.feed(chunk):
                    self._note(event)
                    yield event
                    if event.get("type") in ENDS:
                        return
        raise errors.Unavailable("the server broke off in the middle of its answer")

    @contextlib.contextmanager
    def _answer(self, text: str) -> Iterator[httpx2.Response]:
        """Goes on from an answer that was interrupted; from the one before, if the server did not keep that."""
        *tries, last = [*[self._interrupted] * INTERRUPTED_TRIES, self._previous]
        for previous in filter(None, tries):
            with self._asked(text, previous) as response:
                if response.status_code != NOT_KEPT:
                    yield _checked(response)
                    return
            time.sleep(INTERRUPTED_SECONDS)  # it is kept once its code has stopped
        with self._asked(text, last) as response:
            yield _checked(response)

    def _asked(self, text: str, previous: str | None) -> contextlib.AbstractContextManager[httpx2.Response]:
        body = self._body(text, previous)
        return self._client.stream("POST", "/v1/responses", json=body, timeout=QUIET_SECONDS)

    def forget(self) -> None:
        """The next message begins a new conversation, in a new container."""
        self._previous = self._interrupted = self.container = None
        self._unsent.clear()

    def files(self) -> list[ContainerFile]:
        """Those of the container."""
        if self.container is None:
            return []
        told = self._json("GET", f"/v1/containers/{quote(self.container, safe='')}/files", params={"limit": 100})
        return [ContainerFile(str(each["id"]), str(each["path"]), int(each.get("bytes") or 0)) for each in told["data"]]

    @contextlib.contextmanager
    def content(self, container: str, file: str) -> Iterator[Iterator[bytes]]:
        """What is in a file of a container. Raises what the server answers instead."""
        path = f"/v1/containers/{quote(container, safe='')}/files/{quote(file, safe='')}/content"
        with _broken_off(), self._client.stream("GET", path, timeout=QUIET_SECONDS) as response:
            yield _checked(response).iter_bytes()

    def _body(self, text: str, previous: str | None) -> dict[str, Any]:
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

    def _note(self, event: Event) -> None:
        item = event.get("item")
        if isinstance(item, dict) and item.get("type") == "code_interpreter_call":
            self.container = str(item.get("container_id"))
        kind = str(event.get("type"))
        if kind == "response.created":
            self._interrupted = str(event["response"]["id"])
        if kind in ENDS:
            self._interrupted = None
        if ENDS.get(kind) in ("completed", "incomplete"):
            self._previous = str(event["response"]["id"])
            self._unsent.clear()

    def _first_model(self) -> str:
        try:
            told = self._json("GET", "/v1/models")
        except errors.NotFound:
            return ECHO
        names = [str(each["id"]) for each in told["data"]]
        return next((name for name in names if name != ECHO and not set(name) & set("*?[")), ECHO)

    def _json(self, method: str, path: str, **options: Any) -> Any:
        with _broken_off():
            response = self._client.request(method, path, **options)
        if not response.is_success:
            raise error_of(response)
        return _object(response.content)


def error_of(response: httpx2.Response) -> errors.ClocheError:
    """The error that an answer of `/v1` tells of."""
    try:
        message = str(_object(response.content)["error"]["message"])
    except (errors.ProtocolViolation, KeyError, TypeError):
        message = f"the server answered with status {response.status_code}"
    kinds = {400: errors.InvalidRequest, 404: errors.NotFound, 413: errors.TooLarge, 503: errors.Unavailable}
    return kinds.get(response.status_code, errors.UpstreamFailed)(message)


def _checked(response: httpx2.Response) -> httpx2.Response:
    if not response.is_success:
        response.read()
        raise error_of(response)
    return response


@contextlib.contextmanager
def _broken_off() -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        raise errors.Unavailable(f"the server does not answer: {error}") from None


def _object(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise errors.ProtocolViolation("the server sent something that is no JSON object") from None
