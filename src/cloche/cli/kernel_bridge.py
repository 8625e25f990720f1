"""The process of one kernel of Jupyter's: its ZeroMQ sockets on one side, a kernel of `/jupyter` on the other.

Messages pass as they are, signed on one side and framed on the other: the dialect has the kernel. A lazy-import border:
only this module needs pyzmq.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import signal
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import zmq
import zmq.asyncio
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from cloche import errors
from cloche.api.jupyter.messages import V1_PROTOCOL, join_v1, split_v1
from cloche.cli.control import response_error, short_path
from cloche.cli.own_server import find_server
from cloche.config import Config
from cloche.sdk.backend import KEY_VARIABLE, URL_VARIABLE
from cloche.tasks import run_until_first_ends

DELIMITER = b"<IDS|MSG>"
MAX_WAITING_REPLIES = 10_000  # requests whose sender is remembered
PARENT_SECONDS = 1.0  # between looks whether the program that started this process still runs
CHANNELS = ("shell", "control", "stdin")
REQUEST_SECONDS = 120.0  # a first sandbox may wait for its template


class ConnectionInfo(NamedTuple):
    """A connection file: the ports on which a kernel listens, and the key that signs its messages."""

    transport: str
    ip: str
    ports: dict[str, int]
    key: bytes

    def address(self, channel: str) -> str:
        sign = "-" if self.transport == "ipc" else ":"
        return f"{self.transport}://{self.ip}{sign}{self.ports[channel]}"


def read_connection_file(path: Path) -> ConnectionInfo:
    """Raises InvalidRequest."""
    try:
        told = json.loads(path.read_text())
        ports = {name: int(told[f"{name}_port"]) for name in (*CHANNELS, "iopub", "hb")}
        return ConnectionInfo(told["transport"], told["ip"], ports, str(told["key"]).encode())
    except (OSError, ValueError, KeyError, TypeError):
        raise errors.InvalidRequest(f"{path} is no connection file of Jupyter's") from None


class RemoteKernel(NamedTuple):
    """A kernel of a server, and the way to it."""

    http: httpx2.AsyncClient
    id: str
    path: str
    socket: ClientConnection


def serve_kernel(config: Config, connection_file: Path, name: str, session: str | None) -> None:
    """Serves until the program shuts the kernel down, or ends. Raises the errors of starting a kernel."""
    info = read_connection_file(connection_file)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else _leave)
    base = f"/jupyter/in/{session}" if session else "/jupyter"
    with contextlib.suppress(SystemExit), contextlib.ExitStack() as stack:
        url = os.environ.get(URL_VARIABLE, "").rstrip("/")
        unix = "" if url else stack.enter_context(short_path(stack.enter_context(find_server(config))))
        asyncio.run(_bridge(info, url, unix, base, name))


def _leave(_signum: int, _frame: object) -> None:
    raise SystemExit


async def _bridge(info: ConnectionInfo, url: str, unix: str, base: str, name: str) -> None:
    async with _start_remote_kernel(url, unix, base, name) as kernel:
        bridge = KernelBridge(info, kernel)
        try:
            await bridge.run()
        finally:
            bridge.close()


@contextlib.asynccontextmanager
async def _start_remote_kernel(url: str, unix: str, base: str, name: str) -> AsyncIterator[RemoteKernel]:
    """A new kernel, which ends with the block. Raises Unavailable, and the errors that the server reports."""
    key = os.environ.get(KEY_VARIABLE, "") if url else ""
    headers = {"x-api-key": key} if key else {}
    transport = None if url else httpx2.AsyncHTTPTransport(uds=unix)
    place = (url or "http://localhost") + base
    async with httpx2.AsyncClient(transport=transport, headers=headers, timeout=REQUEST_SECONDS) as http:
        try:
            made = await http.post(f"{place}/api/kernels", json={"name": name})
        except httpx2.HTTPError as error:
            raise errors.Unavailable(f"there is no answer from {place}: {error}") from None
        if not made.is_success:
            raise response_error(made)
        path = f"{place}/api/kernels/{made.json()['id']}"
        address = path.replace("http", "ws", 1) + "/channels"
        options: dict[str, Any] = {"subprotocols": [Subprotocol(V1_PROTOCOL)], "max_size": None, "compression": None}
        opened = (
            unix_connect(unix, address, **options) if unix else connect(address, additional_headers=headers, **options)
        )
        try:
            async with opened as socket:
                yield RemoteKernel(http, made.json()["id"], path, socket)
        finally:
            with contextlib.suppress(httpx2.HTTPError):
                await http.delete(path)


class KernelBridge:
    """The sockets of one kernel."""

    def __init__(self, info: ConnectionInfo, kernel: RemoteKernel):
        self._kernel = kernel
        self._key = info.key
        self._context = zmq.asyncio.Context()
        self._sockets = {name: self._listen(info, name, zmq.ROUTER) for name in CHANNELS}
        self._iopub = self._listen(info, "iopub", zmq.PUB)
        self._heartbeat = self._listen(info, "hb", zmq.REP)
        self._senders: OrderedDict[str, list[bytes]] = OrderedDict()  # by the id of a request

    async def run(self) -> None:
        """Passes messages until the kernel is shut down, or one side has left."""
        await run_until_first_ends(
            *(self._take_requests(name) for name in CHANNELS),
            self._take_messages(),
            self._echo_heartbeats(),
            _wait_for_parents_end(),
        )

    def close(self) -> None:
        self._context.destroy(linger=500)

    def _listen(self, info: ConnectionInfo, channel: str, kind: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.linger = 500
        if kind == zmq.ROUTER:
            socket.router_handover = 1  # a client that connects again keeps its name
        socket.bind(info.address(channel))
        return socket

    async def _echo_heartbeats(self) -> None:
        while True:
            await self._heartbeat.send_multipart(await self._heartbeat.recv_multipart())

    async def _take_requests(self, channel: str) -> None:
        """Passes requests on. A message with a wrong signature is dropped. Returns after a request to shut down."""
        while True:
            parts = await self._sockets[channel].recv_multipart()
            opened = open_message(self._key, parts)
            if opened is None:
                continue
            sender, message = opened
            header = _decode_object(message[0])
            self._remember_sender(str(header.get("msg_id")), sender)
            if header.get("msg_type") == "shutdown_request":
                await self._confirm_shutdown(channel, sender, message)
                return
            await self._kernel.socket.send(join_v1([channel.encode(), *message]))

    async def _confirm_shutdown(self, channel: str, sender: list[bytes], request: Sequence[bytes]) -> None:
        """Jupyter ends the process of a kernel that it restarts, too, and starts another."""
        header = {**_decode_object(request[0]), "msg_type": "shutdown_reply", "msg_id": os.urandom(16).hex()}
        content = {"status": "ok", "restart": _decode_object(request[3]).get("restart") is True}
        parts = [json.dumps(header).encode(), request[0], b"{}", json.dumps(content).encode()]
        await self._sockets[channel].send_multipart(seal_message(self._key, sender, parts))

    async def _take_messages(self) -> None:
        """Passes messages of the kernel on. Returns when it has ended."""
        with contextlib.suppress(ConnectionClosed):
            async for data in self._kernel.socket:
                channel, *message = split_v1(data if isinstance(data, bytes) else data.encode())
                await self._deliver(channel.decode(), message)

    async def _deliver(self, channel: str, message: list[bytes]) -> None:
        if channel == "iopub":
            topic = f"kernel.{self._kernel.id}.{_decode_object(message[0]).get('msg_type')}".encode()
            await self._iopub.send_multipart(seal_message(self._key, [topic], message))
            return
        sender = self._senders.get(str(_decode_object(message[1]).get("msg_id")))
        if sender is not None and channel in self._sockets:
            await self._sockets[channel].send_multipart(seal_message(self._key, sender, message))

    def _remember_sender(self, id: str, sender: list[bytes]) -> None:
        self._senders[id] = sender
        if len(self._senders) > MAX_WAITING_REPLIES:
            self._senders.popitem(last=False)


def open_message(key: bytes, parts: list[bytes]) -> tuple[list[bytes], list[bytes]] | None:
    """The sender, and the four parts of a message, perhaps with buffers; None without a valid signature."""
    if DELIMITER not in parts:
        return None
    at = parts.index(DELIMITER)
    sender, signature, message = parts[:at], parts[at + 1 : at + 2], parts[at + 2 :]
    if len(message) < 4 or not hmac.compare_digest(b"".join(signature), sign_message(key, message[:4])):
        return None
    return sender, message


def seal_message(key: bytes, sender: list[bytes], message: list[bytes]) -> list[bytes]:
    return [*sender, DELIMITER, sign_message(key, message[:4]), *message]


def sign_message(key: bytes, parts: Sequence[bytes]) -> bytes:
    """The signature of the four parts; empty without a key."""
    return hmac.new(key, b"".join(parts), hashlib.sha256).hexdigest().encode() if key else b""


def _decode_object(part: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(part)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _wait_for_parents_end() -> None:
    """Returns when the program that started this process has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_SECONDS)
