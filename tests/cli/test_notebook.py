"""`--notebook FILE` of `cloche run` and `cloche shell`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.conftest import CommandLine


def call(command_line: CommandLine, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    words = command_line.words(*args)
    return subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def cells(path: Path) -> list[tuple[str, list[str]]]:
    made = json.loads(path.read_text())["cells"]
    return [("".join(cell["source"]), [each["output_type"] for each in cell["outputs"]]) for cell in made]


def test_a_programs_run_is_saved(command_line: CommandLine, tmp_path: Path):
    ran = call(command_line, "run", "--notebook", str(tmp_path / "a.ipynb"), "-c", "print(1)\n1/0")
    assert (ran.stdout, ran.returncode) == ("1\n", 1)
    assert cells(tmp_path / "a.ipynb") == [("print(1)\n1/0", ["stream", "error"])]


def test_a_session_is_saved_when_it_is_left(command_line: CommandLine, tmp_path: Path):
    ran = call(command_line, "shell", "--notebook", str(tmp_path / "a.ipynb"), stdin="x = 1\nx\nexit(3)\n")
    assert (ran.stdout, ran.returncode) == ("1\n", 3)
    saved = cells(tmp_path / "a.ipynb")
    assert saved[:2] == [("x = 1", []), ("x", ["execute_result"])]


@pytest.mark.parametrize("args", [("run", "-c", "1"), ("shell",)], ids=lambda args: args[0])
def test_a_place_that_is_not_there_is_refused_before_anything_runs(
    bare_dir: str, tmp_path: Path, args: tuple[str, ...]
):
    ran = call(CommandLine(bare_dir, alone=True), *args, "--notebook", str(tmp_path / "nowhere" / "a.ipynb"))
    assert (ran.stdout, "there is no directory" in ran.stderr) == ("", True)
    assert ran.returncode != 0


def test_a_terminal_has_no_notebook(bare_dir: str, tmp_path: Path):
    ran = call(CommandLine(bare_dir, alone=True), "shell", "--lang", "bash", "--notebook", str(tmp_path / "a.ipynb"))
    assert "a terminal has no cells" in ran.stderr
