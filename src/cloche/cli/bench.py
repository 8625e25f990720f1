"""`cloche bench`: measure Cloche against a plain ipykernel, in one run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from cloche import errors
from cloche.bench import ipykernel_peer, machine, serving, table
from cloche.bench.installs import InstallLab
from cloche.bench.lab import QUICK, Counts, Lab
from cloche.bench.rows import PACKAGE_PARTS, PARTS, SERVER_PARTS, Part, chosen
from cloche.bench.samples import Book
from cloche.bench.serving import ServerLab
from cloche.cli import configuration
from cloche.cli.progress import showing
from cloche.templates import Catalogue, ensure

AnyLab = Lab | ServerLab | InstallLab
_KINDS: dict[str, tuple[type[AnyLab], Sequence[Part]]] = {
    "library": (Lab, PARTS),
    "server": (ServerLab, SERVER_PARTS),
    "packages": (InstallLab, PACKAGE_PARTS),
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
def command(
    quick: bool,
    keys: str,
    file: str | None,
    live: int | None,
    no_peer: bool,
    through_server: bool,
    of_packages: bool,
) -> None:
    """Measure Cloche against a plain ipykernel driven by jupyter_client, in turns, and print a Markdown table.

    Ratios are what counts: times move with the machine. Exit status 1 if a measurement failed, never for slowness.
    """
    kind, among = _KINDS["server" if through_server else "packages" if of_packages else "library"]
    parts = chosen([key for key in keys.split(",") if key], among)
    if through_server and serving.missing():
        raise errors.InvalidRequest(f"E2B's client is not installed: {ipykernel_peer.ADVICE}")
    counts = QUICK if quick else Counts()
    if live is not None:
        counts = msgspec.structs.replace(counts, live=live)
    if not (no_peer or of_packages) and (missing := ipykernel_peer.missing()):
        click.echo(f"no peer: {', '.join(missing)} not installed; {ipykernel_peer.ADVICE}", err=True)
    facts = machine.facts()
    book = _measure(parts, counts, kind, peer=not no_peer)
    facts["load after"] = " ".join(f"{each:.2f}" for each in os.getloadavg())
    click.echo(table.markdown(parts, book, facts))
    if file is not None:
        document = msgspec.json.encode(table.document(parts, book, facts))
        Path(file).write_bytes(msgspec.json.format(document))
    sys.exit(1 if _say_failures(book) else 0)


def _measure(parts: list[Part], counts: Counts, kind: type[AnyLab], *, peer: bool) -> Book:
    config = configuration()
    with showing("building python") as report:
        ensure(Catalogue(config.data_dir, config.aliases), "python", report)
    with kind(config, counts, peer=peer) as lab:
        for part in parts:
            click.echo(f"measuring {part.title}", err=True)
            part.measure(lab)
    return lab.book


def _say_failures(book: Book) -> bool:
    failed = {key: samples.failures for key, samples in book.rows.items() if samples.failures}
    for key, why in failed.items():
        click.echo(f"{key}: {len(why)} failed; the first: {why[0]}", err=True)
    return bool(failed)
