"""POST /exec over a socket: requests of all generations of clients, and what programs do to themselves."""

from __future__ import annotations

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.conftest import RunningServer, wait_until
from tests.librechat.programs import content, names, run

from cloche import errors
from cloche.api.librechat.outcome import ProgramOutcome, encode_outcome, trim_partial_characters
from cloche.api.librechat.replies import ProgramNotes
from cloche.api.librechat.request import decode_exec
from cloche.engine.commands.jobs import CapturedStream, HeadAndTail
from cloche.events import Exited

FIELDS = {"session_id", "files", "stdout", "stderr", "code", "signal", "message", "status", "wall_time"}


def test_an_answer_has_every_field_that_clients_know(client: httpx2.Client) -> None:
    answer = run(client, "bash", "echo out; echo err >&2; exit 3")
    assert answer.keys() >= FIELDS
    assert re.fullmatch(r"[A-Za-z0-9_-]{21}", answer["session_id"])
    assert (answer["stdout"], answer["stderr"], answer["code"]) == ("out\n", "err\n", 3)
    assert answer["signal"] is answer["message"] is answer["status"] is None
    assert answer["files"] == [] and answer["wall_time"] >= 0 and answer["cpu_time"] >= 0


def test_a_script_of_python_shows_no_value_and_its_exit_is_the_code(client: httpx2.Client) -> None:
    answer = run(client, "py", "import os, sys\n40 + 2\nprint(sys.argv[1:], os.getcwd())\nsys.exit(4)", args=["a b"])
    assert (answer["stdout"], answer["stderr"], answer["code"]) == ("['a b'] /mnt/data\n", "", 4)


def test_an_exception_is_the_programs_own_affair(client: httpx2.Client) -> None:
    answer = run(client, "py", "print(1)\n1/0")
    assert (answer["stdout"], answer["code"]) == ("1\n", 1)
    assert "1/0" in answer["stderr"] and "ZeroDivisionError" in answer["stderr"]


def test_extra_fields_of_old_clients_are_ignored(client: httpx2.Client) -> None:
    extra = {"LIBRECHAT_CODE_API_KEY": "sekret", "apiKey": "sekret", "user_id": 7, "entity_id": "x", "session_id": [1]}
    assert run(client, "py", "print(1)", files=[], **extra)["stdout"] == "1\n"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'"x"',
        b"{}",
        b'{"lang":"py"}',
        b'{"code":"1"}',
        b'{"lang":1,"code":"1"}',
        b'{"lang":"py","code":1}',
    ],
)
def test_a_body_without_code_is_refused(client: httpx2.Client, body: bytes) -> None:
    answer = client.post("/exec", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"] == "bad_request" and answer.json()["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"args": "one"},
        {"args": [{}, None, "x\0y"]},
        {"files": "x"},
        {"files": [1, None, {}, {"id": 1}]},
        {"timeout": -1},
        {"timeout": "soon"},
        {"timeout": 0},
        {"runtime_session_hint": "no spaces"},
        {"runtime_session_hint": 12},
    ],
)
def test_an_invalid_file_spoils_only_itself(fields: dict[str, Any]) -> None:
    asked = decode_exec(json.dumps({"lang": "py", "code": "1", **fields}).encode())
    assert asked.code == "1" and not asked.files and asked.hint is None and asked.timeout_seconds is None
    assert asked.notes and asked.args in ((), ("one",))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (r"'\ud83d'", "'\ufffd'"),
        (r"\ude00\ud83d\ud83d\ude00", "\ufffd\ufffd\U0001f600"),
        (r"\\ud83d \\\uD83D\n", "\\ud83d \\\ufffd\n"),
    ],
)
def test_half_a_letter_of_a_text_that_was_cut_is_replaced(sent: str, code: str) -> None:
    assert decode_exec(b'{"lang": "py", "code": "%s"}' % sent.encode()).code == code


def test_the_body_is_not_quoted_in_errors() -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        decode_exec(b'{"lang":"py","LIBRECHAT_CODE_API_KEY":"sekret')
    assert "sekret" not in str(refused.value)


def test_a_hint_that_is_none_is_noted(client: httpx2.Client) -> None:
    answer = run(client, "bash", "echo 1", runtime_session_hint="a hint")
    assert answer["stdout"] == "1\n" and "runtime_session_hint was ignored" in answer["stderr"]
    assert "runtime_session_id" not in answer


def test_at_the_time_limit_output_and_files_are_kept(client: httpx2.Client) -> None:
    answer = run(client, "bash", "echo before; echo kept > kept.txt; sleep 60; echo after", timeout=700)
    assert (answer["status"], answer["message"], answer["signal"]) == ("TO", "Time limit exceeded", "SIGKILL")
    assert answer["stdout"] == "before\n"
    assert answer["stderr"].endswith("\n[sandbox] Time limit exceeded\n")
    assert names(answer) == ["kept.txt"]


