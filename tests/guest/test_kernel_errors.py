"""What a program raises, and what a kernel survives."""

from __future__ import annotations

import pytest


def test_a_traceback_has_the_users_lines_and_nothing_of_ours(kernel):
    kernel.run("def inner():\n    return 1/0")
    error = kernel.run("\n\nx = 1\ninner()").error
    assert (error["name"], error["value"]) == ("ZeroDivisionError", "division by zero")
    assert 'File "Cell In[2]", line 4, in <module>' in error["traceback"]
    assert 'File "Cell In[1]", line 2, in inner' in error["traceback"]
    assert "    return 1/0" in error["traceback"]
    assert (
        "cloche" not in error["traceback"] and "IPython" not in error["traceback"] and "\x1b" not in error["traceback"]
    )


def test_causes_and_groups_are_told(kernel):
    chained = "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('later') from e"
    assert "direct cause" in kernel.run(chained).error["traceback"]
    if kernel.run("ExceptionGroup").outcome == "raised":
        return  # Python 3.10 has none
    group = kernel.run("raise ExceptionGroup('both', [ValueError(1), TypeError(2)])").error["traceback"]
    assert "ValueError: 1" in group and "TypeError: 2" in group


def test_a_syntax_error_shows_its_line(kernel):
    error = kernel.run("x = 1\ny = = 2").error
    assert error["name"] == "SyntaxError"
    assert 'File "Cell In[1]", line 2' in error["traceback"] and "y = = 2" in error["traceback"]
    assert kernel.run("return 5").error["name"] == "SyntaxError"
    assert kernel.run("if 1:\nx").error["name"] == "IndentationError"


def test_lines_before_an_error_have_run(kernel):
    run = kernel.run("print('first')\n1/0\nprint('never')")
    assert (run.stdout, run.outcome) == ("first\n", "raised")


@pytest.mark.parametrize("code", ["x = 'a\0b'", "'\ud800' + 1", "\ud800", b"\xff\xfe"])
def test_nul_bytes_surrogates_and_broken_utf8_are_the_programs_errors(kernel, code):
    run = kernel.run(code)
    assert run.outcome == "raised" and run.error["name"]
    assert kernel.run("1+1").text == "2"


def test_a_lone_surrogate_can_be_printed_and_shown(kernel):
    run = kernel.run("print(chr(0xd800)); chr(0xd800)")
    assert (run.outcome, run.stdout) == ("ok", "\\ud800\n")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("exit()", 0),
        ("quit()", 0),
        ("exit", 0),
        ("exit(3)", 3),
        ("import sys; sys.exit(4)", 4),
        ("raise SystemExit('bye')", 1),
    ],
)
def test_exit_ends_the_cell_and_keeps_the_state(kernel, code, status):
    kernel.run("x = 1")
    run = kernel.run(code)
    assert (run.outcome, run.error["name"], run.ended["exit"]) == ("raised", "SystemExit", status)
    assert kernel.run("x").text == "1"


def test_a_huge_traceback_is_bounded(kernel):
    error = kernel.run("raise ValueError('x' * 5_000_000)").error
    assert len(error["traceback"]) <= 1 << 20
    assert len(error["value"]) <= 70_000


def test_deep_recursion_is_an_error_of_the_program(kernel):
    error = kernel.run("def f(): f()\nf()").error
    assert error["name"] == "RecursionError"
    assert len(error["traceback"]) < 100_000


def test_an_unknown_magic_is_a_usage_error(kernel):
    error = kernel.run("%no_such_magic").error
    assert error["name"] == "UsageError" and "no_such_magic" in error["value"]


HOSTILE = [
    "raise BaseException('odd')",
    "class E(Exception):\n    def __str__(self): raise self\nraise E()",
    "class E(Exception):\n    def __str__(self): return 5\nraise E()",
    "class R:\n    def __repr__(self): raise ValueError('no')\nR()",
    "class R:\n    def __repr__(self): return 5\nR()",
    "class R:\n    def _repr_html_(self): raise ValueError('no')\nR()",
    "class R:\n    def _ipython_display_(self): raise ValueError('no')\nR()",
    "del __builtins__",
    "import sys; sys.stdout = None",
    "import sys; sys.stdout = 5",
    "import sys; sys.stdout.close(); sys.stderr.close()",
    (
        "import sys\nclass W:\n    def flush(self): raise KeyboardInterrupt\n"
        "    def write(self, s): raise ValueError\nsys.stdout = sys.stderr = W()"
    ),
    "import sys; sys.displayhook = None\n5",
    "import sys; sys.setrecursionlimit(60)",
    "import sys; sys.excepthook = None; 1/0",
    "import sys; del sys.stdin",
    "import builtins; builtins.display = None",
    "raise KeyboardInterrupt",
    "raise GeneratorExit",
    "import os; os.close(0)",
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "import os, fcntl; fcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK)",
    "import sys; sys.modules.clear()",
    "get_ipython().display_formatter = None; 5",
    "get_ipython().events.register('post_execute', lambda: 1/0)",
    "import gc; gc.disable(); gc.set_threshold(1)",
    "import os; os.environ.clear()",
    "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
    "%reset -f",
    "import linecache; linecache.clearcache(); 1/0",
    "In.clear(); Out.clear(); 5",
    "get_ipython().user_ns.clear()",
]


@pytest.mark.parametrize("code", HOSTILE)
def test_the_kernel_survives(kernel, code):
    assert kernel.run(code).ended["ev"] == "ended"
    run = kernel.run("y = 1")
    assert run.ended["ev"] == "ended"
    assert kernel.run("y = 2").outcome == "ok"


def test_a_repr_that_fails_is_told_on_stderr(kernel):
    run = kernel.run("class R:\n    def __repr__(self): raise ValueError('no repr')\nR()")
    assert "ValueError: no repr" in run.stderr


def test_an_error_has_its_name_and_place_in_the_order(kernel):
    run = kernel.run("print('out'); 1/0")
    kinds = [event if isinstance(event, str) else event["ev"] for event in run.events]
    assert kinds == ["out\n", "raised", "ended"]


@pytest.mark.parametrize(
    "code", ["%run bad.py", "%%capture\n1/0", "get_ipython().run_cell('1/0');", "%%time\n1/0", "%timeit -n1 -r1 1/0"]
)
def test_an_error_in_run_code_is_the_cells(kernel, code):
    (kernel.data / "bad.py").write_text("x = 1\n1/0\n")
    run = kernel.run(code)
    assert (run.outcome, run.error["name"]) == ("raised", "ZeroDivisionError")
    assert "IPython" not in run.error["traceback"]


def test_tb_shows_the_last_traceback_again(kernel):
    kernel.run("1/0")
    run = kernel.run("%tb")
    assert run.outcome == "ok" and "ZeroDivisionError" in run.stderr
