"""The library where the engine is in the caller's own process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.conftest import embedding

import cloche
from cloche import errors

pytestmark = pytest.mark.usefixtures("template")


def test_a_key_without_a_server_is_refused():
    with pytest.raises(errors.InvalidRequest, match="CLOCHE_URL"):
        cloche.Sandbox(api_key="x")


def test_open_files_are_raised_and_too_few_are_an_error_that_says_so(bare_dir: str):
    program = """if True:
        import os, resource
        from cloche import errors
        import cloche
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with cloche.Sandbox() as box:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 17)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), hard))
            boxes = []
            try:
                while True:
                    boxes.append(cloche.Sandbox())
            except errors.Unavailable as error:
                print(error)
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            assert box.run('6 * 7').text == '42'
            assert cloche.Sandbox().run('1').text == '1'
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CLOCHE_DATA_DIR": bare_dir, "CLOCHE_POOL_READY": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ulimit -n" in done.stdout


def test_importing_is_cheap_and_imports_nothing():
    code = "import sys, cloche; print(sorted(m for m in sys.modules if m.startswith(('cloche', 'msgspec', 'asyncio'))))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "['cloche']"
    assert "Sandbox" in dir(cloche)
    with pytest.raises(AttributeError):
        cloche.nothing


def test_a_program_that_forgets_to_close_ends_and_leaves_nothing(bare_dir: str):
    code = "import cloche; box = cloche.Sandbox(); print(box.run('import os; os.getpid()').text, flush=True)"
    env = {**os.environ, "CLOCHE_DATA_DIR": bare_dir}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip().isdigit()


def test_a_paused_sandbox_is_there_for_the_next_process(bare_dir: str):
    code = (
        "import cloche; box = cloche.Sandbox(env={'E': '1'}); box.files.write('f', b'kept'); box.pause(); print(box.id)"
    )
    env = {**os.environ, "CLOCHE_DATA_DIR": bare_dir}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    with embedding(bare_dir):
        assert ended.stdout.strip() in [each.id for each in cloche.Sandbox.list("paused")]
        with cloche.Sandbox.connect(ended.stdout.strip()) as box:
            assert box.run("import os; open('f').read(), os.environ['E']").text == "('kept', '1')"


def test_a_host_that_exits_pauses_its_pausable_sandboxes(bare_dir: str):
    """Also what its other threads still do with it, when the main one has ended."""
    code = """if True:
        import concurrent.futures, threading
        import cloche
        box = cloche.Sandbox(timeout=3600, on_timeout="pause")
        box.files.write("main", b"kept")
        main_has_ended = threading.main_thread().join
        def late(name):
            main_has_ended()
            box.files.write(name, b"late")
        threading.Thread(target=late, args=("thread",)).start()
        concurrent.futures.ThreadPoolExecutor().submit(lambda: box.files.write("pool", box.run("'late'").text.encode()))
        print(box.id)
    """
    env = {**os.environ, "CLOCHE_DATA_DIR": bare_dir}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    with embedding(bare_dir), cloche.Sandbox.connect(ended.stdout.strip()) as box:
        assert [box.files.read(each) for each in ("main", "thread", "pool")] == [b"kept", b"late", b"'late'"]
