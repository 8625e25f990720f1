"""Matplotlib figures, with and without plt.show()."""

from __future__ import annotations

import importlib.util
import io

import pytest

START = "import matplotlib.pyplot as plt\n"


def pngs(run):
    return [event["data"]["image/png"] for event in run.displays if "image/png" in event["data"]]


def test_an_open_figure_is_shown_at_the_end_and_closed(kernel):
    run = kernel.run(START + "plt.plot([1, 2])\nprint('drawn')")
    assert len(pngs(run)) == 1 and pngs(run)[0].startswith(b"\x89PNG")
    assert isinstance(run.events[0], str)
    assert run.displays[0]["data"]["text/plain"] == "<Figure size 640x480 with 1 Axes>"
    assert kernel.run("plt.get_fignums()").text == "[]"


def test_show_displays_at_once(kernel):
    run = kernel.run(START + "plt.plot([1]); plt.show()\nprint('after')\nplt.plot([2]); plt.show()")
    kinds = ["out" if isinstance(event, str) else event["ev"] for event in run.events]
    assert kinds == ["display", "out", "display", "ended"]


def test_a_figure_as_last_expression_is_shown_once(kernel):
    run = kernel.run(START + "fig, ax = plt.subplots()\nax.plot([1])\nfig")
    assert len(pngs(run)) == 1 and run.displays[0]["main"]
    assert len(pngs(kernel.run("fig"))) == 1


def test_two_figures_are_both_shown_in_order(kernel):
    run = kernel.run(START + "plt.figure(figsize=(2, 2)); plt.plot([1])\nplt.figure(figsize=(6, 2)); plt.plot([2])")
    assert len(pngs(run)) == 2 and pngs(run)[0] != pngs(run)[1]
    sizes = [event["data"]["text/plain"] for event in run.displays if "image/png" in event["data"]]
    assert "200x200" in sizes[0] and "600x200" in sizes[1]


def test_a_saved_figure_is_saved(kernel):
    run = kernel.run(START + "plt.plot([1])\nplt.savefig('a.png')\nplt.close()")
    assert pngs(run) == []
    assert (kernel.data / "a.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_shown_though_the_cell_failed(kernel):
    run = kernel.run(START + "plt.plot([1])\n1/0")
    assert len(pngs(run)) == 1 and run.outcome == "raised"


def test_artists_outside_the_canvas_are_in_the_picture(kernel):
    from PIL import Image

    run = kernel.run(
        START
        + (
            "fig, ax = plt.subplots(figsize=(4, 3))\nax.plot([1], "
            "label='long label')\nax.legend(loc='upper left', bbox_to_anchor=(1.05, 1))"
        )
    )
    width, _height = Image.open(io.BytesIO(pngs(run)[0])).size
    assert width > 400


def test_the_picture_equals_savefigs(kernel):
    import numpy
    from PIL import Image

    run = kernel.run(
        START
        + (
            "fig, ax = plt.subplots()\nax.plot([1, 3, 2]); ax.set_title('T'); "
            "fig.set_facecolor('pink')\nfig.savefig('b.png', bbox_inches='tight')"
        )
    )
    shown = Image.open(io.BytesIO(pngs(run)[0])).convert("RGB")
    saved = Image.open(kernel.data / "b.png").convert("RGB")
    assert abs(shown.width - saved.width) <= 2 and abs(shown.height - saved.height) <= 2
    assert abs(numpy.asarray(shown).mean() - numpy.asarray(saved).mean()) < 1


def test_a_script_run_in_the_kernel_shows_and_a_plain_process_does_not_know_our_backend(kernel):
    (kernel.data / "s.py").write_text(START + "plt.plot([1])\nplt.show()\n")
    assert len(pngs(kernel.run("%run s.py"))) == 1
    run = kernel.run("import sys\n!{sys.executable} -c 'import matplotlib; print(matplotlib.get_backend())'")
    assert "cloche" not in run.stdout


def test_a_figure_without_pyplot_can_be_displayed(kernel):
    run = kernel.run("from matplotlib.figure import Figure\nf = Figure(); f.subplots().plot([1])\nf")
    assert len(pngs(run)) == 1


def test_drawing_can_be_switched_to_agg(kernel):
    run = kernel.run(
        "import matplotlib\nmatplotlib.use('Agg')\nimport matplotlib.pyplot as plt\nplt.plot([1]); plt.savefig('c.png')"
    )
    assert run.outcome == "ok" and (kernel.data / "c.png").exists()


@pytest.mark.skipif(importlib.util.find_spec("e2b_charts") is None, reason="e2b-charts is not installed")
def test_a_figure_has_chart_data(kernel):
    run = kernel.run(START + "plt.plot([1, 2], [3, 4], label='L'); plt.title('T'); plt.xlabel('x (s)')")
    chart = run.displays[-1]["data"]["application/vnd.cloche.chart+json"]
    assert (chart["type"], chart["title"], chart["x_unit"]) == ("line", "T", "s")
    assert chart["elements"] == [{"label": "L", "points": [[1.0, 3.0], [2.0, 4.0]]}]


def test_a_chart_that_cannot_be_read_does_not_fail_the_cell(kernel):
    run = kernel.run(START + "fig = plt.figure(); ax = fig.add_subplot(projection='3d'); ax.plot([1], [2], [3])")
    assert run.outcome == "ok" and len(pngs(run)) == 1 and run.stderr == ""
