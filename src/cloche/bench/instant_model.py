"""A model that answers at once: first a call of `python` with `pass`, then `ok`. In a process of its own.

It speaks the streamed Chat Completions that our gateway requests: the rest of a turn's cost is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

INSTANT_MODEL = "instant"


def _encode_stream(*deltas: dict[str, Any], finish: str) -> bytes:
    """A whole response, as bytes on the wire."""
    head = {"id": "chatcmpl-instant", "object": "chat.completion.chunk", "created": 0, "model": INSTANT_MODEL}
    ends: list[str | None] = [*[None for _ in deltas], finish]
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in zip([*deltas, {}], ends, strict=True)
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    frames = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, {**head, "choices": [], "usage": usage}]]
    content = "".join([*frames, "data: [DONE]\n\n"]).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%s" % (
        len(content),
        content,
    )


_TOOL_CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "python", "arguments": '{"code": "pass"}'},
}
CALL_ANSWER = _encode_stream({"role": "assistant", "tool_calls": [_TOOL_CALL]}, finish="tool_calls")
TEXT_ANSWER = _encode_stream({"role": "assistant", "content": "ok"}, finish="stop")


async def _answer_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(size)
            writer.write(TEXT_ANSWER if b'"tool_call_id"' in body else CALL_ANSWER)
    writer.close()


async def _serve_model() -> None:
    server = await asyncio.start_server(_answer_requests, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Serves until it is ended; the first line on stdout is the port."""
    asyncio.run(_serve_model())


@contextlib.contextmanager
def run_instant_model() -> Iterator[str]:
    """The base URL of such a model, which runs until the block is left."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.terminate()
        process.wait()
