"""The rows of the table with their bars, and the results as Markdown and as JSON."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cloche import errors
from cloche.bench import http_measurements, measurements, server_measurements
from cloche.bench.lab import BENCH_ADVICE, PEER_PACKAGES, Lab, missing_packages
from cloche.bench.measurements import read_figures
from cloche.bench.samples import QUANTILES, SampleBook, Samples
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
        measure=measurements.measure_first_answers,
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
        measure=measurements.measure_first_frame,
        rows=(
            BenchRow(
                key="frame_pool", title="create to a DataFrame's HTML, pool hit", against=("kernel_frame",), bar=40
            ),
            BenchRow(key="kernel_frame", title="ipykernel: start to a DataFrame's HTML"),
        ),
    ),
    BenchPart(
        title="first picture",
        measure=measurements.measure_first_picture,
        rows=(
            BenchRow(key="png_pool", title="create to the first PNG, pool hit", against=("kernel_png",), bar=12),
            BenchRow(key="kernel_png", title="ipykernel: start to the first PNG"),
        ),
    ),
    BenchPart(
        title="round trips",
        measure=measurements.measure_round_trips,
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
        measure=measurements.measure_heredocs,
        rows=(
            BenchRow(key="python_warm", title="bash: `python3` with pandas", against=("python_cold",), bar=5),
            BenchRow(key="python_cold", title="the same with the real interpreter, which starts and imports"),
        ),
    ),
    BenchPart(
        title="interrupts",
        measure=measurements.measure_interrupts,
        rows=(
            BenchRow(key="interrupt", title="interrupt of an endless loop, to its end", against=("kernel_interrupt",)),
            BenchRow(key="kernel_interrupt", title="ipykernel: interrupt, to idle"),
        ),
    ),
    BenchPart(
        title="pauses",
        measure=measurements.measure_pauses,
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
        measure=measurements.measure_branches,
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
        measure=measurements.measure_memory,
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
        measure=measurements.measure_creations,
        rows=(BenchRow(key="creations", title="sandboxes created, used and destroyed, 8 threads", unit="/s"),),
    ),
    BenchPart(
        title="executions under load",
        measure=measurements.measure_executions,
        rows=(BenchRow(key="executions", title="executions in 64 warm sandboxes, 8 threads", unit="/s"),),
    ),
    BenchPart(
        title="files",
        measure=measurements.measure_transfers,
        rows=(
            BenchRow(key="file_write", title="write a file of 100 MB", unit="MB/s"),
            BenchRow(key="file_read", title="read a file of 100 MB", unit="MB/s"),
        ),
    ),
)

SERVER_PARTS: Sequence[BenchPart] = (
    BenchPart(
        title="first answers through a server",
        measure=server_measurements.measure_first_answers,
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
        measure=server_measurements.measure_round_trips,
        rows=(
            BenchRow(key="e2b_warm", title="E2B's client: `run_code('1+1')` in a live context", against=_WARM, bar=1),
            BenchRow(key="kernel_warm_tcp", title="ipykernel: `1+1` over tcp"),
            BenchRow(key="kernel_warm_ipc", title="ipykernel: `1+1` over ipc"),
        ),
    ),
    BenchPart(
        title="turns of the gateway",
        measure=server_measurements.measure_gateway_turns,
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
        measure=measurements.measure_installs,
        rows=tuple(
            row
            for name, command in measurements.INSTALL_COMMANDS.items()
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

HTTP_PARTS: Sequence[BenchPart] = (
    BenchPart(
        title="first results through HTTP",
        measure=http_measurements.measure_first_results,
        rows=(
            BenchRow(
                key="http_one_pool", title="create to `1+1`, from the pool", against=("http_raw",), bar=1, limit=True
            ),
            BenchRow(
                key="http_one_empty", title="create to `1+1`, pool empty", against=("http_raw",), bar=3, limit=True
            ),
            BenchRow(key="http_raw", title="raw cost: fork, all namespaces, one byte back"),
        ),
    ),
    BenchPart(
        title="first DataFrame and picture through HTTP",
        measure=http_measurements.measure_first_displays,
        rows=(
            BenchRow(key="http_frame", title="create to a DataFrame's HTML, from the pool"),
            BenchRow(key="http_png", title="create to the first PNG, from the pool"),
        ),
    ),
    BenchPart(
        title="round trips through HTTP",
        measure=http_measurements.measure_round_trips,
        rows=(BenchRow(key="http_warm", title="warm round trip, `1+1`"),),
    ),
    BenchPart(
        title="tools of MCP",
        measure=http_measurements.measure_mcp_calls,
        rows=(
            BenchRow(key="mcp_call", title="MCP over HTTP: `run_code` of `1+1`, the official client"),
            BenchRow(
                key="mcp_call_adds",
                title="what that adds to a warm round trip, in warm round trips",
                unit="×",
                bar=5,
                limit=True,
            ),
            BenchRow(key="mcp_bare", title="MCP over HTTP: the same, a bare client"),
            BenchRow(key="mcp_bare_adds", title="what that adds, in the same", unit="×", bar=5, limit=True),
            BenchRow(key="mcp_http", title="the warm round trip, in turns with these"),
        ),
    ),
    BenchPart(
        title="output through HTTP",
        measure=http_measurements.measure_streams,
        rows=(BenchRow(key="http_stream", title="10 MB of output, streamed", unit="MB/s"),),
    ),
    BenchPart(
        title="files through HTTP",
        measure=http_measurements.measure_files,
        rows=(
            BenchRow(key="http_file_write", title="upload of 100 MB", unit="MB/s"),
            BenchRow(key="http_file_read", title="download of 100 MB", unit="MB/s"),
        ),
    ),
)

ROWS = {row.key: row for part in PARTS for row in part.rows}
SERVER_ROWS = {row.key: row for part in SERVER_PARTS for row in part.rows}
HTTP_ROWS = {row.key: row for part in HTTP_PARTS for row in part.rows}
PACKAGE_ROWS = {row.key: row for part in PACKAGE_PARTS for row in part.rows}


def choose_parts(keys: Sequence[str], among: Sequence[BenchPart] = PARTS) -> list[BenchPart]:
    """The parts that measure those rows; all without keys. Raises InvalidRequest for an unknown row."""
    known = [row.key for part in among for row in part.rows]
    unknown = sorted(set(keys) - set(known))
    if unknown:
        raise errors.InvalidRequest(f"there is no row {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in among if not keys or any(row.key in keys for row in part.rows)]


# --- The results as Markdown and as JSON.

UNIT_SCALES = {"ms": 1e3, "MB": 1e-6, "/s": 1.0, "MB/s": 1e-6, "×": 1.0, "": 1.0}
_TABLE_HEAD = ("measure", "unit", "n", "ok", *QUANTILES, "ratio", "bar", "")


def results_markdown(parts: Iterable[BenchPart], book: SampleBook, facts: Mapping[str, str]) -> str:
    """The facts as a list, then one table. Ratios are of medians."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", _table_line(_TABLE_HEAD), _table_line(["---", "---", *["---:"] * 8, "---:", ":---:"])]
    for part in parts:
        lines += [_table_line(row_cells(row, book)) for row in part.rows if row.key in book.rows]
    return "\n".join(lines)


