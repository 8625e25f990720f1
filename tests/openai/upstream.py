"""A scripted model: the only fake in the gateway's tests. A real HTTP server that says what a test has written down.

It speaks `POST /v1/chat/completions` and `POST /v1/responses`, streamed (chunk by chunk, flushed) and whole, in
OpenAI's shapes. A *leg* is the answer to one request: a list of parts. The model's name in a request picks the script;
its n-th request gets the script's n-th leg.

    model = upstream.play(style, [Code("print(6 * 7)")], [Text("It is 42.")])      # style: "chat" or "resp"
    response = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER])
    first, second = upstream.asked(model)                                          # what the gateway sent
    assert second.outputs == ["42\\n"]

Registering
    upstream.play(style, *legs)             a new model name of that style; use this
    upstream.script(name, legs)             the same for a name of yours. `legs` is a list of legs, or a function
                                            body -> leg; each leg may be a function body -> leg too
    upstream.script(name, legs, by_outputs=True)    the leg is picked by how many tool outputs the request has, so
                                            that many clients can use one model at once
    A script that has no more legs answers 500 "no leg 3 of chat-x": then the gateway asked more often than planned.

Parts that say something
    Text("..", chunks=None)                 pieces of 7 characters, or `chunks` pieces, or a list of them.
                                            `annotations=[..]` (resp only)
    Code("..", call_id=None, raw_arguments=None)     a call of the function that the request offers for code (`python`,
                                            or the last whose name starts so). `raw_arguments` instead of JSON
    Function(name, {..} | "raw", call_id=None)       a call of another one. call_id="" sends none (chat)
    Custom(name, input, call_id=None)       a call of a custom tool
    Reasoning("..", summary="..", encrypted="..", key="reasoning_content")
                                            chat: deltas of `key`. resp: a reasoning item with content, summary, and
                                            encrypted_content if the request includes it
    Refusal("..")
    Interleaved(part, part, ..)             their pieces alternate
    UnknownItem({"type": "web_search_call", ..}, events=["response.web_search_call.searching", ..])     resp only
    ChatDelta({..})                         chat only: this very delta
    Raw("event: ..\\n\\n")                   these very bytes, in the stream

Parts that do something
    Usage(input=10, output=5, cached=0, reasoning=0)      of this leg; that is the default
    WaitFor(event)                          waits for a threading.Event of the test: to prove that what came before was
                                            passed on before the rest was said
    Reached(event)                          sets one
    Slow(seconds)                           waits before every later piece of this leg
    Hang()                                  says nothing more, and keeps the connection
    BreakOff()                              closes the connection in the middle
    Garbage()                               something that is no JSON, and then nothing more
    StreamError("message", type=, code=)    chat: {"error": {..}} in the stream. resp: `error`, then response.failed
    IncompleteLength(), ContentFilter()     how the leg ends. The last item is incomplete
    NoFinish()                              ends the stream properly, without its last words
    HttpError(status, body, headers)        instead of an answer

`GET /v1/models` lists the names of all scripts.

What was asked
    upstream.asked(model) -> [Asked]        path, headers, body, and .outputs (texts of tool outputs), .tools (names of
                                            offered functions), .abandoned (an Event: the gateway hung up early)
    upstream.requests                       all of them, in order
    upstream.connections                    how many were made so far
Ids of this model's own begin with resp_up_ msg_up_ fc_up_ rs_up_ call_up_ chatcmpl-up_, so that tests see whether they
leak (call ids of functions must reach the client as they are, all others must not).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.openai import upstream_chat, upstream_responses
from tests.openai.upstream_parts import (
    BreakOff,
    ChatDelta,
    Code,
    ContentFilter,
    Custom,
    Function,
    Garbage,
    Hang,
    HttpError,
    IncompleteLength,
    Interleaved,
    NoFinish,
    Raw,
    Reached,
    Reasoning,
    Refusal,
    Slow,
    StreamError,
    Text,
    UnknownItem,
    Usage,
    WaitFor,
)

__all__ = [
    "Asked",
    "BreakOff",
    "ChatDelta",
    "Code",
    "ContentFilter",
    "Custom",
    "Function",
    "Garbage",
    "Hang",
    "HttpError",
    "IncompleteLength",
    "Interleaved",
    "NoFinish",
    "Raw",
    "Reached",
    "Reasoning",
    "Refusal",
    "ScriptedUpstream",
    "Slow",
    "StreamError",
    "Text",
    "UnknownItem",
    "Usage",
    "WaitFor",
]

Leg = Sequence[Any] | Callable[[dict[str, Any]], Any]
_WIRES = {"/v1/chat/completions": upstream_chat, "/v1/responses": upstream_responses}
_WAIT_SECONDS = 60.0  # for an event of a test, which then fails


@dataclass
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def outputs(self) -> list[str]:
        """The texts of all tool outputs that it holds."""
        if self.path == "/v1/responses":
            given = self.body["input"] if isinstance(self.body["input"], list) else []
            return [_text(item["output"]) for item in given if item.get("type", "").endswith("_call_output")]
        return [_text(message["content"]) for message in self.body["messages"] if message["role"] == "tool"]

    @property
    def tools(self) -> list[str]:
        """The names of the functions that it offers."""
        return [tool.get("function", tool).get("name", "") for tool in self.body.get("tools") or []]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "".join(part.get("text", "") for part in value)


class _Script:
    def __init__(self, name: str, legs: Any, *, by_outputs: bool):
        self._name = name
        self._legs = legs
        self._by_outputs = by_outputs
        self._count = itertools.count()

    def leg(self, asked: Asked) -> list[Any]:
        if callable(self._legs):
            return _parts(self._legs, asked.body)
        number = len(asked.outputs) if self._by_outputs else next(self._count)
        if number >= len(self._legs):
            return [HttpError(500, {"error": {"message": f"no leg {number + 1} of {self._name}", "type": "script"}})]
        return _parts(self._legs[number], asked.body)


def _parts(leg: Any, body: dict[str, Any]) -> list[Any]:
    while callable(leg):
        leg = leg(body)
    return list(leg) if isinstance(leg, (list, tuple)) else [leg]


class ScriptedUpstream:
    """Use as a context manager. Every method may be called by any thread."""

    def __init__(self) -> None:
        self.requests: list[Asked] = []
        self._asked: dict[str, list[Asked]] = {}  # the same, by model
        self._scripts: dict[str, _Script] = {}
        self._names = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="upstream", daemon=True)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.connections = 0  # that were made

    def __enter__(self) -> ScriptedUpstream:
        self._thread.start()
        start = asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 20, backlog=1000)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def url(self) -> str:
        """The base URL, with /v1."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def play(self, style: str, *legs: Leg) -> str:
        """The name of a new model that says this."""
        name = f"{style}-{next(self._names)}"
        self.script(name, list(legs))
        return name

    def script(self, model: str, legs: Any, *, by_outputs: bool = False) -> None:
        self._asked.pop(model, None)
        self._scripts[model] = _Script(model, legs, by_outputs=by_outputs)

    def asked(self, model: str) -> list[Asked]:
        """What that model was asked, in order."""
        return list(self._asked.get(model, []))

    # -- HTTP

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.connections += 1
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, _BrokenOff):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readexactly(1)
        while True:
            asked = await _read(first, reader)
            if "model" in asked.body:
                self.requests.append(asked)
                self._asked.setdefault(asked.body["model"], []).append(asked)
            answer = asyncio.create_task(self._answer(asked, writer))
            next_byte = asyncio.create_task(reader.read(1))
            try:
                await _answered(answer, next_byte)
                first = await next_byte
                if not first:
                    return
            except _Abandoned:
                asked.abandoned.set()
                return
            finally:
                answer.cancel()
                next_byte.cancel()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/v1/models":
            data = [{"id": name, "object": "model", "created": 7, "owned_by": "script"} for name in self._scripts]
            writer.write(_whole(200, json.dumps({"object": "list", "data": data})))
            return
        wire, script = _WIRES.get(asked.path), self._scripts.get(asked.body.get("model", ""))
        if wire is None or script is None:
            error = {"message": "The model does not exist", "type": "invalid_request_error", "code": "model_not_found"}
            writer.write(_whole(404, json.dumps({"error": error})))
            return
        leg = script.leg(asked)
        for part in leg:
            if isinstance(part, HttpError):
                writer.write(_whole(part.status, part.text, part.headers))
                return
        if asked.body.get("stream"):
            await _stream(wire.frames(asked.body, leg), writer)
        else:
            await _at_once(wire.whole(asked.body, leg), leg, writer)
        await writer.drain()


