"""The library against a server: what only happens there."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.conftest import embedding, serving

import cloche
from cloche import errors
from cloche.events import Output, fold
from cloche.model import SandboxSpec
from cloche.sdk import remote_execution
from cloche.sdk.remote import RemoteTransport


@pytest.fixture(scope="module", autouse=True)
def _engine(data_dir: str) -> Iterator[None]:
    """For comparisons."""
    with embedding(data_dir):
        yield


@pytest.fixture
def to(server) -> dict[str, str]:
    return {"url": server.url, "api_key": server.key}


def test_a_sandbox_lives_on_without_the_program_that_made_it(server, to: dict[str, str]):
    code = "import cloche, sys; box = cloche.Sandbox(timeout=600); box.run('x = 6 * 7'); print(box.id)"
    env = {"CLOCHE_URL": server.url, "CLOCHE_API_KEY": server.key}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert made.stderr == ""
    with cloche.Sandbox.connect(made.stdout.strip(), **to) as box:
        assert box.run("x").text == "42"


CLIENT_PROGRAM = """
import sys, cloche
with cloche.Sandbox() as box:
    box.run("x = 6 * 7")
    events = list(box.stream("print(x)"))
    box.files.write("a.txt", "a")
    assert box.commands.run("cat a.txt").stdout == "a"
    with box.files.watch(".") as changes:
        box.files.write("b.txt", "b")
        next(changes)
    box.run("y = await double(x=x)", tools={"double": lambda x: 2 * x})
    assert box.run("y").text == "84"
    run = box.run("x", detach=True)
    assert run.result().text == "42"
