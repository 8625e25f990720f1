"""What programs and clients do to a server on purpose: files that grow, directories without end, numbers beyond all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sqlite3
import textwrap
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.conftest import RunningServer, serving, wait_until, with_template
from tests.librechat.conftest import client_with
from tests.librechat.programs import content, names, run, upload
from tests.librechat.test_exec_languages import HELLO, is_here

from cloche import errors
from cloche.api.librechat import program_sandbox
from cloche.api.librechat.identity import LibreChatCaller, space_of
from cloche.api.librechat.outputs import CollectedOutputs
from cloche.api.librechat.replies import LibreChatRefusal, ProgramNotes
from cloche.api.librechat.request import MAX_CODE_BYTES, decode_exec
from cloche.config import Config, PoolConfig
from cloche.guest.files import tree
from cloche.model import MIB, SandboxSpec, Template
from cloche.sdk.assembly import assemble_engine
from cloche.store.blobs import Blobs

DAEMON = """
import os
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    n = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2): os.dup2(n, fd)
    def ready(): os.write(w, b"x")
{body}
    os._exit(0)
os.read(r, 1)
print("ready")
"""

GROW = """
paths = {paths!r}
def read_at(path): return os.stat(path).st_atime_ns
seen = {{path: read_at(path) for path in paths}}
ready()
while True:  # a watch for openings is not to be had; but whoever reads a file leaves the time
    for path, at in seen.items():
        if read_at(path) != at:
            os.truncate(path, {size})
            seen[path] = read_at(path)
    os.sched_yield()
"""


def daemon(body: str) -> str:
    """A program that leaves a process behind, and ends as soon as that one is ready."""
    return DAEMON.format(body=textwrap.indent(body, "    "))


def test_a_file_that_is_made_longer_while_it_is_looked_at_is_read_to_its_old_end(client: httpx2.Client) -> None:
    refs = upload(client, {"in.bin": os.urandom(MIB) * 8})
    code = "import os\nos.utime('in.bin')\n" + daemon(GROW.format(paths=["in.bin"], size=1 << 50))
    body = {"lang": "py", "code": code, "files": refs}
    answer = client.post("/exec", json=body, timeout=20).json()
    assert answer["stdout"] == "ready\n", answer["stderr"]
    assert all(len(content(client, each)) <= 8 * MIB for each in answer["files"])


def test_no_more_is_kept_of_a_file_than_it_had_when_it_was_counted(client: httpx2.Client) -> None:
    paths = [f"{number}.bin" for number in range(4)]
    made = "".join(f"open({path!r}, 'wb').write(b'a' * 3_000_000)\n" for path in paths)
    answer = run(client, "py", made + daemon(GROW.format(paths=paths, size=20_000_000)))
    assert names(answer) == paths
    assert [len(content(client, each)) for each in answer["files"]] == [3_000_000] * 4


def test_a_digest_is_of_a_file_with_that_size_only(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(10))
    assert tree.file_digest(str(file), 10) is not None
    assert tree.file_digest(str(file), 9) is None and tree.file_digest(str(file), 11) is None
    os.truncate(file, 1 << 40)  # nobody would read all of it
    assert tree.file_digest(str(file), 10) is None


class Endless(program_sandbox.ProgramSandbox):
    """A place that nobody ever has seen all of."""

    async def _collect_outputs(self) -> CollectedOutputs:
        await asyncio.Event().wait()
        raise AssertionError

    def _lost_outputs(self) -> CollectedOutputs:
        return CollectedOutputs()


async def test_a_sandbox_that_cannot_be_looked_at_in_time_is_given_up(
    bare_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_sandbox, "COLLECT_SECONDS", 0.01)
    async with assemble_engine(Config(data_dir=bare_dir, pool=PoolConfig(ready=0))) as engine:
        sandbox, notes = await engine.create(SandboxSpec()), ProgramNotes()
        place = Endless(sandbox, LibreChatCaller(owner="o"), "s", notes)
        assert await place.collect() == CollectedOutputs()
        assert "could not be read in time" in notes.after("") and sandbox.ending is not None


async def test_files_with_long_names_may_be_as_many_as_there_can_be(bare_dir: str) -> None:
    name = "/".join(["\N{GRINNING FACE}" * 60] * 4)
    known = {f"{number}/{name}": 1 for number in range(tree.MAX_SURVEY_ENTRIES)}
    async with assemble_engine(Config(data_dir=bare_dir, pool=PoolConfig(ready=0))) as engine:
        sandbox = await engine.create(SandboxSpec())
        await sandbox.files.write(f"/mnt/data/7/{name}", b"x")
        survey = await sandbox.files.survey("/mnt/data", known)
        assert [(each.path, each.size_bytes) for each in survey.files] == [(f"7/{name}", 1)]
        assert survey.files[0].sha256 is not None


class Own(NamedTuple):
    """A server that nobody else uses, and where its store is."""

    server: RunningServer
    place: Path
    client: httpx2.Client


@pytest.fixture(scope="module")
def own(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    place = with_template(tmp_path_factory.mktemp("hostile") / "data", template)
    with serving(place) as server, client_with(server, {"x-api-key": server.key}) as client:
        yield Own(server, place, client)


KILL_PROBES = """
import time
ready()
end, me = time.time() + 20, os.getpid()
while time.time() < end:
    for p in os.listdir("/proc"):
        try:
            if p.isdigit() and int(p) not in (1, me) and b"type -P" in open(f"/proc/{p}/cmdline", "rb").read():
                os.kill(int(p), 9)
        except OSError: pass