class _BrokenOff(Exception):
    """By us, as the script has it."""


class _Abandoned(Exception):
    """The gateway hung up before it had the whole answer."""


async def _answered(answer: asyncio.Task[None], next_byte: asyncio.Task[bytes]) -> None:
    """Until all is said. Raises _Abandoned.

    Who hangs up is heard by the end of what he sends, or by a reset, or by what he no longer takes: whichever is first.
    """
    try:
        await asyncio.wait({answer, next_byte}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and not next_byte.result():
            raise _Abandoned
        await answer
    except ConnectionError:
        raise _Abandoned from None


async def _read(first: bytes, reader: asyncio.StreamReader) -> Asked:
    head = first + await reader.readuntil(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines if each)}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(line.split()[1].partition("?")[0], headers, json.loads(content) if content else {})


def _whole(status: int, text: str, headers: dict[str, str] | None = None) -> bytes:
    content = text.encode()
    given = {"content-type": "application/json", **(headers or {}), "content-length": str(len(content))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"HTTP/1.1 {status} Scripted\r\n{lines}\r\n".encode() + content


async def _at_once(body: dict[str, Any], leg: list[Any], writer: asyncio.StreamWriter) -> None:
    content = json.dumps(body)
    for part in leg:
        if isinstance(part, Garbage):
            content = part.text
        elif isinstance(part, BreakOff):
            writer.write(_whole(200, content)[:-10])
            await writer.drain()
            raise _BrokenOff
        elif isinstance(part, (WaitFor, Reached, Slow, Hang)):
            await _act(part)
    writer.write(_whole(200, content))


async def _stream(frames: Iterator[Any], writer: asyncio.StreamWriter) -> None:
    """Text goes out at once, in a chunk of its own."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    pause = 0.0
    for frame in frames:
        if isinstance(frame, str):
            await asyncio.sleep(pause)
            content = frame.encode()
            writer.write(b"%x\r\n%s\r\n" % (len(content), content))
            await writer.drain()
        elif isinstance(frame, Slow):
            pause = frame.seconds
        elif isinstance(frame, BreakOff):
            raise _BrokenOff
        else:
            await _act(frame)
    writer.write(b"0\r\n\r\n")


async def _act(part: Any) -> None:
    match part:
        case Hang():
            await asyncio.Event().wait()
        case Slow():
            await asyncio.sleep(part.seconds)
        case Reached():
            part.event.set()
        case WaitFor():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_SECONDS):
                    while not part.event.is_set():
                        await asyncio.sleep(0.003)