print([name for name in sys.modules if name.startswith("cloche.")])
"""
SERVER_PACKAGES = ("engine", "isolation", "store", "templates", "egress", "guest", "linux")


def test_a_client_of_a_server_loads_no_engine_module(server):
    env = {"CLOCHE_URL": server.url, "CLOCHE_API_KEY": server.key}
    ran = subprocess.run([sys.executable, "-c", CLIENT_PROGRAM], capture_output=True, text=True, env=env, timeout=60)
    assert ran.stderr == ""
    loaded = ast.literal_eval(ran.stdout)
    assert "cloche.sdk.remote" in loaded
    assert [name for name in loaded if name.split(".")[1] in SERVER_PACKAGES] == []


def test_a_key_that_is_not_known(server):
    with pytest.raises(errors.Unauthenticated, match="not known"):
        cloche.Sandbox(url=server.url, api_key="e2b_" + "0" * 40)
    with pytest.raises(errors.Unauthenticated, match="needs a key"):
        cloche.Sandbox(url=server.url)


def test_where_there_is_no_server_is_said():
    with pytest.raises(errors.Unavailable, match=r"http://127\.0\.0\.1:1"):
        cloche.Sandbox(url="http://127.0.0.1:1/", api_key="x")
    with pytest.raises(errors.Unavailable, match="unix:/nowhere"):
        cloche.Sandbox(url="unix:/nowhere/control.sock")


def test_a_server_that_is_not_ours_is_said(server, to: dict[str, str]):
    with pytest.raises(errors.Unavailable, match="is it Cloche"):
        cloche.Sandbox(url=f"{server.url}/e2b", api_key=server.key)


def test_the_control_socket_needs_no_key(own_data_dir: Path):
    with serving(own_data_dir):
        (found,) = own_data_dir.glob("run/*/control.sock")
        with cloche.Sandbox(url=f"unix:{found}") as box:
            assert [event.text for event in box.stream("print(1)") if isinstance(event, Output)] == ["1\n"]
            assert cloche.Sandbox.connect(box.id, url=f"unix:{found}").run("1").text == "1"


def test_a_server_that_ends_is_an_error_and_never_a_hang(own_data_dir: Path):
    with serving(own_data_dir) as running:
        box = cloche.Sandbox(url=running.url, api_key=running.key)
        process = box.commands.run("sleep 600", background=True)
        stream = box.stream("print('in', flush=True)\nimport time; time.sleep(600)")
        while not isinstance(next(stream), Output):
            pass
        waiting = threading.Timer(0.5, running.process.kill)
        waiting.start()
        with pytest.raises(errors.Unavailable, match="lost"):
            list(stream)
        with pytest.raises(errors.Unavailable):
            process.wait()
        with pytest.raises(errors.Unavailable, match="does it run there"):
            box.run("1")


def test_the_same_error_with_the_same_text(to: dict[str, str]):
    with cloche.Sandbox(**to) as far, cloche.Sandbox() as near:
        for ask in (
            lambda box: box.files.read("/mnt/data/none"),
            lambda box: box.files.read("/mnt/data"),
            lambda box: box.files.list("/mnt/data/none"),
            lambda box: box.files.write("/proc/x", b"x"),
            lambda box: box.files.move("none", "x"),
            lambda box: box.contexts.create("cobol"),
            lambda box: box.contexts.create(cwd=""),
            lambda box: box.commands.kill("nope"),
            lambda box: box.commands.run([]),
            lambda box: box.commands.run(["a\0"]),
            lambda box: box.run("1", timeout=-1),
            lambda box: box.run(7),
            lambda box: box.renew(-1),
            lambda box: box.files.list(depth=0),
            lambda box: box.files.write("a", 7),
            lambda box: box.files.write("a", b"", mode=-1),
            lambda box: box.files.stat(None),
        ):
            said = []
            for box in (far, near):
                with pytest.raises(errors.ClocheError) as caught:
                    ask(box)
                said.append((type(caught.value), str(caught.value)))
            assert said[0] == said[1]


PROGRAMS = [
    "6 * 7",
    "",
    "print('out'); import sys; print('err', file=sys.stderr); {'a': [1, None]}",
    "1 / 0",
    "def f(:",
    "'\\ud800', '\\u2028', '\\x85', 'ä', '\\0'",
    "print('\\ud800'.encode('utf-8', 'replace'), '\\x1b[31m')",
    "'\ud800'",  # a lone surrogate in the program itself
    "import sys; sys.exit(3)",
    "import sys; sys.exit('why')",
    "open('f.txt', 'w').write('x')",
    "from IPython.display import *; display(HTML('<b>'), Markdown('*'), JSON({'a': 2**70}), Latex('$x$'))",
    "from IPython.display import *; display(Javascript('1'))",
    "from IPython.display import *; display(SVG('<svg></svg>')); clear_output(); 1",
    "from IPython.display import *; h = display('a', display_id=True); h.update('b')",
    "display({'image/gif': 'R0lG/w==', 'text/plain': 'gif', 'x/y': 'z'}, raw=True)",
    "import matplotlib.pyplot as plt; _ = plt.plot([1, 4, 9])",
    "import pandas as pd; pd.DataFrame({'x': [1.5, float('nan')], 'y': ['a', None]})",
    "input('a')",
    "print('x' * 5000)",
]


def plain(run: cloche.Run) -> dict:
    """A run without what differs from one time to the next."""
    fields = msgspec.structs.asdict(run)
    files = [(each.path, each.size_bytes) for each in run.files]
    return {**fields, "id": "", "usage": None, "files": files}


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_run_is_the_same_embedded_and_remote(to: dict[str, str], program: str):
    limits = {"output_bytes": 300_000}
    with cloche.Sandbox(**to, limits=limits) as far, cloche.Sandbox(limits=limits) as near:
        wanted = plain(near.run(program))
        assert plain(far.run(program)) == wanted
        wanted = plain(fold(near.stream(program)))
        assert plain(fold(far.stream(program))) == wanted


def test_answers_that_run_out_or_fail_say_so_in_both(to: dict[str, str]):
    def fails(prompt: str) -> str:
        raise RuntimeError("no idea")

    with cloche.Sandbox(**to) as far, cloche.Sandbox() as near:
        for give in (lambda: "a", lambda: ["a"], lambda: iter(["a"]), lambda: fails):
            said = [box.run("input(); input()", input=give()).error for box in (far, near)]
            assert said[0] is not None and said[1] is not None
            assert (said[0].name, said[0].value) == (said[1].name, said[1].value)


def test_an_upload_replaces_a_file_atomically(to: dict[str, str]):
    def breaking():
        yield b"x" * 100_000
        raise ZeroDivisionError

    with cloche.Sandbox(**to) as box:
        box.files.write("a", b"before")
        with pytest.raises(ZeroDivisionError):
            box.files.write("a", breaking())
        assert box.files.read("a") == b"before"


def test_a_stream_may_begin_long_after_it_was_made(to: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_execution, "ACCEPTED_SECONDS", 0.0)  # as if the server had given it up meanwhile
    with cloche.Sandbox(**to) as box:
        assert fold(box.stream("6 * 7")).text == "42"


def test_a_terminal_ends_with_unread_input(to: dict[str, str]):
    async def use(server: RemoteTransport) -> None:
        box = await server.create(SandboxSpec())
        try:
            async with await box.commands.start("stty raw; echo ready; sleep 600", pty=(24, 80)) as process:
                assert "ready" in (await anext(process)).text
                typing = asyncio.ensure_future(process.send_stdin(b"x" * (64 << 20)))
                assert not (await asyncio.wait([typing], timeout=1))[0]
            assert process.exited is not None and process.exited.exit_code == 137
            await asyncio.wait([typing])
            assert isinstance(typing.exception(), errors.Unavailable)
        finally:
            await box.kill()

    server = RemoteTransport(to["url"], to["api_key"])
    server.call(lambda: use(server))
    server.close()


def test_many_threads_and_loops_share_one_server(to: dict[str, str]):
    texts = []

    def use() -> None:
        async def inner() -> None:
            async with cloche.AsyncSandbox(**to) as box:
                texts.append((await box.run("6 * 7")).text)

        asyncio.run(inner())

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["42"] * 6
