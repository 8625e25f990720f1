"""The benchmark measures what it says and shows it. How fast anything is decides nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cloche import errors
from cloche.bench import ipykernel_peer, table
from cloche.bench.lab import Counts, Lab
from cloche.bench.rows import PARTS, ROWS, SERVER_PARTS, SERVER_ROWS, Row, chosen
from cloche.bench.samples import Book, Samples, WrongAnswer, expect, shares
from cloche.bench.serving import ServerLab
from cloche.cli import main
from cloche.config import Config
from cloche.model import Template

pytestmark = pytest.mark.alone

TINY = Counts(
    fast=2,
    warm=2,
    images=1,
    peer=1,
    lean=1,
    live=2,
    measured=1,
    kernels=1,
    loads=1,
    load_seconds=0.1,
    threads=2,
    warm_sandboxes=2,
    interrupts=1,
    transfers=1,
    transfer_bytes=3_000_000,
)


def test_every_row_is_measured_and_shown(data_dir: str, template: Template):
    with_peer = not ipykernel_peer.missing()
    try:
        with Lab(Config(data_dir=data_dir), TINY) as lab:
            for part in PARTS:
                part.measure(lab)
    except errors.IsolationUnavailable as error:
        pytest.skip(str(error))
    expected = {key for key in ROWS if with_peer or not key.startswith("kernel_")}
    assert {key: samples.failures for key, samples in lab.book.rows.items() if samples.failures} == {}
    assert set(lab.book.rows) == expected
    assert all(lab.book[key].values for key in expected)
    text = table.markdown(PARTS, lab.book, {"machine": "this one"})
    assert all(ROWS[key].title in text for key in expected)
    assert set(table.document(PARTS, lab.book, {})["rows"]) == expected


def test_the_command_measures_the_rows_that_are_asked_for(data_dir: str, template: Template, tmp_path: Path):
    out = tmp_path / "bench.json"
    arguments = ["--data-dir", data_dir, "bench", "--quick", "--no-peer", "--rows", "file_read", "--json", str(out)]
    ran = CliRunner().invoke(main, arguments)
    if ran.exit_code == 125:
        pytest.skip(ran.output)
    assert ran.exit_code == 0, ran.output
    assert "read a file of 100 MB" in ran.stdout and "create to ready" not in ran.stdout
    written = json.loads(out.read_text())
    assert set(written["rows"]) == {"file_write", "file_read"}
    assert written["facts"]["kernel"].startswith("Linux")


def test_a_row_that_does_not_exist_is_refused_by_name():
    with pytest.raises(errors.InvalidRequest, match="no row speed"):
        chosen(["warm", "speed"])


def test_quantiles_are_values_that_were_measured():
    samples = Samples()
    samples.values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [samples.quantile(share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1.0, 3.0, 5.0, 5.0, 5.0]


def test_a_wrong_answer_is_a_failure_and_no_sample():
    book = Book()
    with book.attempt("warm"):
        expect(False, "3")
        book.add("warm", 1.0)
    assert "warm" not in book and book["warm"].failures == [f"{WrongAnswer.__name__}: a wrong answer: '3'"]
    assert table.cells(ROWS["warm"], book)[2:6] == ["1", "0.0%", "–", "–"]


def test_two_series_that_take_turns_are_complete():
    assert [sum(shares(200, parts)) for parts in (1, 7, 30, 200)] == [200] * 4
    assert list(shares(2, 4)) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("row", "expected", "verdict"),
    [
        (Row(key="ours", title="", against=("slow", "fast"), bar=4), 4.0, True),
        (Row(key="ours", title="", against=("slow",), bar=9), 8.0, False),
        (Row(key="slow", title="", against=("fast",), bar=2, limit=True), 2.0, True),
        (Row(key="slow", title="", against=("ours",), bar=3, limit=True), 8.0, False),
        (Row(key="ours", title="", against=("slow",)), 8.0, None),
        (Row(key="ours", title="", against=("not measured",), bar=9), None, None),
        (Row(key="ours", title="", against=("absurd",), bar=9), None, None),
    ],
)
def test_bars_are_judged_against_the_best_of_the_others(row: Row, expected: float | None, verdict: bool | None):
    book = Book()
    for key, value in {"ours": 1.0, "fast": 4.0, "slow": 8.0, "absurd": -8.0}.items():
        book.add(key, value)
    assert (table.ratio(row, book), table.met(row, book)) == (expected, verdict)


def test_every_comparison_names_a_row_that_exists():
    assert {key for row in ROWS.values() for key in (*row.against, *filter(None, [row.also]))} <= set(ROWS)


def test_every_row_through_a_server_is_measured(data_dir: str, template: Template):
    with ServerLab(Config(data_dir=data_dir), TINY) as lab:
        for part in SERVER_PARTS:
            part.measure(lab)
    expected = {key for key in SERVER_ROWS if not ipykernel_peer.missing() or not key.startswith("kernel_")}
    assert {key: samples.failures for key, samples in lab.book.rows.items() if samples.failures} == {}
    assert set(lab.book.rows) == expected
