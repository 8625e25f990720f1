"""What a cell shows: MIME types, order, updates, limits."""

from __future__ import annotations

import pytest

from cloche.guest import wire

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89"
    b"\x00\x00\x00\rIDATx\x9cc\xf8\xff\xff?\x00\x05\xfe\x02\xfe\xa75\x81\x84\x00\x00\x00\x00IEND\xaeB`\x82"
)


@pytest.mark.parametrize(
    ("made", "mime", "value"),
    [
        ("HTML('<b>x</b>')", "text/html", "<b>x</b>"),
        ("Markdown('# x')", "text/markdown", "# x"),
        (
            "SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')",
            "image/svg+xml",
            '<svg xmlns="http://www.w3.org/2000/svg"/>',
        ),
        (f"Image({PNG!r})", "image/png", PNG),
        ("Image(b'\\xff\\xd8\\xff\\xe0', format='jpeg')", "image/jpeg", b"\xff\xd8\xff\xe0"),
        ("Latex('$x$')", "text/latex", "$x$"),
        ("JSON({'a': [1, None]})", "application/json", {"a": [1, None]}),
        ("Javascript('alert(1)')", "application/javascript", "alert(1)"),
    ],
)
def test_each_display_class_has_its_type(kernel, made, mime, value):
    kernel.run("from IPython.display import *")
    assert kernel.run(made).main[mime] == value
    assert kernel.run(f"display({made})").displays[0]["data"][mime] == value


@pytest.mark.parametrize(
    ("mime", "source", "value"),
    [
        ("application/pdf", "b'%PDF-1'", b"%PDF-1"),
        ("image/png", "'iVBORw0='", b"\x89PNG\r"),
        ("application/vnd.plotly.v1+json", "{'data': [{'y': [1.5, float('nan')]}]}", {"data": [{"y": [1.5, None]}]}),
        ("application/vnd.vegalite.v5+json", "{'mark': 'bar'}", {"mark": "bar"}),
        ("application/x-unheard-of", "'as it is'", "as it is"),
        ("audio/wav", "b'RIFF'", "UklGRg=="),
    ],
)
def test_bundles_of_any_type_pass_through(kernel, mime, source, value):
    run = kernel.run(f"display({{{mime!r}: {source}, 'text/plain': 'x'}}, raw=True)")
    assert run.displays[0]["data"] == {mime: value, "text/plain": "x"}


@pytest.mark.parametrize("method", ["html", "markdown", "svg", "latex", "javascript"])
def test_objects_may_draw_themselves(kernel, method):
    bundle = kernel.run(f"class A:\n    def _repr_{method}_(self): return 'mine'\nA()").main
    assert "mine" in bundle.values() and len(bundle) == 2


def test_mimebundles_and_ipython_display_are_honoured(kernel):
    code = (
        "class A:\n    def _repr_mimebundle_(self, include=None, "
        "exclude=None): return {'text/x': 'y', 'text/plain': 'p'}\nA()"
    )
    assert kernel.run(code).main == {"text/x": "y", "text/plain": "p"}
    code = "class B:\n    def _ipython_display_(self): print('self made')\nB()"
    run = kernel.run(code)
    assert (run.stdout, run.displays) == ("self made\n", [])


def test_formatters_for_builtin_types_are_honoured(kernel):
    kernel.run("get_ipython().display_formatter.formatters['text/html'].for_type(int, lambda n: f'<i>{n}</i>')")
    assert kernel.run("5").main == {"text/plain": "5", "text/html": "<i>5</i>"}
    kernel.run("%precision 3")
    assert kernel.run("1/3").text == "0.333"


@pytest.mark.parametrize("value", ["'quoted'", "[1, 'a']", "{'k': (1, 2.5)}", "b'x'", "True", "10**50", "{3, 4}"])
def test_text_is_the_repr(kernel, value):
    assert kernel.run(value).text == repr(eval(value))


def test_output_and_displays_keep_their_order(kernel):
    code = (
        "import sys, os\nprint('a'); display(1); os.write(1, b'raw\\n'); "
        "print('b', file=sys.stderr); display(2); print('c'); 3"
    )
    run = kernel.run(code)
    seen = [str(e) if isinstance(e, str) else e.get("data", {}).get("text/plain", e["ev"]) for e in run.events]
    assert seen == ["a\n", "1", "raw\n", "b\n", "2", "c\n", "3", "ended"]


def test_output_of_children_is_before_the_end(kernel):
    run = kernel.run("import subprocess\nsubprocess.run(['sh', '-c', 'echo child; echo bad >&2'])\ndisplay('after');")
    assert (run.stdout, run.stderr) == ("child\n", "bad\n")
    assert isinstance(run.events[0], str)


def test_the_frames_at_the_end_share_one_mark(kernel):
    run = kernel.run("import matplotlib.pyplot as plt\nplt.plot([1])\n5")
    assert len({event["mark"] for event in run.events if "mark" in event}) == 1


