"""`cloche doctor`, by the real command: it must work when nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.model import Template

CLOCHE = Path(sys.executable).with_name("cloche")


def doctor(*args: str, before: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    command = [CLOCHE, *before, "doctor", *args]
    environ = {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ, check=False)


@pytest.fixture(scope="module")
def healthy(data_dir: str, template: Template) -> subprocess.CompletedProcess[str]:
    done = doctor(before=("--data-dir", data_dir))
    if done.returncode:
        pytest.skip(f"this host cannot run sandboxes: {done.stdout}")
    return done


def test_it_names_walls_limits_interpreters_templates_and_places(healthy, data_dir, template):
    for part in (
        "namespaces",
        "seccomp",
        "limit on memory",
        template.python_version,
        template.ref,
        data_dir,
        "GiB free",
    ):
        assert part in healthy.stdout
    assert healthy.stdout.endswith("Sandboxes can run here.\n")


def test_json_has_the_same_and_says_whether_sandboxes_can_run(healthy, data_dir):
    found = json.loads(doctor("--json", before=("--data-dir", data_dir)).stdout)
    assert found["can_run"] is True
    assert found["missing"] == []
    names = [check["name"] for section in found["sections"] for check in section["checks"]]
    assert {"kernel", "namespaces", "trial", "disk space"} <= set(names)


def test_leftovers_of_killed_processes_are_listed_and_left_alone(healthy, tmp_path):
    abandoned = [tmp_path / "run/h0", tmp_path / "templates/small/.scratch-0"]
    draft = tmp_path / "images/.draft-m00000000000000000000-h0"
    for directory in (*abandoned, draft.parent):
        directory.mkdir(parents=True)
    draft.touch()
    found = json.loads(doctor("--json", before=("--data-dir", str(tmp_path))).stdout)
    (check,) = [each for section in found["sections"] for each in section["checks"] if each["name"] == "leftovers"]
    assert check["state"] == "best effort" and "the next start of Cloche" in check["advice"]
    assert all(
        part in check["detail"] for part in ("directories of h0", "m00000000000000000000-h0", "small/.scratch-0")
    )
    assert all(path.exists() for path in (*abandoned, draft))
    assert found["can_run"] is True


def test_without_a_template_it_suggests_the_remedy(healthy, tmp_path):
    done = doctor(before=("--data-dir", str(tmp_path / "none/yet")))
    assert done.returncode == 0
    assert "cloche template build python" in done.stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (("--data-dir", "/proc/nowhere"), {}, "data directory"),
        ((), {"CLOCHE_BACKND": "x"}, "unknown environment variable CLOCHE_BACKND"),
        (("--config", "/nowhere.toml"), {}, "cannot read /nowhere.toml"),
        (("--backend", "nonsense"), {}, "nonsense"),
    ],
)
def test_broken_parts_are_a_line_and_status_1_never_a_traceback(args, env, said):
    done = doctor(before=args, **env)
    assert done.returncode == 1
    assert said in done.stdout
    assert "cannot run here" in done.stdout
    assert done.stderr == ""


def test_an_ordinary_user_without_rights_gets_a_report():
    """Not even the interpreter that runs us can be read by that user: it is imported before."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    code = (
        "import os, cloche.cli.doctor, cloche.isolation.probe, cloche.templates.pythons\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "cloche.cli.main(['--data-dir', '/nowhere/at/all', 'doctor'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "/ cannot be written: set CLOCHE_DATA_DIR" in done.stdout
    assert "cannot run here" in done.stdout
    assert done.stderr == ""


def test_without_walls_it_says_so(tmp_path):
    done = doctor(before=("--data-dir", str(tmp_path), "--backend", "plain-unsafe"))
    assert "plain-unsafe has none" in done.stdout
