"""Conformance claims of every backend, each tried in a real sandbox. `cloche doctor --deep` runs them too.

Claims of kind `function` hold for every backend. Claims of kind `wall` define isolation; a backend without
walls (`plain-unsafe`) is not tried for them.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from cloche import errors
from cloche.isolation.conformance.claims import Claim, ClaimFailed, ClaimKind, ClaimScene, HostTraces, OpenSandbox
from cloche.isolation.conformance.functions import FUNCTION_CLAIMS, LIMIT_CLAIMS
from cloche.isolation.conformance.walls import WALL_CLAIMS
from cloche.model import Limits, Struct

ALL_CLAIMS: tuple[Claim, ...] = (*FUNCTION_CLAIMS, *WALL_CLAIMS, *LIMIT_CLAIMS)


OWN_KERNEL_DIFFERENCES = {
    "inotify limit": "the watchers are its own kernel's: the host has no limit on them that others could miss"
}
"""Claims that mean nothing where each sandbox has a kernel of its own, with the reason."""


class ClaimOutcome(Struct):
    """The outcome of one claim; `detail` has the observation if the claim does not hold."""

    name: str
    kind: ClaimKind
    text: str
    passed: bool
    detail: str = ""


async def run_claims(boxes: OpenSandbox, claims: Sequence[Claim] = ALL_CLAIMS) -> AsyncIterator[ClaimOutcome]:
    """Tries each claim and yields its outcome, in order.

    `boxes(limits)` opens a sandbox, as an async context manager. Most claims share two; claims about limits have
    their own. Raises only as `boxes` does.
    """
    with leave_traces() as host:
        async with boxes(Limits()) as box, boxes(Limits()) as neighbour:
            for claim in claims:
                if claim.limits is None:
                    yield await _try_claim(claim, ClaimScene(box, neighbour, host))
                else:
                    async with boxes(claim.limits) as own:
                        yield await _try_claim(claim, ClaimScene(own, neighbour, host))


async def _try_claim(claim: Claim, scene: ClaimScene) -> ClaimOutcome:
    detail = ""
    try:
        await claim.examine(scene)
    except ClaimFailed as failed:
        detail = str(failed)
    except errors.ClocheError as error:
        detail = f"{type(error).__name__}: {error}"
    return ClaimOutcome(name=claim.name, kind=claim.kind, text=claim.text, passed=not detail, detail=detail)


@contextlib.contextmanager
def leave_traces() -> Iterator[HostTraces]:
    """Things on the host that any of its users may reach, for sandboxes to fail at reaching."""
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
        yield HostTraces(str(file), tcp.getsockname()[1], name)
