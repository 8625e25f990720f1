"""Files in and out of programs: where they are, whose they are, and what is said of those that are not there."""

from __future__ import annotations

import secrets

import httpx2
import pytest
from tests.librechat.conftest import User
from tests.librechat.programs import Json, content, names, reference, run, upload

from cloche import errors
from cloche.api.librechat.inputs import ProgramInput
from cloche.api.librechat.outputs import find_changes
from cloche.engine.sandboxes.files import DirectorySurvey, SurveyedFile, parse_survey
from cloche.engine.sandboxes.init_client import InitReply
from cloche.model import MIB
from cloche.store.librechat import CodeFile

SKILL = {"kind": "skill", "id": "66aa00000000000000000001", "version": "3", "read_only": "true"}


def by_name(answer: Json) -> dict[str, Json]:
    return {file["name"]: file for file in answer["files"]}


def test_outputs_of_a_program_are_inputs_of_the_next(client: httpx2.Client) -> None:
    first = run(client, "py", "open('a.txt', 'w').write('one'); open('b.bin', 'wb').write(bytes(range(256)))")
    made = by_name(first)
    assert made["a.txt"]["storage_session_id"] == made["a.txt"]["session_id"] == first["session_id"]
    assert content(client, made["b.bin"]) == bytes(range(256))
    second = run(client, "bash", "cat a.txt; wc -c < b.bin", files=[reference(each) for each in first["files"]])
    assert second["stdout"] == "one256\n"
    assert names(second) == [] and names(second, inherited=True) == ["a.txt", "b.bin"]
    assert by_name(second)["a.txt"]["id"] == made["a.txt"]["id"]


def test_changed_made_and_deleted_files_are_told_apart(client: httpx2.Client) -> None:
    refs = upload(client, {"same.csv": b"1", "changed.csv": b"2", "deleted.csv": b"3", "touched.csv": b"4"})
    code = "echo x >> changed.csv; rm deleted.csv; touch touched.csv; echo n > new.csv; mv same.csv t; mv t same.csv"
    answer = run(client, "bash", code, files=refs)
    assert names(answer) == ["changed.csv", "new.csv"] and names(answer, inherited=True) == ["same.csv", "touched.csv"]
    assert answer["deleted_files"] == ["deleted.csv"]
    old = next(ref for ref in refs if ref["name"] == "changed.csv")
    changed = by_name(answer)["changed.csv"]
    assert changed["id"] != old["id"] and changed["modified_from"]["id"] == old["id"]
    assert changed["modified_from"]["storage_session_id"] == old["storage_session_id"]
    assert content(client, changed) == b"2x\n" and "modified_from" not in by_name(answer)["new.csv"]


def test_changes_of_large_files_are_seen_however_they_are_made(client: httpx2.Client) -> None:
    refs = upload(client, {name: bytes(2 * MIB) for name in ("same", "written", "mapped", "seen", "replaced")})
    code = """
import mmap, os
with open("written", "r+b") as file: file.seek(5); file.write(b"x")
with open("mapped", "r+b") as file: view = mmap.mmap(file.fileno(), 0); view[5] = 1; view.close()
with open("seen", "r+b") as file: view = mmap.mmap(file.fileno(), 0); view[5] += 1; view.close()  # the ctime stays
with open("other", "wb") as file: file.write(b"x" * (2 << 20))
os.utime("other", ns=(1, 1)); os.rename("other", "replaced"); open("same", "rb").read()
"""
    answer = run(client, "py", code, files=refs)
    assert names(answer) == ["mapped", "replaced", "seen", "written"] and names(answer, inherited=True) == ["same"]
    changed = next(each for each in answer["files"] if each["name"] == "mapped")
    assert content(client, changed)[5] == 1


def test_files_of_a_program_that_failed_are_kept(client: httpx2.Client) -> None:
    answer = run(client, "py", "open('kept.txt', 'w').write('x')\n1/0")
    assert names(answer) == ["kept.txt"] and answer["code"] == 1


