"""Replacing a text in a large file: as `bytes.replace`, in steps between which others are served."""

from __future__ import annotations

import itertools
import random

import pytest

from cloche import errors
from cloche.api.opensandbox import files
from cloche.api.opensandbox.files import replace_in_pieces


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64])
def test_pieces_make_what_replace_makes(step: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "REPLACED_STEP_BYTES", step)
    chance = random.Random(step)
    for length, old, new in itertools.product(
        (0, 1, 5, 40), (b"a", b"aa", b"ab", b"aba", b"abab"), (b"", b"a", b"xyz")
    ):
        content = bytes(chance.choices(b"ab", k=length))
        pieces = list(replace_in_pieces(content, old, new))
        assert b"".join(piece for piece, _ in pieces) == content.replace(old, new), (content, old, new)
        assert sum(count for _, count in pieces) == content.count(old), (content, old)


def test_no_piece_of_a_large_file_is_large():
    """The longest time in which nothing else is done: 64 MiB of one letter took three seconds."""
    content = b"a" * (4 << 20)
    assert max(len(piece) for piece, _ in replace_in_pieces(content, b"aa", b"bb")) <= 2 * files.REPLACED_STEP_BYTES


def test_a_result_that_is_too_large_is_refused_before_it_is_made():
    with pytest.raises(errors.FileError):
        list(replace_in_pieces(b"a" * (1 << 20), b"a", b"b" * 1000))
