"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche.model import Template
from cloche.templates import Catalogue, ensure

REPOSITORY = Path(__file__).parent.parent
DATA_DIR = os.environ.get("CLOCHE_DATA_DIR") or str(REPOSITORY / ".data")


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_developer():
    """The developer's own CLOCHE_* variables must not decide what a test sees."""
    own = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("CLOCHE_")}
    yield
    os.environ.update(own)


@pytest.fixture(scope="session")
def data_dir() -> str:
    """A data directory that outlives the run, so that the built-in template is built once and not per run."""
    return DATA_DIR


@pytest.fixture(scope="session")
def template(data_dir: str) -> Template:
    """The built-in template `python`."""
    return ensure(Catalogue(data_dir), "python")
