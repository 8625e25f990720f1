"""Figures of plotly, which is in the built-in template: shown as in a notebook, without a word of complaint."""

from __future__ import annotations

from tests.conftest import embedding

import cloche

MIME = "application/vnd.plotly.v1+json"


def test_a_figure_is_data_and_a_word_whichever_way_it_is_shown(bare_dir: str) -> None:
    with embedding(bare_dir), cloche.Sandbox() as box:
        last = box.run("import plotly.graph_objects as go\nfig = go.Figure(go.Bar(y=[1, 3, 2]))\nfig")
        shown = box.run("fig.show()")
        chosen = box.run("import plotly.io as pio\npio.renderers.default = 'json'\nfig")
        script = box.commands.run(
            "python3 -c 'import plotly.io as pio; print(repr(pio.renderers.default), pio._renderers.nbformat)'"
        )
    for run in (last, shown):
        (result,) = run.results
        assert (run.outcome, run.stderr, run.stdout) == ("ok", "", "")
        assert result.formats() == ["text", MIME] and result.text == "<Plotly figure: bar>"
        assert result.extra[MIME]["data"][0]["y"] == [1, 3, 2]
    assert [each.formats() for each in chosen.results] == [["json"]]
    assert script.stdout == "'' None\n"  # a program has no screen