def row_cells(row: BenchRow, book: SampleBook) -> list[str]:
    samples = book[row.key]
    tried = len(samples.values) + len(samples.failures)
    return [
        row.title,
        row.unit,
        str(tried),
        f"{len(samples.values) / tried:.1%}" if samples.failures else "all",
        *_quantile_cells(samples, UNIT_SCALES[row.unit]),
        _ratio_cell(row, book),
        _bar_cell(row),
        _verdict_cell(row, book),
    ]


def row_ratio(row: BenchRow, book: SampleBook) -> float | None:
    """The ratio of the best other median to ours; for a limit, of ours to the other."""
    others = [book[key].p50 for key in row.against if key in book]
    if not others or row.key not in book:
        return None
    ours, other = book[row.key].p50, min(others)
    above, below = (ours, other) if row.limit else (other, ours)
    # Memory can seem to shrink where others on the host give some back: that says nothing about us.
    return above / below if above > 0 and below > 0 else None


def is_bar_met(row: BenchRow, book: SampleBook) -> bool | None:
    """Whether the row's bar is met; None where there is none, or nothing to compare with."""
    found = row_ratio(row, book) if row.against else _row_median(row, book)
    if found is None or row.bar is None:
        return None
    return found <= row.bar if row.limit else found >= row.bar


