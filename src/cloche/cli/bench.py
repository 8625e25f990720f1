"""`cloche bench`: measures Cloche against a plain ipykernel, or a server through HTTP, in one run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from cloche import errors
from cloche.bench.http_measurements import HttpLab
from cloche.bench.lab import BENCH_ADVICE, QUICK_COUNTS, Lab, SampleCounts, missing_packages
from cloche.bench.measurements import InstallLab
from cloche.bench.rows import (
    HTTP_PARTS,
    PACKAGE_PARTS,
    PARTS,
    SERVER_PARTS,
    BenchPart,
    choose_parts,
    machine_facts,
    results_document,
    results_markdown,
)
from cloche.bench.samples import SampleBook
from cloche.bench.server_measurements import ServerLab, is_client_missing
from cloche.cli import load_command_config
from cloche.cli.progress import show_progress
from cloche.config import Config
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
@click.option("--rows", "keys", metavar="KEY,...", default="", help="Only these rows and the rows measured with them.")
@click.option("--json", "file", type=click.Path(dir_okay=False), help="Also write every sample to this file.")
@click.option("--live", type=click.IntRange(1, 2000), help="Number of idle sandboxes for the measurement of memory.")
@click.option("--no-peer", is_flag=True, help="Measure Cloche alone.")
@click.option(
    "--server", "through_server", is_flag=True, help="Measure E2B's own client against `cloche serve` instead."
)
@click.option("--packages", "of_packages", is_flag=True, help="Measure installations by uv, pip and npm instead.")
@click.option("--http", "over_http", is_flag=True, help="Measure a server with a minimal HTTP client instead.")
def command(
    quick: bool,
    keys: str,
    file: str | None,
    live: int | None,
    no_peer: bool,
    through_server: bool,
    of_packages: bool,
    over_http: bool,
) -> None:
    """Measure Cloche against a plain ipykernel driven by jupyter_client, in turns, and print a Markdown table.

    Compare ratios: times depend on the machine. Exit status 1 if a measurement failed, never for slowness.
    """
    asked = {"server": through_server, "packages": of_packages, "http": over_http}
    kind, among = _LAB_KINDS[next((name for name, wanted in asked.items() if wanted), "library")]
    parts = choose_parts([key for key in keys.split(",") if key], among)
    if through_server and is_client_missing():
        raise errors.InvalidRequest(f"E2B's client is not installed: {BENCH_ADVICE}")
    counts = QUICK_COUNTS if quick else SampleCounts()
    if live is not None:
        counts = msgspec.structs.replace(counts, live=live)
    if not (no_peer or of_packages) and (missing := missing_packages()):
        click.echo(f"no peer: {', '.join(missing)} not installed; {BENCH_ADVICE}", err=True)
    facts = machine_facts()
    book = measure_parts(parts, load_command_config(), counts, kind, peer=not no_peer)
    facts["load after"] = format_load_average()
    click.echo(results_markdown(parts, book, facts))
    if file is not None:
        write_json(file, results_document(parts, book, facts))
    sys.exit(1 if report_failures(parts, book) else 0)


def measure_parts(
    parts: Sequence[BenchPart], config: Config, counts: SampleCounts, kind: type[AnyLab], *, peer: bool
) -> SampleBook:
    """Opens a lab of that kind and measures all parts in it. Builds the template where it is missing."""
    with show_progress("building python") as report:
        ensure_template(Catalogue(config.data_dir, config.aliases), "python", report)
    with kind(config, counts, peer=peer) as lab:
        for part in parts:
            click.echo(f"measuring {part.title}", err=True)
            part.measure(lab)
    return lab.book


def report_failures(parts: Sequence[BenchPart], book: SampleBook) -> bool:
    """Prints all failures. Returns whether a measurement of these parts failed."""
    failed = {key: samples.failures for key, samples in book.rows.items() if samples.failures}
    for key, why in failed.items():
        click.echo(f"{key}: {len(why)} failed; the first: {why[0]}", err=True)
    return not failed.keys().isdisjoint(row.key for part in parts for row in part.rows)


def format_load_average() -> str:
    return " ".join(f"{each:.2f}" for each in os.getloadavg())


def write_json(file: str, document: dict[str, Any]) -> None:
    Path(file).write_bytes(msgspec.json.format(msgspec.json.encode(document)))
