"""The library against servers that are not what they should be: real ones, on sockets, that say something else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.server
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from websockets.asyncio.server import ServerConnection, serve

from cloche import errors
from cloche.events import Output
from cloche.network_policy import NetworkPolicy
from cloche.sdk import remote
from cloche.sdk.remote_execution import RemoteCommands, RemoteContext
from cloche.sdk.remote_sandbox import DEFAULT_CONTEXT_INFO, RemoteFiles, RemoteNetwork
from cloche.sdk.remote_server import ServerClient

MIB = 1 << 20
ATTACHED = json.dumps({"type": "attached", "id": "../x", "pid": 1})
ACCEPTED = json.dumps({"type": "accepted", "execution": "x"})
OUTPUT = json.dumps({"type": "output", "stream": "stdout", "text": "x"})
CHANGE = json.dumps({"type": "change", "kind": "created", "path": "x"})


@contextlib.contextmanager
def http_server(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[int]:
    """The port of a server that answers everything so."""

    class Answer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            answer(self)

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@contextlib.asynccontextmanager
async def socket_server(*said: str | bytes) -> AsyncIterator[ServerClient]:
    """A client of a server that says this over every WebSocket once it is asked, and closes as if all was well."""

    async def talk(connection: ServerConnection) -> None:
        await connection.recv()
        for each in said:
            await connection.send(each)
            if each is ACCEPTED:
                await connection.recv()

    async with talking(talk) as server:
        yield server


@contextlib.asynccontextmanager
async def talking(talk: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[ServerClient]:
    async with serve(talk, "127.0.0.1", 0, compression=None) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]
        async with contextlib.aclosing(ServerClient(f"http://127.0.0.1:{port}", "key")) as server:
            yield server


ASKS: dict[str, Callable[[ServerClient], Awaitable[object]]] = {
    "socket": lambda server: server.connect("/sandboxes/x/execute"),
    "read": lambda server: RemoteFiles(server, "x").read("/a"),
    "open_read": lambda server: RemoteFiles(server, "x").open_read("/a"),
    "write": lambda server: RemoteFiles(server, "x").write("/a", b"content"),
    "kill": lambda server: RemoteCommands(server, "x").kill("p1"),
    "list": lambda server: RemoteCommands(server, "x").list(),
    "network": lambda server: RemoteNetwork(server, "../x").policy(),
    "set_network": lambda server: RemoteNetwork(server, "x").set(NetworkPolicy(), keep_secrets=True),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_redirect_is_an_error_and_the_key_stays_here(ask: str):
    seen: list[str] = []

    def elsewhere(request: http.server.BaseHTTPRequestHandler) -> None:
        seen.append(str(request.headers))
        request.send_error(404)

    with http_server(elsewhere) as other:

        def redirect(request: http.server.BaseHTTPRequestHandler) -> None:
            scheme = "ws" if request.headers.get("upgrade") else "http"
            request.send_response(302)
            request.send_header("Location", f"{scheme}://localhost:{other}{request.path}")
            request.send_header("Content-Length", "5")
            request.end_headers()
            request.wfile.write(b"moved")

        async def asked(port: int) -> None:
            async with contextlib.aclosing(ServerClient(f"http://127.0.0.1:{port}", "secret")) as server:
                await ASKS[ask](server)

        with http_server(redirect) as port, pytest.raises(errors.Unavailable, match="use this url") as refused:
            asyncio.run(asked(port))
    assert f"//localhost:{other}'" in str(refused.value)
    assert seen == []


def test_a_redirect_to_nowhere_is_not_ours():
    with http_server(lambda request: request.send_error(304)) as port:

        async def asked() -> None:
            async with contextlib.aclosing(ServerClient(f"http://127.0.0.1:{port}", "secret")) as server:
                await RemoteCommands(server, "x").list()

        with pytest.raises(errors.Unavailable, match="is it Cloche"):
            asyncio.run(asked())


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ([], "lost"),
        ([OUTPUT], "is it Cloche"),
        ([b"zzz"], "is it Cloche"),
        (["hello"], "is it Cloche"),
        ([ATTACHED], "lost"),
        ([ATTACHED, OUTPUT], "lost"),
        ([ATTACHED, CHANGE], "is it Cloche"),
        ([ATTACHED, b"zzz"], "is it Cloche"),
    ],
)
def test_a_process_of_a_server_that_says_something_else(said: list[str | bytes], match: str):
    async def use() -> None:
        async with socket_server(*said) as server:
            process = await RemoteCommands(server, "x").start("id", background=True)
            await process.result()

    with pytest.raises(errors.Unavailable, match=match):
        asyncio.run(use())


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ([], "lost"),
        ([OUTPUT], "is it Cloche"),
        ([b"zzz"], "is it Cloche"),
        ([ACCEPTED], "lost"),
        ([ACCEPTED, OUTPUT], "lost"),
        ([ACCEPTED, CHANGE], "is it Cloche"),
        ([ACCEPTED, b"zzz"], "is it Cloche"),
    ],
)
def test_an_execution_of_a_server_that_says_something_else(said: list[str | bytes], match: str):
    async def use() -> None:
        async with socket_server(*said) as server:
            execution = await RemoteContext(server, "x", DEFAULT_CONTEXT_INFO).execute("1")
            await execution.result()

    with pytest.raises(errors.Unavailable, match=match):
        asyncio.run(use())


def test_an_unread_terminal_takes_bounded_memory_and_loses_nothing():
    sent = 0

    async def flood(connection: ServerConnection) -> None:
        nonlocal sent
        await connection.recv()
        await connection.send(ATTACHED)
        for _ in range(1024):
            await connection.send(b"x" * (MIB // 16))
            sent += MIB // 16
        await connection.send(json.dumps({"type": "exited", "exit_code": 0}))

    async def use() -> int:
        async with talking(flood) as server:
            process = await RemoteCommands(server, "x").start("yes", pty=(24, 80), background=True)
            before = -1
            while sent > before:
                before = sent
                await asyncio.sleep(0.5)  # a flood that is not held would have sent more
            assert sent < 32 * MIB
            return sum([len(event.text) async for event in process if isinstance(event, Output)])

    assert asyncio.run(use()) == 64 * MIB


def test_many_keys_share_one_thread_and_are_forgotten():
    made = [remote.remote_transport("http://127.0.0.1:1", f"key {n}") for n in range(3 * remote.KEPT_SERVERS)]
    assert remote.remote_transport("http://127.0.0.1:1", "key 0") is made[0]
    assert [each.name for each in threading.enumerate()].count("cloche-remote") == 1
    del made
    gc.collect()
    assert len(remote._remotes) <= remote.KEPT_SERVERS


def test_a_closed_connection_says_so_and_the_next_is_a_new_one():
    first = remote.remote_transport("http://127.0.0.1:1", "closed")
    first.close()
    first.close()
    with pytest.raises(errors.ShuttingDown, match="closed"):
        first.call(lambda: first.connect("i1"))
    second = remote.remote_transport("http://127.0.0.1:1", "closed")
    with pytest.raises(errors.Unavailable, match="does it run there"):
        second.call(lambda: second.connect("i1"))


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b'{"allow": ["http://x/"], "deny": [], "rules": [], "secrets": []}',
        b'{"allow": [], "deny": [], "rules": [{"action": "maybe", "host": "x"}], "secrets": []}',
        b'{"allow": [], "deny": [], "rules": [], "secrets": [{"domain": "x", "header": "Host"}]}',
    ],
)
def test_a_policy_that_is_none_is_said(body: bytes):
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    async def ask(port: int) -> None:
        async with contextlib.aclosing(ServerClient(f"http://127.0.0.1:{port}", "key")) as server:
            with pytest.raises(errors.Unavailable, match="is it Cloche"):
                await RemoteNetwork(server, "x").policy()
            with pytest.raises(errors.Unavailable, match="is it Cloche"):
                await RemoteNetwork(server, "x").log()

    with http_server(answer) as port:
        asyncio.run(ask(port))