def test_display_ids_and_updates(kernel):
    run = kernel.run(
        "h = display('one', display_id='d')\nh.update('two')\n"
        "from IPython.display import update_display\nupdate_display('three', display_id='d')"
    )
    told = [(event["id"], event["update"], event["data"]["text/plain"]) for event in run.displays]
    assert told == [("d", False, "'one'"), ("d", True, "'two'"), ("d", True, "'three'")]


def test_clear_output(kernel):
    run = kernel.run(
        "from IPython.display import clear_output\nprint('x'); clear_output(wait=True); print('y'); clear_output()"
    )
    assert [event["wait"] for event in run.of("cleared")] == [True, False]
    assert [str(event) for event in run.events if isinstance(event, str)] == ["x\n", "y\n"]


def test_html_javascript_and_latex_magics_display(kernel):
    assert kernel.run("%%html\n<p>x</p>").displays[0]["data"]["text/html"].strip() == "<p>x</p>"
    assert kernel.run("%%javascript\nlet x").displays[0]["data"]["application/javascript"].strip() == "let x"
    assert kernel.run("%%latex\n$x$").displays[0]["data"]["text/latex"].strip() == "$x$"


def test_a_part_over_the_limit_is_dropped_and_text_is_cut(kernel):
    run = kernel.run(
        "from IPython.display import HTML\ndisplay({'text/html': 'x' * 5000, 'text/plain': 'é' * 3000}, raw=True)",
        display_bytes=1001,
    )
    assert run.displays[0]["data"] == {"text/plain": "é" * 500}
    assert sum(event["dropped"] for event in run.of("truncated")) == 5000 + 5000


def test_all_displays_of_a_run_together_are_bounded(kernel):
    run = kernel.run("for i in range(100): display('x' * 900)", display_bytes=1000)
    assert sum(len(event["data"]["text/plain"]) for event in run.displays) <= 2000
    assert run.of("truncated") and run.outcome == "ok"
    assert kernel.run("'again'").text == "'again'"


def test_a_dataframe_has_html_text_and_data(kernel):
    code = (
        "import pandas as pd\npd.DataFrame({'n': [1, 2], 'f': [.5, None], 's': ['a', None],"
        " 't': pd.to_datetime(['2024-01-02', None]), 7: [True, False]})"
    )
    bundle = kernel.run(code).main
    assert "<table" in bundle["text/html"] and "text/plain" in bundle
    assert bundle["application/vnd.cloche.data+json"] == {
        "n": [1, 2], "f": [0.5, None], "s": ["a", None], "t": ["2024-01-02T00:00:00", None], "7": [True, False],
    }  # fmt: skip


def test_the_data_of_a_big_dataframe_is_its_first_rows(kernel):
    data = kernel.run("import pandas as pd\npd.DataFrame({'a': range(200_000), 'b': 1})").main[
        "application/vnd.cloche.data+json"
    ]
    assert (len(data["a"]), data["a"][:2], len(data["b"])) == (5000, [0, 1], 5000)


def test_odd_dataframes_have_data_too(kernel):
    code = (
        "import pandas as pd, numpy as np, decimal, datetime\n"
        "pd.DataFrame({'o': [decimal.Decimal('1.5'), [1, np.nan]], 'c': pd.Categorical(['x', 'y']),"
        " 'd': pd.to_timedelta([1, 2], 's'), 'i': np.array([1, 2], "
        "'int8'), 'z': [np.inf, {'k': datetime.date(2024, 1, 1)}]})"
    )
    data = kernel.run(code).main["application/vnd.cloche.data+json"]
    assert data["o"] == ["1.5", [1, None]] and data["c"] == ["x", "y"] and data["i"] == [1, 2]
    assert data["z"] == [None, {"k": "2024-01-01"}]


def test_a_threads_late_display_belongs_to_no_run(kernel):
    kernel.run(
        "import threading\ngo = threading.Event()\ndef late():\n    go.wait(); "
        "display('late')\nt = threading.Thread(target=late); t.start()"
    )
    run = kernel.run("go.set(); t.join()")
    assert len(run.displays) == 1


def test_a_value_shown_before_the_end_keeps_its_place(kernel):
    kernel.run("get_ipython().ast_node_interactivity = 'all'; import sys")
    run = kernel.run("1\nprint('between')\n2")
    kinds = [str(event) if isinstance(event, str) else event["ev"] for event in run.events]
    assert kinds == ["display", "between\n", "display", "ended"]


def test_a_cell_that_prints_nothing_ends_without_a_mark(kernel):
    assert [event["mark"] for event in kernel.run("1+1").events] == [None, None]
    assert kernel.run("print('x')").stdout == "x\n"
    assert [event["mark"] for event in kernel.run("1+1").events] == [None, None]


def test_unread_output_is_behind_a_mark(kernel):
    kernel.start("print('x')")
    decoder = wire.FrameDecoder(wire.MAX_BODY_FROM_GUEST)
    decoder.feed(kernel.sock.recv(1 << 16))
    ((header, _body),) = decoder.frames()
    assert (header["ev"], type(header["mark"])) == ("ended", int)
