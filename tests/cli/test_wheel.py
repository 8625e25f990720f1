"""The wheel, installed as people do: by pip into an environment, and by `uv tool install`. It needs a package index."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx2
import pytest
from tests.conftest import REPOSITORY, serving
from uv import find_uv_bin

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SOURCE = REPOSITORY / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    run_uv("build", "--wheel", "--out-dir", place, REPOSITORY)
    return next(place.glob("*.whl"))


@pytest.fixture(scope="module", params=["pip", "uv tool"])
def command(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed `cloche`, in an environment that has the wheel and its dependencies only."""
    place = tmp_path_factory.mktemp("installed")
    if request.param == "pip":
        run_uv("venv", "--seed", "--python", sys.executable, place / "env")
        subprocess.run([place / "env/bin/pip", "install", "--quiet", wheel], env=environment(), check=True)
        return place / "env/bin/cloche"
    places = {"UV_TOOL_DIR": str(place / "tools"), "UV_TOOL_BIN_DIR": str(place / "bin")}
    run_uv("tool", "install", "--python", sys.executable, wheel, **places)
    return place / "bin/cloche"


def run_uv(*args: str | Path, **variables: str) -> None:
    subprocess.run([find_uv_bin(), *args, "--quiet"], env=environment() | variables, check=True)


def environment() -> dict[str, str]:
    """Nothing of the checkout's own environment."""
    kept = {name: text for name, text in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    path = [each for each in kept["PATH"].split(os.pathsep) if Path(each) != Path(sys.executable).parent]
    return {**kept, "PATH": os.pathsep.join(path)}


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path):
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert there == {str(path.relative_to(SOURCE)) for path in files}


def test_an_installed_command_runs_code(command: Path, bare_dir: str, tmp_path: Path):
    done = subprocess.run(
        [command, "--data-dir", bare_dir, "run", "-c", "print(42)"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_an_installed_server_has_its_console(command: Path, bare_dir: str):
    statics = REPOSITORY / "src/cloche/api/console/static"
    names = sorted(str(path.relative_to(statics)) for path in statics.rglob("*.*") if path.is_file())
    with serving(bare_dir, command=command) as server, httpx2.Client(base_url=server.url) as client:
        assert "<title>" in client.get("/ui/login").text
        page = client.get("/ui/login").text
        assert "/ui/static/" in page
        told = {name: client.get(f"/ui/static/{name}").status_code for name in names}
    assert set(told.values()) == {200}, told