def _row_median(row: BenchRow, book: SampleBook) -> float | None:
    return book[row.key].p50 * UNIT_SCALES[row.unit] if row.key in book else None


def results_document(parts: Iterable[BenchPart], book: SampleBook, facts: Mapping[str, str]) -> dict[str, Any]:
    """All measurements, in seconds, bytes and per second."""
    rows = [row for part in parts for row in part.rows if row.key in book.rows]
    return {"facts": dict(facts), "rows": {row.key: _describe_row(row, book, book[row.key]) for row in rows}}


def _describe_row(row: BenchRow, book: SampleBook, samples: Samples) -> dict[str, Any]:
    found = {name: samples.quantile(share) for name, share in QUANTILES.items()} if samples.values else {}
    return {
        "title": row.title,
        **found,
        "ratio": row_ratio(row, book),
        "bar": row.bar,
        "met": is_bar_met(row, book),
        "failures": samples.failures,
        "samples": samples.values,
    }


def _quantile_cells(samples: Samples, scale: float) -> list[str]:
    if not samples.values:
        return ["–"] * len(QUANTILES)
    return [format_figure(samples.quantile(share) * scale) for share in QUANTILES.values()]


def _ratio_cell(row: BenchRow, book: SampleBook) -> str:
    found = row_ratio(row, book)
    if found is None:
        return ""
    if row.also is None or row.also not in book:
        return f"{format_figure(found)}×"
    return f"{format_figure(found)}× ({format_figure(book[row.also].p50 / book[row.key].p50)}× lean)"


def _bar_cell(row: BenchRow) -> str:
    if row.bar is None:
        return ""
    unit = "×" if row.against else f" {row.unit}".replace(" /", "/").replace(" ×", "×").rstrip()
    return f"{'≤' if row.limit else '≥'} {row.bar:,g}{unit}"


def _verdict_cell(row: BenchRow, book: SampleBook) -> str:
    found = is_bar_met(row, book)
    if found is None:
        return "?" if row.bar is not None else ""
    return "✓" if found else "✗"


def format_figure(value: float) -> str:
    """Three significant digits, no exponent."""
    for digits, least in ((0, 100.0), (1, 10.0), (2, 0.1)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3f}"


def _table_line(words: Iterable[str]) -> str:
    return "| " + " | ".join(words) + " |"


# --- Facts about the machine, printed with every result: place, hardware, time and versions.

GIT_SECONDS = 10


def machine_facts() -> dict[str, str]:
    memory_gib = read_figures(Path("/proc/meminfo"))["MemTotal"] / 1024**3
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "CPU": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} usable",
        "memory": f"{memory_gib:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
        "commit": current_commit(),
        "peer": _peer_versions(),
        "load before": " ".join(f"{each:.2f}" for each in os.getloadavg()),
        "user": "root" if os.geteuid() == 0 else "an ordinary user",
    }


def current_commit() -> str:
    """The commit of the checkout that we run from, if there is one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"unknown (cloche {version('cloche')})"
    return found.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _peer_versions() -> str:
    if missing := missing_packages():
        return f"none: {', '.join(missing)} not installed; {BENCH_ADVICE}"
    return (
        ", ".join(f"{name} {_package_version(name)}" for name in PEER_PACKAGES)
        + f" on Python {sys.version_info[0]}.{sys.version_info[1]}"
    )


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"