def test_names_are_exact(client: httpx2.Client) -> None:
    odd = {"d/é ö/データ file.csv": b"1", "a'b\"c.txt": b"2", "no extension": b"3", ".hidden": b"4"}
    answer = run(
        client,
        "py",
        f"for name, content in {odd!r}.items():\n"
        "    import os; os.makedirs(os.path.dirname(name) or '.', exist_ok=True)\n"
        "    open(name, 'wb').write(content)",
    )
    assert {name: content(client, file) for name, file in by_name(answer).items()} == odd
    again = run(client, "bash", "find . -type f | sort", files=[reference(each) for each in answer["files"]])
    assert sorted(again["stdout"].split("\n")[:-1]) == sorted(f"./{name}" for name in odd)


def test_the_name_of_the_reference_counts(client: httpx2.Client) -> None:
    (ref,) = upload(client, {"stored.csv": b"x"})
    answer = run(client, "bash", "cat skills/here.csv; ls", files=[{**ref, "name": "skills/here.csv"}])
    assert answer["stdout"] == "xskills\n"
    assert run(client, "bash", "cat stored.csv", files=[{**ref, "name": None}])["stdout"] == "x"
    assert run(client, "bash", "cat here.csv", files=[{**ref, "name": "/mnt/data/here.csv"}])["stdout"] == "x"


def test_references_of_old_clients(client: httpx2.Client) -> None:
    (ref,) = upload(client, {"data.csv": b"x"}, entity_id="agent_1")
    old = {"session_id": ref["storage_session_id"], "id": ref["id"], "name": "data.csv"}
    assert run(client, "bash", "cat data.csv", files=[old])["stdout"] == "x"


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a/../b", "a//b", "n\0ul", "x" * 300, "", "."])
def test_one_bad_reference_spoils_only_itself(client: httpx2.Client, name: str) -> None:
    good, bad = upload(client, {"good.csv": b"good", "bad.csv": b"bad"})
    files = [{**bad, "name": name}, {"id": "A" * 21, "storage_session_id": "B" * 21, "name": "gone.csv"}, "x", good]
    answer = run(client, "bash", "cat good.csv", files=files)
    assert (answer["stdout"], answer["code"]) == ("good", 0)
    assert "'gone.csv' is not here" in answer["stderr"] and "files[2] was ignored" in answer["stderr"]
    assert name == "" or "It is not here" in answer["stderr"]


def test_of_two_files_of_one_name_the_newer_has_it(client: httpx2.Client) -> None:
    old = upload(client, {"d/x.csv": b"old\n", "y/x.csv": b"y\n"})
    new = upload(client, {"d/x.csv": b"new\n"})
    answer = run(client, "bash", "cat d/x.csv d/x-2.csv y/x.csv", files=[*new, *old])
    assert answer["stdout"] == "new\nold\ny\n"
    assert "two files 'd/x.csv'" in answer["stderr"]
    assert by_name(answer)["d/x-2.csv"]["id"] == old[0]["id"]  # so that the client has it under that name from now on


def test_strangers_find_nothing(client: httpx2.Client, stranger: httpx2.Client, user: User) -> None:
    (ref,) = upload(client, {"mine.csv": b"secret"})
    (ours,) = upload(user("ann"), {"ours.csv": b"secret"})
    for other, foreign in ((stranger, ref), (user("ben"), ours), (user("ann", "other"), ours), (client, ours)):
        for kind in ({}, {"kind": "agent"}, {"kind": "skill", "version": 1}):
            answer = run(other, "bash", "ls", files=[{**foreign, **kind}])
            assert answer["stdout"] == "" and "it has expired, was deleted, or never was" in answer["stderr"]
    assert run(user("ann"), "bash", "cat ours.csv", files=[ours])["stdout"] == "secret"


def test_outputs_belong_to_the_user_of_the_program(user: User) -> None:
    made = run(user("ann"), "bash", "echo x > out")["files"][0]
    theirs = user("ben").get(f"/download/{made['storage_session_id']}/{made['id']}", params={"kind": "user", "id": "x"})
    assert theirs.status_code == 404
    assert content(user("ann"), made) == b"x\n"


