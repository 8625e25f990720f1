"""`cloche run`, by the real command."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import CommandLine

PATIENCE_SECONDS = 120
PNG = b"\x89PNG\r\n\x1a\n"


def calling(command_line: CommandLine):
    """Runs `cloche ARGS` to its end, and gives what it said."""

    def call(*args: str, stdin: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command_line.words(*args),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            cwd=cwd,
            check=False,
        )

    return call


@pytest.fixture(scope="module")
def cloche(command_line: CommandLine):
    """Without a server, then with one."""
    return calling(command_line)


@pytest.fixture(scope="module")
def served(place_of_server: str):
    """With a server only: for what is decided before anybody is asked, or done with what came back."""
    return calling(CommandLine(place_of_server, alone=False))


@pytest.fixture
def started(command_line: CommandLine):
    """Starts `cloche run -c CODE` and gives the process, its streams being pipes."""
    processes = []

    def start(code: str, *args: str) -> subprocess.Popen[bytes]:
        command = command_line.words("run", "-c", code, *args)
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe))
        return processes[-1]

    yield start
    for each in processes:
        each.kill()
        each.communicate()


def test_output_and_the_last_expression_are_printed(cloche):
    done = cloche("run", "-c", "import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (done.stdout, done.stderr, done.returncode) == ("out\n42\n", "err\n", 0)


def test_arguments_are_data_in_sys_argv(cloche, tmp_path):
    (tmp_path / "show.py").write_text("import sys\nprint(sys.argv)\n")
    done = cloche("run", "show.py", "--", "--json", "'; import os", "ä", cwd=tmp_path)
    assert done.stdout == "['show.py', '--json', \"'; import os\", 'ä']\n"


def test_a_traceback_has_the_files_own_line_numbers(cloche, tmp_path):
    (tmp_path / "bad.py").write_text("# -*- coding: utf-8 -*-\n\ndef broken():\n    return 1 / 0\n\nbroken()\n")
    done = cloche("run", str(tmp_path / "bad.py"))
    assert done.returncode == 1
    assert "line 6, in <module>" in done.stderr
    assert "line 4, in broken" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert done.stdout == ""


def test_the_program_can_come_from_stdin_and_then_has_no_input(cloche):
    done = cloche("run", "-", stdin="try:\n    input()\nexcept EOFError as error:\n    print('no input')\n")
    assert (done.stdout, done.returncode) == ("no input\n", 0)


def test_stdin_feeds_input_and_ends_where_it_ends(cloche):
    code = "import sys\na = input('first? ')\nrest = [line.strip() for line in sys.stdin]\nprint(a, rest)\ninput()"
    done = cloche("run", "-c", code, stdin="one\ntwo\nthree")
    assert done.stdout == "first? one ['two', 'three']\n"
    assert "EOF when reading a line" in done.stderr
    assert done.returncode == 1


def test_a_program_that_reads_nothing_does_not_wait_for_stdin(started):
    process = started("print('done')")
    assert process.wait(PATIENCE_SECONDS) == 0
    assert process.stdout.read() == b"done\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [("import sys; sys.exit(3)", 3, ""), ("import os; os._exit(7)", 7, "")],
)
def test_the_exit_status_is_the_programs_own(cloche, code, status, said):
    done = cloche("run", "-c", code)
    assert (done.returncode, done.stderr, done.stdout) == (status, said, "")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit('because')", 1, "because\n"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            139,
            "cloche: kernel killed by signal 11 (SIGSEGV)\n",
        ),
    ],
)
def test_however_it_ends(served, code, status, said):
    done = served("run", "-c", code)
    assert (done.returncode, done.stderr, done.stdout) == (status, said, "")


def test_a_time_out_is_124(cloche):
    done = cloche("run", "--timeout", "0.5", "-c", "while True: pass")
    assert done.returncode == 124
    assert "the time limit of 0.5 s was reached" in done.stderr


def test_out_of_memory_is_137(cloche, memory_is_enforced):
    done = cloche("run", "--memory", "256MiB", "-c", "x = [bytes([1]) * 10**8 for _ in range(100)]")
    if not memory_is_enforced:
        assert done.returncode in (1, 137)
        return
    assert done.returncode == 137
    assert "out of memory" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--timeout", "-1", "-c", "1"], "--timeout must be a positive number"),
        (["--memory", "much", "-c", "1"], "'much' is not a size"),
        (["--env", "NAME", "-c", "1"], "'NAME' is not NAME=VALUE"),
        (["--file", "/nowhere", "-c", "1"], "'/nowhere' is not a file"),
        (["--no-such-option"], "No such option"),
        (["/nowhere/at/all.py"], "cannot read /nowhere/at/all.py"),
    ],
)
def test_our_own_failures_are_125_and_reported(served, args, said):
    done = served("run", *args)
    assert done.returncode == 125
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_template_that_does_not_exist_is_125_and_said(cloche):
    done = cloche("run", "--template", "nowhere", "-c", "1")
    assert done.returncode == 125
    assert "no template 'nowhere'" in done.stderr and "Traceback" not in done.stderr


def test_out_receives_images_and_new_and_changed_files_only(cloche, tmp_path):
    (tmp_path / "same.csv").write_text("1,2\n")
    (tmp_path / "other.csv").write_text("3,4\n")
    code = (
        "import matplotlib.pyplot as plt, pathlib\n"
        "plt.plot([1, 2])\nplt.show()\n"
        "open('changed.csv', 'a').write('5,6\\n')\n"
        "pathlib.Path('deep/er').mkdir(parents=True)\npathlib.Path('deep/er/new.txt').write_text('new')\n"
        "pathlib.Path('.hidden').write_text('x')\n"
        "open('/mnt/data/same.csv').read()"
    )
    files = ["--file", f"{tmp_path}/same.csv", "--file", f"{tmp_path}/other.csv:changed.csv"]
    out = tmp_path / "out"
    done = cloche("run", *files, "--out", str(out), "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "'1,2\\n'\n"
    saved = {str(each.relative_to(out)) for each in out.rglob("*") if each.is_file()}
    assert saved == {"display-1.png", "changed.csv", "deep/er/new.txt"}
    assert (out / "changed.csv").read_text() == "3,4\n5,6\n"
    assert (out / "display-1.png").read_bytes().startswith(PNG)
    assert f"saved {out}/deep/er/new.txt" in done.stderr
    assert "not saved: /mnt/data/.hidden" in done.stderr


@pytest.mark.long
def test_files_of_a_program_that_had_to_be_killed_are_saved_too(served, tmp_path):
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "open('part.txt', 'w').write('half')\nwhile True: pass"
    )
    done = served("run", "--timeout", "0.5", "--out", str(tmp_path), "-c", code)
    assert done.returncode == 124
    assert (tmp_path / "part.txt").read_text() == "half"


def test_a_symlink_in_out_is_replaced_and_never_followed(served, tmp_path):
    (tmp_path / "precious").write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.txt").symlink_to(tmp_path / "precious")
    served("run", "--out", str(out), "-c", "open('a.txt', 'w').write('theirs')")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (out / "a.txt").read_text() == "theirs"


def test_an_image_that_cannot_be_shown_is_said_and_described(served):
    done = served("run", "-c", "import matplotlib.pyplot as plt; _ = plt.plot([1])")
    assert done.stdout.startswith("<Figure size")
    assert "--out DIR" in done.stderr


def test_json_is_one_run_with_binary_in_base64(served):
    code = "import matplotlib.pyplot as plt\n_ = plt.plot([1])\nplt.show()\nprint('out')\n'ü'"
    done = served("run", "--json", "--env", "A=1", "-c", code)
    run = json.loads(done.stdout)
    assert (run["outcome"], run["stdout"], run["text"], run["exit_code"]) == ("ok", "out\n", "'ü'", None)
    assert base64.b64decode(run["results"][0]["png"]).startswith(PNG)
    assert run["usage"]["wall_seconds"] > 0
    assert done.stderr == ""


def test_json_of_a_failure_has_the_error_and_the_status(served):
    done = served("run", "--json", "-c", "import sys; print('a'); sys.exit(9)")
    run = json.loads(done.stdout)
    assert (run["outcome"], run["exit_code"], run["error"]["name"]) == ("raised", 9, "SystemExit")
    assert done.returncode == 9


def test_events_are_lines_of_json_from_started_to_ended(cloche):
    code = "import os\nprint(os.environ['A'])\nx = input('p')\n{'lone': '\\ud800'}"
    done = cloche("run", "--events", "--env", "A=b=c", "-c", code, stdin="answer\n")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["type"] for each in events] == ["started", "output", "input", "display", "ended"]
    assert events[1] == {"type": "output", "stream": "stdout", "text": "b=c\n"}
    assert events[-1]["outcome"] == "ok"


def test_output_comes_while_the_program_runs_and_ctrl_c_interrupts_it(started):
    process = started("print('up', flush=True)\nwhile True: pass")
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 130
    assert process.stderr.read().endswith(b"KeyboardInterrupt\n")


def test_ctrl_c_interrupts_a_program_that_waits_for_input(started):
    process = started("input('waiting\\n')")
    assert process.stdout.readline() == b"waiting\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 130


def test_a_second_ctrl_c_kills_a_program_that_does_not_stop(started):
    defy = "import signal\nsignal.signal(signal.SIGINT, lambda *_: print('no', flush=True))\n"
    process = started(defy + "print('up', flush=True)\nwhile True: pass")
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"no\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 130


def test_sigterm_ends_it_with_143(started):
    process = started("print('up', flush=True)\nwhile True: pass")
    assert process.stdout.readline() == b"up\n"
    process.terminate()
    assert process.wait(PATIENCE_SECONDS) == 143
    assert b"Traceback" not in process.stderr.read()


def test_a_broken_pipe_ends_it_quietly(started):
    process = started("while True: print('x' * 1000)")
    assert process.stdout.read(10) == b"x" * 10
    process.stdout.close()
    assert process.wait(PATIENCE_SECONDS) == 141
    assert process.stderr.read() == b""


def test_without_walls_files_are_saved_just_the_same(cloche, tmp_path):
    done = cloche("--backend", "plain-unsafe", "run", "--out", str(tmp_path), "-c", "open('a.txt', 'w').write('x')")
    assert done.returncode == 0
    assert (tmp_path / "a.txt").read_text() == "x"


def test_out_takes_no_more_than_the_sandbox_has_space(cloche, tmp_path):
    """And holes stay holes, so that what is saved takes no more of the disk than it did inside."""
    code = """if True:
        sizes = {'a-huge': 1 << 50, 'b-over': (1 << 30) + 1, 'c-holes': 300 << 20, 'd-again': 900 << 20}
        for name, size in sizes.items():
            with open(name, 'wb') as f: f.truncate(size); f.seek(100 << 20); f.write(b'data')
        open('e-small', 'w').write('x')
    """
    done = cloche("run", "--out", str(tmp_path), "-c", code)
    assert done.returncode == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c-holes", "e-small"]
    assert done.stderr.count("over the limit") == 3
    saved = (tmp_path / "c-holes").stat()
    assert saved.st_size == 300 << 20
    assert saved.st_blocks * 512 <= 2 << 20
    with open(tmp_path / "c-holes", "rb") as file:
        file.seek(100 << 20)
        assert file.read(5) == b"data\0"


def test_a_file_that_grows_while_it_is_saved_is_stopped(cloche, tmp_path):
    code = """if True:
        import os, subprocess, sys
        grow = 'f = open("grows", "r+b")\\nfor n in range(1, 1 << 40): f.truncate(n << 20)'
        open('grows', 'wb').close()
        subprocess.Popen([sys.executable, '-c', grow])
        while os.path.getsize('grows') == 0: pass
    """
    done = cloche("run", "--out", str(tmp_path), "-c", code)
    assert "over the limit" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_listed_are_said_and_change_nothing_else(served, tmp_path):
    code = "import os\nfor n in range(20_001): os.close(os.open(str(n), os.O_CREAT | os.O_WRONLY))"
    done = served("run", "--out", str(tmp_path), "-c", code)
    assert done.returncode == 0
    assert "files were not saved" in done.stderr


def test_closed_streams_are_harmless(command_line):
    command = shlex.join(command_line.words("run", "-c", "print(1)")) + " >&- <&- 2>&-"
    assert subprocess.run(["bash", "-c", command], timeout=PATIENCE_SECONDS, check=False).returncode == 0


def test_help_and_usage_import_no_engine():
    code = "import sys, cloche.cli.run; print([m for m in sys.modules if m.startswith(('cloche.engine', 'asyncio.'))])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert "cloche.engine" not in done.stdout
