"""A connection to where a program wants to go, if it may."""

from __future__ import annotations

import asyncio
import ssl

from cloche.egress.destination import Destination
from cloche.egress.door import BUFFER_BYTES, Door
from cloche.egress.resolver import Resolve, Unresolved
from cloche.egress.rulebook import Denied

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Unreachable(Exception):
    """It is allowed, but nobody answers there."""


class Dialler:
    def __init__(self, resolve: Resolve):
        self._resolve = resolve

    async def connect(self, door: Door, asked: Destination, tls: ssl.SSLContext | None = None) -> Streams:
        """With `tls`, over TLS, and the server must prove to be that host. Raises Denied, Unreachable."""
        door.rulebooks.check(asked)
        try:
            async with asyncio.timeout(door.config.connect_seconds):
                addresses = [asked.address] if asked.address is not None else await self._addresses(door, asked)
                return await self._first(addresses, asked, tls)
        except TimeoutError:
            raise Unreachable(f"{asked} did not answer within {door.config.connect_seconds:g} s") from None

    async def _addresses(self, door: Door, asked: Destination) -> list:  # type: ignore[type-arg]
        try:
            found = await self._resolve(asked.host)
        except Unresolved as error:
            raise Unreachable(str(error)) from None
        return door.rulebooks.reachable(asked, found)

    async def _first(self, addresses: list, asked: Destination, tls: ssl.SSLContext | None) -> Streams:  # type: ignore[type-arg]
        why = ""
        for address in addresses:
            try:
                return await asyncio.open_connection(
                    str(address), asked.port, limit=BUFFER_BYTES, ssl=tls, server_hostname=asked.host if tls else None
                )
            except OSError as error:
                why = error.strerror or str(error)
        raise Unreachable(f"{asked} cannot be reached: {why}")


__all__ = ["Denied", "Dialler", "Unreachable"]
