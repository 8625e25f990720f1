"""What a cell may contain, and what it leaves."""

from __future__ import annotations

import pytest


def test_the_last_expression_is_the_main_result(kernel):
    run = kernel.run("x = 20\nx + 1")
    assert (run.text, run.outcome, run.stdout) == ("21", "ok", "")


def test_nothing_is_shown_for_a_statement_or_for_none(kernel):
    assert kernel.run("x = 1").displays == []
    assert kernel.run("None").displays == []


def test_state_lives_on_and_the_count_rises(kernel):
    kernel.run("x = 5")
    assert kernel.run("x * 2").text == "10"
    assert kernel.count == 2


@pytest.mark.parametrize("code", ["1+1;", "1+1 ; # quiet", "x = 1\nx;", "'a';\n\n"])
def test_a_trailing_semicolon_silences(kernel, code):
    assert kernel.run(code).displays == []


@pytest.mark.parametrize("code", ["'a;'", "1 # no;", "'#;'"])
def test_a_semicolon_in_a_string_or_comment_does_not_silence(kernel, code):
    assert kernel.run(code).text is not None


def test_underscores_in_and_out_remember(kernel):
    kernel.run("10")
    kernel.run("20")
    kernel.run("30")
    assert kernel.run("_, __, ___, _1, Out[2], In[1], _i2").text == "(30, 20, 10, 10, 20, '10', '20')"


def test_an_underscore_of_the_program_is_left_alone(kernel):
    kernel.run("_ = 'mine'")
    kernel.run("42")
    assert kernel.run("print(_)").stdout == "mine\n"


def test_out_is_bounded(kernel):
    kernel.run("import sys; hook = sys.displayhook")
    fill = (
        "ip = get_ipython()\nfor i in range(3000):\n"
        "    ip.execution_count += 1\n    ip.displayhook.update_history(ip, i)"
    )
    assert kernel.run(fill).outcome == "ok"
    assert (
        kernel.run("len(Out) <= 1001, sum(n.startswith('_') and n[1:].isdigit() for n in dir()) <= 1001").text
        == "(True, True)"
    )


@pytest.mark.parametrize("code", ["", "   ", "\n\n", "# only a comment"])
def test_empty_code_is_ok(kernel, code):
    assert kernel.run(code).outcome == "ok"


def test_line_magics_cell_magics_and_help_work(kernel):
    assert kernel.run("%pwd").text == repr(str(kernel.data))
    assert kernel.run("%%bash\necho out; echo err >&2").stdout == "out\n"
    assert "per loop" in kernel.run("%timeit -n1 -r1 pass").stdout
    assert "Wall time" in kernel.run("%%time\nx = 1").stdout
    assert "Docstring" in str(kernel.run("len?").events)
    assert kernel.run("value = %who_ls\nvalue").outcome == "ok"


def test_automagic_works_and_gives_way_to_variables(kernel):
    (kernel.data / "seen.txt").touch()
    assert "seen.txt" in kernel.run("ls").stdout
    kernel.run("ls = 5")
    assert kernel.run("ls").text == "5"


def test_shell_commands_share_the_cells_output(kernel):
    run = kernel.run("word = 'hi'\nprint('before')\n!echo {word} there\nprint(_exit_code)")
    assert run.stdout == "before\nhi there\n0\n"
    assert kernel.run("lines = !printf 'a\\nb\\n'\nlist(lines)").text == "['a', 'b']"


def test_a_captured_cell_captures_commands_and_displays(kernel):
    run = kernel.run("%%capture got\nprint('a')\n!echo b\ndisplay(5)\n7")
    assert (run.stdout, run.displays) == ("", [])
    assert kernel.run("got.stdout").text == "'a\\nb\\n'"


def test_indented_code_and_pasted_prompts_are_understood(kernel):
    assert kernel.run("    x = 1\n    x + 1").text == "2"
    assert kernel.run(">>> 1 + 2").text == "3"
    assert kernel.run("In [1]: 3 + 4").text == "7"


def test_get_ipython_and_interactivity_all_work(kernel):
    assert kernel.run("get_ipython().__class__.__name__").text == "'Shell'"
    kernel.run("get_ipython().ast_node_interactivity = 'all'")
    assert [event["data"]["text/plain"] for event in kernel.run("1\n2\n3").displays] == ["1", "2", "3"]


def test_future_imports_hold_for_later_cells(kernel):
    kernel.run("from __future__ import annotations")
    assert kernel.run("def f(a: undefined_name): pass\nf.__annotations__").text == "{'a': 'undefined_name'}"


def test_the_source_of_a_cells_function_can_be_had(kernel):
    kernel.run("def f():\n    return 'here'")
    assert "return 'here'" in kernel.run("import inspect; print(inspect.getsource(f))").stdout


def test_pickle_and_main_know_the_cells_classes(kernel):
    kernel.run("class A: x = 1")
    assert kernel.run("import pickle; pickle.loads(pickle.dumps(A())).x, __name__").text == "(1, '__main__')"


def test_the_warm_up_left_nothing_to_see(kernel):
    run = kernel.run("sorted(n for n in globals() if not n.startswith('_'))")
    assert run.text == "['In', 'Out', 'exit', 'get_ipython', 'open', 'quit']"
    assert kernel.count == 1
    assert (
        kernel.run("import sys, threading; hasattr(sys, 'last_value'), threading.active_count()").text == "(False, 1)"
    )


def test_preparing_leaves_no_descriptor_and_no_thread(zygote):
    assert zygote.ready["fds_left"] == []
    assert zygote.ready["threads"] == 1


def test_siblings_do_not_share_random_numbers(make_kernel):
    code = "import random, numpy as np, uuid; (random.random(), np.random.rand(), str(uuid.uuid4()))"
    assert make_kernel().run(code).text != make_kernel().run(code).text


def test_usage_is_reported(kernel):
    ended = kernel.run("sum(range(3_000_000))").ended
    assert ended["cpu"] > 0
    assert ended["rss"] > 10 << 20
    child = kernel.run("import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(5_000_000))'])")
    assert child.ended["cpu"] > 0.02


def test_many_kernels_can_follow_each_other(make_kernel):
    assert [make_kernel().run("6*7").text for _ in range(5)] == ["42"] * 5


def test_a_kernel_ends_when_its_channel_does(make_kernel, zygote, tmp_path):
    kernel = make_kernel()
    kernel.sock.shutdown(2)
    assert zygote.ask({"do": "wait", "pid": kernel.pid})["status"] == 0
    kernel.close = lambda: None
