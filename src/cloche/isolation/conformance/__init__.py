"""What every backend must show: named claims, each tried in a real sandbox. `cloche doctor --deep` runs them too.

Claims of kind `function` hold for every backend. Those of kind `wall` are what isolation means; a backend without walls
(`plain-unsafe`) is not asked for them.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from cloche import errors
from cloche.isolation.conformance.claims import Boxes, Claim, Failed, Kind, Scene, Traces
from cloche.isolation.conformance.functions import FUNCTIONS, LIMITS
from cloche.isolation.conformance.walls import WALLS
from cloche.model import Limits, Struct

CLAIMS: tuple[Claim, ...] = (*FUNCTIONS, *WALLS, *LIMITS)


class Outcome(Struct):
    """What became of one claim; `detail` says what was seen instead, if it does not hold."""

    name: str
    kind: Kind
    text: str
    passed: bool
    detail: str = ""


async def run(boxes: Boxes, claims: Sequence[Claim] = CLAIMS) -> AsyncIterator[Outcome]:
    """Tries each claim and yields what became of it, in order.

    `boxes(limits)` opens a sandbox, as an async context manager. Most claims share two; those about limits have their
    own. Raises only what opening a sandbox raises.
    """
    with traces() as host:
        async with boxes(Limits()) as box, boxes(Limits()) as neighbour:
            for claim in claims:
                if claim.limits is None:
                    yield await _try(claim, Scene(box, neighbour, host))
                else:
                    async with boxes(claim.limits) as own:
                        yield await _try(claim, Scene(own, neighbour, host))


async def _try(claim: Claim, scene: Scene) -> Outcome:
    detail = ""
    try:
        await claim.examine(scene)
    except Failed as failed:
        detail = str(failed)
    except errors.ClocheError as error:
        detail = f"{type(error).__name__}: {error}"
    return Outcome(name=claim.name, kind=claim.kind, text=claim.text, passed=not detail, detail=detail)


@contextlib.contextmanager
def traces() -> Iterator[Traces]:
    """Things on the host that anybody on it may reach, for sandboxes to fail at reaching."""
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        Path(directory).chmod(0o755)
        file = Path(directory, "of-the-host")
        file.write_text("a file of the host\n")
        name = f"cloche-{file.parent.name}"
        unix.bind(f"\0{name}")
        unix.listen()
        yield Traces(str(file), tcp.getsockname()[1], name)
