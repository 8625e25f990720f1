"""Stands between openai-python's resource tests and a server, and swaps the ids that they write down for real ones.

Those tests were made for a mock that takes any id: they retrieve `container_id`, delete `conv_123`. Here each of these
words in a path becomes the id of a thing that was just made for it. Nothing else of a request or an answer is changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

METHODS = ["GET", "POST", "DELETE"]
OF_THE_CONNECTION = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "content-encoding"}
FILE = {"file": ("known.txt", b"known")}
MESSAGE = {"type": "message", "role": "user", "content": "known"}
# In the background, because only such a response can be cancelled.
RESPONSE = {"model": "cloche/echo", "input": "known", "background": True}


@contextmanager
def knowing_ids(url: str) -> Iterator[str]:
    """The address of a server before the one at `url` that knows the tests' ids, until the block is left."""
    config = uvicorn.Config(KnownIds(url).app, port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server that knows the tests' ids did not start")
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


class KnownIds:
    """The requests of one run. A container is kept until a test deletes it; anything else is made for each request."""

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=120)
        self.container: str | None = None
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=METHODS)])

    async def answer(self, request: Request) -> Response:
        path = await self.known(request.url.path.split("/"))
        body = await request.body()
        if b'"file_id":"file_id"' in body:
            body = body.replace(b'"file_id":"file_id"', f'"file_id":"{await self.file()}"'.encode())
        sent = self.client.build_request(
            request.method, path, params=request.url.query, headers=kept(request.headers), content=body
        )
        got = await self.client.send(sent)
        if request.method == "DELETE" and path == f"/v1/containers/{self.container}":
            self.container = None
        return Response(got.content, got.status_code, kept(got.headers))

    async def known(self, parts: list[str]) -> str:
        """The path with real ids. `parts` begin with "", "v1" and the kind of thing."""
        match parts[2:]:
            case ["containers", "container_id", *_]:
                self.container = parts[3] = self.container or await self.made("/v1/containers", json={"name": "known"})
                if parts[5:6] == ["file_id"]:
                    parts[5] = await self.made(f"/v1/containers/{self.container}/files", files=FILE)
            case ["files", "file_id", *_]:
                parts[3] = await self.file()
            case ["conversations", "conv_123", *_]:
                parts[3] = await self.made("/v1/conversations", json={"items": [MESSAGE]})
                if parts[5:6] == ["msg_abc"]:
                    listed = await self.client.get(f"/v1/conversations/{parts[3]}/items")
                    parts[5] = listed.json()["data"][0]["id"]
            case ["responses", "response_id" | "resp_677efb5139a88190b512bc3fef8e535d", *_]:
                parts[3] = await self.made("/v1/responses", json=RESPONSE)
        return "/".join(parts)

    async def file(self) -> str:
        return await self.made("/v1/files", data={"purpose": "assistants"}, files=FILE)

    async def made(self, path: str, **body: Any) -> str:
        """The id of what this request makes."""
        done = await self.client.post(path, **body)
        done.raise_for_status()
        return str(done.json()["id"])


def kept(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_THE_CONNECTION}
