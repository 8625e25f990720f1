"""Top-level await, background tasks, and loops of the program's own."""

from __future__ import annotations


def test_top_level_await(kernel):
    assert kernel.run("import asyncio\nawait asyncio.sleep(0.01)\n'done'").text == "'done'"
    assert kernel.run("await asyncio.sleep(0, 'value')").text == "'value'"
    assert kernel.run("async def gen():\n    yield 4\nasync for i in gen():\n    print(i)").stdout == "4\n"


def test_errors_of_awaited_code_have_the_users_lines(kernel):
    error = kernel.run("async def f():\n    1/0\nawait f()").error
    assert error["name"] == "ZeroDivisionError"
    assert 'File "Cell In[1]", line 3' in error["traceback"] and "cloche" not in error["traceback"]


def test_asyncio_run_works_in_a_cell(kernel):
    code = "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    return 5\nasyncio.run(main())"
    assert kernel.run(code).text == "5"
    assert kernel.run("await main()").text == "5"
    assert kernel.run("asyncio.run(main())").text == "5"


def test_a_task_goes_on_between_cells(kernel):
    kernel.run(
        "import asyncio\nticks = []\nasync def tick():\n    for i in range(3):\n"
        "        ticks.append(i)\n        await asyncio.sleep(0.01)\n"
        "    open('ticked', 'w').close()\ntask = asyncio.create_task(tick())"
    )
    while not (kernel.data / "ticked").exists():  # nothing is asked of the kernel: the task goes on by itself
        pass
    assert kernel.run("ticks").text == "[0, 1, 2]"


def test_a_task_made_by_an_awaiting_cell_can_be_awaited_later(kernel):
    kernel.run("import asyncio\nt = asyncio.create_task(asyncio.sleep(0.01, 'late'))\nawait asyncio.sleep(0)")
    assert kernel.run("await t").text == "'late'"


def test_a_task_that_exits_does_not_end_the_kernel(kernel):
    kernel.run(
        "import asyncio, sys\nasync def quitter():\n    await asyncio.sleep(0)\n"
        "    sys.exit(3)\nt = asyncio.ensure_future(quitter())"
    )
    assert kernel.run("1+1").text == "2"


def test_a_closed_or_stopped_loop_is_replaced(kernel):
    kernel.run("import asyncio\nawait asyncio.sleep(0)")
    kernel.run("get_ipython().loop.close()")
    assert kernel.run("await asyncio.sleep(0, 1)").text == "1"
    kernel.run("asyncio.get_running_loop().stop()")
    assert kernel.run("await asyncio.sleep(0, 2)").text == "2"


def test_await_is_interrupted_and_other_tasks_live(kernel):
    kernel.run("import asyncio\nother = asyncio.create_task(asyncio.sleep(0.2, 'alive'))")
    kernel.start("print('waiting', flush=True)\nawait asyncio.sleep(100)")
    kernel.wait_for_output("waiting")
    kernel.interrupt()
    events = list(kernel.events())
    assert (events[-1]["outcome"], events[-2]["name"]) == ("interrupted", "KeyboardInterrupt")
    assert kernel.run("await other").text == "'alive'"


def test_busy_code_in_an_awaiting_cell_is_interrupted(kernel):
    kernel.start("import asyncio\nawait asyncio.sleep(0)\nprint('busy', flush=True)\nwhile True: pass")
    kernel.wait_for_output("busy")
    kernel.interrupt()
    assert list(kernel.events())[-1]["outcome"] == "interrupted"
    assert kernel.run("await asyncio.sleep(0, 3)").text == "3"
