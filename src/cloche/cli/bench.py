"""`cloche bench`: measures Cloche against its peers, in one run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from cloche import errors
from cloche.bench import comparison, ipykernel_peer, machine, plot, serving, table
from cloche.bench.http_rows import HTTP_PARTS
from cloche.bench.installs import InstallLab
from cloche.bench.lab import QUICK_COUNTS, Lab, SampleCounts
from cloche.bench.over_http import HttpLab
from cloche.bench.peer_runs import PeerMeasurements
from cloche.bench.rows import PACKAGE_PARTS, PARTS, SERVER_PARTS, BenchPart, choose_parts
from cloche.bench.samples import SampleBook
from cloche.bench.serving import ServerLab
from cloche.cli import load_command_config
from cloche.cli.progress import show_progress
from cloche.templates import Catalogue, ensure_template

AnyLab = Lab | ServerLab | InstallLab | HttpLab
_LAB_KINDS: dict[str, tuple[type[AnyLab], Sequence[BenchPart]]] = {
    "library": (Lab, PARTS),
    "server": (ServerLab, SERVER_PARTS),
    "packages": (InstallLab, PACKAGE_PARTS),
    "http": (HttpLab, HTTP_PARTS),
}


@click.command("bench")
@click.option("--quick", is_flag=True, help="Fewer samples: a minute instead of four.")
@click.option("--rows", "keys", metavar="KEY,...", default="", help="Only these rows and what is measured with them.")
@click.option("--json", "file", type=click.Path(dir_okay=False), help="Also write every sample to this file.")
@click.option("--live", type=click.IntRange(1, 2000), help="How many idle sandboxes are made to measure their memory.")
@click.option("--no-peer", is_flag=True, help="Measure Cloche alone.")
@click.option(
    "--server", "through_server", is_flag=True, help="Measure E2B's own client against `cloche serve` instead."
)
@click.option("--packages", "of_packages", is_flag=True, help="Measure installations by uv, pip and npm instead.")
@click.option("--http", "over_http", is_flag=True, help="Measure a server by a bare HTTP client instead, in crowds.")
@click.option("--peers", metavar="PYTHON", help="With --http: the interpreter that has the peers, to measure them too.")
@click.option("--checkout", metavar="DIR", default="", help="With --peers: a checkout of e2b-dev/code-interpreter.")
@click.option(
    "--plot", "picture", type=click.Path(dir_okay=False), help="With --peers: draw the comparison, .svg or .png."
)
def command(
    quick: bool,
    keys: str,
    file: str | None,
    live: int | None,
    no_peer: bool,
    through_server: bool,
    of_packages: bool,
    over_http: bool,
    peers: str | None,
    checkout: str,
    picture: str | None,
) -> None:
    """Measure Cloche against a plain ipykernel driven by jupyter_client, in turns, and print a Markdown table.

    With --http --peers, against everything that runs without Docker. Ratios are what counts: times move with the
    machine. Exit status 1 if a measurement failed, never for slowness.
    """
    asked = {"server": through_server, "packages": of_packages, "http": over_http}
    kind, among = _LAB_KINDS[next((name for name, wanted in asked.items() if wanted), "library")]
    parts = choose_parts([key for key in keys.split(",") if key], among)
    if through_server and serving.is_client_missing():
        raise errors.InvalidRequest(f"E2B's client is not installed: {ipykernel_peer.BENCH_ADVICE}")
    if (peers or picture) and not over_http:
        raise errors.InvalidRequest("--peers and --plot are for --http")
    if picture is not None and plot.is_matplotlib_missing():
        raise errors.InvalidRequest(f"matplotlib is not installed: {ipykernel_peer.BENCH_ADVICE}")
    counts = QUICK_COUNTS if quick else SampleCounts()
    if live is not None:
        counts = msgspec.structs.replace(counts, live=live)
    if not (no_peer or of_packages) and (missing := ipykernel_peer.missing_packages()):
        click.echo(f"no peer: {', '.join(missing)} not installed; {ipykernel_peer.BENCH_ADVICE}", err=True)
    facts = machine.machine_facts()
    book = _measure_parts(parts, counts, kind, peer=not no_peer)
    found = _measure_peers(book, peers, checkout, counts) if peers else None
    facts["load after"] = " ".join(f"{each:.2f}" for each in os.getloadavg())
    click.echo(table.results_markdown(parts, book, facts))
    document = table.results_document(parts, book, facts)
    if found is not None:
        click.echo("\n" + comparison.comparison_markdown(book, found))
        document["peers"] = comparison.comparison_document(book, found)
    if file is not None:
        Path(file).write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    if picture is not None:
        plot.draw_comparison(Path(picture), book, found or PeerMeasurements(book))
    sys.exit(1 if _say_failures(book, {row.key for part in parts for row in part.rows}) else 0)


def _measure_peers(book: SampleBook, python: str, checkout: str, counts: SampleCounts) -> PeerMeasurements:
    peers = PeerMeasurements(book)
    peers.measure(python, checkout, counts, lambda text: click.echo(text, err=True))
    return peers


def _measure_parts(parts: list[BenchPart], counts: SampleCounts, kind: type[AnyLab], *, peer: bool) -> SampleBook:
    config = load_command_config()
    with show_progress("building python") as report:
        ensure_template(Catalogue(config.data_dir, config.aliases), "python", report)
    with kind(config, counts, peer=peer) as lab:
        for part in parts:
            click.echo(f"measuring {part.title}", err=True)
            part.measure(lab)
    return lab.book


def _say_failures(book: SampleBook, ours: set[str]) -> bool:
    """Prints all failures. Returns whether one of our own measurements failed."""
    failed = {key: samples.failures for key, samples in book.rows.items() if samples.failures}
    for key, why in failed.items():
        click.echo(f"{key}: {len(why)} failed; the first: {why[0]}", err=True)
    return not ours.isdisjoint(failed)
