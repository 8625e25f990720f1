"""Code contexts of E2B's Python SDK."""

from __future__ import annotations

import threading

import pytest
from e2b import NotFoundException, SandboxException
from e2b_code_interpreter import AsyncSandbox


def test_contexts_are_listed_in_the_order_of_their_making(box):
    made = [box.create_code_context(), box.create_code_context(cwd="/root", language="python")]
    listed = box.list_code_contexts()
    assert [context.id for context in listed[-2:]] == [context.id for context in made]
    assert [(context.language, context.cwd) for context in listed[-2:]] == [
        ("python", "/home/user"),
        ("python", "/root"),
    ]
    assert (listed[0].language, listed[0].cwd) == ("python", "/home/user")


def test_a_context_works_in_its_directory(box):
    for cwd in ("/root", "/home/user", "/tmp/made/for/it"):
        context = box.create_code_context(cwd=cwd)
        assert box.run_code("import os; os.getcwd()", context=context).text == cwd


def test_contexts_do_not_share_names_and_run_side_by_side(box):
    context = box.create_code_context()
    box.run_code("x = 1")
    assert box.run_code("x", context=context).error.value == "name 'x' is not defined"
    started = threading.Event()
    code = "import os, time\nprint('go')\nwhile not os.path.exists('/tmp/done'): time.sleep(.01)"
    slow = threading.Thread(target=box.run_code, args=(code,), kwargs={"on_stdout": lambda _: started.set()})
    slow.start()
    assert started.wait(30)
    assert box.run_code("open('/tmp/done', 'w').close(); 5", context=context).text == "5"
    slow.join(30)
    assert not slow.is_alive()


def test_the_language_chooses_the_default_context(box):
    box.run_code("x = 'default'")
    assert box.run_code("x", language="python").text == "default"
    assert box.run_code("x", language=" Python ").text == "default"


def test_a_restart_loses_the_state_and_keeps_the_context(box):
    context = box.create_code_context()
    box.run_code("x = 1", context=context)
    box.restart_code_context(context)
    assert box.run_code("x", context=context).error.value == "name 'x' is not defined"
    assert context.id in [each.id for each in box.list_code_contexts()]


def test_an_execution_in_a_restarted_context_reports_the_restart(box):
    context = box.create_code_context()

    def restart(_message) -> None:
        threading.Thread(target=box.restart_code_context, args=(context,)).start()

    run = box.run_code("print(1)\nimport time; time.sleep(300)", context=context, on_stdout=restart)
    assert run.error.name == "ContextRestarting" and "Context was restarted" in run.error.value
    assert box.run_code("2", context=context).text == "2"


def test_a_context_that_was_removed_is_gone(box):
    context = box.create_code_context()
    box.remove_code_context(context)
    assert context.id not in [each.id for each in box.list_code_contexts()]
    with pytest.raises(NotFoundException, match=f"Context {context.id} not found"):
        box.restart_code_context(context)
    with pytest.raises(NotFoundException):
        box.remove_code_context(context)


def test_the_default_context_can_be_removed_and_is_there_again_empty(box):
    box.run_code("x = 1")
    box.remove_code_context(box.list_code_contexts()[0])
    assert box.run_code("x").error.name == "NameError"


@pytest.mark.parametrize("options", [{"language": "cobol"}, {"cwd": "/proc/nowhere"}, {"cwd": "a\0b"}])
def test_a_context_that_cannot_be_made_says_why(box, options):
    with pytest.raises(SandboxException, match=r"500 .*Failed to create context: "):
        box.create_code_context(**options)
    assert box.run_code("1").text == "1"


async def test_the_same_by_await(async_box: AsyncSandbox):
    context = await async_box.create_code_context(cwd="/root")
    assert (await async_box.run_code("import os; os.getcwd()", context=context)).text == "/root"
    await async_box.restart_code_context(context)
    await async_box.remove_code_context(context)
    assert context.id not in [each.id for each in await async_box.list_code_contexts()]
