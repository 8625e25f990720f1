"""One table of languages and one of MIME types: the copies elsewhere are equal to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cloche.guest.languages.languages import KERNEL_STARTERS
from cloche.languages import LANGUAGE_NAMES, LANGUAGES, list_titles
from cloche.mime_types import BINARY_MIMES, SIGNATURES
from cloche.model import TOOL_LANGUAGES

REPOSITORY = Path(__file__).parents[2]


def test_every_language_is_in_the_table_and_has_a_kernel():
    assert tuple(LANGUAGES) == LANGUAGE_NAMES
    assert tuple(KERNEL_STARTERS) == LANGUAGE_NAMES
    assert set(TOOL_LANGUAGES) <= set(LANGUAGE_NAMES)


def test_the_titles_of_languages_make_a_sentence():
    assert list_titles() == "Python, JavaScript, TypeScript, bash, R or Java"


def test_languages_share_neither_names_nor_extensions():
    names = [name for known, language in LANGUAGES.items() for name in (known, *language.fences)]
    extensions = [each for language in LANGUAGES.values() for each in language.extensions]
    assert len(set(names)) == len(names)
    assert len(set(extensions)) == len(extensions)


def test_every_language_is_documented():
    text = (REPOSITORY / "docs/languages.md").read_text()
    assert [each.title for each in LANGUAGES.values() if each.title not in text] == []


def test_images_that_models_see_are_binary():
    assert SIGNATURES.keys() <= BINARY_MIMES


def test_the_copies_of_the_console_and_of_kernels_are_current():
    """If not: `python tools/generate_tables.py`."""
    command = [sys.executable, str(REPOSITORY / "tools/generate_tables.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.stdout == checked.stderr == ""
    assert checked.returncode == 0
