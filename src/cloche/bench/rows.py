"""The rows of the table: what each is called, what measures it, what it is compared with, and its bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cloche import errors
from cloche.bench import branches, installs, load, memory, pauses, pythons, serving, starts, turns, warm
from cloche.bench.lab import Lab
from cloche.model import Struct

Measure = Callable[[Any], None]  # of a Lab, a ServerLab or an InstallLab


class Row(Struct):
    """`against` names rows to compare with, of which the best counts: how many times it is ours.

    `bar` is the ratio that the design asks for; `limit` means that ours is to be at most that many times the other.
    Without `against`, it is a bar for the median itself, in the row's unit.
    """

    key: str
    title: str
    unit: str = "ms"
    against: tuple[str, ...] = ()
    also: str | None = None  # a second ratio, for information
    bar: float | None = None
    limit: bool = False


class Part(Struct):
    """Rows that are measured together, in turns."""

    title: str
    measure: Measure
    rows: tuple[Row, ...]


_WARM, _KILOBYTE, _IMAGE = (
    tuple(f"kernel_{key}_{transport}" for transport in ("tcp", "ipc"))
    for key in ("warm", "warm_kilobyte", "warm_image")
)


def _nothing(lab: Lab) -> None:
    """It was measured when the lab was opened."""


PARTS: Sequence[Part] = (
    Part(
        title="cold start",
        measure=_nothing,
        rows=(Row(key="cold", title="engine start to `1+1`, nothing running yet"),),
    ),
    Part(
        title="first answers",
        measure=starts.first_answers,
        rows=(
            Row(key="ready_pool", title="create to ready, pool hit"),
            Row(key="ready_empty", title="create to ready, pool empty", against=("raw",), bar=3, limit=True),
            Row(
                key="one_pool",
                title="create to `1+1`, pool hit",
                against=("kernel_one",),
                also="kernel_one_lean",
                bar=150,
            ),
            Row(
                key="one_empty",
                title="create to `1+1`, pool empty",
                against=("kernel_one",),
                also="kernel_one_lean",
                bar=40,
            ),
            Row(key="raw", title="raw cost: fork, all namespaces, one byte back"),
            Row(key="kernel_one", title="ipykernel: start to `1+1`"),
            Row(key="kernel_one_lean", title="ipykernel: start to `1+1`, without `wait_for_ready`"),
        ),
    ),
    Part(
        title="first DataFrame",
        measure=starts.first_frame,
        rows=(
            Row(key="frame_pool", title="create to a DataFrame's HTML, pool hit", against=("kernel_frame",), bar=40),
            Row(key="kernel_frame", title="ipykernel: start to a DataFrame's HTML"),
        ),
    ),
    Part(
        title="first picture",
        measure=starts.first_picture,
        rows=(
            Row(key="png_pool", title="create to the first PNG, pool hit", against=("kernel_png",), bar=12),
            Row(key="kernel_png", title="ipykernel: start to the first PNG"),
        ),
    ),
    Part(
        title="round trips",
        measure=warm.round_trips,
        rows=(
            Row(key="warm", title="warm round trip, `1+1`", against=_WARM, bar=5),
            Row(key="warm_kilobyte", title="warm round trip, 1 kB of output", against=_KILOBYTE),
            Row(key="warm_image", title="warm round trip, an image of 1 MB", against=_IMAGE),
            Row(key="kernel_warm_tcp", title="ipykernel: `1+1` over tcp"),
            Row(key="kernel_warm_ipc", title="ipykernel: `1+1` over ipc"),
            Row(key="kernel_warm_kilobyte_tcp", title="ipykernel: 1 kB of output over tcp"),
            Row(key="kernel_warm_kilobyte_ipc", title="ipykernel: 1 kB of output over ipc"),
            Row(key="kernel_warm_image_tcp", title="ipykernel: an image of 1 MB over tcp"),
            Row(key="kernel_warm_image_ipc", title="ipykernel: an image of 1 MB over ipc"),
        ),
    ),
    Part(
        title="programs of a shell",
        measure=pythons.heredocs,
        rows=(
            Row(key="python_warm", title="bash: `python3` with pandas", against=("python_cold",), bar=5),
            Row(key="python_cold", title="the same with the real interpreter, which starts and imports"),
        ),
    ),
    Part(
        title="interrupts",
        measure=warm.interrupts,
        rows=(
            Row(key="interrupt", title="interrupt of an endless loop, to its end", against=("kernel_interrupt",)),
            Row(key="kernel_interrupt", title="ipykernel: interrupt, to idle"),
        ),
    ),
    Part(
        title="pauses",
        measure=pauses.pauses,
        rows=(
            Row(key="pause", title="pause with memory, files on a disk"),
            Row(
                key="resume_one",
                title="resume and `1+1`",
                against=("resumed_warm",),
                bar=4,
                limit=True,
            ),
            Row(key="resumed_warm", title="warm `1+1` in that sandbox"),
        ),
    ),
    Part(
        title="copies of a context",
        measure=branches.branches,
        rows=(
            Row(
                key="branch",
                title="fork of a context with a DataFrame of 100 MB, to ready",
                against=("branch_raw",),
                bar=3,
                limit=True,
            ),
            Row(key="branch_raw", title="raw cost: that process forks, one byte back"),
            Row(
                key="branch_memory",
                title="what such a fork adds until it is written to",
                unit="MB",
                against=("branch_frame",),
                bar=10,
            ),
            Row(key="branch_frame", title="the DataFrame", unit="MB"),
        ),
    ),
    Part(
        title="memory",
        measure=memory.memory,
        rows=(
            Row(key="memory", title="idle sandbox: MemAvailable", unit="MB", against=("kernel_private",), bar=20),
            Row(key="memory_anon", title="idle sandbox: AnonPages", unit="MB"),
            Row(key="memory_page_tables", title="idle sandbox: PageTables", unit="MB"),
            Row(key="memory_slab", title="idle sandbox: Slab", unit="MB"),
            Row(key="memory_used", title="sandbox after `1+1`: MemAvailable", unit="MB", against=("kernel_private",)),
            Row(key="kernel_memory", title="ipykernel with pandas and pyplot: MemAvailable", unit="MB"),
            Row(key="kernel_pss", title="ipykernel with pandas and pyplot: PSS", unit="MB"),
            Row(key="kernel_private", title="ipykernel with pandas and pyplot: private", unit="MB"),
        ),
    ),
    Part(
        title="creations under load",
        measure=load.creations,
        rows=(Row(key="creations", title="sandboxes created, used and destroyed, 8 threads", unit="/s"),),
    ),
    Part(
        title="executions under load",
        measure=load.executions,
        rows=(Row(key="executions", title="executions in 64 warm sandboxes, 8 threads", unit="/s"),),
    ),
    Part(
        title="files",
        measure=load.transfers,
        rows=(
            Row(key="file_write", title="write a file of 100 MB", unit="MB/s"),
            Row(key="file_read", title="read a file of 100 MB", unit="MB/s"),
        ),
    ),
)

SERVER_PARTS: Sequence[Part] = (
    Part(
        title="first answers through a server",
        measure=serving.first_answers,
        rows=(
            Row(key="e2b_ready", title="E2B's client: `Sandbox.create()`"),
            Row(
                key="e2b_one",
                title="E2B's client: `Sandbox.create()` and `run_code('1+1')`",
                against=("kernel_one",),
                bar=20,
            ),
            Row(key="kernel_one", title="ipykernel: start to `1+1`"),
        ),
    ),
    Part(
        title="round trips through a server",
        measure=serving.round_trips,
        rows=(
            Row(key="e2b_warm", title="E2B's client: `run_code('1+1')` in a live context", against=_WARM, bar=1),
            Row(key="kernel_warm_tcp", title="ipykernel: `1+1` over tcp"),
            Row(key="kernel_warm_ipc", title="ipykernel: `1+1` over ipc"),
        ),
    ),
    Part(
        title="turns of the gateway",
        measure=turns.gateway_turns,
        rows=(
            Row(
                key="gateway_turn",
                title="`/v1/responses`: a turn with code `pass`, instant upstream, container from the pool",
                against=("native_warm",),
                bar=4,
                limit=True,
            ),
            Row(key="gateway_echo", title="the same with `cloche/echo`", against=("native_warm",), limit=True),
            Row(key="native_warm", title="`/api/v1`: run `pass` in a live context"),
        ),
    ),
)

PACKAGE_PARTS: Sequence[Part] = (
    Part(
        title="installations of packages",
        measure=installs.installs,
        rows=tuple(
            row
            for name, command in installs.COMMANDS.items()
            for row in (
                Row(
                    key=f"{name}_second",
                    title=f"`{command}` from the host's cache",
                    against=(f"{name}_first",),
                    bar=3 if name == "uv" else None,  # the others' own work takes longer than a near index
                ),
                Row(key=f"{name}_first", title=f"`{command}`, the first on this host"),
            )
        ),
    ),
)

ROWS = {row.key: row for part in PARTS for row in part.rows}
SERVER_ROWS = {row.key: row for part in SERVER_PARTS for row in part.rows}
PACKAGE_ROWS = {row.key: row for part in PACKAGE_PARTS for row in part.rows}


def chosen(keys: Sequence[str], among: Sequence[Part] = PARTS) -> list[Part]:
    """The parts that measure those rows; all without keys. Raises InvalidRequest for a row that does not exist."""
    known = [row.key for part in among for row in part.rows]
    unknown = sorted(set(keys) - set(known))
    if unknown:
        raise errors.InvalidRequest(f"there is no row {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in among if not keys or any(row.key in keys for row in part.rows)]
