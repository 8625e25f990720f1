"""Ways into other code interpreters, each tried here: what a program leaves for later ones, for init and for the host."""

# ruff: noqa: E501 - a hostile program reads better with one try per line

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import pytest

import cloche
from cloche import errors
from cloche.model import SandboxSpec

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(90)]

# Files that some program or other runs when it starts, and modules under the names of those that we import. Each leaves
# a trace with the pid and uid of whoever ran it.
PLANT = r"""
import os, site
trace = "import os; open('/tmp/ran-%d-%d' % (os.getpid(), os.getuid()), 'a').close()\n"
packages = site.getusersitepackages()
startup = "/home/user/.ipython/profile_default/startup"
for place in (packages, startup): os.makedirs(place, exist_ok=True)
names = "sitecustomize usercustomize cloche zipfile tarfile json ctypes select hashlib shutil signal mimetypes linecache traceback tokenize base64 struct array resource termios pty stat grp pwd errno".split()
for name in names:
    for place in (packages, "/mnt/data", "/home/user", "/tmp", "/app"): open(f"{place}/{name}.py", "w").write(trace)
for path in (packages + "/x.pth", startup + "/00.py", "/home/user/.ipython/profile_default/ipython_config.py", "/home/user/.ipython/profile_default/ipython_kernel_config.py", "/home/user/.pythonrc.py"):
    open(path, "w").write(trace)
for name in (".bashrc", ".bash_profile", ".profile", ".bash_login"): open("/home/user/" + name, "w").write("touch /tmp/ran-$$-$(id -u)\n")
"""


async def test_init_runs_nothing_that_a_program_has_planted(box, execute, single):
    """Start-up files, modules and .pth files in each place where Python, IPython or a shell looks for them."""
    assert (await execute(box, PLANT)).outcome == "ok"
    await box.files.write("/mnt/data/file.txt", b"x")
    await box.files.list("/mnt/data")
    async with box.files.watch("/mnt/data"):
        pass
    other = await box.create_context()
    await other.execute("import json; value = 1").result()
    await other.variables()
    await (await box.create_context(language="bash")).execute("value=1").result()
    await box.commands.run("true", user="root", timeout_seconds=10)
    with pytest.raises(errors.PortNotOpen):
        await box.connect_port(9999)
    traces = (await box.commands.run("ls /tmp", user="root", timeout_seconds=10)).stdout.split()
    ran = [tuple(map(int, name.split("-")[1:])) for name in traces if name.startswith("ran-")]
    assert ran and all(pid != 1 and (single or uid == 1000) for pid, uid in ran), ran


async def test_planted_files_are_in_no_other_sandbox(engine, execute):
    first = await engine.create(SandboxSpec())
    await execute(first, PLANT)
    await first.kill()
    second = await engine.create(SandboxSpec())
    try:
        run = await execute(
            second, "import os; print(os.listdir('/tmp'), os.listdir('/home/user'), os.listdir('/mnt/data'))"
        )
        assert run.stdout == "[] [] []\n"
    finally:
        await second.kill()


async def test_no_server_listens_in_a_new_sandbox(box, attack):
    """ChatGPT's ran its whole control API on a port inside, Jupyter's kernels have five: code in the sandbox spoke to it."""
    for user in ("user", "root"):
        seen = await attack(
            box,
            """
answer = [line.split()[1] for path in ("tcp", "tcp6", "udp", "udp6", "raw") for line in list(open("/proc/net/" + path))[1:]]
answer += [line.split()[-1] for line in list(open("/proc/net/unix"))[1:] if line.split()[-1].startswith(("@", "/"))]
answer += [path for path in ("/run", "/tmp", "/home/user", "/root") if os.path.exists(path) and attempt(lambda: os.listdir(path)) not in ("done: []", "EACCES")]
""",
            user,
        )
        assert seen == ["@cloche-python"]  # what forks a Python for whoever asks: tests/escape/test_warm_python.py


