"""The threat model is true: what it names as tried is tried, and what it says of the filter is what the filter does."""

from __future__ import annotations

import re
from pathlib import Path

from cloche.linux import seccomp

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/threat-model.md").read_text("utf-8")
POLICY = REPOSITORY / "src/cloche/isolation/policy"


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE))
    assert len(named) > 40
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if f"def {name}(" not in (REPOSITORY / "tests/escape" / file).read_text("utf-8")
    ]
    assert missing == []


def test_every_test_of_another_place_that_is_named_exists():
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE))
    assert len(named) > 20
    texts = {file: (REPOSITORY / file).read_text("utf-8") for file, _ in named}
    assert [f"{file}::{name}" for file, name in sorted(named) if f"def {name}(" not in texts[file]] == []


def test_every_file_and_directory_of_tests_that_is_named_exists():
    files = set(re.findall(r"`(test_\w+\.py)`", PAGE))
    assert [name for name in files if not (REPOSITORY / "tests/escape" / name).exists()] == []
    places = set(re.findall(r"`(tests/\w+/)`", PAGE))
    assert [name for name in places if not (REPOSITORY / name).is_dir()] == []


def test_every_file_of_hostile_programs_is_named():
    written = {path.name for path in (REPOSITORY / "tests/escape").glob("test_*.py")}
    assert written - set(re.findall(r"test_\w+\.py", PAGE)) == set()


def test_every_rule_of_the_filter_is_in_the_comparison():
    policy = seccomp.load_policy(POLICY / "cell.toml")
    assert [name for name in policy["rule"] if f"`{name}" not in PAGE and f"`{name}(" not in PAGE] == []
