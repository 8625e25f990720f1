"""`cloche completion`, in the shells themselves where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def shell(*command: str, **variables: str) -> str:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout


def complete_in_bash(*words: str) -> list[str]:
    """The completions that bash offers for the last word."""
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _cloche_completion cloche; printf "%s\\n" "${COMPREPLY[@]}"'
    setup = 'eval "$(cloche completion bash)"; complete -p cloche >/dev/null'
    return shell("bash", "--norc", "-c", f"{setup}; {ask}", "bash", *words).split()


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["se"], ["serve"]),
        (["s"], ["shell", "serve", "snapshot", "snapshots"]),
        (["key", "r"], ["revoke", "rotate"]),
        (["serve", "--da"], ["--data-dir"]),
        (["serve", "--pu"], ["--public-url"]),
        (["key", "add", "--role", ""], ["user", "admin"]),
        (["--data-dir", "/x", "run", "--no"], ["--notebook"]),
        (["completion", "f"], ["fish"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bash_completes_commands_options_and_values(words: list[str], found: list[str]):
    assert complete_in_bash("cloche", *words) == found


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_is_for_that_shell_and_valid_in_it(name: str, tmp_path: Path):
    script = shell("cloche", "completion", name)
    (tmp_path / "script").write_text(script)
    assert f"_CLOCHE_COMPLETE={name}_complete" in script
    register = {
        "bash": "complete -o nosort -F",
        "zsh": "compdef _cloche_completion cloche",
        "fish": "complete --no-files",
    }
    assert register[name] in script
    if shutil.which(name):
        shell(name, "-n", str(tmp_path / "script"))


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_a_request_of_the_script_is_answered_with_names_and_help(name: str):
    asked = {
        "zsh": {"COMP_WORDS": "cloche doc", "COMP_CWORD": "1"},
        "fish": {"COMP_WORDS": "cloche doc", "COMP_CWORD": "doc"},
    }
    answer = shell("cloche", _CLOCHE_COMPLETE=f"{name}_complete", **asked[name])
    assert "doctor" in answer and "Report the isolation and limits" in answer
