"""Kernels for tests: real ones, forked from a prepared process, without walls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kernel_driver import Driver, Zygote


@pytest.fixture(scope="session")
def zygote():
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def make_kernel(zygote, tmp_path):
    """Makes kernels that end with the test."""
    made = []

    def make(**options):
        made.append(Driver(zygote, tmp_path, **options))
        return made[-1]

    yield make
    for kernel in made:
        kernel.close()


@pytest.fixture
def kernel(make_kernel):
    return make_kernel()
