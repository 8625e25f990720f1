"""The rows that are measured through HTTP, with their bars."""

from __future__ import annotations

from collections.abc import Sequence

from cloche.bench import crowds, mcp_calls, over_http
from cloche.bench.rows import Part, Row

_GROWN = tuple(
    row
    for live in crowds.LIVE
    for row in (
        Row(key=f"grown_first_{live}", title=f"{live} sandboxes live: create to `1+1`, one client after another"),
        Row(key=f"grown_warm_{live}", title=f"{live} sandboxes live: `1+1` in each in turn, one client"),
        Row(key=f"grown_executions_{live}", title=f"{live} sandboxes live: executions, 8 clients", unit="/s"),
        Row(key=f"grown_system_{live}", title="cores that the system's own threads took meanwhile", unit="×"),
        Row(key=f"grown_crowd_{live}", title=f"{live} sandboxes live: executions, 64 clients", unit="/s"),
        Row(key=f"grown_few_{live}", title=f"{live} sandboxes live: executions, 8 clients in 8 of them", unit="/s"),
    )
)
_EXECUTIONS = tuple(
    row
    for clients in crowds.CLIENTS
    for row in (
        Row(key=f"http_executions_{clients}", title=f"executions, clients: {clients}", unit="/s"),
        Row(key=f"http_executions_{clients}_cpu", title=f"the server's CPU time for each, clients: {clients}"),
    )
)

HTTP_PARTS: Sequence[Part] = (
    Part(
        title="first results through HTTP",
        measure=over_http.first_results,
        rows=(
            Row(key="http_one_pool", title="create to `1+1`, from the pool", against=("http_raw",), bar=1, limit=True),
            Row(key="http_one_empty", title="create to `1+1`, pool empty", against=("http_raw",), bar=3, limit=True),
            Row(key="http_raw", title="raw cost: fork, all namespaces, one byte back"),
        ),
    ),
    Part(
        title="first DataFrame and picture through HTTP",
        measure=over_http.first_shows,
        rows=(
            Row(key="http_frame", title="create to a DataFrame's HTML, from the pool"),
            Row(key="http_png", title="create to the first PNG, from the pool"),
        ),
    ),
    Part(
        title="round trips through HTTP",
        measure=over_http.round_trips,
        rows=(Row(key="http_warm", title="warm round trip, `1+1`"),),
    ),
    Part(
        title="tools of MCP",
        measure=mcp_calls.calls,
        rows=(
            Row(key="mcp_call", title="MCP over HTTP: `run_code` of `1+1`, the official client"),
            Row(
                key="mcp_call_adds",
                title="what that adds to a warm round trip, in warm round trips",
                unit="×",
                bar=5,
                limit=True,
            ),
            Row(key="mcp_bare", title="MCP over HTTP: the same, a bare client"),
            Row(key="mcp_bare_adds", title="what that adds, in the same", unit="×", bar=5, limit=True),
            Row(key="mcp_http", title="the warm round trip, in turns with these"),
        ),
    ),
    Part(
        title="executions through HTTP",
        measure=crowds.executions,
        rows=(
            *_EXECUTIONS,
            Row(
                key="fairness",
                title="64 clients: p99, in fair shares (64 / throughput)",
                unit="×",
                bar=3,
                limit=True,
            ),
        ),
    ),
    Part(
        title="creations through HTTP",
        measure=crowds.cycles,
        rows=(
            Row(
                key="http_cycles_8",
                title="sandboxes created, used and destroyed, 8 clients",
                unit="/s",
                bar=60,
            ),
            Row(key="http_cycles_8_cpu", title="the server's CPU time for each of those"),
        ),
    ),
    Part(
        title="output through HTTP",
        measure=over_http.streams,
        rows=(Row(key="http_stream", title="10 MB of output, streamed", unit="MB/s"),),
    ),
    Part(
        title="files through HTTP",
        measure=over_http.files,
        rows=(
            Row(key="http_file_write", title="upload of 100 MB", unit="MB/s"),
            Row(key="http_file_read", title="download of 100 MB", unit="MB/s"),
        ),
    ),
    Part(
        title="how cost grows",
        measure=crowds.growth,
        rows=(
            *_GROWN,
            Row(
                key="growth",
                title="throughput at 500 live sandboxes, of that at 10: 64 clients",
                unit="×",
                bar=0.8,
            ),
            Row(key="growth_eight", title="the same by 8 clients", unit="×", bar=0.8),
            Row(key="growth_few", title="by 8 clients in 8 of them: what the others cost that nobody uses", unit="×"),
        ),
    ),
    Part(
        title="idle sandboxes",
        measure=crowds.idle,
        rows=(
            Row(key="idle_memory", title="idle sandbox: memory, all in", unit="MB", bar=5, limit=True),
            *(
                Row(key=f"idle_{key}", title=f"idle sandbox: {field}", unit="MB")
                for key, field in crowds.FIELDS.items()
            ),
            Row(key="used_memory", title="sandbox after `1+1`: memory, all in", unit="MB", bar=8, limit=True),
            Row(key="answering", title="idle sandboxes alive at once that answered", unit="", bar=1000),
        ),
    ),
    Part(
        title="the load generator",
        measure=lambda lab: None,
        rows=(Row(key="generator", title="the load generator's own share of a core", unit="×"),),
    ),
)
HTTP_ROWS = {row.key: row for part in HTTP_PARTS for row in part.rows}
