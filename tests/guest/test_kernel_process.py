"""The kernel as a process: environment, directory, files, children, descriptors."""

from __future__ import annotations

import os
import signal

import pytest


def test_configure_sets_environment_and_directory_for_good(kernel, tmp_path):
    kernel.send({"do": "configure", "env": {"A": "1"}, "cwd": str(tmp_path)})
    assert kernel.run("import os; print(os.environ['A'], os.getcwd())").stdout == f"1 {tmp_path}\n"
    assert kernel.run("os.environ['A']").text == "'1'"


def test_the_environment_of_a_run_ends_with_it(kernel):
    kernel.send({"do": "configure", "env": {"BASE": "base"}, "cwd": None})
    code = "import os; print(os.environ.get('BASE'), os.environ.get('NEW'), flush=True)\n!echo $BASE $NEW"
    assert kernel.run(code, env={"BASE": "run", "NEW": "é\n'\""}).stdout == "run é\n'\"\nrun é '\"\n"
    assert kernel.run("print(os.environ['BASE'], 'NEW' in os.environ)").stdout == "base False\n"


def test_settings_of_the_program_persist(kernel):
    kernel.run("import os; os.environ['OWN'] = '1'", env={"GIVEN": "x"})
    assert kernel.run("os.environ['OWN'], 'GIVEN' in os.environ").text == "('1', False)"


def test_the_directory_of_a_run_ends_with_it_unless_the_program_moved(kernel, tmp_path):
    (tmp_path / "other").mkdir()
    assert kernel.run("import os; os.getcwd()", cwd=str(tmp_path)).text == repr(str(tmp_path))
    assert kernel.run("os.getcwd()").text == repr(str(kernel.data))
    kernel.run("os.chdir('other')", cwd=str(tmp_path))
    assert kernel.run("os.getcwd()").text == repr(str(tmp_path / "other"))


def test_a_directory_that_is_not_there_is_told(kernel):
    run = kernel.run("1", cwd="/no/such/place")
    assert (run.outcome, run.error["name"]) == ("raised", "FileNotFoundError")


def test_files_that_a_cell_writes_are_told_once(kernel):
    run = kernel.run("import os\nopen('a.txt', 'w').write('hello')\nos.makedirs('d'); open('d/b', 'w').close()")
    files = {event["file"]["name"]: event["file"] for event in run.of("wrote")}
    assert set(files) == {"a.txt", "b"}
    assert files["a.txt"] == {
        "path": str(kernel.data / "a.txt"), "name": "a.txt", "kind": "file", "size_bytes": 5,
        "mode": os.stat(kernel.data / "a.txt").st_mode & 0o7777,
        "owner": files["b"]["owner"], "group": files["b"]["group"],
        "modified_at": os.stat(kernel.data / "a.txt").st_mtime,
    }  # fmt: skip
    assert kernel.run("1").of("wrote") == []
    assert [event["file"]["size_bytes"] for event in kernel.run("open('a.txt', 'a').write('!')").of("wrote")] == [6]


def test_files_of_others_are_not_the_cells(kernel):
    kernel.run("1")
    (kernel.data / "upload").write_text("x")
    assert kernel.run("1").of("wrote") == []
    assert kernel.run("open('upload', 'a').write('y')").of("wrote") != []


def test_files_are_told_though_the_directory_was_empty_a_moment_before(kernel):
    """A directory keeps the time of its first change for as long as the clock's tick lasts."""
    for number in range(40):
        kernel.run("1")
        kernel.run("open('passing', 'w').close(); os.unlink('passing')" if number else "import os")
        assert [each["file"]["name"] for each in kernel.run("open('kept', 'w').close()").of("wrote")] == ["kept"]
        assert kernel.run("os.unlink('kept')").of("wrote") == []


def test_only_so_many_files_are_looked_at(kernel):
    run = kernel.run("for i in range(1500): open(f'f{i}', 'w').close()")
    assert len(run.of("wrote")) == 1000


def test_a_forked_child_cannot_speak_for_the_kernel(kernel):
    code = (
        "import os\npid = os.fork()\nif pid == 0:\n    print('child', flush=True); display('from child')\nelse:\n"
        "    os.waitpid(pid, 0); print('parent')"
    )
    run = kernel.run(code)
    assert (run.stdout, run.displays, run.outcome) == ("child\nparent\n", [], "ok")
    assert kernel.run("1+1").text == "2"


