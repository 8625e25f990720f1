"""Contexts of Java: values, errors, interrupts, environment and variables, with the host's own JDK."""

from __future__ import annotations

import pytest
from tests.engine.test_languages import interrupted, run

from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Output, Run
from cloche.guest.languages import languages
from cloche.model import MIB, Limits, SandboxSpec

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(languages.find_java() is None, reason="no JDK here: apt-get install openjdk-17-jdk-headless"),
]


async def java(box: Sandbox, code: str, **how) -> Run:
    return await run(box.default_context("java"), code, **how)


async def test_the_last_expression_is_the_result(box: Sandbox):
    shown = await java(box, 'int kept = 41;\nkept + 1;\nSystem.out.println("printed");\n"text"')
    assert (shown.text, shown.stdout, shown.error) == ('"text"', "printed\n", None)
    assert (await java(box, "int twice(int n) {\n  return 2 * n;\n}\ntwice(kept)")).text == "82"
    assert (await java(box, "kept = 5; record Pair(int a, int b) {}")).results == []
    assert (
        await java(box, "Stream.of(1, 2).map(n -> new Pair(n, n)).toList()")
    ).text == "[Pair[a=1, b=1], Pair[a=2, b=2]]"


async def test_output_is_there_while_the_cell_of_java_runs(box: Sandbox):
    execution = box.default_context("java").execute('System.out.print("running"); Thread.sleep(60_000);')
    async for event in execution:
        if isinstance(event, Output):
            execution.interrupt()
    assert execution.ended is not None and execution.ended.outcome == "interrupted"


async def test_an_error_of_java_has_name_value_and_the_lines_of_the_cell(box: Sandbox):
    context = await box.create_context(language="java")
    failed = await run(context, 'int f(int n) {\n  throw new IllegalStateException("bad " + n);\n}\nf(3)')
    assert failed.outcome == "raised" and failed.error is not None
    assert (failed.error.name, failed.error.value) == ("IllegalStateException", "bad 3")
    assert "at [cell 1]:2 in f\n    at [cell 1]:4\n" in failed.error.traceback
    wrong = await run(context, 'int ok = 1;\nint y = "a";')
    assert wrong.error is not None and wrong.error.name == "CompilationError"
    assert wrong.error.traceback.startswith("[cell 2]:2: incompatible types")
    assert (await run(context, "ok")).text == "1"


@pytest.mark.parametrize("endless", ["while (true) {}", "Thread.sleep(60_000);"])
async def test_an_interrupt_of_java_keeps_the_state(box: Sandbox, endless: str):
    context = await box.create_context(language="java")
    await run(context, "int kept = 41;")
    stopped = await interrupted(context, f'System.out.println("running"); {endless}')
    assert stopped.outcome == "interrupted"
    assert (await run(context, "kept")).text == "41"


@pytest.mark.long
async def test_environment_of_a_run_is_properties_and_variables_and_ends_with_it(box: Sandbox):
    context = await box.create_context(language="java")
    hostile = 'it\'s "$HOME" `id` \\ \n2'
    show = 'System.out.print(System.getProperty("V") + ":" + System.getenv("V"))'
    assert (await run(context, show, env={"V": hostile})).stdout == f"{hostile}:{hostile}"
    assert (await run(context, show)).stdout == "null:null"
    assert (await run(context, 'System.getProperty("user.dir")', cwd="/tmp")).text == '"/tmp"'
    assert (await run(context, 'System.getProperty("user.dir")')).text != '"/tmp"'
    refused = await run(context, "1", cwd="/nonexistent")
    assert refused.error is not None and refused.error.value == "cannot work in /nonexistent"


@pytest.mark.long
async def test_exit_ends_the_context_of_java_with_its_status(box: Sandbox):
    context = await box.create_context(language="java")
    ended = await run(context, "System.exit(3)")
    assert (ended.outcome, ended.exit_code) == ("died", 3)
    assert (await run(context, "1")).text == "1"


async def test_variables_of_java_are_listed_without_running_code_of_the_program(box: Sandbox):
    context = await box.create_context(language="java")
    await run(context, 'int number = 5; String text = "a\\"b"; var list = List.of(1);')
    await run(
        context, 'class Odd { public String toString() { System.out.println("ran"); return ""; } } var odd = new Odd();'
    )
    found = {each.name: (each.type, each.preview) for each in await context.variables()}
    assert (found["number"], found["text"]) == (("int", "5"), ("String", '"a\\"b"'))
    assert found["list"] == ("List<Integer>", "") and found["odd"] == ("Odd", "")
    assert (await run(context, "1")).stdout == ""


@pytest.mark.long
async def test_a_full_heap_is_an_error_of_the_cell_and_keeps_the_state(engine, config):
    if config.backend != "namespaces":
        pytest.skip("without walls there are no limits")
    box = await engine.create(SandboxSpec(limits=Limits(memory_bytes=256 * MIB)))
    try:
        context = await box.create_context(language="java")
        await run(context, "int kept = 41;")
        full = await run(context, "var all = new ArrayList<byte[]>(); while (true) all.add(new byte[8 << 20]);")
        assert full.error is not None and full.error.name == "OutOfMemoryError"
        assert (await run(context, "kept")).text == "41"
    finally:
        await box.kill()
