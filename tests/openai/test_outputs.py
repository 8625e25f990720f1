"""What is kept of an execution: never more than there is room for, and what a model is shown of it."""

from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche.events import Cleared, Display, Ended, Output, Truncated
from cloche.gateway.outputs import (
    DROPPED_PICTURE,
    ENTRY_BYTES,
    MAX_EXECUTION_PICTURES,
    MAX_PICTURE_BYTES,
    MAX_TURN_PICTURE_BYTES,
    MAX_TURN_PICTURES,
    ExecutionOutputs,
    OutputTail,
    OutputText,
    PictureLimit,
)
from cloche.model import KIB, MIB

PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 100
ROOM = 8 * KIB
NOTES = 200  # bytes of words about what was dropped


def printed(text):
    return Output(stream="stdout", text=text)


def shown(content=PNG, mime="image/png", **fields):
    return Display(data={mime: content}, **fields)


def seen(*events, room=ROOM):
    sight = ExecutionOutputs(room)
    for event in (*events, Ended(outcome="ok")):
        sight.feed(event)
    return sight


def json_bytes(sight):
    return len(msgspec.json.encode(sight.outputs()))


def test_output_within_the_limit_is_kept_verbatim():
    sight = seen(printed("a"), printed("b\n"), shown(), printed("c"))
    assert sight.outputs() == [
        {"type": "logs", "logs": "ab\n"},
        {"type": "image", "url": "data:image/png;base64," + base64.b64encode(PNG).decode()},
        {"type": "logs", "logs": "c"},
    ]


def test_of_excess_output_beginning_and_end_are_kept():
    sight = seen(printed("begin"), *(printed(f"{number:07}\n") for number in range(100_000)), printed("end"))
    (output,) = sight.outputs()
    assert output["logs"].startswith("begin0000000\n")
    assert output["logs"].endswith("0099999\nend")
    assert "bytes dropped" in output["logs"]
    assert json_bytes(sight) <= ROOM + NOTES
    assert sight.kept_bytes <= ROOM


def test_one_huge_piece_is_cut_like_many():
    (output,) = seen(printed("begin" + "x" * 10_000_000 + "end")).outputs()
    assert len(output["logs"]) <= ROOM + NOTES
    assert (output["logs"][:5], output["logs"][-3:]) == ("begin", "end")


def test_no_more_is_held_while_a_program_prints():
    sight, tail = ExecutionOutputs(ROOM), OutputTail(ROOM)
    for _ in range(1000):
        sight.feed(printed("x" * 10_000))
        tail.add("x" * 10_000)
    assert sight.kept_bytes <= ROOM
    assert sum(size for _, size in tail._pieces) <= 2 * ROOM


def test_the_outcome_is_reported_with_any_output():
    sight = ExecutionOutputs(ROOM)
    sight.feed(printed("x" * 100_000))
    sight.feed(Ended(outcome="out_of_memory"))
    assert sight.outputs()[-1]["logs"].endswith("\nKernel restarted: out of memory; variables are lost\n")


def test_pictures_without_room_are_named():
    large = PNG + b"x" * ROOM
    outputs = seen(printed("a\n"), shown(large), printed("b\n")).outputs()
    assert outputs == [{"type": "logs", "logs": f"a\n{DROPPED_PICTURE}b\n"}]


def test_a_display_that_grows_too_large_is_cut_and_can_shrink_again():
    sight = ExecutionOutputs(ROOM)
    for content in (PNG, PNG + b"x" * ROOM, PNG):
        sight.feed(shown(content, id="1", update=content is not PNG))
        sight.feed(shown(PNG, id="1", update=True))
    assert [each["type"] for each in sight.outputs()] == ["image", "image"]
    sight.feed(Display(data={"text/plain": "y" * 3 * ROOM}, id="1", update=True))
    assert json_bytes(sight) <= ROOM + NOTES


def test_cleared_output_takes_no_space():
    sight = seen(printed("x" * 3 * ROOM), Cleared(), printed("y"))
    assert sight.outputs() == [{"type": "logs", "logs": "y"}]
    assert sight.kept_bytes == ENTRY_BYTES + 1


EVENTS = (
    st.text(max_size=3000).map(printed)
    | st.builds(shown, st.binary(max_size=5000), id=st.sampled_from([None, "a", "b"]), update=st.booleans())
    | st.builds(
        lambda text, id, update: Display(data={"text/plain": text}, id=id, update=update),
        st.text(max_size=9000),
        st.sampled_from([None, "a", "b"]),
        st.booleans(),
    )
    | st.builds(Cleared, wait=st.booleans())
    | st.just(Truncated(stream="stdout", dropped_bytes=3))
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=20), st.integers(KIB, ROOM))
def test_shown_output_never_exceeds_its_limit(events, room):
    sight = seen(*events, room=room)
    entries = len(sight.outputs())
    assert json_bytes(sight) <= room + NOTES + entries * ENTRY_BYTES
    sight.result(KIB, PictureLimit())


def test_small_pieces_take_the_room_of_their_letters():
    log = OutputText()
    for _ in range(100_000):
        log.add("ä")
    assert log.whole == "ä" * 100_000
    assert (log.size, log.ends_line) == (200_000, False)


# -- what a model sees


def told(*events, pictures):
    result = seen(*events, room=64 * MIB).result(16 * KIB, pictures)
    if isinstance(result, str):
        return result, 0
    assert all(each["type"] == "input_image" for each in result[1:])
    return result[0]["text"], len(result) - 1


def test_a_picture_is_seen_and_named():
    assert told(shown(), pictures=PictureLimit()) == ("[image image/png]\n", 1)
    assert told(shown(), pictures=None) == ("[image image/png]\n", 0)
    assert told(Display(data={"image/svg+xml": "<svg/>"}), pictures=PictureLimit()) == ("[image image/svg+xml]\n", 0)


@pytest.mark.parametrize(
    ("mime", "content"),
    [
        ("image/png", PNG),
        ("image/jpeg", b"\xff\xd8\xff\xe0.."),
        ("image/gif", b"GIF87a.."),
        ("image/gif", b"GIF89a.."),
        ("image/webp", b"RIFF\n\n\x00\x00WEBPVP8 "),
    ],
)
def test_only_images_with_a_valid_signature_are_shown(mime, content):
    assert told(shown(content, mime), pictures=PictureLimit())[1] == 1
    text, count = told(shown(b"<html>", mime), pictures=PictureLimit())
    assert (text, count) == (f"[image that cannot be shown to you: it is no {mime}]\n", 0)


def test_a_picture_that_servers_refuse_for_its_size_is_told_in_words():
    text, count = told(shown(PNG.ljust(8_000_000)), shown(PNG.ljust(MAX_PICTURE_BYTES)), pictures=PictureLimit())
    assert (text, count) == ("[image too large to be shown to you: 8.0 MB]\n[image image/png]\n", 1)


def test_an_execution_and_a_turn_have_so_many_pictures():
    pictures = PictureLimit()
    counts = [told(*[shown()] * 12, pictures=pictures)[1] for _ in range(6)]
    assert counts == [MAX_EXECUTION_PICTURES] * 5 + [0]
    assert sum(counts) == MAX_TURN_PICTURES


def test_a_turn_has_so_many_bytes_of_pictures():
    pictures = PictureLimit()
    text, count = told(*[shown(PNG.ljust(MAX_PICTURE_BYTES))] * 6, pictures=pictures)
    assert count == MAX_TURN_PICTURE_BYTES // MAX_PICTURE_BYTES
    assert text.count("as many as one answer can have") == 2
