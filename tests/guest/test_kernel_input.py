"""Questions of the program, and interrupts."""

from __future__ import annotations

import pytest


def answering(kernel, code, *answers):
    """Runs a cell and answers its questions; gives the questions and the events."""
    kernel.start(code, input=True)
    left, asked, events = list(answers), [], []
    for event in kernel.events():
        events.append(event)
        if isinstance(event, dict) and event["ev"] == "input":
            asked.append((event["prompt"], event["secret"]))
            kernel.send({"do": "input", **left.pop(0)})
    return asked, events


def test_input_is_asked_and_answered(kernel):
    asked, events = answering(kernel, "name = input('Name? ')\nprint('hi', name)", {"text": "Ada"})
    assert asked == [("Name? ", False)]
    assert "hi Ada\n" in events


def test_earlier_output_comes_before_the_prompt(kernel):
    _asked, events = answering(kernel, "print('first'); input()", {"text": ""})
    assert [event if isinstance(event, str) else event["ev"] for event in events][:2] == ["first\n", "input"]


def test_getpass_is_secret(kernel):
    asked, events = answering(kernel, "import getpass\ngetpass.getpass('Key: ')", {"text": "s3"})
    assert asked == [("Key: ", True)] and events[0]["secret"]
    assert kernel.run("_").text == "'s3'"


def test_stdin_readline_asks_too(kernel):
    asked, _events = answering(kernel, "import sys\nline = sys.stdin.readline()", {"text": "a line"})
    assert len(asked) == 1
    assert kernel.run("line").text == "'a line\\n'"


def test_pdb_asks(kernel):
    asked, events = answering(kernel, "import pdb\nx = 41\npdb.set_trace()\nx + 1", {"text": "p x"}, {"text": "c"})
    assert len(asked) == 2 and "41\n" in "".join(event for event in events if isinstance(event, str))


def test_debug_magic_asks(kernel):
    kernel.run("def f():\n    inside = 'seen'\n    1/0\nf()")
    asked, events = answering(kernel, "%debug", {"text": "p inside"}, {"text": "q"})
    assert len(asked) == 2 and "'seen'" in "".join(event for event in events if isinstance(event, str))


@pytest.mark.parametrize("code", ["input()", "import getpass; getpass.getpass()"])
def test_without_input_the_error_says_how_to_give_it(kernel, code):
    error = kernel.run(code).error
    assert error["name"] == "StdinNotImplementedError" and "input=" in error["value"]
    assert kernel.run("try:\n    input()\nexcept EOFError:\n    print('eof')").stdout == "eof\n"


def test_without_input_stdin_is_at_its_end(kernel):
    assert kernel.run("import sys; sys.stdin.read(), sys.stdin.readline(), list(sys.stdin)").text == "('', '', [])"


def test_a_refused_answer_is_an_error(kernel):
    _asked, events = answering(kernel, "input('?')", {"error": "nobody is there"})
    assert events[-2]["value"] == "nobody is there" and events[-1]["outcome"] == "raised"


INTERRUPTIBLE = {
    "sleep": "import time\nprint('go', flush=True)\ntime.sleep(100)",
    "busy": "print('go', flush=True)\nwhile True: pass",
    "command": "!echo go; sleep 100",
    "subprocess": "import subprocess\nprint('go', flush=True)\nsubprocess.run(['sleep', '100'])",
    "thread": "import threading\nprint('go', flush=True)\nthreading.Event().wait()",
    "bash": "print('go', flush=True)\nget_ipython().run_cell_magic('bash', '', 'sleep 100')",
}


@pytest.mark.parametrize("name", INTERRUPTIBLE)
def test_an_interrupt_ends_the_cell_and_keeps_the_state(kernel, name):
    kernel.run("x = 7")
    kernel.start(INTERRUPTIBLE[name])
    kernel.wait_for_output("go")
    kernel.interrupt()
    events = list(kernel.events())
    assert events[-1]["outcome"] == "interrupted"
    assert [event["name"] for event in events if isinstance(event, dict) and event["ev"] == "raised"] == [
        "KeyboardInterrupt"
    ]
    assert kernel.run("x").text == "7"


def test_input_can_be_interrupted(kernel):
    kernel.start("input()", input=True)
    assert kernel.frame()[0]["ev"] == "input"
    kernel.interrupt()
    assert list(kernel.events())[-1]["outcome"] == "interrupted"
    kernel.send({"do": "input", "text": "too late"})
    assert kernel.run("1+1").text == "2"


def test_interrupts_while_idle_or_at_odd_times_do_nothing(kernel):
    for _ in range(30):
        kernel.interrupt()
        kernel.start("for i in range(50): display(i)")
        kernel.interrupt()
        assert list(kernel.events())[-1]["outcome"] in ("ok", "interrupted")
        kernel.interrupt()
    assert kernel.run("'alive'").outcome in ("ok", "interrupted")
    assert kernel.run("'alive'").text == "'alive'"


def test_a_program_may_catch_an_interrupt_and_be_interrupted_again(kernel):
    kernel.start(
        "import time\ntry:\n    print('one', flush=True); time.sleep(100)\n"
        "except KeyboardInterrupt:\n    print('two', flush=True); time.sleep(100)"
    )
    for word in ("one", "two"):
        kernel.wait_for_output(word)
        kernel.interrupt()
    assert list(kernel.events())[-1]["outcome"] == "interrupted"
