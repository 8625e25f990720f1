"""`python3` in a sandbox is a fork of an interpreter with everything imported. Nobody can tell it from the real one.

Each program runs twice in one sandbox: by `python3`, and by the path of the real interpreter. What they print, to
stdout and stderr, and how they end must be the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import program_ends
import pytest
from tests.conftest import embedding

import cloche
from cloche.model import Template

REAL = "/opt/cloche/env/bin/python3"
PYTHONS = ("python3", REAL)
WARM = "import sys; print('pandas' in sys.modules)"


@pytest.fixture(scope="module")
def box(data_dir: str, template: Template) -> Iterator[cloche.Sandbox]:
    with embedding(data_dir), cloche.Sandbox() as box:
        yield box


def said(box: cloche.Sandbox, command: str, **options: Any) -> str:
    result = box.commands.run(command, **options)
    assert result.exit_code == 0, result
    return result.stdout


def both(box: cloche.Sandbox, command: str) -> list:
    """What a command with PY in it gives, with the warm and with the real interpreter, at the same time."""
    runs = [box.commands.run(with_python(command, python), background=True, timeout=300) for python in PYTHONS]
    results = [run.wait() for run in runs]
    return [(result.exit_code, neutral(result.stdout), neutral(result.stderr)) for result in results]


def with_python(command: str, python: str) -> str:
    return re.sub(r"\bPY\b", python, command)


def neutral(text: str) -> str:
    """Without what differs from one process to the next, and with one name for the interpreter."""
    return re.sub(r"0x[0-9a-f]+|started \d+|line 1: +\d+", "", text).replace(REAL, "python3")


@pytest.mark.parametrize(
    "command",
    [
        f'PY -c "{WARM}"',
        f'echo "{WARM}" | PY',
        f'PY -u -B -c "{WARM}"',
        f"PY - <<'END'\n{WARM}\nEND",
        f'echo "{WARM}" > warm.py; PY warm.py; PY -m warm | uniq',
        f'echo "#!/usr/bin/env PY\n{WARM}" > warm; chmod +x warm; ./warm | tail -1',
        f'PYTHONUNBUFFERED=1 TZ=Asia/Tokyo nice -n 3 PY -c "{WARM}" 7</dev/null',
    ],
)
def test_it_is_warm(box: cloche.Sandbox, command: str):
    assert said(box, with_python(command, "python3")).startswith("True\n")


PROGRAMS = {
    "flags": "import sys; print(sys.flags, sys.path, sys.argv, sys.executable, sys.orig_argv[1:2], sys.warnoptions)",
    "prefixes": "import sys; print(sys.prefix, sys.base_prefix, sys._base_executable, sys.pycache_prefix)",
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__): print(s, s.errors, "
    "s.newlines, s.line_buffering, s.write_through, s.buffer, s.fileno(), s.isatty())",
    "main": "print({n: v for n, v in globals().items()}, list(globals()))",
    "builtins": "import builtins; print(sorted(dir(builtins)), exit, quit, input, copyright)",
    "hooks": "import sys, threading, getpass; print(sys.displayhook, sys.excepthook, sys.unraisablehook, "
    "threading.excepthook, getpass.getpass, hasattr(sys, 'ps1'), sys.gettrace(), sys.getprofile())",
    "signals": "import signal; print([(n, signal.getsignal(n)) for n in range(1, 65) if n not in (32, 33)], "
    "signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "limits": "import resource, os; print([resource.getrlimit(n) for n in range(16)], os.nice(0), os.getgroups(), "
    "os.sched_getaffinity(0), open('/proc/self/oom_score_adj').read())",
    "threads": "import threading, os; print(threading.enumerate(), threading.main_thread() is "
    "threading.current_thread(), "
    "os.listdir('/proc/self/task') == [str(os.getpid())])",
    "gc": "import gc, sys; print(gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval())",
    "files": "import os; print(os.listdir('/proc/self/fd'), os.umask(0), os.getcwd())",
    "environment": "import os; print(sorted((n, v) for n, v in os.environ.items() if n not in ('_', 'SHLVL')))",
    "not ours": "import cloche",
    "no shell": "import IPython; print(IPython.get_ipython())",
    "error": "def f(x):\n    return 1 / x\nf(0)",
    "chain": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error",
    "group": "raise ExceptionGroup('x', [ValueError(1), TypeError(2)])",
    "notes": "e = ValueError('x'); e.add_note('note'); raise e",
    "syntax": "x = = 1",
    "indentation": "if 1:\nprint()",
    "unclosed": "print('a'\n",
    "bad escape": "print('\\d')",
    "nothing": "",
    "exit 3": "import sys; sys.exit(3)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit 256": "import sys; sys.exit(256)",
    "exit huge": "import sys; sys.exit(1 << 80)",
    "exit none": "raise SystemExit",
    "exit true": "raise SystemExit(True)",
    "exit text": "import sys; print('out'); sys.exit('bye')",
    "exit object": "import sys; sys.exit([1])",
    "exit builtin": "exit(4)",
    "os._exit": "import os; print('lost'); os._exit(5)",
    "interrupt": "raise KeyboardInterrupt",
    "abort": "import os; os.abort()",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "sigterm": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "sigint": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "own excepthook": "import sys; sys.excepthook = lambda *a: print('hook', a[0], a[1]); 1/0",
    "broken excepthook": "import sys\ndef hook(*a): raise ValueError('hook')\nsys.excepthook = hook\n1/0",
    "atexit": "import atexit; atexit.register(print, 'one'); atexit.register(print, 'two'); print('main')",
    "atexit raises": "import atexit; atexit.register(lambda: 1 / 0)",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), "
    "print('late'))).start()\nprint('m')",
    "daemon": "import threading, time\nthreading.Thread(target=lambda: time.sleep(99), "
    "daemon=True).start()\nprint('m')",
    "thread raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start(); t.join()",
    "finalizer": "class A:\n    def __del__(self): print('del', self.n)\nfor n in 'ab':\n    a = A(); "
    "a.n = n\n_b = A(); _b.n = 'c'",
    "finalizer raises": "class A:\n    def __del__(self): 1 / 0\na = A()\ndel a",
    "weakref": "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'final')\n",
    "generator": "def g():\n    try:\n        yield 1\n    finally:\n        print('closed')\nx = g(); next(x)",
    "buffered": "import sys; print('a'); sys.stderr.write('b'); print('c', end='')",
    "closed stdout": "import sys; sys.stdout.close()",
    "unencodable": "print('\\udcff')",
    "surrogate": "print('\\ud800')",
    "input": "print(input('ask '))",
    "read stdin": "import sys; print(repr(sys.stdin.read()))",
    "warn": "import warnings; warnings.warn('x'); warnings.warn('y', DeprecationWarning)",
    "filters": "import warnings; print([f for f in warnings.filters if f[2].__module__ == 'builtins' and not f[1]])",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
    "inspect": "import inspect, __main__, sys; print(sys.modules['__main__'] is __main__, __main__.__name__)",
    "fork": "import os\npid = os.fork()\nif not pid:\n    print('child'); raise "
    "SystemExit(3)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "system": "import os; print(os.system('exit 3'), flush=True); os.system('echo $0; ulimit -n; umask')",
    "subprocess": "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'import sys; "
    "print(sys.flags)'], "
    "capture_output=True, text=True)); print(subprocess._args_from_interpreter_flags())",
    "logging": "import logging; logging.warning('w'); logging.getLogger('x').error('e %s', 1)",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return "
    "asyncio.get_running_loop().__class__\nprint(asyncio.run(f()))",
    "asyncio raises": "import asyncio\nasync def f(): 1 / 0\nasyncio.run(f())",
    "libraries": "import matplotlib, matplotlib.pyplot as p, pandas as pd, numpy\nfrom PIL import Image\n"
    "print(matplotlib.get_backend(), matplotlib.rcParams, p.isinteractive(), p.get_fignums(), p.figure().number)\n"
    "p.show(); pd.describe_option('display'); print(pd.DataFrame({'a': range(99), 'b': 'x'}))\n"
    "print(numpy.get_printoptions(), numpy.geterr(), numpy.ones((99, 99)) / 0)\n"
    "print(Image.Image.show.__module__, Image.Image.save.__module__, Image.Image.save.__qualname__)",
    "time zone": "import time; print(time.tzname, time.timezone)",
    "locale": "import locale; print(locale.getlocale(), locale.setlocale(locale.LC_ALL))",
    "decimal": "import decimal, random; print(decimal.getcontext(), random.random() != random.random())",
    "caller": "import sys; print(sys._getframe().f_code.co_filename, sys._getframe().f_code.co_name)",
    "unicode": "# é\nprint('é', '\\N{SNOWMAN}')",
    "recursion": "def f(): f()\ntry: f()\nexcept RecursionError as error: print(error)",
    "big output": "print('x' * 300000)",
    "memory": "import tracemalloc, faulthandler; print(tracemalloc.is_tracing(), faulthandler.is_enabled())",
}


ON_ALL_WAYS = (
    "flags",
    "main",
    "error",
    "syntax",
    "exit text",
    "interrupt",
    "read stdin",
    "unicode",
    "caller",
    "nothing",
)
WAYS = {"command": 'PY -c "$(cat $f)" a "b c"', "stdin": "PY - a 'b c' < $f", "file": "PY $f a 'b c'"}


@pytest.mark.parametrize("way", WAYS)
def test_programs_are_the_same(box: cloche.Sandbox, way: str):
    """All of them in one command of bash each time, which takes seconds instead of minutes."""
    programs = {name: PROGRAMS[name] for name in (PROGRAMS if way == "file" else ON_ALL_WAYS)}
    for number, source in enumerate(programs.values()):
        box.files.write(f"/mnt/data/programs/{number}.py", source)
    loop = f"cd programs; d=$(mktemp -d); for n in $(seq 0 {len(programs) - 1}); do f=$n.py; "
    loop += f"echo one line | {WAYS[way]} >$d/out 2>$d/err; "
    loop += "echo $?; cat $d/out; printf '\\0'; cat $d/err; printf '\\0'; done"
    outcomes = [outcome[1].split("\0") for outcome in both(box, loop)]
    for name, warm, real in zip(programs, *[zip(said[::2], said[1::2]) for said in outcomes], strict=True):
        assert warm == real, name


@pytest.mark.long
def test_programs_leave_the_same(box: cloche.Sandbox):
    """Nothing that a program wrote is lost, whatever still holds the file when it ends."""
    programs = program_ends.PROGRAMS
    for number, source in enumerate(programs.values()):
        box.files.write(f"/mnt/data/ends/{number}.py", source)
    outcomes = [outcome[1].split("\0")[:-1] for outcome in both(box, program_ends.all_of_them("PY", "/mnt/data/ends"))]
    for name, warm, real in zip(programs, *outcomes, strict=True):
        assert warm == real, name


TRANSCRIPTS = (
    # What a shell gives it.
    "echo data > d; PY -c 'print(open(3).read())' 3<d; PY -c 'import sys; print(open(sys.argv[1]).read())' <(echo sub)",
    "PY <(echo 'print(1)'); PY /dev/null; echo $?; PY -c 'print(1)' >&-; echo $?; PY -c 'print(input())' <&-",
    "seq 99999 | PY -c 'print(input())'; PY -c 'for i in range(99999): print(i)' | head -1; echo ${PIPESTATUS[@]}",
    "PY -c 'print(1)' >/dev/full; echo $?; PY -c 'print(1)' 2>&1 >/dev/full | cat",
    "PY - <<'END'\nprint(input())\nEND\necho $?",
    "mkdir gone; cd gone; rmdir ../gone; PY -c 'import sys; print(sys.path[0]); import os; os.getcwd()'; "
    "PY -m timeit x",
    "umask 077; nice -n 5 PY -c 'import os; print(os.umask(0), os.nice(0))'; ulimit -n 50; PY -c "
    "'import resource as r; print([r.getrlimit(n) for n in range(16)])'; taskset 1 PY -c 'import os; "
    "print(os.sched_getaffinity(0))'; ulimit -v 3000000; ulimit -t 7; PY -c 'import resource as r; "
    "print(r.getrlimit(9))'",
    "trap '' INT TERM; PY -c 'import signal as s; print(s.getsignal(2), s.getsignal(15), s.getsignal(13))'",
    "A=$'\\xff' PY -c 'import os, sys; print(os.environb[b\"A\"], ascii(sys.argv))' $'\\xfe' ''",
    # Its command line.
    "PY -V; PY -X dev -c 'import sys; print(sys.flags.dev_mode)'; PY -E -s -c 'import sys; print(sys.flags)'",
    "PY -uc 'import sys; print(sys.stdout, sys.stdout.write_through, sys.stdout.buffer, sys.flags)'; PY -Bc "
    "'import sys; print(sys.flags, sys.dont_write_bytecode)'; PYTHONDONTWRITEBYTECODE=1 PY -c 'import "
    "sys; print(sys.flags)'",
    "PY nosuch.py; echo $?; PY -m nosuch; echo $?; PY -c; echo $?; PY -q -Z; echo $?; PY -m json.tool <<< '{\"a\": 1}'",
    "mkdir pk; echo 'print(__name__, __package__, __file__, __spec__)' > pk/__main__.py; PY pk; PY -m pk; cd pk; "
    "zip -q ../pk.zip __main__.py 2>/dev/null || true; cp __main__.py x.txt; PY x.txt; ln -s ../pk/x.txt ../l; PY ../l",
    "PYTHONPATH=/tmp PY -c 'import sys; print(sys.path)'; PYTHONHASHSEED=0 PY -c 'print(hash(\"a\"))'; LC_ALL=C PY -c "
    "'import locale, sys; print(locale.getlocale(), sys.stdout.errors)'; OMP_NUM_THREADS=3 PY -c 'import os; "
    'print(os.environ["OMP_NUM_THREADS"])\'; PYTHONIOENCODING=latin-1 PY -c \'print("\\xe9")\' | od -c',
    # Its source.
    "printf '# coding: latin-1\\nprint(\"\\xe9\")' > l.py; PY l.py; PY < l.py; "
    "printf '# coding: nosuch\\n' > n.py; PY n.py; "
    "printf 'print(\"\\xe9\")' > b.py; PY b.py; PY < b.py; PY -c $'# coding: latin-1\\nprint(\"\\u00e9\")'",
    "printf 'a\\0' > z.py; PY z.py; PY - a < z.py; "
    "printf '\\xef\\xbb\\xbfdef f():\\r\\n  1/0\\r\\nf()\\r\\n' > w.py; PY w.py; PY < w.py",
    # What looks below it on the stack, and what the leader of a session may not.
    "PY -c 'import faulthandler as f; f.enable(); import os; os.abort()' 2>&1 | grep -v Ext; "
    "PY - a <<< 'import traceback, sys; traceback.print_stack(); print(sys.argv, sys.stdin.read()); input()'; "
    "PY -c 'import pdb; pdb.set_trace(); x = 1' <<< n; PY -c 'import os; os.setpgrp(); print(1)'",
    # What it sets before it imports: the real one has imported nothing yet.
    'PY -c \'import os; os.environ["MPLBACKEND"] = "svg"; import sys; print("pandas" in sys.modules)\'; '
    "export XDG_CONFIG_HOME=$PWD; mkdir matplotlib; echo 'lines.linewidth: 7' > matplotlib/matplotlibrc; "
    "PY -c 'import sys; print(\"pandas\" in sys.modules)'; unset XDG_CONFIG_HOME; "
    "echo 'x = 8' > json.py; mkdir in; cd in; "
    "PY -c 'import sys; sys.path.insert(0, \"..\"); import json; print(json.x)'",
    # What lies beside the program comes first, and what it imports runs.
    "mkdir own; cd own; echo 'x = 1' > json.py; echo 'import json; print(json.x)' > a.py; PY a.py; cd ..; PY own/a.py",
    "mkdir own2; cd own2; printf 'class A:\\n  def __del__(s): print(7)\\na = A()' > b.py; PY -c 'import b; print(b)'",
    # How it ends.
    "PY -c 'import os; os.kill(os.getpid(), 11)'; echo $?; timeout 0.5 PY -c 'import time; time.sleep(9)'; echo $?",
    "timeout -s KILL 0.5 PY -c 'import time; time.sleep(9)'; echo $?; timeout -s INT 0.7 PY -c 'import time; "
    'time.sleep(9)\'; echo $?; timeout 0.5 PY -c \'import subprocess; subprocess.run(["sleep", "9"])\'; echo $?',
    "PY -c 'import signal, sys, time; signal.signal(15, lambda *a: sys.exit(5)); print(1, flush=True); time.sleep(9)' "
    "> out & until [ -s out ]; do sleep 0.01; done; kill $!; wait $!; echo $?",
    # Processes that it makes.
    'printf \'import multiprocessing as mp\\ndef f(x): return x * 2\\nif __name__ == "__main__":\\n  for m in '
    '("fork", "spawn"):\\n    with mp.get_context(m).Pool(2) as p: print(m, p.map(f, range(3)))\' > mp.py; PY mp.py',
    'PY -c \'import os; os.execvp("sh", ["sh", "-c", "echo $A; ls /proc/self/fd | wc -l; exit 3"])\'; echo $?',
)


@pytest.mark.parametrize("number", range(len(TRANSCRIPTS)))
def test_shells_see_the_same(box: cloche.Sandbox, number: int):
    fresh = f"d=$(mktemp -d); cd $d; {TRANSCRIPTS[number]}"
    warm, real = (tuple(str(part).replace("tmp.", "") for part in run) for run in both(box, fresh))
    assert [re.sub(r"/tmp/\w+", "", part) for part in warm] == [re.sub(r"/tmp/\w+", "", part) for part in real]


def test_it_has_the_rights_of_its_caller_and_nothing_of_inits(box: cloche.Sandbox, single: bool):
    rows = "grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp)' /proc/self/status"
    look = "print(open('/proc/self/status').read()); import os; assert os.listdir('/proc/self/fd') == list('0123')"
    for user in ("user", "root"):
        of_python = said(box, f'python3 -c "{look}" | {rows.replace("/proc/self/status", "")}', user=user)
        assert of_python == said(box, rows, user=user)
        is_warm = user == "user" or not single  # where root is the same identity by another name, it is the real one
        assert said(box, f'python3 -c "{WARM}"', user=user) == f"{is_warm}\n"


def test_a_program_dies_with_its_client(box: cloche.Sandbox):
    program = "open('up', 'w').write(str(os.getpid())); time.sleep(99)"
    start = f'rm -f up; setsid python3 -c "import os, time; {program}" & until [ -s up ]; do sleep 0.01; done; '
    for kill in ("kill -9 $!", "kill -9 -- -$!"):
        gone = "for _ in $(seq 500); do [ -d /proc/$(cat up) ] || { echo gone; break; }; sleep 0.01; done"
        assert said(box, start + kill + "; " + gone) == "gone\n"


def test_ending_a_command_ends_its_leftover_programs(box: cloche.Sandbox):
    left = "import subprocess; subprocess.Popen(['sleep', '4711'])"
    process = box.commands.run(f'python3 -c "{left}"; echo up; sleep 99', background=True)
    next(iter(process))
    process.kill()
    gone = "for _ in $(seq 500); do pgrep -fx 'sleep 4711' >/dev/null || { echo gone; break; }; sleep 0.01; done"
    assert said(box, gone) == "gone\n"


def test_installed_packages_come_first(box: cloche.Sandbox):
    place = "cd /mnt/data; s=$(python3 -m site --user-site); mkdir -p $s; "
    assert said(box, place + "echo 'x = 2' > $s/added.py; python3 -c 'import added; print(added.x)'") == "2\n"
    assert said(box, f'python3 -c "{WARM}"') == "True\n"
    other = "mkdir $s/pandas; echo 'y = 3' > $s/pandas/__init__.py; python3 -c 'import pandas; print(pandas.y)'; "
    assert said(box, place + other + f'python3 -c "{WARM}"; rm -r $s/pandas') == "3\nFalse\n"


def test_the_real_one_finds_its_packages_by_its_bare_name_too(box: cloche.Sandbox):
    """An interpreter that has only a name looks for itself on the PATH, where it finds ours. Embedded ones do that."""
    look = "import traitlets, subprocess, sys; subprocess.run([sys.executable, '-c', 'import traitlets; print(7)'])"
    assert said(box, f'exec -a python3 {REAL} -c "{look}"') == "7\n"
    path = "import sys; print([path.replace('/front/', '/env/') for path in sys.path])"
    assert said(box, f'(exec -a python3 {REAL} -c "{path}")') == said(box, f'{REAL} -c "{path}"')


def test_cells_have_it_too(box: cloche.Sandbox):
    assert box.run(f'!python3 -c "{WARM}"').stdout == "True\n"
    assert box.run(f'import subprocess; subprocess.run(["python3", "-c", "{WARM}"])').stdout == "True\n"


def test_figures_become_files_where_that_is_asked_for(box: cloche.Sandbox):
    draw = "import matplotlib.pyplot as p; p.plot([1]); p.figure(); p.plot([2]); p.show(); print(p.get_fignums())"
    for python in PYTHONS:
        show = f"d=$(mktemp -d); cd $d; touch figure-2.png; CLOCHE_FIGURES=files {python} -c '{draw}'; ls -s"
        assert re.sub(r"total.*|\d+ f", "f", said(box, show)).split() == [
            "[]", "f", "figure-1.png", "figure-2.png", "figure-3.png",
        ]  # fmt: skip


def test_an_environment_of_the_users_own_draws_as_anywhere(box: cloche.Sandbox):
    """It has no backend of ours, however its interpreter is started."""
    make = "d=$(mktemp -d); cd $d; python3 -m venv --without-pip own; export CLOCHE_FIGURES=files; "
    look = "import os; print(os.environ.get('MPLBACKEND'))"
    inner = "python3 -c \"import subprocess; subprocess.run(['own/bin/python', 'look.py'])\""
    assert said(box, f'{make} echo "{look}" > look.py; own/bin/python look.py; {inner}') == "Agg\nAgg\n"


LOCK_IN = """
import ctypes, os, struct
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)  # no_new_privs
ruleset = libc.syscall(444, struct.pack("Q", 2), 8, 0)  # landlock_create_ruleset: no file may be opened for writing
assert libc.syscall(446, ruleset, 0) == 0  # landlock_restrict_self
os.execvp("python3", ["python3", "-c", "print('once', flush=True); raise SystemExit(3)"])
"""


def test_a_client_that_may_not_write_anywhere_waits_for_its_program_all_the_same(box: cloche.Sandbox):
    box.files.write("/mnt/data/lock_in.py", LOCK_IN)
    result = box.commands.run(f"{REAL} lock_in.py")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "once\n", "")


@pytest.mark.long
def test_many_at_once_all_run(box: cloche.Sandbox):
    many = "for i in $(seq 70); do python3 -c 'import time; time.sleep(0.3); print(1)' & done; wait"
    assert said(box, many, timeout=120) == "1\n" * 70


def test_it_is_warm_where_a_signal_of_the_c_librarys_own_is_ignored(box: cloche.Sandbox):
    """`make` starts its programs so. No interpreter can ignore signal 32 itself."""
    program = (
        "import ctypes, os, struct; number = {'x86_64': 13, 'aarch64': 134}[os.uname().machine]; "
        "assert ctypes.CDLL(None).syscall(number, 32, struct.pack('4Q', 1, 0, 0, 0), None, 8) == 0; "
        f"os.execvp('python3', ['python3', '-c', {WARM!r}])"
    )
    box.files.write("ignoring.py", program)
    assert said(box, f"{REAL} ignoring.py") == "True\n"
