"""Sessions: what lasts from program to program, whose it is, and what comes back after an end."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest
from tests.conftest import RunningServer, serving, with_template
from tests.librechat.conftest import User, client_with
from tests.librechat.programs import Json, content, names, reference, run, upload

from cloche.api.programs import MAX_ARGUMENT_BYTES
from cloche.model import MIB, Template


def new_hint() -> str:
    return f"v2:conversation:{secrets.token_hex(16)}"


@pytest.fixture
def hint() -> str:
    return new_hint()


def end_sandboxes(server: RunningServer) -> None:
    """As if all had been idle for too long, or had died."""
    headers = {"x-api-key": server.key}
    for each in httpx2.get(f"{server.url}/api/v1/sandboxes", headers=headers).json():
        httpx2.delete(f"{server.url}/api/v1/sandboxes/{each['id']}", headers=headers)


def test_files_last_and_the_session_is_named(client: httpx2.Client, hint: str) -> None:
    first = run(client, "bash", "echo 1 > a; mkdir -p empty/dir; cd /tmp; sleep 300 &", runtime_session_hint=hint)
    second = run(client, "bash", "cat a; ls -d empty/dir; echo 2 > b", runtime_session_hint=hint)
    assert second["stdout"] == "1\nempty/dir\n"
    assert (first["runtime_status"], second["runtime_status"]) == ("new", "reused")
    assert first["runtime_session_id"] == second["runtime_session_id"] and first["runtime_session_id"].startswith("rt_")
    assert names(first) == ["a"] and names(second) == ["b"] and names(second, inherited=True) == []
    assert first["session_id"] != second["session_id"]  # each program's files have a storage session of their own


def test_changes_in_a_session_are_told(client: httpx2.Client, hint: str) -> None:
    made = run(client, "bash", "echo 1 > a; echo 1 > b; echo 1 > c", runtime_session_hint=hint)
    refs = [reference(each) for each in made["files"] if each["name"] != "c"]
    changed = run(client, "bash", "echo 2 >> a; rm c", runtime_session_hint=hint, files=refs)
    assert names(changed) == ["a"] and names(changed, inherited=True) == ["b"] and changed["deleted_files"] == ["c"]
    (new,) = (each for each in changed["files"] if each["name"] == "a")
    assert new["modified_from"]["id"] == next(ref["id"] for ref in refs if ref["name"] == "a")
    # The client may still name the old one: what the session has is newer.
    again = run(client, "bash", "cat a", runtime_session_hint=hint, files=refs)
    assert (
        again["stdout"] == "1\n2\n" and next(each for each in again["files"] if each["name"] == "a")["id"] == new["id"]
    )


def test_changes_of_large_files_are_seen_by_each_program(client: httpx2.Client, hint: str) -> None:
    refs = upload(client, {"large": bytes(2 * MIB)})
    assert names(run(client, "bash", "true", runtime_session_hint=hint, files=refs)) == []
    change = "printf x | dd of=large conv=notrunc status=none bs=1 seek=7"
    for code, expected in ((change, ["large"]), ("true", []), (f"{change}7", ["large"]), ("cat large > /tmp/x", [])):
        assert names(run(client, "bash", code, runtime_session_hint=hint)) == expected, code


def test_a_newer_file_replaces_the_sessions(client: httpx2.Client, hint: str) -> None:
    run(client, "bash", "echo old > a", runtime_session_hint=hint)
    answer = run(client, "bash", "cat a", runtime_session_hint=hint, files=upload(client, {"a": b"new\n"}))
    assert answer["stdout"] == "new\n" and "'a' is now the newer file" in answer["stderr"]


def test_unstorable_files_are_not_replaced_and_reported(client: httpx2.Client, hint: str) -> None:
    assert "'a' was not kept" in run(client, "bash", "truncate -s 1T a", runtime_session_hint=hint)["stderr"]
    answer = run(client, "bash", "stat -c %s a", runtime_session_hint=hint, files=upload(client, {"a": b"other"}))
    assert answer["stdout"] == f"{1 << 40}\n" and "'a' is the session's own" in answer["stderr"]


def test_of_a_programs_source_nothing_is_left_in_its_session(client: httpx2.Client, hint: str) -> None:
    long = "#" * (MAX_ARGUMENT_BYTES + 1) + "\nls -d /tmp/.program-* | wc -l"
    assert run(client, "bash", long, runtime_session_hint=hint)["stdout"] == "1\n"
    assert run(client, "bash", "ls -A /tmp | grep program", runtime_session_hint=hint)["stdout"] == ""


def test_files_present_in_the_session_are_not_rewritten(client: httpx2.Client, hint: str) -> None:
    refs = upload(client, {"a": b"x"})
    first, second = (run(client, "bash", "stat -c '%i %z' a", runtime_session_hint=hint, files=refs) for _ in range(2))
    assert first["stdout"] == second["stdout"] != ""


def test_a_skill_of_a_newer_version_replaces_the_old_one(client: httpx2.Client, hint: str) -> None:
    for version in ("1", "2"):
        fields = {"kind": "skill", "id": "66aa00000000000000000001", "version": version, "read_only": "true"}
        refs = upload(client, {"skills/SKILL.md": version.encode()}, batch=True, **fields)
        answer = run(
            client, "bash", "cat skills/SKILL.md; rm -f skills/SKILL.md", runtime_session_hint=hint, files=refs
        )
        assert answer["stdout"] == version, answer["stderr"]


def test_one_program_at_a_time_and_all_in_turn(client: httpx2.Client, hint: str) -> None:
    code = "n=$(cat n 2>/dev/null || echo 0); mkdir lock || exit 1; sleep 0.05; rmdir lock; echo $((n + 1)) > n"
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: run(client, "bash", code, runtime_session_hint=hint), range(8)))
    assert [each["code"] for each in answers] == [0] * 8
    assert run(client, "bash", "cat n", runtime_session_hint=hint)["stdout"] == "8\n"


def test_a_session_hint_is_private_to_its_user(
    user: User, client: httpx2.Client, stranger: httpx2.Client, hint: str
) -> None:
    run(user("ann"), "bash", "echo secret > mine", runtime_session_hint=hint)
    for other in (user("ben"), user("ann", "other"), client, stranger):
        answer = run(other, "bash", "ls", runtime_session_hint=hint)
        assert answer["stdout"] == "" and answer["runtime_status"] == "new"
    assert run(user("ann"), "bash", "ls", runtime_session_hint=hint)["stdout"] == "mine\n"


def test_a_timeout_ends_the_program_and_not_the_session(client: httpx2.Client, hint: str) -> None:
    run(client, "bash", "echo x > a; sleep 60", runtime_session_hint=hint, timeout=500)
    answer = run(client, "bash", "ls", runtime_session_hint=hint)
    assert (answer["stdout"], answer["runtime_status"]) == ("a\n", "reused")


def test_a_disconnect_ends_the_program_and_releases_the_session(client: httpx2.Client, hint: str) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        body = {"lang": "bash", "code": "echo x > a; sleep 3600", "runtime_session_hint": hint}
        client.post("/exec", json=body, timeout=0.7)
    answer = run(client, "bash", "cat a; pgrep sleep", runtime_session_hint=hint)
    assert (answer["stdout"], answer["runtime_status"], names(answer)) == ("x\n", "reused", ["a"])


SMALL = {"CLOCHE_LIMITS_DEFAULT_MEMORY_BYTES": str(400 * MIB), "CLOCHE_LIMITS_DEFAULT_SPACE_BYTES": str(16 * MIB)}


class Lasting(NamedTuple):
    """A server whose Python sessions keep variables, and that can be started again where it was."""

    place: Path
    log: Path

    def serving(self):  # type: ignore[no-untyped-def]
        return serving(self.place, env={"CLOCHE_LIBRECHAT_PYTHON_STATE": "true", **SMALL}, log=self.log)


@pytest.fixture(scope="module")
def lasting(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Lasting:
    place = tmp_path_factory.mktemp("lasting")
    return Lasting(with_template(place / "data", template), place / "log")


def python(client: httpx2.Client, hint: str, code: str, **fields: object) -> Json:
    return run(client, "py", code, runtime_session_hint=hint, **fields)


def check_variables(client: httpx2.Client) -> None:
    """In one session, as a program after the other."""
    hint = new_hint()
    assert python(client, hint, "x = 41\nx")["stdout"] == ""  # no value is shown
    ended = python(client, hint, "import sys\nx += 1\nprint(x, sys.argv[1:])\nsys.exit(3)", args=["a"])
    assert (ended["stdout"], ended["stderr"], ended["code"]) == ("42 ['a']\n", "", 3)
    assert python(client, hint, "sys.exit('bye')")["stderr"] == "bye\n"
    raised = python(client, hint, "print(x)\n1/0")
    assert (raised["stdout"], raised["code"]) == ("42\n", 1) and "ZeroDivisionError" in raised["stderr"]
    assert python(client, hint, "while True: pass", timeout=500)["status"] == "TO"
    assert python(client, hint, "print(x)")["stdout"] == "42\n"
    drawn = python(client, hint, "import matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()")
    assert names(drawn) == ["figure-1.png"] and content(client, drawn["files"][0]).startswith(b"\x89PNG")
    assert run(client, "py", "print('x' in globals())")["stdout"] == "False\n"  # without a session nothing lasts
    asked = python(client, hint, "input()")
    assert "nobody answers in this run\n" in asked["stderr"] and "library" not in asked["stderr"]
    check_ends_of_the_interpreter(client, hint)


def check_ends_of_the_interpreter(client: httpx2.Client, hint: str) -> None:
    """Variables are gone by them, and that is said at once, and once."""
    left = python(client, hint, "import os\nos._exit(4)")
    assert (left["code"], left["signal"]) == (4, None) and "variables and functions of this session" in left["stderr"]
    assert (python(client, hint, "print('x' in globals())"))["stderr"] == ""
    killed = python(client, hint, "import os\nos.kill(os.getpid(), 11)")
    assert (killed["code"], killed["signal"]) == (None, "SIGSEGV")
    assert "killed by signal 11" in killed["stderr"] and "variables and functions of this session" in killed["stderr"]


def check_pauses(client: httpx2.Client, server: RunningServer) -> None:
    """By another client, with the memory and without it: only then are variables gone, which is said once."""
    hint, headers = new_hint(), {"x-api-key": server.key}
    for memory, there in ((True, True), (False, False)):
        python(client, hint, "x = 1")
        for each in httpx2.get(f"{server.url}/api/v1/sandboxes", headers=headers).json():
            pausing = httpx2.post(
                f"{server.url}/api/v1/sandboxes/{each['id']}/pause", headers=headers, json={"memory": memory}
            )
            assert pausing.status_code == 200, pausing.text
        resumed = python(client, hint, "print('x' in globals())")
        assert (resumed["stdout"], resumed["runtime_status"]) == (f"{there}\n", "reused")
        assert ("variables of earlier programs are gone" in resumed["stderr"]) is not there
        assert python(client, hint, "x = 1")["stderr"] == ""


def check_limits(client: httpx2.Client, memory_is_enforced: bool) -> None:
    """Of memory and of space: what did not fit is named."""
    greedy = "import numpy\nprint('before', flush=True)\nx = numpy.ones(1 << 30)"
    for lang, code in (("py", greedy), ("bash", f"python3 - <<'PY'\n{greedy}\nPY")) if memory_is_enforced else ():
        answer = run(client, lang, code)
        assert (answer["status"], answer["message"], answer["stdout"]) == ("SG", "Out of memory", "before\n"), answer
        assert answer["stderr"].endswith("[sandbox] Out of memory\n")
        if lang == "bash":
            body = {"lang": "bash", "code": code, "tools": [{"name": "any"}]}
            with_tools = client.post("/exec/programmatic", json=body).json()
            assert (with_tools["status"], with_tools["error"]) == ("error", "Out of memory"), with_tools
            went_on = run(client, "bash", f"{code}\ntrue")
            assert (went_on["code"], went_on["status"]) == (0, None)
            assert "[sandbox] Out of memory: a process of the program was killed\n" in went_on["stderr"]
    refs = upload(client, {"large.bin": bytes(17 * MIB), "small": b"x"})
    answer = run(client, "bash", "cat small; ls", files=refs)
    assert answer["stdout"] == "xsmall\n" and "'large.bin' is not here: there is no space left" in answer["stderr"]


def check_return(client: httpx2.Client, hint: str) -> None:
    """Of what `make` left there."""
    answer = run(client, "bash", "cat a/b; ls -d empty; cat top.md; ls", runtime_session_hint=hint)
    assert answer["stdout"] == "1\nempty\nskilla\nempty\ntop.md\n", answer["stderr"]
    assert answer["runtime_status"] == "new" and answer["files"] == []
    first = python(client, hint, "print('x' in globals())")
    assert first["stdout"] == "False\n" and "variables of earlier programs are gone" in first["stderr"]
    assert python(client, hint, "x = 1")["stderr"] == ""


def make(client: httpx2.Client, hint: str) -> None:
    fields = {"kind": "skill", "id": "66aa00000000000000000001", "version": "1", "read_only": "true"}
    skill = upload(client, {"top.md": b"skill"}, batch=True, **fields)
    run(client, "bash", "mkdir a empty; echo 1 > a/b", runtime_session_hint=hint, files=skill)
    python(client, hint, "x = 1")


def check_what_was_only_read(client: httpx2.Client, server: RunningServer) -> None:
    hint = new_hint()
    run(client, "bash", "cat read", runtime_session_hint=hint, files=upload(client, {"read": b"x"}))
    end_sandboxes(server)
    answer = run(client, "bash", "cat read", runtime_session_hint=hint)
    assert (answer["stdout"], answer["runtime_status"]) == ("x", "new")


@pytest.mark.long
def test_sessions_keep_variables_and_come_back_after_their_end_and_after_the_servers(
    lasting: Lasting, memory_is_enforced: bool
) -> None:
    hint = new_hint()
    with lasting.serving() as server, client_with(server, {"x-api-key": server.key}) as client:
        check_variables(client)
        end_sandboxes(server)
        check_pauses(client, server)
        make(client, hint)
        end_sandboxes(server)
        check_return(client, hint)
        check_what_was_only_read(client, server)
        check_limits(client, memory_is_enforced)
    with lasting.serving() as server, client_with(server, {"x-api-key": server.key}) as client:
        check_return(client, hint)
    said = lasting.log.read_text()
    assert "request.ended" in said and "globals" not in said and "top.md" not in said  # neither code nor names
