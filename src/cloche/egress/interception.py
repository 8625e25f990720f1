"""TLS ended at the proxy, for hosts that get secrets: a program's requests are read, and sent on with secrets added.

The program speaks with a stand-in that the sandbox's own authority vouches for; the far server is spoken to over TLS of
the proxy's own, and must prove who it is as to anybody. Only HTTP/1.1 is spoken, since only what is understood can be
rewritten.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cloche.egress import refusal
from cloche.egress.destination import Destination
from cloche.egress.dialling import Dialler
from cloche.egress.exchange import Exchanges
from cloche.egress.http1 import BadRequest
from cloche.egress.masking import Masks
from cloche.egress.refusal import Refusal, TooSlow
from cloche.egress.tls import TlsEnd
from cloche.egress.visit import Visit

if TYPE_CHECKING:
    from cloche.egress.door import Door


class NobodyVouches(Refusal):
    """The proxy cannot stand in for a host."""

    verdict = "failed"


class Interception:
    """For all doors of one host process."""

    def __init__(self, dialler: Dialler):
        self._dialler = dialler
        self._trust: ssl.SSLContext | None = None
        self._masks: WeakKeyDictionary[Door, Masks] = WeakKeyDictionary()
        self._turn = asyncio.Lock()

    async def intercept(self, visit: Visit, asked: Destination, said: bytes) -> None:
        """Serves the requests of a program that may go to `asked`, until it has no more.

        `said` is what it has said already. Raises Refusal where that is no TLS, or is meant for another host.
        """
        authority = visit.door.authority
        if authority is None:
            raise NobodyVouches(f"{asked.host} has got secrets only now, and programs are not told yet whom to trust")
        trust = await self._trusted()
        context = authority.known(asked.host)
        if context is None:
            context = await asyncio.to_thread(authority.context_for, asked.host)
        end = TlsEnd(visit.reader, visit.writer, context, said)
        visit.say_no = refusal.in_silence  # what there is to say, TLS says itself
        await _shake_hands(end, asked, visit.door.config.request_seconds)
        async with end:
            masks = self._masks.setdefault(visit.door, Masks(self._turn))
            await Exchanges(visit, asked, end, self._dialler, trust, masks).serve()

    async def _trusted(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = await asyncio.to_thread(_system_trust)
        return self._trust


def _system_trust() -> ssl.SSLContext:
    """Whom the proxy takes servers' word from: this host's authorities, or those of SSL_CERT_FILE.

    It reads all of their certificates, which takes some 20 ms.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _shake_hands(end: TlsEnd, asked: Destination, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await end.handshake()
    except TimeoutError:
        raise TooSlow(f"it took longer than {seconds:g} s over its TLS handshake") from None
    except ssl.SSLError as error:
        raise BadRequest(_why_no_tls(asked, error)) from None


def _why_no_tls(asked: Destination, error: ssl.SSLError) -> str:
    if error.reason == "CALLBACK_FAILED":
        return f"the TLS server name is not {asked.host}"
    return f"no TLS with the program: {error.reason or 'it broke off'}; does it trust $SSL_CERT_FILE?"
