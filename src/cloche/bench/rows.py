"""The rows of the table: title, measurement, rows to compare with, and bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cloche import errors
from cloche.bench import branches, installs, load, memory, pauses, pythons, serving, starts, turns, warm
from cloche.bench.lab import Lab
from cloche.model import Struct

Measure = Callable[[Any], None]  # of a Lab, a ServerLab or an InstallLab


class BenchRow(Struct):
    """`against` names rows to compare with, of which the best counts: the ratio is that row's median by ours.

    `bar` is the ratio that the design asks for; `limit` means that ours is to be at most that many times the
    other. Without `against`, it is a bar for the median itself, in the row's unit.
    """

    key: str
    title: str
    unit: str = "ms"
    against: tuple[str, ...] = ()
    also: str | None = None  # a second ratio, for information
    bar: float | None = None
    limit: bool = False


class BenchPart(Struct):
    """Rows that are measured together, in turns."""

    title: str
    measure: Measure
    rows: tuple[BenchRow, ...]


_WARM, _KILOBYTE, _IMAGE = (
    tuple(f"kernel_{key}_{transport}" for transport in ("tcp", "ipc"))
    for key in ("warm", "warm_kilobyte", "warm_image")
)


def _measure_nothing(lab: Lab) -> None:
    """Does nothing: it was measured when the lab was opened."""


PARTS: Sequence[BenchPart] = (
    BenchPart(
        title="cold start",
        measure=_measure_nothing,
        rows=(BenchRow(key="cold", title="engine start to `1+1`, nothing running yet"),),
    ),
    BenchPart(
        title="first answers",
        measure=starts.measure_first_answers,
        rows=(
            BenchRow(key="ready_pool", title="create to ready, pool hit"),
            BenchRow(key="ready_empty", title="create to ready, pool empty", against=("raw",), bar=3, limit=True),
            BenchRow(
                key="one_pool",
                title="create to `1+1`, pool hit",
                against=("kernel_one",),
                also="kernel_one_lean",
                bar=150,
            ),
            BenchRow(
                key="one_empty",
                title="create to `1+1`, pool empty",
                against=("kernel_one",),
                also="kernel_one_lean",
                bar=40,
            ),
            BenchRow(key="raw", title="raw cost: fork, all namespaces, one byte back"),
            BenchRow(key="kernel_one", title="ipykernel: start to `1+1`"),
            BenchRow(key="kernel_one_lean", title="ipykernel: start to `1+1`, without `wait_for_ready`"),
        ),
    ),
    BenchPart(
        title="first DataFrame",
        measure=starts.measure_first_frame,
        rows=(
            BenchRow(
                key="frame_pool", title="create to a DataFrame's HTML, pool hit", against=("kernel_frame",), bar=40
            ),
            BenchRow(key="kernel_frame", title="ipykernel: start to a DataFrame's HTML"),
        ),
    ),
    BenchPart(
        title="first picture",
        measure=starts.measure_first_picture,
        rows=(
            BenchRow(key="png_pool", title="create to the first PNG, pool hit", against=("kernel_png",), bar=12),
            BenchRow(key="kernel_png", title="ipykernel: start to the first PNG"),
        ),
    ),
    BenchPart(
        title="round trips",
        measure=warm.measure_round_trips,
        rows=(
            BenchRow(key="warm", title="warm round trip, `1+1`", against=_WARM, bar=5),
            BenchRow(key="warm_kilobyte", title="warm round trip, 1 kB of output", against=_KILOBYTE),
            BenchRow(key="warm_image", title="warm round trip, an image of 1 MB", against=_IMAGE),
            BenchRow(key="kernel_warm_tcp", title="ipykernel: `1+1` over tcp"),
            BenchRow(key="kernel_warm_ipc", title="ipykernel: `1+1` over ipc"),
            BenchRow(key="kernel_warm_kilobyte_tcp", title="ipykernel: 1 kB of output over tcp"),
            BenchRow(key="kernel_warm_kilobyte_ipc", title="ipykernel: 1 kB of output over ipc"),
            BenchRow(key="kernel_warm_image_tcp", title="ipykernel: an image of 1 MB over tcp"),
            BenchRow(key="kernel_warm_image_ipc", title="ipykernel: an image of 1 MB over ipc"),
        ),
    ),
    BenchPart(
        title="programs of a shell",
        measure=pythons.measure_heredocs,
        rows=(
            BenchRow(key="python_warm", title="bash: `python3` with pandas", against=("python_cold",), bar=5),
            BenchRow(key="python_cold", title="the same with the real interpreter, which starts and imports"),
        ),
    ),
    BenchPart(
        title="interrupts",
        measure=warm.measure_interrupts,
        rows=(
            BenchRow(key="interrupt", title="interrupt of an endless loop, to its end", against=("kernel_interrupt",)),
            BenchRow(key="kernel_interrupt", title="ipykernel: interrupt, to idle"),
        ),
    ),
    BenchPart(
        title="pauses",
        measure=pauses.measure_pauses,
        rows=(
            BenchRow(key="pause", title="pause with memory, files on a disk"),
            BenchRow(
                key="resume_one",
                title="resume and `1+1`",
                against=("resumed_warm",),
                bar=4,
                limit=True,
            ),
            BenchRow(key="resumed_warm", title="warm `1+1` in that sandbox"),
        ),
    ),
    BenchPart(
        title="copies of a context",
        measure=branches.measure_branches,
        rows=(
            BenchRow(
                key="branch",
                title="fork of a context with a DataFrame of 100 MB, to ready",
                against=("branch_raw",),
                bar=3,
                limit=True,
            ),
            BenchRow(key="branch_raw", title="raw cost: that process forks, one byte back"),
            BenchRow(
                key="branch_memory",
                title="what such a fork adds until it is written to",
                unit="MB",
                against=("branch_frame",),
                bar=10,
            ),
            BenchRow(key="branch_frame", title="the DataFrame", unit="MB"),
        ),
    ),
    BenchPart(
        title="memory",
        measure=memory.measure_memory,
        rows=(
            BenchRow(key="memory", title="idle sandbox: MemAvailable", unit="MB", against=("kernel_private",), bar=20),
            BenchRow(key="memory_anon", title="idle sandbox: AnonPages", unit="MB"),
            BenchRow(key="memory_page_tables", title="idle sandbox: PageTables", unit="MB"),
            BenchRow(key="memory_slab", title="idle sandbox: Slab", unit="MB"),
            BenchRow(
                key="memory_used", title="sandbox after `1+1`: MemAvailable", unit="MB", against=("kernel_private",)
            ),
            BenchRow(key="kernel_memory", title="ipykernel with pandas and pyplot: MemAvailable", unit="MB"),
            BenchRow(key="kernel_pss", title="ipykernel with pandas and pyplot: PSS", unit="MB"),
            BenchRow(key="kernel_private", title="ipykernel with pandas and pyplot: private", unit="MB"),
        ),
    ),
    BenchPart(
        title="creations under load",
        measure=load.measure_creations,
        rows=(BenchRow(key="creations", title="sandboxes created, used and destroyed, 8 threads", unit="/s"),),
    ),
    BenchPart(
        title="executions under load",
        measure=load.measure_executions,
        rows=(BenchRow(key="executions", title="executions in 64 warm sandboxes, 8 threads", unit="/s"),),
    ),
    BenchPart(
        title="files",
        measure=load.measure_transfers,
        rows=(
            BenchRow(key="file_write", title="write a file of 100 MB", unit="MB/s"),
            BenchRow(key="file_read", title="read a file of 100 MB", unit="MB/s"),
        ),
    ),
)

SERVER_PARTS: Sequence[BenchPart] = (
    BenchPart(
        title="first answers through a server",
        measure=serving.measure_first_answers,
        rows=(
            BenchRow(key="e2b_ready", title="E2B's client: `Sandbox.create()`"),
            BenchRow(
                key="e2b_one",
                title="E2B's client: `Sandbox.create()` and `run_code('1+1')`",
                against=("kernel_one",),
                bar=20,
            ),
            BenchRow(key="kernel_one", title="ipykernel: start to `1+1`"),
        ),
    ),
    BenchPart(
        title="round trips through a server",
        measure=serving.measure_round_trips,
        rows=(
            BenchRow(key="e2b_warm", title="E2B's client: `run_code('1+1')` in a live context", against=_WARM, bar=1),
            BenchRow(key="kernel_warm_tcp", title="ipykernel: `1+1` over tcp"),
            BenchRow(key="kernel_warm_ipc", title="ipykernel: `1+1` over ipc"),
        ),
    ),
    BenchPart(
        title="turns of the gateway",
        measure=turns.measure_gateway_turns,
        rows=(
            BenchRow(
                key="gateway_turn",
                title="`/v1/responses`: a turn with code `pass`, instant upstream, container from the pool",
                against=("native_warm",),
                bar=4,
                limit=True,
            ),
            BenchRow(key="gateway_echo", title="the same with `cloche/echo`", against=("native_warm",), limit=True),
            BenchRow(key="native_warm", title="`/api/v1`: run `pass` in a live context"),
        ),
    ),
)

PACKAGE_PARTS: Sequence[BenchPart] = (
    BenchPart(
        title="installations of packages",
        measure=installs.measure_installs,
        rows=tuple(
            row
            for name, command in installs.INSTALL_COMMANDS.items()
            for row in (
                BenchRow(
                    key=f"{name}_second",
                    title=f"`{command}` from the host's cache",
                    against=(f"{name}_first",),
                    bar=3 if name == "uv" else None,  # the others' own work takes longer than a near index
                ),
                BenchRow(key=f"{name}_first", title=f"`{command}`, the first on this host"),
            )
        ),
    ),
)

ROWS = {row.key: row for part in PARTS for row in part.rows}
SERVER_ROWS = {row.key: row for part in SERVER_PARTS for row in part.rows}
PACKAGE_ROWS = {row.key: row for part in PACKAGE_PARTS for row in part.rows}


def choose_parts(keys: Sequence[str], among: Sequence[BenchPart] = PARTS) -> list[BenchPart]:
    """The parts that measure those rows; all without keys. Raises InvalidRequest for an unknown row."""
    known = [row.key for part in among for row in part.rows]
    unknown = sorted(set(keys) - set(known))
    if unknown:
        raise errors.InvalidRequest(f"there is no row {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in among if not keys or any(row.key in keys for row in part.rows)]