"""


@pytest.mark.skipif(not is_here("c"), reason="this host has no compiler of C")
def test_a_client_cannot_change_the_languages_of_others(own: Own) -> None:
    """It is the first question about languages that this server is asked, so the answer is looked for."""
    run(own.client, "py", daemon(KILL_PROBES), runtime_session_hint="p")
    run(own.client, "brainfuck", "+", runtime_session_hint="p")
    answer = run(own.client, "c", HELLO["c"], args=["you"])
    assert (answer["stdout"], answer["code"]) == ("hello you\n", 7), answer["stderr"]


def test_a_disconnected_client_leaves_no_unnamed_files(own: Own) -> None:
    code = "import os\nfor n in range(40): open(f'{n}', 'wb').write(os.urandom(2_000_000))"
    body = json.dumps({"lang": "py", "code": code}).encode()
    url = urlsplit(own.server.url)
    head = f"POST /librechat/v1/exec HTTP/1.1\r\nhost: x\r\nx-api-key: {own.server.key}\r\ncontent-length: {len(body)}"
    before = len(blobs(own))
    with socket.create_connection((str(url.hostname), int(url.port or 0))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: len(blobs(own)) > before)
    wait_until(lambda: blobs(own) == rows(own))
    run(own.client, "bash", "true")
    assert blobs(own) == rows(own)
    wait_until(lambda: not open_below("/mnt/data", own.server.process.pid))


def open_below(directory: str, pid: int) -> list[str]:
    """Files that a process has open there, in whatever sandbox."""
    paths = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            paths.append(str(each.readlink()))
    return [path for path in paths if path.startswith(directory)]


async def test_an_answer_that_comes_as_its_asker_leaves_is_closed(bare_dir: str) -> None:
    async with assemble_engine(Config(data_dir=bare_dir, pool=PoolConfig(ready=0))) as engine:
        sandbox = await engine.create(SandboxSpec())
        await sandbox.files.write("/mnt/data/large", bytes(MIB))
        opening = asyncio.ensure_future(sandbox.files.open("/mnt/data/large"))
        while not open_below("/mnt/data", os.getpid()):  # it is looked at in each turn of the loop
            await asyncio.sleep(0)
        assert opening.cancel(), "it has taken the answer before it could be cancelled"
        await asyncio.gather(opening, return_exceptions=True)
        assert opening.cancelled() and not open_below("/mnt/data", os.getpid())


async def test_of_a_content_whose_writer_is_cancelled_at_once_no_draft_is_left(tmp_path: Path) -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"x"

    for _ in range(50):  # a thread makes the draft meanwhile, sooner or later
        putting = asyncio.ensure_future(Blobs(tmp_path).put("id", chunks(), 10))
        await asyncio.sleep(0)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)
        assert putting.cancelled()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert list(tmp_path.iterdir()) == []


def blobs(own: Own) -> set[str]:
    where = own.place / "blobs"
    return {each.name.removeprefix("lc-") for each in where.iterdir()} if where.is_dir() else set()


def rows(own: Own) -> set[str]:
    with sqlite3.connect(f"file:{own.place}/store.sqlite3?mode=ro", uri=True) as db:
        return {id for (id,) in db.execute("SELECT id FROM code_files")}


def test_empty_directories_of_a_session_are_not_without_number(own: Own) -> None:
    answer = run(own.client, "bash", "mkdir {1..250}; ls | wc -l", runtime_session_hint="empty")
    assert answer["stdout"] == "250\n" and "50 empty directories will not last" in answer["stderr"]
    with sqlite3.connect(f"file:{own.place}/store.sqlite3?mode=ro", uri=True) as db:
        assert db.execute("SELECT COUNT(*) FROM code_workspaces WHERE file = ''").fetchone() == (200,)


@pytest.mark.parametrize("way", ["ln -s /home/user/evil sub", "mkdir sub; ln -s /home/user/evil/ro.txt sub/ro.txt"])
def test_no_file_is_written_behind_a_symlink_of_a_program(client: httpx2.Client, way: str) -> None:
    hint = f"symlink-{os.urandom(8).hex()}"
    run(client, "bash", f"mkdir /home/user/evil; {way}", runtime_session_hint=hint)
    refs = upload(client, {"sub/ro.txt": b"original"}, read_only="true") + upload(client, {"sub/x.txt": b"x"})
    answer = run(client, "bash", "ls /home/user/evil", runtime_session_hint=hint, files=refs)
    assert answer["stdout"] == "" and "'sub/ro.txt' is not here" in answer["stderr"]
    assert "sub/ro.txt" not in names(answer, inherited=True)


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**30, 1e308], ids=["huge", "tiny", "large", "float"])
def test_numbers_beyond_all_bounds_spoil_only_themselves(number: float) -> None:
    ref = {"id": "a" * 21, "session_id": "b" * 21, "kind": "skill", "resource_id": "x", "version": number}
    asked = decode_exec(
        json.dumps({"lang": "py", "code": "1", "timeout": number, "args": [1], "files": [ref]}).encode()
    )
    assert asked.timeout_seconds == (1e12 if number > 0 else None) and asked.args == ("1",)
    with pytest.raises(LibreChatRefusal, match="version must be"):
        space_of(LibreChatCaller(owner="o"), asked.files[0].space, "resource_id")


def test_unread_outputs_are_not_created() -> None:
    asked = decode_exec(
        b'{"lang":"py","code":"1","other":' + b"[" * 190 + b"]" * 190 + b',"timeout":"' + b"x" * 2000 + b'"}'
    )
    assert asked.code == "1" and "`timeout` was ignored" in asked.notes[0]
    long = decode_exec(b'{"lang":"py","code":"1","args":["' + b"x" * (5 * MIB) + b'"]}')
    assert long.args == () and "`args` was ignored" in long.notes[0]
    with pytest.raises(LibreChatRefusal, match="more than 200000 values"):
        decode_exec(b'{"lang":"py","code":"1","args":[' + b"[]," * (2 * MIB) + b"1]}")
    with pytest.raises(errors.InvalidRequest, match="`code` must be there"):
        decode_exec(b'{"lang":"py","code":[' + b"[]," * 1000 + b"1]}")


def test_a_program_that_is_too_long_is_refused(client: httpx2.Client) -> None:
    answer = client.post("/exec", json={"lang": "bash", "code": "#" * (MAX_CODE_BYTES + 1)})
    assert answer.status_code == 413 and "10000001 bytes" in answer.json()["error"]


def test_a_time_limit_ends_the_program_and_background_processes_continue(client: httpx2.Client) -> None:
    hint = f"daemon-{os.urandom(8).hex()}"
    code = "setsid sleep 1002 > /dev/null 2>&1 & until pgrep -f 'sleep 1002' > /dev/null; do :; done"
    run(client, "bash", code, runtime_session_hint=hint)
    assert run(client, "bash", "sleep 1001 & sleep 60", runtime_session_hint=hint, timeout=300)["status"] == "TO"
    answer = run(client, "bash", "pgrep -a sleep | cut -d' ' -f2-", runtime_session_hint=hint)
    assert (answer["stdout"], answer["runtime_status"]) == ("sleep 1002\n", "reused")
