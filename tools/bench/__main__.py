"""`make bench`: Cloche through HTTP, alone and under load, beside the peers that run without Docker.

    PYTHONPATH=tools python -m bench [--quick] [--rows KEY,...] [--peers PYTHON [--checkout DIR] [--plot FILE]]

See docs/benchmarks.md. `cloche bench` measures the library, and the rows of one client through HTTP.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from bench.comparison import comparison_document, comparison_markdown, draw_comparison, is_matplotlib_missing
from bench.load_rows import LOAD_PARTS
from bench.peer_runs import PeerMeasurements

from cloche import errors
from cloche.bench.http_measurements import HttpLab
from cloche.bench.lab import BENCH_ADVICE, QUICK_COUNTS, SampleCounts
from cloche.bench.rows import HTTP_PARTS, choose_parts, machine_facts, results_document, results_markdown
from cloche.bench.samples import SampleBook
from cloche.cli.bench import format_load_average, measure_parts, report_failures, write_json
from cloche.config import load_config


@click.command("bench")
@click.option("--config", "config_file", type=click.Path(), help="Configuration file, instead of ./cloche.toml.")
@click.option("--data-dir", type=click.Path(), help="Directory of templates and records.")
@click.option("--quick", is_flag=True, help="Fewer samples.")
@click.option("--rows", "keys", metavar="KEY,...", default="", help="Only these rows and the rows measured with them.")
@click.option("--json", "file", type=click.Path(dir_okay=False), help="Also write every sample to this file.")
@click.option("--peers", metavar="PYTHON", help="The interpreter that has the peers, to measure them too.")
@click.option("--checkout", metavar="DIR", default="", help="With --peers: a checkout of e2b-dev/code-interpreter.")
@click.option(
    "--plot", "picture", type=click.Path(dir_okay=False), help="With --peers: draw the comparison, .svg or .png."
)
def main(
    config_file: str | None,
    data_dir: str | None,
    quick: bool,
    keys: str,
    file: str | None,
    peers: str | None,
    checkout: str,
    picture: str | None,
) -> None:
    """Measure a server of Cloche by a bare HTTP client, alone and in crowds; with --peers, its peers too.

    Ratios are what counts: times move with the machine. Exit status 1 if a measurement of Cloche failed, never for
    slowness.
    """
    parts = choose_parts([key for key in keys.split(",") if key], (*HTTP_PARTS, *LOAD_PARTS))
    if picture is not None and is_matplotlib_missing():
        raise errors.InvalidRequest(f"matplotlib is not installed: {BENCH_ADVICE}")
    counts = QUICK_COUNTS if quick else SampleCounts()
    facts = machine_facts()
    config = load_config(config_file, flags={"data_dir": data_dir})
    book = measure_parts(parts, config, counts, HttpLab, peer=False)
    found = _measure_peers(book, peers, checkout, counts) if peers else None
    facts["load after"] = format_load_average()
    click.echo(results_markdown(parts, book, facts))
    document = results_document(parts, book, facts)
    if found is not None:
        click.echo("\n" + comparison_markdown(book, found))
        document["peers"] = comparison_document(book, found)
    if file is not None:
        write_json(file, document)
    if picture is not None:
        draw_comparison(Path(picture), book, found or PeerMeasurements(book))
    sys.exit(1 if report_failures(parts, book) else 0)


def _measure_peers(book: SampleBook, python: str, checkout: str, counts: SampleCounts) -> PeerMeasurements:
    peers = PeerMeasurements(book)
    peers.measure(python, checkout, counts, lambda text: click.echo(text, err=True))
    return peers


if __name__ == "__main__":
    try:
        main()
    except errors.ClocheError as error:
        sys.exit(f"bench: {error}")