def test_multiprocessing_works(kernel):
    code = (
        "import multiprocessing as mp\ndef f(x): return x * x\n"
        "with mp.get_context('fork').Pool(2) as pool:\n    got = pool.map(f, range(4))\ngot"
    )
    assert kernel.run(code).text == "[0, 1, 4, 9]"


def test_commands_do_not_inherit_our_descriptors(kernel):
    run = kernel.run("!ls /proc/self/fd | wc -l")
    assert run.stdout.strip() == "4"  # 0, 1, 2 and the listing itself


def test_the_programs_own_descriptors_can_be_redirected(kernel):
    run = kernel.run(
        "import os\nsaved = os.dup(1)\nf = os.open('log', "
        "os.O_CREAT | os.O_WRONLY)\nos.dup2(f, 1)\nprint('to file')\ndisplay(5)"
    )
    assert run.stdout == "" and run.outcome == "ok"
    assert (kernel.data / "log").read_text() == "to file\n"


def test_exiting_hard_ends_the_kernel_only(make_kernel, zygote):
    kernel = make_kernel()
    kernel.start("import os; os._exit(9)")
    try:
        list(kernel.events())
        raise AssertionError("the kernel went on")
    except EOFError:
        pass
    assert os.waitstatus_to_exitcode(zygote.ask({"do": "wait", "pid": kernel.pid})["status"]) == 9
    kernel.close = lambda: None


def test_an_executing_kernel_is_killed_before_an_idle_one(kernel):
    run = kernel.run("open('/proc/self/oom_score_adj').read().strip()")
    assert run.text == "'300'"  # below the 1000 of commands, which are killed first
    kernel.run("1")
    with open(f"/proc/{kernel.pid}/oom_score_adj") as score:
        assert score.read().strip() in ("0", "300")  # lowering it again may need rights that the host does not give


def test_nothing_is_written_to_the_home(zygote, make_kernel, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    kernel = make_kernel(env={"HOME": str(home)})
    kernel.run("1+1")
    kernel.run("%pwd")
    kernel.run("1/0")
    assert list(home.iterdir()) == []


def test_a_flood_of_output_arrives_whole(kernel):
    run = kernel.run("for i in range(20000): print('x' * 100)\n5")
    assert len(run.stdout) == 20000 * 101 and run.text == "5"


def test_threads_print_and_display_meanwhile(kernel):
    code = (
        "import threading\ndef f(n):\n    for i in range(50): display(n)\n"
        "ts = [threading.Thread(target=f, args=(n,)) for n in range(4)]\n"
        "[t.start() for t in ts]\n[t.join() for t in ts];"
    )
    assert len(kernel.run(code).displays) == 200


@pytest.mark.parametrize("before", ["1", "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)"])
def test_an_interrupt_that_overtakes_its_cell_ends_the_cell(kernel, before):
    """The host may interrupt a cell that the kernel has not read; and whoever was in our handler's place is gone."""
    kernel.run(before)
    os.kill(kernel.pid, signal.SIGSTOP)
    kernel.start("import time\ntime.sleep(60)")
    kernel.interrupt()
    os.kill(kernel.pid, signal.SIGCONT)
    assert list(kernel.events())[-1]["outcome"] == "interrupted"
    assert kernel.run("1").text == "1"


def test_an_interrupt_of_an_ended_cell_has_no_effect(kernel):
    kernel.run("1")
    kernel.interrupt()
    assert kernel.run("import time\ntime.sleep(0.05)\n2").text == "2"


@pytest.mark.parametrize("count", ["-5", "1.5", "'x'", "None", "__import__('numpy').int64(7)"])
def test_a_program_that_spoils_the_count_spoils_nothing_else(kernel, count):
    kernel.run(f"get_ipython().execution_count = {count}")
    assert [kernel.run("1+1").text, kernel.run("1+1").text] == ["2", "2"]


def test_a_program_that_breaks_waiting_does_not_block_the_next_cell(kernel):
    """As eventlet does."""
    assert kernel.run("import select; del select.poll").outcome == "ok"
    assert kernel.run("1+1").text == "2"
