"""Python programs that the engine starts in a fork of what is imported already: they run as `python3 main.py` would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from cloche.config import Config, PoolConfig
from cloche.engine.commands.program import PythonScript
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import ProcessResult
from cloche.model import SandboxSpec, Template
from cloche.sdk.assembly import assemble_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["namespaces", pytest.param("plain-unsafe", marks=pytest.mark.long)]
)
async def box(request: pytest.FixtureRequest, data_dir: str, template: Template) -> AsyncIterator[Sandbox]:
    async with assemble_engine(Config(data_dir=data_dir, backend=request.param, pool=PoolConfig(ready=0))) as engine:
        yield await engine.create(SandboxSpec())


async def ran(box: Sandbox, source: str, *, stdin: str | None = None, env: dict[str, str] | None = None, **of: Any):
    process = await box.commands.start(script=PythonScript(source, **of), stdin=stdin is not None, env=env)
    async with process:
        if stdin is not None:
            await process.send_stdin(stdin.encode())
            process.close_stdin()
        return await process.result()


def outcome(result: ProcessResult) -> tuple[int, str, str]:
    return result.exit_code, result.stdout, result.stderr


async def test_it_is_a_script_and_no_cell(box: Sandbox):
    source = "import sys, os\n1 + 1\nprint(sys.argv, os.path.basename(__file__), __name__, sys.path[0] == os.getcwd())"
    assert outcome(await ran(box, source, argv=("a", "b c"))) == (
        0,
        "['main.py', 'a', 'b c'] main.py __main__ True\n",
        "",
    )
    assert (await ran(box, "import sys; print(hasattr(sys, 'ps1'), 'get_ipython' in dir(__builtins__))")).stdout == (
        "False False\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sys; print('a'); sys.exit(7)", (7, "a\n", "")),
        ("raise SystemExit('bye')", (1, "", "bye\n")),
        ("raise SystemExit", (0, "", "")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", (137, "", "")),
        ("import atexit; atexit.register(print, 'late'); print('main')", (0, "main\nlate\n", "")),
        ("print(input('? '))", (1, "? ", "EOFError: EOF when reading a line\n")),
        ("", (0, "", "")),
    ],
)
async def test_it_ends_as_python_ends(box: Sandbox, source: str, expected: tuple):
    result = await ran(box, source)
    last_line = result.stderr.splitlines(keepends=True)[-1:]
    assert (result.exit_code, result.stdout, "".join(last_line)) == expected


async def test_a_traceback_has_the_programs_lines_and_no_others(box: Sandbox):
    result = await ran(box, "def f():\n    return 1 / 0\n\nf()\n", name="job.py")
    lines = result.stderr.splitlines()
    assert result.exit_code == 1 and lines[0] == "Traceback (most recent call last):"
    assert [line.strip() for line in lines if "^" not in line][2::2] == ["f()", "return 1 / 0"]
    assert lines[1].endswith('/job.py", line 4, in <module>') and lines[-1] == "ZeroDivisionError: division by zero"
    wrong = (await ran(box, "x = = 1")).stderr.splitlines()
    assert wrong[0].endswith('/main.py", line 1') and wrong[-1] == "SyntaxError: invalid syntax"


async def test_a_script_reads_stdin_and_has_its_variables(box: Sandbox):
    source = "import os, sys; print(input(), sys.stdin.read(), os.environ['A'])"
    assert (await ran(box, source, stdin="one\ntwo", env={"A": "b"})).stdout == "one two b\n"


async def test_top_level_await_is_optional(box: Sandbox):
    source = "import asyncio\nprint(await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2)))\n1 / 0"
    result = await ran(box, source, awaits=True)
    assert (result.exit_code, result.stdout) == (1, "[1, 2]\n")
    assert len(result.stderr.splitlines()) - ("^" in result.stderr) == 4
    assert "SyntaxError" in (await ran(box, source)).stderr
    assert outcome(await ran(box, "print(1)", awaits=True)) == (0, "1\n", "")


async def test_modules_beside_a_script_come_before_preimported_ones(box: Sandbox):
    for name in ("decimal.py", "json.py"):
        await box.files.write(name, b"x = 3")
    try:
        assert outcome(await ran(box, "import decimal, json; print(decimal.x, json.x)")) == (0, "3 3\n", "")
        assert (await ran(box, "1 / 0")).stderr.splitlines()[2:3] == ["    1 / 0"]
    finally:
        for name in ("decimal.py", "json.py"):
            await box.files.remove(name)


async def test_classes_of_it_can_be_pickled_and_its_processes_run(box: Sandbox):
    source = """