def test_read_only_files_cannot_be_changed(client: httpx2.Client, single: bool) -> None:
    refs = upload(client, {"skills/s/SKILL.md": b"skill", "top.md": b"top"}, batch=True, **SKILL)
    code = """
    echo x >> top.md; echo x > skills/s/SKILL.md; rm -f top.md; rm -rf skills; mv skills other; mv top.md t
    chmod 777 top.md; ln -sf /etc/passwd top.md; echo x > n && mv -f n top.md; python3 -c 'open("top.md", "w")'
    cat top.md skills/s/SKILL.md; echo mine > skills/s/mine.txt; echo mine > mine.txt
    """
    answer = run(client, "bash", code, files=refs)
    assert names(answer, inherited=True) == ["skills/s/SKILL.md", "top.md"]
    assert {each["id"] for each in answer["files"] if each.get("inherited")} == {ref["id"] for ref in refs}
    assert "deleted_files" not in answer
    if not single:  # else nothing is promised but that no change is told
        assert answer["stdout"] == "topskill"
        assert {"skills/s/mine.txt", "mine.txt"} <= set(names(answer))


def test_links_hidden_directories_and_caches_are_no_files(client: httpx2.Client) -> None:
    (ref,) = upload(client, {".config/app/x.ini": b"x"})
    code = "ln -s /etc/passwd link; mkdir .cache __pycache__; echo 1 > .cache/x; echo 1 > __pycache__/y; mkfifo pipe"
    assert run(client, "bash", code)["files"] == []
    answer = run(client, "bash", f"{code}; echo y > .config/app/y.ini", files=[ref])
    assert names(answer) == [".config/app/y.ini"] and names(answer, inherited=True) == [".config/app/x.ini"]


def test_empty_directories_last(client: httpx2.Client) -> None:
    answer = run(client, "bash", "mkdir -p a/b c; echo x > c/x")
    assert names(answer) == ["a/b/.dirkeep", "c/x"]
    again = run(client, "bash", "ls -d a/b", files=[reference(each) for each in answer["files"]])
    assert again["stdout"] == "a/b\n" and names(again) == []


def test_two_hundred_files_and_one_more(client: httpx2.Client) -> None:
    answer = run(client, "bash", "for i in $(seq 201); do echo $i > f$i; done")
    assert len(answer["files"]) == 200 and "1 files were not kept" in answer["stderr"]
    delivery = answer["artifact_delivery"]
    assert delivery["code"] == "artifact_delivery_failed" and delivery["status"] == "partial"
    assert (delivery["attempted"], delivery["delivered"], delivery["failed"]) == (201, 200, 1)
    refs = [reference(each) for each in answer["files"]]
    again = run(client, "bash", "ls | wc -l", files=[*refs, {**refs[0], "name": "one-more"}])
    assert again["stdout"] == "200\n" and "1 files are not here" in again["stderr"]
    assert len(names(again, inherited=True)) == 200


def test_a_file_that_is_too_large_is_told(client: httpx2.Client) -> None:
    answer = run(client, "bash", "truncate -s 151M large.bin; truncate -s 3M fine.bin")
    assert names(answer) == ["fine.bin"] and "'large.bin' was not kept" in answer["stderr"]
    assert answer["artifact_delivery"]["failed"] == 1
    size = len(content(client, answer["files"][0]))
    assert size == 3 * MIB
    again = run(client, "bash", "wc -c < fine.bin", files=[reference(answer["files"][0])])
    assert again["stdout"] == f"{size}\n" and names(again, inherited=True) == ["fine.bin"]


def test_unstorable_outputs_are_reported(client: httpx2.Client, single: bool) -> None:
    deep = "/".join("abcdefghijkl")
    code = f"mkdir -p {deep}; echo x > {deep}/x; echo x > 'back\\slash'; printf x > $'\\377'; echo x > no; chmod 0 no"
    answer = run(client, "bash", code)
    assert names(answer) == (["no"] if single else [])  # with a single uid, init may read all that programs have
    assert answer["artifact_delivery"]["status"] == ("partial" if single else "failed")
    assert answer["artifact_delivery"]["failed"] == (3 if single else 4)
    for said in ("is too deep", "backslash", "1 file or directory in /mnt/data was not kept: a name"):
        assert said in answer["stderr"]
    assert ("'no' was not" in answer["stderr"]) != single


