"""What a program says at the door: CONNECT, plain HTTP, SOCKS5, or a request to the door itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from cloche.egress import forward, http1, refusal, socks
from cloche.egress.destination import Destination, parse_authority
from cloche.egress.dialling import Dialler
from cloche.egress.http1 import BadRequest, Head
from cloche.egress.refusal import Refusal
from cloche.egress.tunnel import Tunnel
from cloche.egress.visit import Visit
from cloche.egress.waiting import patience

if TYPE_CHECKING:  # loaded with the first connection that gets a secret
    from cloche.egress.interception import Interception

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

ServePackages = Callable[[Visit, Head], Awaitable[None]]


class NotServed(Refusal):
    status = 404


class Proxy:
    """`packages` answers what is asked of the door itself: None where it has nothing of its own."""

    def __init__(self, dialler: Dialler, packages: ServePackages | None):
        self._dialler = dialler
        self._packages = packages
        self._interception: Interception | None = None

    async def attend(self, visit: Visit) -> None:
        """Until the connection has had its answer. What it does not get it is told."""
        try:
            heard = await self._hear(visit)
            if isinstance(heard, Destination):
                await Tunnel(visit, heard, self._dialler, self._intercept, socks.ESTABLISHED).run()
            elif heard is not None:
                await self._answer(visit, heard)
        except Refusal as why:
            await visit.refuse(why)

    async def _hear(self, visit: Visit) -> Head | Destination | None:
        async with patience(visit):
            first = await visit.reader.read(1)
            if not first:
                return None
            if first[0] == socks.VERSION:
                return await socks.hear(visit)
            if first[0] == socks.OLD_VERSION:
                visit.attempt.protocol, visit.say_no = "socks", refusal.in_old_socks
                raise socks.BadSocks("of SOCKS only version 5 is served: use socks5h://")
            return await http1.read_head(visit.reader, first)

    async def _answer(self, visit: Visit, head: Head) -> None:
        if head.method == "CONNECT":
            visit.attempt.protocol, visit.attempt.host = "connect", head.target
            await Tunnel(visit, _goal_of_connect(head), self._dialler, self._intercept, ESTABLISHED).run()
        elif head.target.startswith("/"):
            await self._of_its_own(visit, head)
        else:
            await self._plain(visit, head)

    async def _of_its_own(self, visit: Visit, head: Head) -> None:
        visit.attempt.protocol = "package"
        if self._packages is None:
            raise NotServed(
                "this is a proxy, and has no pages of its own: packages can be had here where the operator sets "
                "packages.enabled"
            )
        await self._packages(visit, head)

    async def _intercept(self, visit: Visit, asked: Destination, said: bytes) -> None:
        """TLS to a host that gets secrets. `said` is what the program has said of it."""
        if self._interception is None:
            from cloche.egress.interception import Interception

            self._interception = Interception(self._dialler)
        await self._interception.intercept(visit, asked, said)

    async def _plain(self, visit: Visit, head: Head) -> None:
        visit.attempt.protocol = "http"
        asked, path = forward.split_target(head.target)
        visit.attempt.asked = asked
        forward.check_host(head, asked)
        head.body_length  # noqa: B018  # what can be read in two ways is refused before anybody is spoken to
        far = await self._dialler.connect(visit, asked)
        await forward.Exchange(visit, head, asked, far).run(path)
        visit.attempt.end("allowed")


def _goal_of_connect(head: Head) -> Destination:
    """Raises BadRequest, BadDestination."""
    asked = parse_authority(head.target, None)
    if head.all("transfer-encoding") or head.one("content-length") not in (None, "0"):
        raise BadRequest("CONNECT has no body")
    if head.one("host") is not None:
        forward.check_host(head, asked)
    return asked
