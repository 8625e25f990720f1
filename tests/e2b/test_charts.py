"""Plots as results: one picture each, with the data that it shows."""

from __future__ import annotations

import pytest
from e2b_code_interpreter import charts

START = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\n"


def chart_of(box, code: str):
    run = box.run_code(START + code)
    assert run.error is None and len(run.results) == 1, run
    result = run.results[0]
    assert result.png and result.text.startswith("<Figure") and not result.extra
    return result.chart


def test_a_plot_that_is_shown_and_a_value_are_two_results(box):
    run = box.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nx = 1\nx")
    assert [(bool(result.png), result.is_main_result) for result in run.results] == [(True, False), (False, True)]
    assert run.text == "1"


def test_an_unshown_plot_is_shown_at_the_end(box):
    assert chart_of(box, "ax.plot([1, 2])\nNone").type == charts.ChartType.LINE


def test_a_line(box):
    chart = chart_of(
        box, "ax.plot([1, 2], [3, 4], label='L'); ax.set_title('T'); ax.set_xlabel('Time (s)')\nplt.show()"
    )
    assert isinstance(chart, charts.LineChart)
    assert (chart.title, chart.x_label, chart.x_unit, chart.y_label) == ("T", "Time (s)", "s", None)
    assert [(line.label, [tuple(point) for point in line.points]) for line in chart.elements] == [
        ("L", [(1.0, 3.0), (2.0, 4.0)])
    ]


@pytest.mark.parametrize(
    ("code", "kind", "elements"),
    [
        ("ax.scatter([1], [2], label='S')", charts.ScatterChart, 1),
        ("ax.bar(['a', 'b'], [1, 2])", charts.BarChart, 2),
        ("ax.pie([1, 3], labels=['p', 'q'])", charts.PieChart, 2),
        ("ax.boxplot([[1, 2, 3], [4, 5, 9]], patch_artist=True)", charts.BoxAndWhiskerChart, 2),
    ],
)
def test_each_kind_of_chart(box, code, kind, elements):
    chart = chart_of(box, code + "\nplt.show()")
    assert isinstance(chart, kind) and len(chart.elements) == elements


def test_several_axes_are_a_superchart(box):
    run = box.run_code(
        "import matplotlib.pyplot as plt\nfig, (a, b) = plt.subplots(1, 2)\na.plot([1, 2]); b.bar(['x', 'y'], [1, 2])\n"
        "fig.suptitle('S')\nplt.show()"
    )
    chart = run.results[0].chart
    assert isinstance(chart, charts.SuperChart) and chart.title == "S"
    assert [type(one) for one in chart.elements] == [charts.LineChart, charts.BarChart]


def test_scales_are_told(box):
    chart = chart_of(box, "ax.plot([1, 10], ['a', 'b']); ax.set_xscale('log')\nplt.show()")
    assert (chart.x_scale, chart.y_scale) == (charts.ScaleType.LOG, charts.ScaleType.CATEGORICAL)


def test_an_empty_figure_has_a_picture_and_no_chart(box):
    run = box.run_code(START + "plt.show()")
    assert run.results[0].png and run.results[0].chart is None and run.logs.stderr == []
