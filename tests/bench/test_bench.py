"""The benchmark measures what it says and shows it. How fast anything is decides nothing here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cloche import errors
from cloche.bench import raw_http
from cloche.bench.http_measurements import HttpLab
from cloche.bench.lab import Lab, SampleCounts, missing_packages
from cloche.bench.rows import (
    HTTP_PARTS,
    HTTP_ROWS,
    PARTS,
    ROWS,
    SERVER_PARTS,
    SERVER_ROWS,
    BenchRow,
    choose_parts,
    is_bar_met,
    results_document,
    results_markdown,
    row_cells,
    row_ratio,
)
from cloche.bench.samples import SampleBook, Samples, WrongAnswer, expect_answer, split_evenly
from cloche.bench.server_measurements import ServerLab
from cloche.cli import main
from cloche.config import Config
from cloche.model import Template

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
from bench import comparison  # noqa: E402
from bench.load_rows import LOAD_PARTS, LOAD_ROWS  # noqa: E402
from bench.peer_runs import PEERS, PeerMeasurements  # noqa: E402

TINY = SampleCounts(
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
    most_live=2,
    crowd=2,
    peer_starts=1,
    peer_warm=1,
    peer_clients=(),
)


@pytest.mark.long
def test_every_row_is_measured_and_shown(data_dir: str, template: Template):
    with_peer = not missing_packages()
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
    text = results_markdown(PARTS, lab.book, {"machine": "this one"})
    assert all(ROWS[key].title in text for key in expected)
    assert set(results_document(PARTS, lab.book, {})["rows"]) == expected


@pytest.mark.long
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
        choose_parts(["warm", "speed"])


def test_quantiles_are_values_that_were_measured():
    samples = Samples()
    samples.values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [samples.quantile(share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1.0, 3.0, 5.0, 5.0, 5.0]


def test_a_wrong_answer_is_a_failure_and_no_sample():
    book = SampleBook()
    with book.attempt("warm"):
        expect_answer(False, "3")
        book.add("warm", 1.0)
    assert "warm" not in book and book["warm"].failures == [f"{WrongAnswer.__name__}: a wrong answer: '3'"]
    assert row_cells(ROWS["warm"], book)[2:6] == ["1", "0.0%", "–", "–"]


def test_a_failure_in_a_task_of_a_client_is_one_of_its_row_and_a_mistake_of_ours_ends_the_run():
    book = SampleBook()
    with book.attempt("mcp_call"):
        raise ExceptionGroup("a client's tasks", [ExceptionGroup("a session's", [WrongAnswer("3")])])
    assert book["mcp_call"].failures == ["WrongAnswer: 3"]
    with pytest.raises(ExceptionGroup), book.attempt("mcp_call"):
        raise ExceptionGroup("a client's tasks", [WrongAnswer("3"), KeyError("text")])


def test_two_series_that_take_turns_are_complete():
    assert [sum(split_evenly(200, parts)) for parts in (1, 7, 30, 200)] == [200] * 4
    assert list(split_evenly(2, 4)) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("row", "expected", "verdict"),
    [
        (BenchRow(key="ours", title="", against=("slow", "fast"), bar=4), 4.0, True),
        (BenchRow(key="ours", title="", against=("slow",), bar=9), 8.0, False),
        (BenchRow(key="slow", title="", against=("fast",), bar=2, limit=True), 2.0, True),
        (BenchRow(key="slow", title="", against=("ours",), bar=3, limit=True), 8.0, False),
        (BenchRow(key="ours", title="", against=("slow",)), 8.0, None),
        (BenchRow(key="ours", title="", against=("not measured",), bar=9), None, None),
        (BenchRow(key="ours", title="", against=("absurd",), bar=9), None, None),
    ],
)
def test_bars_are_judged_against_the_best_of_the_others(row: BenchRow, expected: float | None, verdict: bool | None):
    book = SampleBook()
    for key, value in {"ours": 1.0, "fast": 4.0, "slow": 8.0, "absurd": -8.0}.items():
        book.add(key, value)
    assert (row_ratio(row, book), is_bar_met(row, book)) == (expected, verdict)


def test_every_comparison_names_a_row_that_exists():
    assert {key for row in ROWS.values() for key in (*row.against, *filter(None, [row.also]))} <= set(ROWS)


@pytest.mark.long
def test_every_row_through_a_server_is_measured(data_dir: str, template: Template):
    with ServerLab(Config(data_dir=data_dir), TINY) as lab:
        for part in SERVER_PARTS:
            part.measure(lab)
    expected = {key for key in SERVER_ROWS if not missing_packages() or not key.startswith("kernel_")}
    assert {key: samples.failures for key, samples in lab.book.rows.items() if samples.failures} == {}
    assert set(lab.book.rows) == expected


@pytest.mark.long
def test_every_row_through_http_is_measured_and_drawn(data_dir: str, template: Template, tmp_path: Path):
    with HttpLab(Config(data_dir=data_dir), TINY) as lab:
        for part in (*HTTP_PARTS, *LOAD_PARTS):
            part.measure(lab)
    assert {key: samples.failures for key, samples in lab.book.rows.items() if samples.failures} == {}
    assert set(lab.book.rows) == set(HTTP_ROWS | LOAD_ROWS)
    text = results_markdown(LOAD_PARTS, lab.book, {})
    assert "| ≥ 60/s |" in text and "| ≤ 5 MB |" in text
    comparison.draw_comparison(tmp_path / "peers.svg", lab.book, PeerMeasurements(lab.book))
    assert b"<svg" in (tmp_path / "peers.svg").read_bytes()


def test_a_bar_without_another_row_is_for_the_median_in_its_unit():
    book = SampleBook()
    book.add("memory", 4e6)
    assert is_bar_met(BenchRow(key="memory", title="", unit="MB", bar=5, limit=True), book) is True
    assert is_bar_met(BenchRow(key="memory", title="", unit="MB", bar=3, limit=True), book) is False
    assert is_bar_met(BenchRow(key="nothing", title="", unit="MB", bar=3, limit=True), book) is None


def test_peers_that_are_not_there_are_said_and_not_failed(tmp_path: Path):
    book = SampleBook()
    peers = PeerMeasurements(book)
    peers.measure(str(tmp_path / "no-python"), "", TINY, lambda text: None)
    assert set(peers.absent) == {peer.key for peer in PEERS} and not book.rows
    text = comparison.comparison_markdown(book, peers)
    assert text.count("not measured") == len(PEERS)


def test_a_peer_that_says_why_it_cannot_be_measured_is_absent():
    """Its driver runs in another interpreter, where nothing else of ours is."""
    book = SampleBook()
    peers = PeerMeasurements(book)
    peers.measure(sys.executable, "", TINY, lambda text: None, [peer for peer in PEERS if peer.key == "e2b_server"])
    assert "checkout" in peers.absent["e2b_server"] and not book.rows


def test_the_comparison_says_how_many_times_better_ours_is():
    book = SampleBook()
    peers = PeerMeasurements(book)
    peers.absent = {peer.key: "it is far away" for peer in PEERS[1:]}
    for key, value in {"http_one_pool": 0.004, "http_executions_8": 2000.0}.items():
        book.add(key, value)
    for line in (
        {"version": "7"},
        {"key": "one", "value": 0.4},
        {"key": "executions_8", "value": 100.0},
        {"key": "frame", "failure": "no"},
    ):
        peers.record_line("ipykernel", line)
    text = comparison.comparison_markdown(book, peers)
    assert "| create to `1+1` | ms | 4.00 | 400 (100×) |" in text
    assert "| executions, 8 clients | /s | 2,000 | 100 (20.0×) |" in text
    assert "| create to a DataFrame | ms | – | failed |" in text
    assert "Kernel Gateway: not measured: it is far away" in text
    assert comparison.comparison_document(book, peers)["ipykernel"]["rows"]["ipykernel_one"]["samples"] == [0.4]


def test_answers_are_read_whole_and_only_then():
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd"
    assert all(raw_http.parse_answer(bytearray(whole[:end])) is None for end in range(len(whole)))
    assert raw_http.parse_answer(bytearray(whole)) == (200, b"abcd")
    assert raw_http.parse_answer(bytearray(b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n")) == (204, b"")
    with pytest.raises(WrongAnswer):
        raw_http.parse_answer(bytearray(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"))
