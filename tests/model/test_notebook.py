"""Notebooks: whatever ran, Jupyter's own library finds them valid, and reads from them what was shown."""

from __future__ import annotations

import gc
import itertools
import json
import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche.engine.executions.history import HistoryBudget, SandboxHistory
from cloche.events import Cleared, Display, Ended, Event, Output, Raised, Started
from cloche.model import Usage
from cloche.notebook import Cell, build_notebook, encode_notebook

NUMBERS = itertools.count()
PNG = b"\x89PNG\r\n\x1a\n"


def checked(content: bytes):
    """The notebook as Jupyter reads it."""
    import nbformat

    made = nbformat.reads(content.decode(), as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nbformat.validate(made)
    assert (made.nbformat, made.nbformat_minor) == (4, 5)
    return made


def recorded(*events: Event, code: str = "x", transcript: SandboxHistory | None = None, context: str = "c") -> Cell:
    """The cell that an execution with these events becomes."""
    transcript = transcript or SandboxHistory()
    hear = transcript.start_recording(context, "python", code).on_event
    for event in (Started(execution=f"x{next(NUMBERS)}", count=1), *events):
        hear(event, len(event.text) if isinstance(event, Output) else 100)
    if not events or not isinstance(events[-1], Ended):
        hear(Ended(outcome="ok", usage=Usage(wall_seconds=0.5)), 0)
    return transcript.cells()[-1]


def out(text: str) -> Output:
    return Output(stream="stdout", text=text)


def err(text: str) -> Output:
    return Output(stream="stderr", text=text)


def shown(**data: object) -> Display:
    return Display(data={name.replace("_", "/"): value for name, value in data.items()})


def test_streams_are_merged_in_their_order():
    cell = recorded(out("a\n"), out("b"), err("c\n"), out("d\r\n"))
    texts = [(each["name"], each["text"]) for each in cell.outputs]
    assert texts == [("stdout", ["a\n", "b"]), ("stderr", ["c\n"]), ("stdout", ["d\r\n"])]


def test_values_and_displays_are_told_apart():
    main = Display(data={"text/plain": "1\n2", "text/html": "<b>"}, main=True)
    made = checked(encode_notebook(build_notebook([recorded(shown(image_png=PNG), main)])))
    first, second = made.cells[0].outputs
    assert (first.output_type, first.data["image/png"]) == ("display_data", "iVBORw0KGgo=")
    assert (second.output_type, second.execution_count, second.data["text/plain"]) == ("execute_result", 1, "1\n2")


def test_json_and_unknown_types_are_kept():
    data = {
        "application/json": [1, None],
        "application/vnd.plotly.v1+json": {"data": [math.nan]},
        "model/gltf+json": {"a": 1},
        "application/x-own": "text\nmore",
        "application/pdf": b"%PDF",
    }
    made = checked(encode_notebook(build_notebook([recorded(Display(data=data))])))
    found = made.cells[0].outputs[0].data
    assert found["application/json"] == [1, None]
    assert found["application/vnd.plotly.v1+json"] == {"data": [None]}
    assert json.loads(found["model/gltf+json"]) == {"a": 1}
    assert found["application/x-own"] == "text\nmore"


def test_an_error_has_its_traceback_in_lines():
    cell = recorded(Raised(name="E", value="v", traceback="\x1b[31mTraceback\n  line\x1b[0m\nE: v\n"))
    assert cell.outputs[0]["traceback"] == ["\x1b[31mTraceback", "  line\x1b[0m", "E: v"]


def test_a_cell_that_was_stopped_says_so():
    ended = Ended(outcome="timed_out", reason="the time limit of 1 s was reached", usage=Usage(wall_seconds=1))
    cell = recorded(out("a"), ended)
    assert cell.outputs[-1]["evalue"] == "the time limit of 1 s was reached"
    assert (cell.outcome, cell.seconds) == ("timed_out", 1)
    assert checked(encode_notebook(build_notebook([cell]))).cells[0].metadata.cloche.outcome == "timed_out"


def test_a_cell_that_runs_has_no_end():
    transcript = SandboxHistory()
    hear = transcript.start_recording("c", "python", "x").on_event
    assert transcript.cells() == []
    hear(Started(execution="x1", count=1), 0)
    hear(out("so far"), 6)
    (cell,) = transcript.cells()
    assert (cell.outcome, cell.seconds, cell.outputs[0]["text"]) == (None, None, ["so far"])


def test_cleared_output_is_gone():
    assert recorded(out("a"), Cleared(), out("b")).outputs[0]["text"] == ["b"]
    assert recorded(out("a"), Cleared(wait=True)).outputs[0]["text"] == ["a"]
    assert [each["text"] for each in recorded(out("a"), Cleared(wait=True), err("b")).outputs] == [["b"]]


def test_an_update_replaces_displays_with_its_id_in_earlier_cells():
    transcript = SandboxHistory()
    first = Display(data={"text/plain": "1"}, id="d")
    recorded(first, first, transcript=transcript)
    recorded(first, transcript=transcript, context="another")
    recorded(Display(data={"text/plain": "2"}, id="d", update=True), transcript=transcript)
    texts = [[each["data"]["text/plain"] for each in cell.outputs] for cell in transcript.cells()]
    assert texts == [[["2"], ["2"]], [["1"]], []]
    recorded(Display(data={"text/plain": "3"}, id="other", update=True), transcript=transcript)


def test_the_oldest_outputs_go_first_and_then_the_oldest_cells():
    transcript = SandboxHistory(20_000)
    for number in range(10):
        recorded(out("x" * 4000), code=f"code {number}", transcript=transcript)
    cells = transcript.cells()
    assert (len(cells), cells.dropped) == (10, 0)
    assert [each.outputs_dropped for each in cells] == [True] * 8 + [False] * 2
    for number in range(10, 40):
        recorded(code=f"code {number}", transcript=transcript)
    cells = transcript.cells()
    assert (cells[-1].code, len(cells) + cells.dropped) == ("code 39", 40)
    assert cells.dropped > 0
    made = checked(encode_notebook(build_notebook(cells, dropped=cells.dropped)))
    assert f"{cells.dropped} earlier cells" in made.cells[0].source


def test_a_cell_whose_outputs_made_room_says_so():
    transcript = SandboxHistory(20_000)
    for _ in range(4):
        recorded(out("x" * 8000), Raised(name="E", value="v", traceback="t"), transcript=transcript)
    made = checked(encode_notebook(build_notebook(transcript.cells())))
    assert "made room" in made.cells[0].outputs[0].text


def test_one_cell_alone_is_bounded():
    transcript = SandboxHistory(100_000)
    cell = recorded(*[out("x" * 1000)] * 1000, transcript=transcript)
    assert "more bytes of this cell's outputs" in "".join(cell.outputs[-1]["text"])
    assert sum(len("".join(each["text"])) for each in cell.outputs) < 60_000
    recorded(*[shown(text_plain="x" * 50), Cleared()] * 10_000, shown(text_plain="last"), transcript=transcript)
    assert transcript.cells()[-1].outputs[-1]["data"] == {"text/plain": ["last"]}


def test_code_that_is_too_large_is_not_kept():
    transcript = SandboxHistory(10_000)
    hear = transcript.start_recording("c", "python", "x" * 20_000).on_event
    for event in (Started(execution="x1", count=1), out("a"), Ended(outcome="ok")):
        hear(event, 1)
    assert (transcript.cells(), transcript.cells().dropped) == ([], 1)


@pytest.mark.parametrize("language", ["python", "javascript", "typescript", "bash"])
def test_each_language_has_its_kernel(language: str):
    assert checked(encode_notebook(build_notebook([], language))).metadata.kernelspec.language == language


ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=30)  # with halves of letters
ANY_JSON = st.recursive(st.none() | st.floats() | ANY_TEXT, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
ANY_MIME = ANY_TEXT | st.sampled_from(["text/plain", "a/b+json"])
JSON_MIME = st.sampled_from(["application/json", "x/y+json", "application/a+json"])
ANY_BUNDLE = st.dictionaries(ANY_MIME, ANY_TEXT | st.binary(max_size=9)) | st.dictionaries(JSON_MIME, ANY_JSON)
ANY_EVENT = st.one_of(
    st.builds(Output, stream=st.sampled_from(["stdout", "stderr"]), text=ANY_TEXT),
    st.builds(Display, data=ANY_BUNDLE, main=st.booleans(), id=st.sampled_from([None, "a"]), update=st.booleans()),
    st.builds(Raised, name=ANY_TEXT, value=ANY_TEXT, traceback=ANY_TEXT),
    st.builds(Cleared, wait=st.booleans()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ANY_EVENT, max_size=8), ANY_TEXT)
def test_any_displayed_value_gives_a_valid_notebook(events: list[Event], code: str):
    checked(encode_notebook(build_notebook([recorded(*events, code=code)])))


def test_all_histories_share_a_bound_evenly():
    archive = HistoryBudget(100_000)
    quiet, loud = SandboxHistory(80_000, archive), SandboxHistory(80_000, archive)
    recorded(out("x" * 10_000), transcript=quiet)
    for _ in range(40):
        recorded(out("y" * 10_000), transcript=loud)
        assert archive.bytes <= 100_000
    assert len(quiet.cells()) == 1 and quiet.cells()[0].outputs
    assert len(loud.cells()) > 0 and archive.bytes > 50_000
    del quiet, loud
    gc.collect()
    assert (archive.bytes, archive.transcripts) == (0, 0)


def test_cells_that_have_ended_are_nothing_to_the_garbage_collector():
    """With hundreds of thousands of them it would stop everybody for a tenth of a second, again and again."""
    archive = HistoryBudget()
    transcript = SandboxHistory(archive=archive)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for number in range(500):
            named = Display(data={"text/plain": "1"}, id=f"n{number}")
            failed = Raised(name="E", value="v", traceback="t")
            recorded(out("a"), shown(text_plain="2"), named, failed, transcript=transcript)
        gc.collect()  # tuples of what is not looked at are left alone from then on
        of_names = 3 * 500  # a list, a pair and a key for each name by which something can be replaced
        assert len(gc.get_objects()) - before < of_names + 100
        transcript.start_recording("c", "python", "x").on_event(Started(execution="x", count=1), 0)  # and never ends
        del transcript
        assert archive.transcripts == 0, "it is part of a cycle"
    finally:
        gc.enable()