import multiprocessing, pickle
class Thing: pass
def double(x): return 2 * x
if __name__ == "__main__":
    print(type(pickle.loads(pickle.dumps(Thing()))).__module__)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(double, [1, 2]))
"""
    assert outcome(await ran(box, source)) == (0, "__main__\n[2, 4]\n", "")


async def test_its_source_may_be_long_and_anything(box: Sandbox):
    assert outcome(await ran(box, f"x = '{'é' * 400_000}'\nprint(len(x))")) == (0, "400000\n", "")
    assert (await ran(box, "print('a\0b')")).exit_code == 1
    assert (await ran(box, "print('\udcff')")).exit_code == 1


SPAWNS = """
import multiprocessing, os
def double(x): return 2 * x, os.path.basename(__file__)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""


async def test_processes_that_it_spawns_have_its_source(box: Sandbox):
    assert outcome(await ran(box, SPAWNS)) == (0, "[(2, 'main.py'), (4, 'main.py')]\n", "")
    assert [file.name for file in await box.files.list() if file.kind == "file"] == []


async def test_a_scripts_output_is_flushed(box: Sandbox):
    tee = "import sys\nclass Tee:\n    def __init__(self): self.files = [sys.stdout, open('log', 'w')]\n"
    tee += "    def write(self, text): [file.write(text) for file in self.files]\n    def flush(self): pass\n"
    assert outcome(await ran(box, tee + "sys.stdout = Tee(); print('data')")) == (0, "data\n", "")
    assert await box.files.read("log") == b"data\n"
    await box.files.remove("log")
    assert (await ran(box, "import io, sys\nprint('data'); sys.stdout = io.StringIO()")).stdout == "data\n"


@pytest.mark.parametrize("source", ["x = 1\nreturn x", "x = 1\nawait x", "def f():\n    nonlocal x"])
async def test_a_syntax_error_has_its_line(box: Sandbox, source: str):
    lines = (await ran(box, source)).stderr.splitlines()
    assert lines[0].endswith('/main.py", line 2') and lines[1].strip() == source.splitlines()[1].strip()


async def test_an_unawaited_coroutine_is_reported_with_its_line(box: Sandbox):
    result = await ran(box, "async def f(): pass\n\nkept = f()", awaits=True)
    assert result.stderr.startswith("sys:1: RuntimeWarning: coroutine 'f' was never awaited\n")
    assert '/main.py", line 3, in <module>' in result.stderr and "ending.py" not in result.stderr


async def test_tasks_can_be_begun_without_an_await_and_are_waited_for(box: Sandbox):
    begin = "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    print(END)\nasyncio.create_task(f())\n"
    assert outcome(await ran(box, begin.replace("END", "'done'"), awaits=True)) == (0, "done\n", "")
    failed = await ran(box, begin.replace("END", "1 / 0"), awaits=True)
    assert (failed.exit_code, failed.stderr.splitlines()[2]) == (1, "    print(1 / 0)")
    own = "import asyncio\nasync def f(): print(await asyncio.create_task(asyncio.sleep(0, 7)))\nasyncio.run(f())"
    assert outcome(await ran(box, own, awaits=True)) == (0, "7\n", "")
    old = "import asyncio\nasyncio.get_event_loop().run_until_complete(asyncio.sleep(0))"
    assert outcome(await ran(box, old)) == (0, "", "")