HOSTILE_OBJECTS = """
import os, sys, time
class Liar:
    def __init__(self, work): object.__setattr__(self, "work", work)
    def hook(self, *args, **kwargs):
        open("/tmp/hooked-%d" % os.getpid(), "a").close()
        return object.__getattribute__(self, "work")()
for name in "__repr__ __str__ __len__ __getattr__ __iter__ __bool__ __eq__ __hash__ __sizeof__ __dir__ __reduce_ex__ __array__ __dataframe__ _repr_html_ _repr_mimebundle_ _ipython_display_".split():
    setattr(Liar, name, Liar.hook)
def deep():
    return deep()
raises = Liar(lambda: 1 / 0)
leaves = Liar(lambda: sys.exit(3))
huge = Liar(lambda: "x" * (50 << 20))
endless = Liar(deep)
wrong = Liar(lambda: object())
loop = []; loop.append(loop)
nested = []
for _ in range(100_000): nested = [nested]
many = {f"key{n}": n for n in range(100_000)}
for number in range(5000): globals()[f"name_{number}_" + "x" * 150] = number
globals()["\\ud800 name"] = 1
"""


async def test_variables_that_lie_about_themselves_are_told_of_within_bounds(box, execute):
    """Looking at a variable runs its code: in its kernel, as its user, for a limited time; the host gets bounded text."""
    assert (await execute(box, HOSTILE_OBJECTS)).outcome == "ok"
    try:
        told = await box.context().variables()
        assert len(told.variables if hasattr(told, "variables") else told) <= 1000
    except errors.ClocheError:
        pass  # a clear refusal is an answer, too
    hooked = (await box.commands.run("ls /tmp; cat /proc/1/comm", timeout_seconds=10)).stdout.split()
    assert "hooked-1" not in hooked
    run = await execute(box, "[raises, huge]")
    assert run.outcome in ("ok", "raised", "out_of_memory", "died")
    assert len(run.text or "") < 4 << 20
    assert (await execute(box, "6 * 7")).text == "42"


async def test_a_look_that_never_ends_costs_its_kernel_and_no_more(box, execute, neighbour):
    code = "import os\nclass Slow:\n    def __repr__(self):\n        while True: pass\n    __len__ = __dir__ = __sizeof__ = __repr__\nslow = Slow()"
    await execute(box, code)
    looking = asyncio.create_task(box.context().variables())
    assert (await neighbour.sandbox.commands.run("echo", timeout_seconds=10)).exit_code == 0
    async with asyncio.timeout(45):
        try:
            await looking
        except errors.ClocheError:
            pass
    assert (await box.commands.run("echo alive", timeout_seconds=10)).stdout == "alive\n"


async def test_hostile_file_names_are_reported_verbatim_and_never_interpreted(box, attack):
    """Terminal escapes, line ends, format strings, markup, traversal, reserved names: they are text."""
    names = [
        "\x1b]0;owned\x07",
        "a\nb\r\nSet-Cookie: x=1",
        "%s%n{0.__class__}",
        "<img src=x onerror=alert(1)>",
        "..\\..\\x",
        "-rf",
        "~",
        "$(touch x)",
        "\u202egpj.exe",
        ".." + "/" * 0 + "...",
        "CON",
        " ",
    ]
    await attack(
        box,
        f"os.makedirs('/mnt/data/odd', exist_ok=True)\nfor name in {names!r}: open('/mnt/data/odd/' + name, 'w').write(name)\nanswer = 1",
    )
    listed = await box.files.list("/mnt/data/odd")
    assert sorted(each.name for each in listed) == sorted(names)
    for name in names:
        assert await box.files.read(f"/mnt/data/odd/{name}") == name.encode()


UNSAFE_READERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "jsonpickle",
}

SUSPICIOUS = re.compile(rf"\b({'|'.join(sorted(UNSAFE_READERS))})\b|\b(eval|exec)\(".encode())


def _imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


async def test_the_host_reads_nothing_in_a_format_that_runs_code():
    """A pickle from a kernel was the end of more than one interpreter. The host parses JSON, and evaluates nothing."""
    found = []
    root = Path(cloche.__file__).parent
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] == "guest":
            continue  # runs inside
        text = path.read_bytes()
        if not SUSPICIOUS.search(text):
            continue  # to parse them all takes seconds
        tree = ast.parse(text)
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        if unsafe := _imports(tree) & UNSAFE_READERS | calls & {"eval", "exec"}:
            found.append((str(path.relative_to(root)), sorted(unsafe)))
    assert found == []
