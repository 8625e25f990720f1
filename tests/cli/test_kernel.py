"""`cloche kernel`: kernelspecs, and the kernel that Jupyter's own client starts by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from tests.conftest import RunningServer, wait_until

from cloche import errors
from cloche.cli import main
from cloche.cli.kernel import kernelspec_directory
from cloche.cli.kernel_bridge import DELIMITER, open_message, read_connection_file, seal_message

SECONDS = 60


def cloche(*args: str) -> str:
    return CliRunner().invoke(main, args, catch_exceptions=False).output


def test_a_kernelspec_is_installed_and_removed(tmp_path: Path):
    given = ("--prefix", str(tmp_path), "--name", "box")
    assert "installed the kernel 'box'" in cloche("kernel", "install", *given, "--lang", "bash", "--session", "s")
    place = tmp_path / "share/jupyter/kernels/box"
    spec = json.loads((place / "kernel.json").read_text())
    assert (spec["display_name"], spec["language"], spec["interrupt_mode"]) == ("Bash (Cloche)", "bash", "message")
    assert spec["argv"][-4:] == ["--lang", "bash", "--session", "s"]
    cloche("kernel", "remove", *given)
    assert not place.exists()
    assert "there is no kernel" in cloche("kernel", "remove", *given)


def test_only_kernelspecs_of_cloche_are_removed(tmp_path: Path):
    place = tmp_path / "share/jupyter/kernels/other"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text("{}")
    assert "not installed by Cloche" in cloche("kernel", "remove", "--prefix", str(tmp_path), "--name", "other")
    assert place.exists()


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden"])
def test_a_name_is_one_of_a_directory(name: str):
    with pytest.raises(errors.InvalidRequest):
        kernelspec_directory(name, Path("/tmp"))


def test_the_directory_is_jupyters(tmp_path: Path):
    assert kernelspec_directory("x", None, {"JUPYTER_DATA_DIR": "/j"}) == Path("/j/kernels/x")
    assert kernelspec_directory("x", None, {"XDG_DATA_HOME": "/d"}) == Path("/d/jupyter/kernels/x")


def test_messages_without_a_valid_signature_are_dropped(tmp_path: Path):
    sealed = seal_message(b"key", [b"sender"], [b"{}"] * 4)
    assert open_message(b"key", sealed) == ([b"sender"], [b"{}"] * 4)
    for wrong in (sealed[:-1], [*sealed[:-1], b"{ }"], [], [DELIMITER], [b"x"] * 9):
        assert open_message(b"key", wrong) is None
    assert open_message(b"other", sealed) is None
    (tmp_path / "file").write_text("{}")
    with pytest.raises(errors.InvalidRequest):
        read_connection_file(tmp_path / "file")


@pytest.fixture
def kernel(tmp_path: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelManager]:
    """A kernel that Jupyter's client has started, on the server."""
    monkeypatch.setenv("CLOCHE_URL", server.url)
    monkeypatch.setenv("CLOCHE_API_KEY", server.key)
    cloche("kernel", "install", "--prefix", str(tmp_path), "--data-dir", str(tmp_path / "none"))
    specs = KernelSpecManager(kernel_dirs=[str(tmp_path / "share/jupyter/kernels")])
    manager = KernelManager(kernel_name="cloche", kernel_spec_manager=specs)
    manager.start_kernel()
    yield manager
    if manager.has_kernel:
        manager.shutdown_kernel()


def kernels(server: RunningServer) -> list[Any]:
    return list(httpx2.get(f"{server.url}/jupyter/api/kernels", headers={"x-api-key": server.key}).json())


def test_jupyters_client_runs_cells_in_a_sandbox(kernel: KernelManager, server: RunningServer):
    client = kernel.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=SECONDS)
    said: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        content = message["content"]
        said.append(content.get("text") or content.get("data", {}).get("text/plain") or "")

    reply = client.execute_interactive(
        "name = input('who? ')\nprint('hello', name)\nimport os; os.getcwd()",
        output_hook=hear,
        stdin_hook=lambda _: client.input("me"),
        allow_stdin=True,
        timeout=SECONDS,
    )
    assert reply["content"]["status"] == "ok"
    assert "".join(said) == "hello me\n'/mnt/data'"
    assert client.complete("nam", reply=True, timeout=SECONDS)["content"]["matches"] == ["name"]
    client.execute("while True: pass")
    wait_until(lambda: kernels(server)[-1]["execution_state"] == "busy")
    kernel.interrupt_kernel()
    assert client.get_shell_msg(timeout=SECONDS)["content"]["ename"] == "KeyboardInterrupt"
    client.stop_channels()


def test_a_restart_begins_anew_and_a_shutdown_leaves_nothing(kernel: KernelManager, server: RunningServer):
    client = kernel.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=SECONDS)
    before = {each["id"] for each in kernels(server)}
    kernel.restart_kernel()
    client.wait_for_ready(timeout=SECONDS)
    assert client.execute("name", reply=True, timeout=SECONDS)["content"]["ename"] == "NameError"
    (new,) = {each["id"] for each in kernels(server)} - before
    client.stop_channels()
    kernel.shutdown_kernel()
    wait_until(lambda: new not in {each["id"] for each in kernels(server)})
