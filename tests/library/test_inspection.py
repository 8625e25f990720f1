"""Variables, history and notebooks by the library: embedded and remote, blocking and with `await`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import cloche
from cloche import errors

pytestmark = pytest.mark.usefixtures("library")

SURROGATE = "x = '\\ud800'; print('before')\nx"


@pytest.fixture
def box() -> Iterator[cloche.Sandbox]:
    with cloche.Sandbox() as box:
        yield box


@pytest.fixture
async def abox() -> AsyncIterator[cloche.AsyncSandbox]:
    async with cloche.AsyncSandbox() as box:
        yield box


def sources(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]


def test_variables(box: cloche.Sandbox):
    assert box.variables() == []
    box.run("import numpy as np\nx = {'a': 1}\ny = np.arange(4).reshape(2, 2)")
    module, x, y = box.variables()
    assert module.kind == "module"
    assert (x.name, x.type, x.length, x.preview) == ("x", "dict", 1, "{'a': 1}")
    assert (y.shape, y.dtype, y.size_bytes, y.preview) == ((2, 2), "int64", 32, "[0, 1, 2, 3]")
    assert repr(box.variables()).splitlines()[1] == "x: dict[1] = {'a': 1}"
    assert "<td>numpy.ndarray</td><td>(2, 2)</td>" in box.variables()._repr_html_()


def test_variables_of_a_context(box: cloche.Sandbox):
    context = box.contexts.create()
    context.run("y = 2")
    assert [each.name for each in context.variables()] == ["y"]
    assert box.variables(context=context) == box.variables(context=context.id) == context.variables()
    assert box.variables() == []
    box.contexts.remove(context)
    with pytest.raises(errors.ContextNotFound):
        context.variables()


def test_a_history_shows_itself_as_a_table(box: cloche.Sandbox, tmp_path: Path):
    box.run("x = '<b>'\nx")
    box.run("1 / 0")
    first, second = repr(box.history()).splitlines()
    assert first.startswith("[1] ok in ") and first.endswith(" s: x = '<b>'…")
    assert second.startswith("[2] raised in ") and second.endswith(": 1 / 0")
    shown = box.history()._repr_html_()
    assert "<td>raised</td>" in shown and "&lt;b&gt;" in shown and "<b>" not in shown
    assert (
        repr(cloche.History([], dropped=2)) == "(2 older cells made room)"
        and repr(cloche.History()) == "nothing has run"
    )
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "missing'$")):
        box.export_notebook(tmp_path / "missing" / "n.ipynb")


def test_history_and_notebook(box: cloche.Sandbox, tmp_path: Path):
    box.run("print(1)\n2")
    context = box.contexts.create("bash")
    context.run("echo hello")
    list(box.stream("1/0"))
    assert [each.code for each in box.history()] == ["print(1)\n2", "echo hello", "1/0"]
    assert box.history().dropped == 0
    first, failed = box.history(context="default")
    assert [each["output_type"] for each in first.outputs] == ["stream", "execute_result"]
    assert (failed.outcome, failed.outputs[0]["evalue"]) == ("raised", "division by zero")
    assert box.history(context=context) == context.history()
    box.export_notebook(tmp_path / "session.ipynb")
    context.export_notebook(str(tmp_path / "shell.ipynb"))
    assert sources(tmp_path / "session.ipynb") == ["print(1)\n2", "1/0"]
    assert sources(tmp_path / "shell.ipynb") == ["echo hello"]
    with pytest.raises(errors.ContextNotFound):
        box.export_notebook(tmp_path / "nothing.ipynb", context="nobody")
    assert not (tmp_path / "nothing.ipynb").exists()


def test_halves_of_letters_come_through(box: cloche.Sandbox, tmp_path: Path):
    box.run(SURROGATE)
    assert [each.preview for each in box.variables()] == ["'\\ud800'"]
    assert box.history()[0].code == SURROGATE
    box.export_notebook(tmp_path / "a.ipynb")
    box.run("# \ud800")
    assert box.history()[1].code == "# \ud800"
    box.export_notebook(tmp_path / "a.ipynb")
    assert sources(tmp_path / "a.ipynb")[1] == "# \ufffd"


async def test_the_same_with_await(abox: cloche.AsyncSandbox, tmp_path: Path):
    await abox.run("x = 1")
    context = await abox.contexts.create()
    await context.run("y = 2")
    assert [each.name for each in await abox.variables()] == ["x"]
    assert [each.name for each in await abox.variables(context=context)] == ["y"]
    assert [each.code for each in await abox.history()] == ["x = 1", "y = 2"]
    assert [each.code for each in await context.history()] == ["y = 2"]
    await abox.export_notebook(tmp_path / "a.ipynb")
    await abox.export_notebook(tmp_path / "b.ipynb", context=context)
    assert (sources(tmp_path / "a.ipynb"), sources(tmp_path / "b.ipynb")) == (["x = 1"], ["y = 2"])
