"""The rows measured through HTTP, with their bars."""

from __future__ import annotations

from collections.abc import Sequence

from cloche.bench import crowds, mcp_calls, over_http
from cloche.bench.rows import BenchPart, BenchRow

_GROWN = tuple(
    row
    for live in crowds.LIVE_COUNTS
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
    for clients in crowds.CLIENT_COUNTS
    for row in (
        BenchRow(key=f"http_executions_{clients}", title=f"executions, clients: {clients}", unit="/s"),
        BenchRow(key=f"http_executions_{clients}_cpu", title=f"the server's CPU time for each, clients: {clients}"),
    )
)

HTTP_PARTS: Sequence[BenchPart] = (
    BenchPart(
        title="first results through HTTP",
        measure=over_http.measure_first_results,
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
        measure=over_http.measure_first_displays,
        rows=(
            BenchRow(key="http_frame", title="create to a DataFrame's HTML, from the pool"),
            BenchRow(key="http_png", title="create to the first PNG, from the pool"),
        ),
    ),
    BenchPart(
        title="round trips through HTTP",
        measure=over_http.measure_round_trips,
        rows=(BenchRow(key="http_warm", title="warm round trip, `1+1`"),),
    ),
    BenchPart(
        title="tools of MCP",
        measure=mcp_calls.measure_mcp_calls,
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
        title="executions through HTTP",
        measure=crowds.measure_executions,
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
        measure=crowds.measure_cycles,
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
        title="output through HTTP",
        measure=over_http.measure_streams,
        rows=(BenchRow(key="http_stream", title="10 MB of output, streamed", unit="MB/s"),),
    ),
    BenchPart(
        title="files through HTTP",
        measure=over_http.measure_files,
        rows=(
            BenchRow(key="http_file_write", title="upload of 100 MB", unit="MB/s"),
            BenchRow(key="http_file_read", title="download of 100 MB", unit="MB/s"),
        ),
    ),
    BenchPart(
        title="how cost grows",
        measure=crowds.measure_growth,
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
        measure=crowds.measure_idle,
        rows=(
            BenchRow(key="idle_memory", title="idle sandbox: memory, all in", unit="MB", bar=5, limit=True),
            *(
                BenchRow(key=f"idle_{key}", title=f"idle sandbox: {field}", unit="MB")
                for key, field in crowds.MEMORY_FIELDS.items()
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
HTTP_ROWS = {row.key: row for part in HTTP_PARTS for row in part.rows}
