"""AutoGen's code executor, on a server. Skipped without AutoGen, which is not among the packages for development."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.conftest import RunningServer

pytest.importorskip("autogen_core", reason="needs the extra `autogen`")
pytest.importorskip("autogen_ext", reason="needs the extra `autogen`")

from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock

from cloche.autogen import ClocheCodeExecutor, ClocheCodeResult


def double(number: int) -> int:
    """Twice that."""
    return number * 2


def executor(server: RunningServer, tmp_path: Path, **more: object) -> ClocheCodeExecutor:
    return ClocheCodeExecutor(url=server.url, api_key=server.key, output_dir=tmp_path, **more)  # type: ignore[arg-type]


def execute(made: ClocheCodeExecutor, *blocks: tuple[str, str]) -> ClocheCodeResult:
    async def run() -> ClocheCodeResult:
        async with made:
            given = [CodeBlock(code=code, language=language) for language, code in blocks]
            return await made.execute_code_blocks(given, CancellationToken())

    return asyncio.run(run())


def test_blocks_share_variables_and_files_and_stop_at_a_failure(server: RunningServer, tmp_path: Path):
    blocks = [
        ("python", "a = 41; open('f', 'w').write('x'); print('p')"),
        ("sh", "cat f; echo"),
        ("python", "a + 1"),
        ("bash", "exit 3"),
        ("python", "print('never')"),
    ]
    result = execute(executor(server, tmp_path), *blocks)
    assert (result.exit_code, result.output) == (3, "p\n\nx\n\n42\n")
    assert execute(executor(server, tmp_path), ("cobol", "x")).output == "unknown language cobol"
    assert execute(executor(server, tmp_path), ("python", "# filename: ../x.py\n1")).exit_code == 1


def test_pictures_are_saved_and_tracebacks_have_no_colours(server: RunningServer, tmp_path: Path):
    plotted = execute(executor(server, tmp_path), ("python", "import matplotlib.pyplot as p; p.plot([1]); p.show()"))
    assert [path.suffix for path in plotted.output_files] == [".png"] and plotted.output_files[0].stat().st_size
    failed = execute(executor(server, tmp_path), ("python", "1/0"))
    assert failed.exit_code == 1 and failed.output.endswith("ZeroDivisionError: division by zero")


def test_a_time_limit_and_a_cancellation_are_errors(server: RunningServer, tmp_path: Path):
    with pytest.raises(TimeoutError):
        execute(executor(server, tmp_path, timeout=1), ("python", "while True: pass"))

    async def cancel() -> None:
        async with executor(server, tmp_path) as made:
            token = CancellationToken()
            block = CodeBlock(code="while True: pass", language="python")
            running = asyncio.create_task(made.execute_code_blocks([block], token))
            asyncio.get_running_loop().call_later(0.05, token.cancel)
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(cancel())


def test_functions_are_a_module_and_its_settings_are_a_component(server: RunningServer, tmp_path: Path):
    made = executor(server, tmp_path, functions=[double])
    assert "def double(number" in made.format_functions_for_prompt()
    assert execute(made, ("python", "from functions import double; print(double(4))")).output == "8\n"
    plain = executor(server, tmp_path, timeout=7)
    assert ClocheCodeExecutor.load_component(plain.dump_component()).timeout == 7
