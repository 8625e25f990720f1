"""What a program says at the door: CONNECT, plain HTTP, SOCKS5, or a request to the door itself."""

from __future__ import annotations

from cloche.egress import http1
from cloche.egress.destination import BadDestination, parse_authority
from cloche.egress.dialling import Dialler, Unreachable
from cloche.egress.door import Visit
from cloche.egress.relay import OverLimit, relay
from cloche.egress.rulebook import Denied


class Proxy:
    def __init__(self, dialler: Dialler):
        self._dialler = dialler

    async def attend(self, visit: Visit) -> None:
        try:
            head = await http1.read_head(visit.reader)
            if head is None:
                return
            if head.method == "CONNECT":
                await self._connect(visit, head)
            else:
                raise http1.BadRequest("not served yet")
        except (http1.BadRequest, BadDestination) as error:
            _refuse(visit, 400, str(error))
        except Denied as error:
            _refuse(visit, 403, str(error))
        except Unreachable as error:
            _refuse(visit, 502, str(error), verdict="failed")
        except OverLimit as error:
            visit.attempt.end("denied", str(error))

    async def _connect(self, visit: Visit, head: http1.Head) -> None:
        visit.attempt.protocol = "connect"
        visit.attempt.asked = asked = parse_authority(head.target, None)
        far = await self._dialler.connect(visit.door, asked)
        visit.writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await relay(visit, far)
        visit.attempt.end("allowed")


def _refuse(visit: Visit, status: int, why: str, verdict: str = "denied") -> None:
    text = f"Cloche: {why}\n"
    headers = [("content-type", "text/plain"), ("content-length", str(len(text))), ("connection", "close")]
    visit.writer.write(http1.write_head(f"HTTP/1.1 {status} {why}", headers) + text.encode())
    visit.attempt.end(verdict, why)
