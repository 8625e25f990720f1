"""OpenSandbox's own Python SDK, unmodified: commands, sessions, files and code."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from code_interpreter import CodeInterpreterSync
from opensandbox import SandboxManagerSync, SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.exceptions import SandboxException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.models.sandboxes import PVC, Host, Volume
from opensandbox.pool import InMemoryPoolStateStore, PoolCreationSpec, SandboxPoolSync
from tests.conftest import RunningServer

METRICS = {"cpu_count", "cpu_used_pct", "mem_total_mib", "mem_used_mib", "timestamp"}


@pytest.fixture(scope="module")
def connection(server: RunningServer) -> ConnectionConfigSync:
    domain = server.url.removeprefix("http://") + "/opensandbox"
    return ConnectionConfigSync(domain=domain, api_key=server.key, request_timeout=timedelta(seconds=60))


@pytest.fixture(scope="module")
def box(connection: ConnectionConfigSync) -> Iterator[SandboxSync]:
    made = SandboxSync.create("opensandbox/code-interpreter:latest", connection_config=connection)
    yield made
    made.kill()
    made.close()


def text(messages: list) -> list[str]:
    return [each.text for each in messages]


def test_commands_tell_lines_and_exit_codes(box: SandboxSync):
    done = box.commands.run("echo one; echo; echo two >&2; exit 3", opts=RunCommandOpts(working_directory="/tmp"))
    assert (text(done.logs.stdout), text(done.logs.stderr)) == (["one", "\n"], ["two"])
    assert (done.exit_code, done.error.name, done.error.value, done.complete) == (3, "CommandExecError", "3", None)
    done = box.commands.run(["printf", "%s", "a b"], opts=RunCommandOpts(envs={"A": "1"}))
    assert (text(done.logs.stdout), done.exit_code) == (["a b"], 0)
    assert box.commands.get_command_status(done.id).exit_code == 0


def test_a_command_has_a_time_limit_and_an_identity(box: SandboxSync):
    done = box.commands.run("sleep 60", opts=RunCommandOpts(timeout=timedelta(milliseconds=300)))
    assert done.exit_code == 137
    for uid, gid, name in ((0, None, "0 0"), (1000, None, "1000 1000"), (65534, 65534, "65534 65534")):
        done = box.commands.run("echo $(id -u) $(id -g)", opts=RunCommandOpts(uid=uid, gid=gid))
        assert text(done.logs.stdout) == [name]


def test_a_command_in_the_background_is_followed_and_ended(box: SandboxSync):
    started = box.commands.run("echo begun; exec sleep 60", opts=RunCommandOpts(background=True))
    cursor, found = None, ""
    deadline = time.monotonic() + 30
    while "begun" not in found and time.monotonic() < deadline:
        logs = box.commands.get_background_command_logs(started.id, cursor=cursor)
        found, cursor = found + logs.content, logs.cursor
    assert (found, cursor) == ("begun\n", 6)
    assert box.commands.get_background_command_logs(started.id, cursor=cursor).content == ""
    assert box.commands.get_command_status(started.id).running is True
    box.commands.interrupt(started.id)
    while (status := box.commands.get_command_status(started.id)).running and time.monotonic() < deadline:
        pass
    assert (status.exit_code, status.running) == (143, False)


def test_a_session_keeps_its_directory_and_variables(box: SandboxSync):
    session = box.commands.create_session(working_directory="/tmp")
    assert text(box.commands.run_in_session(session, "pwd; export A=kept").logs.stdout) == ["/tmp"]
    assert text(box.commands.run_in_session(session, "cd /var; echo $A").logs.stdout) == ["kept"]
    assert text(box.commands.run_in_session(session, "pwd; sh -c 'exit 7'").logs.stdout) == ["/var"]
    failed = box.commands.run_in_session(session, "sh -c 'exit 7'", working_directory="/usr")
    assert (failed.exit_code, failed.error.value) == (7, "7")
    box.commands.delete_session(session)
    with pytest.raises(SandboxException, match="session not found"):
        box.commands.run_in_session(session, "pwd")


def test_a_persistent_variable_reaches_commands_and_sessions(box: SandboxSync):
    box.commands.set_env("KEPT", "it's\n'kept'")
    assert text(box.commands.run('printf "%s" "$KEPT"').logs.stdout) == ["it's", "'kept'"]
    as_root = box.commands.run("echo $KEPT", opts=RunCommandOpts(uid=0))  # whose environment no program chooses
    assert text(as_root.logs.stdout) == ["\n"]
    session = box.commands.create_session()
    assert text(box.commands.run_in_session(session, 'echo "$KEPT"').logs.stdout) == ["it's", "'kept'"]


def test_files_are_written_read_moved_and_removed(box: SandboxSync):
    files, at = box.files, "/tmp/files"
    files.create_directories([WriteEntry(path=at, mode=755)])
    files.write_files(
        [
            WriteEntry(path=f"{at}/a.txt", data="one\ntwo\nthree", mode=640),
            WriteEntry(path=f"{at}/b/c.bin", data=b"\0\1\2" * 200_000, owner="nobody", group="nogroup"),
        ]
    )
    assert files.read_file(f"{at}/a.txt", offset=2, limit=1) == "two"
    assert files.read_bytes(f"{at}/b/c.bin", range_header="bytes=1-2") == b"\1\2"
    assert files.read_bytes(f"{at}/b/c.bin") == b"\0\1\2" * 200_000
    info = files.get_file_info([f"{at}/a.txt", f"{at}/b/c.bin"])
    assert (info[f"{at}/a.txt"].mode, info[f"{at}/a.txt"].owner) == (640, "user")
    assert (info[f"{at}/b/c.bin"].owner, info[f"{at}/b/c.bin"].group) == ("nobody", "nogroup")
    files.set_permissions([SetPermissionEntry(path=f"{at}/a.txt", mode=600, owner="root", group="root")])
    assert files.get_file_info([f"{at}/a.txt"])[f"{at}/a.txt"].mode == 600
    replaced = files.replace_contents_detailed(
        [ContentReplaceEntry(path=f"{at}/a.txt", old_content="t", new_content="T")]
    )
    assert (replaced[0].replaced_count, files.read_file(f"{at}/a.txt")) == (2, "one\nTwo\nThree")
    assert [each.path for each in files.search(SearchEntry(path=at, pattern="*.{bin,x}"))] == [f"{at}/b/c.bin"]
    assert [each.path for each in files.list_directory(DirectoryListEntry(path=at))] == [f"{at}/a.txt", f"{at}/b"]
    files.move_files([MoveEntry(src=f"{at}/a.txt", dest=f"{at}/d.txt")])
    with pytest.raises(SandboxException):
        files.move_files([MoveEntry(src=f"{at}/b/c.bin", dest=f"{at}/d.txt")])
    with pytest.raises(SandboxException):
        files.delete_files([at])
    files.delete_files([f"{at}/d.txt", f"{at}/never"])
    files.delete_directories([at])
    with pytest.raises(SandboxException):
        files.get_file_info([at])


def test_a_command_ends_with_its_client(box: SandboxSync, server: RunningServer):
    endpoint = box.get_endpoint(44772)
    body = {"command": "echo $$; exec sleep 600"}
    with httpx.stream("POST", f"http://{endpoint.endpoint}/command", json=body, headers=endpoint.headers) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line)
        id, pid = next(lines)["text"], next(lines)["text"]
        assert box.commands.run(f"kill -0 {pid}").exit_code == 0
    deadline = time.monotonic() + 30
    while box.commands.get_command_status(id).running and time.monotonic() < deadline:
        pass
    assert box.commands.get_command_status(id).exit_code == 137
    assert box.commands.run(f"kill -0 {pid}").exit_code == 1


def test_metrics_are_streamed(box: SandboxSync):
    endpoint = box.get_endpoint(44772)
    with httpx.stream("GET", f"http://{endpoint.endpoint}/metrics/watch", headers=endpoint.headers) as answer:
        lines = answer.iter_lines()
        assert [json.loads(next(lines)).keys() for _ in range(2)] == [METRICS, METRICS]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/command", {}, 400, "INVALID_REQUEST_BODY"),
        ("POST", "/command", {"command": "id", "argv": ["id"]}, 400, "INVALID_REQUEST_BODY"),
        ("POST", "/command", {"command": "id", "gid": 1}, 400, "INVALID_REQUEST_BODY"),
        ("POST", "/command", {"command": "id", "uid": -1}, 400, "INVALID_REQUEST_BODY"),
        ("POST", "/command", {"command": "id", "cwd": "/never"}, 404, "FILE_NOT_FOUND"),
        ("POST", "/command", {"command": "id", "envs": {"A=": "1"}}, 400, "INVALID_REQUEST_BODY"),
        ("POST", "/command", {"command": 1}, 400, "INVALID_REQUEST_BODY"),
        ("DELETE", "/command", None, 400, "MISSING_QUERY"),
        ("DELETE", "/command?id=never", None, 404, "NOT_FOUND"),
        ("GET", "/command/status/never", None, 404, "NOT_FOUND"),
        ("GET", "/command/never/logs", None, 404, "NOT_FOUND"),
        ("POST", "/session/never/run", {"command": "id"}, 404, "CONTEXT_NOT_FOUND"),
        ("DELETE", "/session/never", None, 404, "CONTEXT_NOT_FOUND"),
        ("POST", "/session/default/run", {"command": "id"}, 404, "CONTEXT_NOT_FOUND"),
        ("GET", "/files/info?path=/never", None, 404, "FILE_NOT_FOUND"),
        ("GET", "/files/download", None, 400, "MISSING_QUERY"),
        ("GET", "/files/download?path=/etc/passwd&offset=0", None, 400, "INVALID_REQUEST_BODY"),
        ("GET", "/files/download?path=/tmp", None, 400, "INVALID_FILE"),
        ("POST", "/files/permissions", {"/etc/passwd": {"mode": 999}}, 400, "INVALID_REQUEST_BODY"),
        ("POST", "/files/permissions", {"/tmp": {"owner": "never"}}, 400, "INVALID_REQUEST_BODY"),
        ("POST", "/files/replace", {"/etc/passwd": {"old": "", "new": ""}}, 400, "INVALID_REQUEST_BODY"),
        ("GET", "/directories/list?path=/etc/passwd", None, 400, "INVALID_FILE"),
        ("GET", "/v1/filesystem/7/7/files/info?path=/tmp", None, 400, "NOT_SUPPORTED"),
        ("POST", "/files/upload", None, 400, "INVALID_REQUEST_BODY"),
        ("POST", "/pty", {}, 501, "NOT_SUPPORTED"),
        ("GET", "/v1/isolated/capabilities", None, 501, "NOT_SUPPORTED"),
    ],
)
def test_bad_requests_of_execd_are_named(box: SandboxSync, method: str, path: str, body: Any, status: int, code: str):
    endpoint = box.get_endpoint(44772)
    answer = httpx.request(method, f"http://{endpoint.endpoint}{path}", json=body, headers=endpoint.headers)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert httpx.get(f"http://{endpoint.endpoint}/ping", headers=endpoint.headers).status_code == 200


def test_files_are_used_as_an_identity(box: SandboxSync):
    as_user, as_root = box.files_with_identity(1000, 1000), box.files_with_identity(0, 0)
    as_root.write_file("/tmp/of-root", "x", mode=600)
    as_user.write_file("/tmp/of-user", "x")
    info = box.files.get_file_info(["/tmp/of-root", "/tmp/of-user"])
    assert (info["/tmp/of-root"].owner, info["/tmp/of-user"].owner) == ("root", "user")
    with pytest.raises(SandboxException):
        as_user.read_file("/tmp/of-root")


def test_code_runs_in_contexts(box: SandboxSync):
    interpreter = CodeInterpreterSync.create(box)
    context = interpreter.codes.create_context("python")
    assert interpreter.codes.run("a = 6", context=context).error is None
    assert interpreter.codes.run("a * 7", context=context).result[0].text == "42"
    assert interpreter.codes.run("a", language="python").error.name == "NameError"
    assert 0 < box.get_metrics().memory_used_in_mib <= box.get_metrics().memory_total_in_mib


def test_volumes_are_shared_read_only_and_in_part(
    connection: ConnectionConfigSync, box: SandboxSync, server: RunningServer
):
    name = f"claim-{box.id}"

    def create(path: str, **other: Any) -> SandboxSync:
        volume = Volume(name="data", mountPath=path, **{"pvc": PVC(claimName=name), **other})
        return SandboxSync.create("python:3.12", connection_config=connection, volumes=[volume])

    with create("/mnt/data-set") as writer, create("/tmp/a/set", readOnly=True) as reader:
        writer.files.write_file("/mnt/data-set/in/f.txt", "shared")
        assert reader.files.read_file("/tmp/a/set/in/f.txt") == "shared"
        assert reader.commands.run("touch /tmp/a/set/g").exit_code == 1
        with create("/mnt/part", subPath="in") as part:
            assert text(part.commands.run("ls /mnt/part").logs.stdout) == ["f.txt"]
            part.kill()
        host = Host(path=f"/etc/{box.id}")  # names a volume: nothing of the server's own
        with create("/mnt/etc", pvc=None, host=host) as other:
            assert text(other.commands.run("ls /mnt/etc").logs.stdout) == []
            other.kill()
        writer.kill()
        reader.kill()
    http = httpx.Client(base_url=server.url + "/api/v1", headers={"X-API-Key": server.key}, timeout=60)
    made = [each["name"] for each in http.get("/volumes").json() if box.id in each["name"]]
    assert [http.delete(f"/volumes/{each}").status_code for each in made] == [204, 204]


def test_a_program_on_a_port_is_reached_with_the_endpoints_token(connection: ConnectionConfigSync, box: SandboxSync):
    box.files.write_file("/tmp/www/a b.txt", "served")
    serving = "cd /tmp/www && exec python3 -m http.server 8123"
    box.commands.run(serving, opts=RunCommandOpts(background=True))
    endpoint = box.get_endpoint(8123)
    url = f"http://{endpoint.endpoint}/a%20b.txt"
    deadline = time.monotonic() + 30
    while (answer := httpx.get(url, headers=endpoint.headers)).status_code == 502 and time.monotonic() < deadline:
        assert answer.json()["code"] == "SANDBOX::PORT_NOT_OPEN"
    assert (answer.status_code, answer.text) == (200, "served")
    assert httpx.get(url).status_code == 401
    other = f"http://{box.get_endpoint(8124).endpoint}/"
    signed = box.get_signed_endpoint(8123, int(time.time()) + 60)
    assert httpx.get(url, headers=signed.headers).text == "served"
    assert httpx.get(other, headers=signed.headers).status_code == 401
    (header, token), *_ = signed.headers.items()
    late = {header: f"{int(time.time()) + 9000}.{token.partition('.')[2]}"}
    assert httpx.get(url, headers=late).status_code == 401


def test_an_entrypoint_runs_and_templates_and_events_are_listed(
    connection: ConnectionConfigSync, server: RunningServer
):
    entrypoint = ["/bin/sh", "-c", "echo $A > /tmp/begun; sleep 600"]
    made = SandboxSync.create(
        "any", extensions={"poolRef": "python"}, entrypoint=entrypoint, env={"A": "1"}, connection_config=connection
    )
    with made as box:
        deadline = time.monotonic() + 30
        while not text(box.commands.run("cat /tmp/begun").logs.stdout) and time.monotonic() < deadline:
            pass
        assert text(box.commands.run("cat /tmp/begun").logs.stdout) == ["1"]
        assert box.get_info().entrypoint == entrypoint
        box.kill()
    http = httpx.Client(base_url=server.url + "/opensandbox/v1", headers={"OPEN-SANDBOX-API-KEY": server.key})
    assert "python" in [each["templateId"] for each in http.get("/templates").json()["items"]]
    assert http.get("/templates/python").json()["status"] == {"phase": "Succeeded"}
    events = http.get(f"/sandboxes/{box.id}/diagnostics/events", params={"scope": "all"}).json()["content"]
    assert [line.split()[1] for line in events.splitlines()] == ["created", "ended:"]
    assert http.get("/health").json() == {"status": "healthy"}


@pytest.mark.parametrize(
    ("language", "compilers", "code"),
    [
        ("c", "gcc cc clang", '#include <stdio.h>\nint main() { puts("out"); fputs("err", stderr); return 3; }'),
        (
            "go",
            "go",
            'package main\nimport "os"\nfunc main() { print("err"); os.Stdout.WriteString("out\\n"); os.Exit(3) }',
        ),
    ],
)
def test_a_language_without_a_kernel_has_contexts_of_programs(
    box: SandboxSync, language: str, compilers: str, code: str
):
    if box.commands.run(f"type -P {compilers}").exit_code:
        pytest.skip(f"there is no compiler for {language} in the template")
    codes = CodeInterpreterSync.create(box).codes
    context = codes.create_context(language)
    done = codes.run(code, context=context)
    assert (text(done.logs.stdout), text(done.logs.stderr), done.error.value) == (["out\n"], ["err"], "3")
    assert (done.id, codes.get_context(context.id).language) == (context.id, language)
    assert "error" in codes.run("no program", context=context).error.name.lower()
    assert [each.id for each in codes.list_contexts(language)] == [context.id]
    codes.delete_context(context.id)
    with pytest.raises(SandboxException, match="no context"):
        codes.run(code, context=context)


def test_a_language_that_there_is_not_is_named(box: SandboxSync):
    with pytest.raises(SandboxException, match="there is no language 'cobol'"):
        CodeInterpreterSync.create(box).codes.create_context("cobol")


@pytest.mark.long
def test_a_pool_of_the_client_is_filled_and_used(connection: ConnectionConfigSync):
    spec = PoolCreationSpec(image="python:3.12")
    pool = SandboxPoolSync(
        pool_name="p",
        max_idle=2,
        state_store=InMemoryPoolStateStore(),
        connection_config=connection,
        creation_spec=spec,
    )
    pool.start()
    try:
        deadline = time.monotonic() + 60
        while pool.snapshot().idle_count < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert pool.snapshot().idle_count == 2
        taken = pool.acquire()
        assert text(taken.commands.run("echo from the pool").logs.stdout) == ["from the pool"]
        taken.kill()
    finally:
        pool.shutdown()
        pool.release_all_idle()


@pytest.mark.long
def test_a_pause_and_a_snapshot_keep_what_there_was(connection: ConnectionConfigSync):
    box = SandboxSync.create("python:3.12", connection_config=connection)
    session = box.commands.create_session()
    box.commands.run_in_session(session, "A=kept; echo kept > /mnt/data/f")
    box.pause()
    box = SandboxSync.resume(box.id, connection_config=connection)
    assert text(box.commands.run_in_session(session, "echo $A").logs.stdout) == ["kept"]
    with SandboxManagerSync.create(connection) as manager:
        snapshot = manager.create_snapshot(box.id, "s")
        copy = SandboxSync.create(snapshot_id=snapshot.id, connection_config=connection)
        assert copy.files.read_file("/mnt/data/f") == "kept\n"
        copy.kill()
        manager.delete_snapshot(snapshot.id)
    box.kill()
