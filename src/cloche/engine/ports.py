"""Connections to programs that listen inside a sandbox."""

from __future__ import annotations

import asyncio
import os
import socket

from cloche import errors
from cloche.engine.descriptors import only_fd
from cloche.engine.guest import Guest
from cloche.guest.paths import DOOR_PORT

CONNECT_SECONDS = 5.0
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


async def listening(guest: Guest) -> list[int]:
    """The ports on which programs listen, but for the sandbox's own door. Raises ProtocolViolation, Gone."""
    told = (await guest.request("port_list")).ok.get("ports")
    if not isinstance(told, list) or not all(type(each) is int and 0 < each < 65536 for each in told):
        raise errors.ProtocolViolation("the guest's init sent no list of ports")
    return [port for port in told if port != DOOR_PORT]


async def connect_port(guest: Guest, port: int) -> socket.socket:
    """A connected, non-blocking socket. Raises PortNotOpen, InvalidRequest for what is no port, Gone."""
    if port == DOOR_PORT:  # whoever came in by it would speak in the sandbox's name, and use its secrets
        raise errors.PortNotOpen(f"port {port} is the door of the sandbox's network, which opens from inside only")
    guest.noted("port.reached", about=str(port))
    for six in (False, True):  # most programs listen on IPv4, or on both
        try:
            return await _connect(guest, port, six)
        except errors.PortNotOpen:
            continue
    raise errors.PortNotOpen(f"nothing listens on port {port} of this sandbox")


async def _connect(guest: Guest, port: int, six: bool) -> socket.socket:
    connection = _checked(only_fd(await guest.request("port_connect", port=port, six=six)))
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await guest.wait(_writable(connection))
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise errors.PortNotOpen(os.strerror(error))
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise errors.PortNotOpen(f"port {port} is listened on, but no connection was accepted") from None
        raise
    return connection


def _checked(fd: int) -> socket.socket:
    """What a guest passed must be what it says: a TCP socket."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise errors.ProtocolViolation("the guest's init passed something else than a socket") from None
    if connection.family not in _FAMILIES or connection.type != socket.SOCK_STREAM:
        connection.close()
        raise errors.ProtocolViolation("the guest's init passed a socket that is not of TCP")
    connection.setblocking(False)
    return connection


def _writable(connection: socket.socket) -> asyncio.Future[None]:
    """Done when a connection has come about, or has failed."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_writer(connection, ready)
    future.add_done_callback(lambda _: loop.remove_writer(connection))
    return future
