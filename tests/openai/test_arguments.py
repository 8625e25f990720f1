"""Code out of a call's arguments, however they are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche.gateway.items import CODE_FIELD_NAMES, CodeArgumentParser, extract_code

CODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=80).filter(lambda code: "```" not in code)
SPACE = st.sampled_from(["", " ", "\n", "\t  ", "\r\n "])


@st.composite
def cut(draw, arguments):
    """The same text, in pieces of any size."""
    places = sorted(draw(st.lists(st.integers(0, len(arguments)), max_size=8)))
    return [arguments[start:end] for start, end in zip([0, *places], [*places, len(arguments)], strict=True)]


def read(pieces):
    """What came while it was read, and the whole."""
    reading = CodeArgumentParser()
    came = [reading.feed(piece) for piece in pieces]
    return "".join(came) + reading.rest(), reading.whole()


@settings(deadline=None)
@given(st.data(), CODE, st.sampled_from(CODE_FIELD_NAMES), st.booleans(), SPACE, SPACE)
def test_any_cut_of_any_encoding_gives_the_code(data, code, name, ascii_only, before, between):
    arguments = f"{before}{{{between}{json.dumps(name)}{between}:{between}{json.dumps(code, ensure_ascii=ascii_only)}}}"
    came, whole = read(data.draw(cut(arguments)))
    assert (came, whole) == (code, code)


@settings(deadline=None)
@given(CODE)
def test_letter_by_letter_nothing_is_said_twice_nor_taken_back(code):
    reading, came = CodeArgumentParser(), ""
    for letter in json.dumps({"code": code}):
        came += reading.feed(letter)
        assert code.startswith(came)
    assert came == code or not code.lstrip("`").strip()  # all of it, before the end is known; what may be a fence waits


@settings(deadline=None)
@given(CODE)
def test_all_escapes_are_understood(code):
    came, whole = read(list('{"code": "' + _escaped(_utf16(code)) + '"}'))
    assert (came, whole) == (code, code)


@settings(deadline=None)
@given(st.data(), st.lists(st.sampled_from([0x41, 0xD800, 0xD83D, 0xDC00, 0xDE00]) | st.integers(0x20, 0xFFFF)))
def test_halves_of_characters_are_replaced(data, units):
    came, whole = read(data.draw(cut('{"code": "' + _escaped(units) + '"}')))
    assert came == whole
    whole.encode()


def _escaped(units):
    return "".join(f"\\u{unit:04x}" for unit in units)


def _utf16(text):
    raw = text.encode("utf-16-be")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]


TOKENS = [
    "{",
    "}",
    '"code"',
    '"input"',
    '"x"',
    ":",
    ",",
    '"',
    "\\",
    "\\n",
    "\\u",
    "00e9",
    "\ud83d",
    "```",
    "\n",
    " ",
    "1",
]


@settings(deadline=None)
@given(st.data(), st.text(max_size=60) | st.lists(st.sampled_from(TOKENS), max_size=20).map("".join))
def test_nothing_that_a_model_sends_raises_or_cannot_be_sent_on(data, arguments):
    came, whole = read(data.draw(cut(arguments)))
    assert whole == extract_code(arguments)
    came.encode()
    whole.encode()


@settings(deadline=None)
@given(st.data(), CODE, st.integers(0, 40))
def test_truncated_arguments_give_the_beginning_of_the_code(data, code, missing):
    arguments = json.dumps({"code": code})
    arguments = arguments[: max(len(arguments) - 2 - missing, len('{"code": "'))]
    came, whole = read(data.draw(cut(arguments)))
    assert code.startswith(whole)
    assert came == whole


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("print(1)", "print(1)"),
        ('"print(1)"', "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ('{"code": "```py\\nprint(1)\\n```"}', "print(1)"),
        ('{"language": "python", "code": "print(1)"}', "print(1)"),
        ('{"python": "print(1)"}', "print(1)"),
        ('{"cell": "print(1)"}', "print(1)"),
        ('{"code": "print(1)\nprint(2)"}', "print(1)\nprint(2)"),
        ('{"code": "x = \\ud83d"}', "x = \ufffd"),
        ("{'code': 1}", "{'code': 1}"),
        ("{}", ""),
        ("", ""),
    ],
)
def test_arguments_of_small_models_are_understood(arguments, code):
    assert extract_code(arguments) == code
    assert read(list(arguments)) == (code, code)


@pytest.mark.parametrize("endless", ["{" + " " * 50_000, "\n" * 50_000, '{"' + "a" * 50_000, '{"code"' + "\t" * 50_000])
def test_nothing_grows_while_an_opening_is_waited_for(endless):
    """Else every letter would take as long as all before it."""
    reading = CodeArgumentParser()
    for letter in endless:
        assert reading.feed(letter) == ""
        assert len(reading._head) < 32
    assert reading.whole() == extract_code(endless)


def test_fenced_code_is_held_back_without_being_looked_at_again():
    code = "x = 1\n" * 10_000
    reading = CodeArgumentParser()
    for piece in ['{"code": "', *json.dumps(f"```python\n{code}```")[1:], "}"]:
        assert reading.feed(piece) == ""
        assert sum(map(len, reading._held)) <= 3
    assert reading.whole() == reading.rest() == code.rstrip("\n")


def test_blanks_before_code_are_given_with_it():
    reading = CodeArgumentParser()
    said = [reading.feed(letter) for letter in '{"code": "' + " " * 1000 + '``x"}']
    assert [each for each in said if each] == [" " * 1000 + "``x"]


def test_many_escapes_in_one_piece_are_read_in_one_pass():
    code = "\n" * 1_000_000
    assert read(['{"code": "', json.dumps(code)[1:-1], '"}']) == (code, code)
