"""Tables as a model reads them."""

from __future__ import annotations

import time

import pandas
import pytest

from cloche.mcp.content import MAX_ROWS, html_table_to_markdown


def test_a_cell_that_spans_is_said_once():
    index = pandas.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)], names=["of", "n"])
    html = pandas.DataFrame({"x": [1, 2, 3]}, index=index)._repr_html_()
    assert html_table_to_markdown(html) == (
        "|  |  | x |\n| --- | --- | --- |\n| of | n |  |\n| a | 1 | 1 |\n|  | 2 | 2 |\n| b | 1 | 3 |"
    )


def test_a_value_that_is_no_table_gives_none():
    assert [
        html_table_to_markdown(each) for each in ("", "<p>no</p>", "<table></table>", "<table><tr></tr></table>")
    ] == [None] * 4


@pytest.mark.parametrize(
    "html",
    [
        "<table>" + "<tr>" * 100_000,
        "<table><tr>" + "<td rowspan=99999 colspan=99999>x" * 10_000,
        "<table><tr><td>" + "<table><tr><td>" * 10_000,
        "<table><tr><td>" + "&" * 400_000,
        "<table><tr><td>" + "<" * 400_000,
        "<table><tr><td>" + "<!--" * 100_000,
        "<table " + "a=1 " * 100_000,
    ],
)
def test_hostile_markup_is_read_within_bounds(html: str):
    began = time.process_time()
    found = html_table_to_markdown(html) or ""
    assert time.process_time() - began < 1
    assert len(found.splitlines()) <= MAX_ROWS + 2 and len(found) < 1_000_000
