"""What a fold makes of a stream of events."""

from __future__ import annotations

import msgspec

from cloche.events import (
    AnyEvent,
    Cleared,
    Display,
    Ended,
    Output,
    Raised,
    Result,
    Started,
    Wrote,
    fold,
)
from cloche.model import FileInfo, Usage

START = Started(execution="x1", count=3)
END = Ended(outcome="ok", usage=Usage(wall_seconds=1.0))


def test_output_of_each_stream_is_joined_in_order():
    run = fold(
        [
            START,
            Output(stream="stdout", text="a"),
            Output(stream="stderr", text="e"),
            Output(stream="stdout", text="b"),
            END,
        ]
    )
    assert (run.stdout, run.stderr, run.id, run.count, run.outcome) == ("ab", "e", "x1", 3, "ok")


def test_the_last_expression_is_the_text_and_other_displays_are_not():
    shown = Display(data={"text/plain": "shown"})
    main = Display(data={"text/plain": "42", "text/html": "<b>42</b>", "application/x-own": "y"}, main=True)
    run = fold([START, shown, main, END])
    assert run.text == "42"
    assert [result.text for result in run.results] == ["shown", "42"]
    assert run.results[1].formats() == ["text", "html", "application/x-own"]
    assert run.results[1]._repr_mimebundle_() == main.data


def test_an_update_replaces_the_display_of_its_id_and_nothing_else():
    first, second = Display(data={"text/plain": "1"}, id="a"), Display(data={"text/plain": "2"}, id="b")
    update = Display(data={"text/plain": "3"}, id="a", update=True)
    assert [result.text for result in fold([START, first, second, update, END]).results] == ["3", "2"]


def test_clear_with_wait_forgets_only_when_something_new_comes():
    old, new = Output(stream="stdout", text="old"), Output(stream="stdout", text="new")
    assert fold([START, old, Cleared(wait=True), END]).stdout == "old"
    assert fold([START, old, Cleared(wait=True), new, END]).stdout == "new"
    assert fold([START, old, Cleared(), END]).stdout == ""


def test_an_exception_is_data():
    run = fold([START, Raised(name="ValueError", value="no", traceback="Trace"), Ended(outcome="raised")])
    assert run.error is not None
    assert (run.error.name, str(run.error), run.outcome) == ("ValueError", "Trace", "raised")


def test_a_stream_that_breaks_off_has_died():
    run = fold([START, Output(stream="stdout", text="a")])
    assert (run.outcome, run.stdout) == ("died", "a")


def test_a_file_written_twice_is_reported_once():
    def info(size: int) -> FileInfo:
        return FileInfo(
            path="/mnt/data/a",
            name="a",
            kind="file",
            size_bytes=size,
            mode=0o644,
            owner="user",
            group="user",
            modified_at=0.0,
        )

    run = fold([START, Wrote(file=info(1)), Wrote(file=info(2)), END])
    assert [file.size_bytes for file in run.files] == [2]


def test_events_survive_json():
    events: list[AnyEvent] = [
        START,
        Output(stream="stderr", text="é"),
        Display(data={"text/plain": "1"}, main=True),
        END,
    ]
    encoded = msgspec.json.encode(events)
    assert msgspec.json.decode(encoded, type=list[AnyEvent]) == events


def test_a_result_shows_itself_in_a_notebook():
    result = Result.from_bundle({"image/png": b"png", "text/latex": "x"}, main=False)
    assert (result._repr_png_(), result._repr_latex_(), result._repr_html_(), str(result)) == (b"png", "x", None, "")
