"""JSON with characters that were cut in half is read all the same."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import errors
from cloche.gateway.upstream.http import decode_lenient, parse_json_object


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (rb'{"a": "x\ud83d"}', "x\ufffd"),
        (rb'{"a": "\ude00y"}', "\ufffdy"),
        (rb'{"a": "\ud83d\ud83d\ude00"}', "\ufffd\U0001f600"),
        (rb'{"a": "\ud83d\u0041"}', "\ufffdA"),
        (rb'{"a": "\\ud83d \ud83d"}', "\\ud83d \ufffd"),
        (b'{"a": "\xf0\x9f"}', "\ufffd"),
        (b'{"a": "\xff"}', "\ufffd"),
    ],
)
def test_halves_are_replaced(content, text):
    assert parse_json_object(content) == {"a": text}


@given(st.dictionaries(st.text(), st.text(st.characters())))
def test_any_text_is_read_as_far_as_it_has_whole_characters(value):
    def whole(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    read = decode_lenient(json.dumps(value).encode())
    assert read == {whole(name): whole(text) for name, text in value.items()}
    msgspec.json.encode(read)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": \\ud83d}', b'"\\ud83', b"\xff", b"[1]"])
def test_a_value_that_is_not_an_object_is_a_failure(content):
    with pytest.raises(errors.UpstreamFailed):
        parse_json_object(content)
