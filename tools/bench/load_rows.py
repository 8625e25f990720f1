"""The rows measured through HTTP with many clients and sandboxes, with their bars."""

from __future__ import annotations

from collections.abc import Sequence

from bench import load_measurements

from cloche.bench.rows import BenchPart, BenchRow

_GROWN = tuple(
    row
    for live in load_measurements.LIVE_COUNTS
    for row in (
        BenchRow(key=f"grown_first_{live}", title=f"{live} sandboxes live: create to `1+1`, one client after another"),
        BenchRow(key=f"grown_warm_{live}", title=f"{live} sandboxes live: `1+1` in each in turn, one client"),
        BenchRow(key=f"grown_executions_{live}", title=f"{live} sandboxes live: executions, 8 clients", unit="/s"),
        BenchRow(key=f"grown_system_{live}", title="cores that the system's own threads took meanwhile", unit="×"),
        BenchRow(key=f"grown_crowd_{live}", title=f"{live} sandboxes live: executions, 64 clients", unit="/s"),
        BenchRow(
            key=f"grown_few_{live}", title=f"{live} sandboxes live: executions, 8 clients in 8 of them", unit="/s"
        ),
    )
)
_EXECUTIONS = tuple(
    row
    for clients in load_measurements.CLIENT_COUNTS
    for row in (
        BenchRow(key=f"http_executions_{clients}", title=f"executions, clients: {clients}", unit="/s"),
        BenchRow(key=f"http_executions_{clients}_cpu", title=f"the server's CPU time for each, clients: {clients}"),
    )
)

LOAD_PARTS: Sequence[BenchPart] = (
    BenchPart(
        title="executions through HTTP",
        measure=load_measurements.measure_executions,
        rows=(
            *_EXECUTIONS,
            BenchRow(
                key="fairness",
                title="64 clients: p99, in fair shares (64 / throughput)",
                unit="×",
                bar=3,
                limit=True,
            ),
        ),
    ),
    BenchPart(
        title="creations through HTTP",
        measure=load_measurements.measure_cycles,
        rows=(
            BenchRow(
                key="http_cycles_8",
                title="sandboxes created, used and destroyed, 8 clients",
                unit="/s",
                bar=60,
            ),
            BenchRow(key="http_cycles_8_cpu", title="the server's CPU time for each of those"),
        ),
    ),
    BenchPart(
        title="how cost grows",
        measure=load_measurements.measure_growth,
        rows=(
            *_GROWN,
            BenchRow(
                key="growth",
                title="throughput at 500 live sandboxes, of that at 10: 64 clients",
                unit="×",
                bar=0.8,
            ),
            BenchRow(key="growth_eight", title="the same by 8 clients", unit="×", bar=0.8),
            BenchRow(
                key="growth_few", title="by 8 clients in 8 of them: what the others cost that nobody uses", unit="×"
            ),
        ),
    ),
    BenchPart(
        title="idle sandboxes",
        measure=load_measurements.measure_idle,
        rows=(
            BenchRow(key="idle_memory", title="idle sandbox: memory, all in", unit="MB", bar=5, limit=True),
            *(
                BenchRow(key=f"idle_{key}", title=f"idle sandbox: {field}", unit="MB")
                for key, field in load_measurements.MEMORY_FIELDS.items()
            ),
            BenchRow(key="used_memory", title="sandbox after `1+1`: memory, all in", unit="MB", bar=8, limit=True),
            BenchRow(key="answering", title="idle sandboxes alive at once that answered", unit="", bar=1000),
        ),
    ),
    BenchPart(
        title="the load generator",
        measure=lambda lab: None,
        rows=(BenchRow(key="generator", title="the load generator's own share of a core", unit="×"),),
    ),
)
LOAD_ROWS = {row.key: row for part in LOAD_PARTS for row in part.rows}
