"""Contexts of R: values, plots, errors, interrupts and variables, with the host's own R."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from tests.engine.test_languages import interrupted, run

from cloche.engine.executions.context import Context
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Output, Run, fold

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("R") is None, reason="there is no R on this host: apt-get install r-base-core"),
]


async def r(box: Sandbox, code: str, **how) -> Run:
    return await run(box.default_context("r"), code, **how)


def texts(shown: Run) -> list[str | None]:
    return [result.text for result in shown.results]


async def test_visible_values_are_results_and_the_last_one_is_the_main_one(box: Sandbox):
    shown = await r(box, 'kept <- 41\nkept\ninvisible(1)\nprint("printed")\nSys.getenv("NOTHING")\n"supertest"')
    assert texts(shown) == ["[1] 41", '[1] ""', '[1] "supertest"']
    assert [result.is_main_result for result in shown.results] == [False, False, True]
    assert (shown.stdout, shown.stderr, shown.error) == ('[1] "printed"\n', "", None)
    assert (await r(box, "kept + 1")).text == "[1] 42"
    assert (await r(box, "unseen <- 1")).results == []
    assert (await r(box, "")).outcome == "ok"


async def test_output_of_programs_and_messages_comes_in_order(box: Sandbox):
    shown = await r(box, 'cat("one\\n"); system("echo two"); message("three"); warning("four")')
    assert (shown.stdout, shown.stderr) == ("one\ntwo\n", "three\nWarning: four\n")


async def test_output_is_there_while_the_cell_runs(box: Sandbox):
    execution = box.default_context("r").execute('cat("running\\n"); Sys.sleep(60)')
    async for event in execution:
        if isinstance(event, Output):
            execution.interrupt()
    assert execution.ended is not None and execution.ended.outcome == "interrupted"


async def test_a_data_frame_is_a_table_with_escaped_text(box: Sandbox):
    shown = (await r(box, 'data.frame(n = 1:2, text = c("a", "<b>"))')).results[0]
    assert shown.text == "  n text\n1 1    a\n2 2  <b>"
    assert shown.html is not None and "<td>&lt;b&gt;</td>" in shown.html and "<th>text</th>" in shown.html


async def test_pages_of_plots_are_pictures(box: Sandbox):
    shown = await r(box, "plot(1:10); lines(10:1)\nhist(c(1, 2, 2))\n'last'")
    assert [bool(result.png and result.png.startswith(b"\x89PNG")) for result in shown.results] == [True, False, True]
    assert shown.results[1].text == '[1] "last"'
    own = await r(box, "png('/tmp/own.png'); plot(1); invisible(dev.off()); file.exists('/tmp/own.png')")
    assert texts(own) == ["[1] TRUE"]


async def test_an_error_has_name_value_and_the_lines_of_its_calls(box: Sandbox):
    context = await box.create_context(language="r")
    failed = await run(context, "f <- function(x) {\n  stop('boom')\n}\nf(3)")
    assert failed.outcome == "raised" and failed.error is not None
    assert (failed.error.name, failed.error.value) == ("Error", "boom")
    assert failed.error.traceback == 'Error in f(3): boom\n  at [cell 1]:2: stop("boom")\n  at [cell 1]:4: f(3)\n'
    unparsed = await run(context, "kept <- 1\n1 +* 2")
    assert unparsed.error is not None and "[cell 2]:2:4: unexpected '*'" in unparsed.error.value
    missing = await run(context, "exists('kept'); library(nothere)")
    assert missing.error is not None and missing.error.name == "packageNotFoundError"
    assert texts(missing) == ["[1] FALSE"]


@pytest.mark.parametrize("endless", ["repeat {}", "Sys.sleep(60)", "system('sleep 60')"])
async def test_an_interrupt_of_r_keeps_the_state(box: Sandbox, endless: str):
    context = await box.create_context(language="r")
    await run(context, "kept <- 41")
    stopped = await interrupted(context, f"cat('running\\n'); {endless}")
    assert stopped.outcome == "interrupted"
    assert (await run(context, "kept")).text == "[1] 41"


@pytest.mark.long
async def test_an_interrupt_at_any_moment_reaches_its_own_run(box: Sandbox):
    context = await box.create_context(language="r")
    await run(context, "kept <- 41")
    for delay in range(10):
        execution = context.execute("for (each in 1:3000) sqrt(each)")
        reading = asyncio.create_task(collect(execution))
        await asyncio.sleep(delay / 500)
        execution.interrupt()
        assert (await reading).outcome in ("ok", "interrupted")
        assert (await run(context, "kept")).text == "[1] 41"


async def collect(execution) -> Run:
    return fold([event async for event in execution])


@pytest.mark.long
async def test_environment_and_directory_of_a_run_end_with_it(box: Sandbox):
    context = await box.create_context(language="r")
    hostile = 'it\'s "$HOME" `id` \\ \n2'
    show = 'cat(Sys.getenv("V", "unset"), getwd(), sep = ":")'
    home = (await run(context, show)).stdout
    assert (await run(context, show, env={"V": hostile}, cwd="/tmp")).stdout == f"{hostile}:/tmp"
    assert (await run(context, show)).stdout == home
    refused = await run(context, "1", cwd="/nonexistent")
    assert refused.error is not None and "cannot change working directory" in refused.error.value
    assert (await run(context, "2")).text == "[1] 2"


@pytest.mark.long
@pytest.mark.parametrize(
    "first",
    ["closeAllConnections()", "c <- list <- file <- print <- 1", "eval <- function(...) stop()", "options(warn = 2)"],
)
async def test_no_name_that_a_program_defines_stands_in_the_way_of_r(box: Sandbox, first: str):
    context = await box.create_context(language="r")
    assert (await run(context, first)).outcome == "ok"
    assert (await run(context, "kept <- 1; kept")).text == "[1] 1"


@pytest.mark.long
async def test_quit_ends_the_context_with_its_status(box: Sandbox):
    context = await box.create_context(language="r")
    ended = await run(context, "quit(status = 3)")
    assert (ended.outcome, ended.exit_code) == ("died", 3)
    assert (await run(context, "1")).text == "[1] 1"


async def test_variables_of_r_are_listed_without_running_code_of_the_program(box: Sandbox):
    context = await box.create_context(language="r")
    await run(context, "number <- 5; frame <- data.frame(a = 1:3, b = 4:6); f <- function() 1")
    await run(context, "makeActiveBinding('active', function() cat('ran\\n'), globalenv())")
    await run(
        context, "odd <- structure(list(1), class = 'odd'); length.odd <- print.odd <- function(...) cat('ran\\n')"
    )
    found = {each.name: each for each in await context.variables()}
    assert (found["number"].type, found["number"].length, found["number"].preview) == ("double", 1, "5")
    assert (found["frame"].type, found["frame"].shape) == ("data.frame", (3, 2))
    assert (found["f"].type, found["active"].type, found["odd"].type) == ("closure", "active binding", "odd")
    assert (await run(context, "1")).stdout == ""


async def test_files_that_a_cell_of_r_writes_are_told(box: Sandbox, config):
    if config.backend != "namespaces":
        pytest.skip("without walls there is no /mnt/data")
    context: Context = await box.create_context(language="r")
    written = await run(context, "writeLines('hello', '/mnt/data/a.txt')")
    assert [(file.name, file.size_bytes) for file in written.files] == [("a.txt", 6)]