def test_package_directories_are_not_stored_and_reported_once(client: httpx2.Client) -> None:
    session = {"runtime_session_hint": f"v2:user:{secrets.token_hex(16)}"}
    code = "mkdir -p v/lib node_modules/x; touch v/pyvenv.cfg v/lib/a.py node_modules/x/index.js v/kept; echo 1 > kept"
    first, second = run(client, "bash", code, **session), run(client, "bash", "ls", **session)
    assert names(first) == ["kept", "v/kept"] and "(a venv, node_modules) is not kept" in first["stderr"]
    assert (second["stdout"], second["stderr"]) == ("kept\nnode_modules\nv\n", "") and "artifact_delivery" not in first
    given = run(client, "bash", "echo 2 >> v/pyvenv.cfg", files=upload(client, {"v/pyvenv.cfg": b"1"}))
    assert names(given) == ["v/pyvenv.cfg"]


def test_a_file_where_a_directory_must_be_spoils_only_the_other(client: httpx2.Client) -> None:
    refs = upload(client, {"a": b"file", "b": b"other"})
    answer = run(client, "bash", "ls -R", files=[refs[0], {**refs[1], "name": "a/b"}])
    assert "is not here" in answer["stderr"] and answer["code"] == 0
    assert len(answer["files"]) == 1


def _file(name: str, sha256: str, *, read_only: bool = False) -> CodeFile:
    return CodeFile(
        id=name, session="s", owner="", tenant="", user="", space="", name=name, bytes=1, content_type="",
        read_only=read_only, sha256=sha256, created_at=0, used_at=0,
    )  # fmt: skip


def test_changes_are_the_differing_files() -> None:
    inputs = [
        ProgramInput(path=name, file=_file(name, "1", read_only=name == "ro")) for name in ("same", "new", "gone", "ro")
    ]
    there = [SurveyedFile(path="same", size_bytes=1, sha256="1"), SurveyedFile(path="new", size_bytes=1, sha256="2")]
    found = DirectorySurvey(
        files=(
            *there,
            SurveyedFile(path="ro", size_bytes=9),
            SurveyedFile(path="more", size_bytes=3),
            SurveyedFile(path="x", size_bytes=5),
        )
    )
    changes = find_changes(found, inputs, {"x": 5})
    assert [each.path for each in changes.made] == ["new", "more"]
    assert [each.path for each in changes.inherited] == ["same", "ro"]
    assert changes.deleted == ("gone",) and changes.ignored == {"x": 5}


@pytest.mark.parametrize(
    "survey", [DirectorySurvey(files=(), whole=False), DirectorySurvey(files=(), passed={"unreadable": 1})]
)
def test_unlisted_files_are_deleted_only_after_a_complete_listing(survey: DirectorySurvey) -> None:
    changes = find_changes(survey, [ProgramInput(path="a", file=_file("a", "1"))], {})
    assert [each.path for each in changes.inherited] == ["a"] and changes.deleted == ()


def test_an_input_in_a_directory_that_cannot_be_read_is_not_deleted(client: httpx2.Client, single: bool) -> None:
    answer = run(client, "bash", "chmod 000 d", files=upload(client, {"d/in": b"x"}, batch=True))
    assert "deleted_files" not in answer and names(answer, inherited=True) == ["d/in"]
    assert ("cannot be read" in answer["stderr"]) != single  # with a single uid, init may read all that programs have


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"files":[["../x",1,null]],"empty":[]}',
        b'{"files":[["/etc/x",1,null]],"empty":[]}',
        b'{"files":[["a",-1,null]],"empty":[]}',
        b'{"files":[["a",1,"no digest"]],"empty":[]}',
        b'{"files":[["a",1,null],["a",2,null]],"empty":[]}',
        b'{"files":[],"empty":["a//b"]}',
    ],
)
def test_a_guest_that_lies_about_its_files_is_not_believed(body: bytes) -> None:
    with pytest.raises(errors.ProtocolViolation):
        parse_survey(InitReply({"truncated": False, "passed": {}, "at_ns": 1}, body, []))