def test_a_signal_is_named(client: httpx2.Client) -> None:
    answer = run(client, "bash", "echo x; kill -SEGV $$")
    assert (answer["signal"], answer["stdout"]) == ("SIGSEGV", "x\n")
    assert "killed by signal 11" in answer["stderr"]


def test_of_too_much_output_head_and_tail_are_left_and_the_program_goes_on(client: httpx2.Client) -> None:
    answer = run(client, "py", "print('first'); print('x' * 3_000_000); print('last'); open('done', 'w').write('1')")
    stdout = answer["stdout"]
    assert stdout.startswith("first\nxxx") and stdout.endswith("xxx\nlast\n")
    assert 1_000_000 < len(stdout) < 1_100_000 and "bytes were left out here" in stdout
    assert (answer["status"], answer["message"], answer["code"]) == ("OL", "stdout length exceeded", 0)
    assert "bytes of stdout were left out" in answer["stderr"] and names(answer) == ["done"]


def test_output_is_exact(client: httpx2.Client) -> None:
    text = "  é\t\x1b[1m漢\r\n\x07  \n\n"
    answer = run(client, "py", f"import sys; sys.stdout.write({text!r})")
    assert answer["stdout"] == text and answer["stderr"] == ""


def test_output_that_is_no_text_is_replaced_and_noted(client: httpx2.Client) -> None:
    answer = run(client, "bash", r"printf 'a\377b'")
    assert answer["stdout"] == "a\ufffdb" and "no UTF-8" in answer["stderr"]


def test_head_and_tail_are_exact() -> None:
    for limit in (1, 2, 7, 100):
        for pieces in ([b"abcdef"], [b"ab", b"c", b"defghij"], [bytes([65 + n % 26]) for n in range(300)]):
            whole, kept = b"".join(pieces), HeadAndTail(limit)
            for piece in pieces:
                kept.add(piece)
            left = kept.kept()
            assert len(left.head + left.tail) == min(limit, len(whole))
            assert whole.startswith(left.head) and whole.endswith(left.tail)
            assert left.dropped_bytes == max(len(whole) - limit, 0)


def test_a_letter_that_is_cut_in_the_middle_is_no_riddle() -> None:
    kept = CapturedStream(head="é".encode(), tail="é".encode(), dropped_bytes=0)
    answer = encode_outcome(ProgramOutcome(exited=Exited(exit_code=0), stdout=kept), ProgramNotes())
    assert answer["stdout"] == "éé"


def test_no_letter_is_cut_where_something_is_left_out() -> None:
    for text in ("aé漢😀z", "é" * 9, "漢" * 9, "😀" * 9):
        data = text.encode()
        for start in range(len(data)):
            for end in range(start, len(data) + 1):
                kept = trim_partial_characters(
                    CapturedStream(head=data[:start], tail=data[end:], dropped_bytes=end - start)
                )
                assert text.startswith(kept.head.decode()) and text.endswith(kept.tail.decode())
                assert len(kept.head) + len(kept.tail) + kept.dropped_bytes == len(data)


def test_arguments_that_are_too_long_are_the_programs_affair(client: httpx2.Client) -> None:
    answer = run(client, "bash", "echo $#", args=["x" * 200_000])
    assert answer["code"] == 1 and "into a file" in answer["stderr"]


def test_forty_at_once_all_run(client: httpx2.Client) -> None:
    def one(number: int) -> tuple[str, list[str]]:
        answer = run(client, "bash", f"echo {number}; echo {number} > f{number}")
        return answer["stdout"], names(answer)

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(one, range(40)))
    assert answers == [(f"{number}\n", [f"f{number}"]) for number in range(40)]


def test_nothing_is_left_for_the_next_program(client: httpx2.Client) -> None:
    run(client, "bash", "echo x > left; echo x > /tmp/left; export LEFT=1")
    assert run(client, "bash", "ls -A /mnt/data /tmp/left; echo $LEFT")["stdout"] == "/mnt/data:\n\n"


def test_a_client_that_leaves_ends_its_program(librechat_server: RunningServer, client: httpx2.Client) -> None:
    key, url = librechat_server.key, urlsplit(librechat_server.url)
    body = json.dumps({"lang": "bash", "code": "sleep 3600"}).encode()
    head = f"POST /librechat/v1/exec HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"

    def sandboxes() -> int:
        listed = httpx2.get(f"{librechat_server.url}/api/v1/sandboxes", headers={"x-api-key": key})
        return sum(1 for each in listed.json() if each["created_at"] > began_at)

    began_at = time.time()
    with socket.create_connection((str(url.hostname), int(url.port or 0))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: sandboxes() == 1)
    wait_until(lambda: sandboxes() == 0)
    assert run(client, "bash", "echo next")["stdout"] == "next\n"


def test_a_figure_that_is_shown_is_a_file(client: httpx2.Client) -> None:
    answer = run(client, "py", "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint('shown')")
    assert answer["stdout"] == "shown\n", answer["stderr"]
    (name,) = names(answer)
    assert name.endswith(".png") and content(client, answer["files"][0]).startswith(b"\x89PNG")
