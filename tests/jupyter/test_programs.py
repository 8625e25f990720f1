"""Jupyter's own programs and suites of others, unmodified. docs/dialects/jupyter.md has their results.

They live in an environment of their own, which `make test-all` makes; without it nothing of this runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.conftest import REPOSITORY, RunningServer, free_port
from tests.console.conftest import CHROMIUM, FLAGS

from cloche.cli import main

PLACE = REPOSITORY / ".venv-jupyter"
HERE = REPOSITORY / "tests" / "jupyter"
AUTOGEN = PLACE / "sdist" / "autogen_ext-0.7.5" / "tests" / "code_executors"
MILLISECONDS = 60_000  # how long a failing test takes

pytestmark = [
    pytest.mark.skipif(not PLACE.exists(), reason="Jupyter has an environment of its own: make jupyter-env"),
    pytest.mark.timeout(600),
    pytest.mark.long,
    pytest.mark.alone,
]


@pytest.fixture
def environment(server: RunningServer, tmp_path: Path) -> dict[str, str]:
    """Variables of a program that uses the server, and finds nothing of the developer's."""
    homes = {name: str(tmp_path / name) for name in ("HOME", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    return {
        "PATH": f"{PLACE / 'bin'}:{os.environ['PATH']}",
        **homes,
        "CLOCHE_URL": server.url,
        "CLOCHE_API_KEY": server.key,
        "JUPYTER_PATH": str(tmp_path / "share/jupyter"),
        "PYTHONPATH": str(HERE),
    }


def install_kernel(prefix: Path, name: str = "cloche") -> None:
    made = CliRunner().invoke(main, ["kernel", "install", "--prefix", str(prefix), "--name", name])
    assert made.exit_code == 0, made.output


def run_suite(environment: dict[str, str], *words: str) -> tuple[set[str], int]:
    """The names of the tests that fail, and how many pass."""
    command = [
        PLACE / "bin/python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "--rootdir",
        environment["HOME"],
    ]
    Path(environment["HOME"]).mkdir(exist_ok=True)
    ran = subprocess.run([*command, *words], env=environment, cwd=environment["HOME"], capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None, ran.stdout + ran.stderr
    failed = re.findall(r"^FAILED .*?::(?:\w+::)?(\w+)", ran.stdout, re.MULTILINE)
    return set(failed), int(passed[1])


def test_jupyters_suite_for_kernels(environment: dict[str, str], tmp_path: Path):
    install_kernel(tmp_path)
    assert run_suite(environment, str(HERE / "kernel_suite.py")) == ({"test_pager"}, 11)


def test_autogens_executor_for_a_kernel_gateway(environment: dict[str, str]):
    """One looks for the program's file in a directory of the host."""
    suite = str(AUTOGEN / "test_docker_jupyter_code_executor.py")
    assert run_suite(environment, "-p", "autogen_server", suite) == ({"test_canncellation"}, 6)


def test_autogens_executor_with_nbclient(environment: dict[str, str], tmp_path: Path):
    """Two compare the text of IPython's traceback."""
    install_kernel(tmp_path, "python3")
    failed = {"test_execute_code_error", "test_execute_multiple_code_blocks_error"}
    assert run_suite(environment, str(AUTOGEN / "test_jupyter_code_executor.py")) == (failed, 12)


def notebook(*cells: str, kernel: str = "cloche") -> dict[str, Any]:
    code = {"cell_type": "code", "execution_count": None, "outputs": []}
    tags = [{"tags": ["parameters"]}, *({} for _ in cells[1:])]
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": kernel, "display_name": "Python 3", "language": "python"}},
        "cells": [{**code, "id": f"c{at}", "source": cell, "metadata": tags[at]} for at, cell in enumerate(cells)],
    }


def test_papermill_runs_a_notebook(environment: dict[str, str], tmp_path: Path):
    install_kernel(tmp_path)
    cells = ("x = 1", "print(x)\nx * 2", "import matplotlib.pyplot as plt; plt.plot([1]); plt.show()")
    (tmp_path / "in.ipynb").write_text(json.dumps(notebook(*cells)))
    command = [PLACE / "bin/papermill", "in.ipynb", "out.ipynb", "-p", "x", "21", "--no-progress-bar"]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    done = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    outputs = [each for cell in done for each in cell["outputs"]]
    assert outputs[0]["text"] == ["21\n"]
    assert outputs[1]["data"]["text/plain"] == ["42"]
    assert outputs[2]["data"]["image/png"].startswith("iVBOR")


@contextmanager
def jupyterlab(environment: dict[str, str], server: RunningServer, place: Path) -> Iterator[str]:
    """JupyterLab of a directory, all of whose kernels are on the server."""
    port = free_port()
    options = [
        f"--gateway-url={server.url}/jupyter",
        f"--GatewayClient.auth_token={server.key}",
        f"--ServerApp.port={port}",
        f"--ServerApp.root_dir={place}",
        "--IdentityProvider.token=lab",
        "--ServerApp.open_browser=False",
        "--ServerApp.allow_root=True",
    ]
    process = subprocess.Popen([PLACE / "bin/jupyter", "lab", *options], env=environment, cwd=place)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def open_notebook(page: Any, address: str) -> None:
    """Waits also for the server's start."""
    for _ in range(600):
        try:
            page.goto(f"{address}/lab/tree/book.ipynb?token=lab&reset")
            break
        except Exception as error:
            if "ERR_CONNECTION_REFUSED" not in str(error):
                raise
            page.wait_for_timeout(100)
    page.locator(".jp-NotebookPanel .jp-CodeCell").first.wait_for()


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: `apt install chromium`")
def test_jupyterlab_runs_a_notebook_from_top_to_bottom(
    environment: dict[str, str], server: RunningServer, tmp_path: Path
):
    from playwright.sync_api import expect, sync_playwright

    cells = (
        "number = 6 * 7\nnumber",
        "name = input('who? ')\nprint('hello', name)",
        "import pandas as pd\npd.DataFrame({'column': [1, 2]})",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
        "import platform, os\nprint(os.getcwd(), number)",
        "1 / 0",
    )
    (tmp_path / "book.ipynb").write_text(json.dumps(notebook(*cells, kernel="python3")))
    with jupyterlab(environment, server, tmp_path) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(MILLISECONDS)
        expect.set_options(timeout=MILLISECONDS)
        open_notebook(page, address)
        expect(page.locator("#jp-main-statusbar")).to_contain_text("Python 3 (Cloche) | Idle")
        outputs = page.locator(".jp-NotebookPanel .jp-CodeCell .jp-Cell-outputArea")
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.locator(".jp-Stdin-input").fill("Ada")
        page.locator(".jp-Stdin-input").press("Enter")
        expect(outputs.nth(0)).to_contain_text("42")
        expect(outputs.nth(1)).to_contain_text("hello Ada")
        expect(outputs.nth(2).locator("table")).to_contain_text("column")
        expect(outputs.nth(3).locator("img")).to_be_visible()
        expect(outputs.nth(4)).to_contain_text("/mnt/data 42")
        expect(outputs.nth(5)).to_contain_text("ZeroDivisionError")
        browser.close()
