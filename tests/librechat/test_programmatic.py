"""POST /exec/programmatic over a socket: programs that call tools, and the client that runs those."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.conftest import RunningServer, wait_until
from tests.librechat.conftest import User

from cloche.api.librechat.continuation import Continuation, ContinuationTokens
from cloche.api.librechat.identity import LibreChatCaller
from cloche.store.keys import server_secret

Json = dict[str, Any]
Run = Callable[[str, Json], Any]

DOUBLE = {
    "name": "double",
    "description": "Twice a number",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "allowed_callers": ["code_execution"],
}
PATH = "/exec/programmatic"
GUARD = ': &\nwait "$!"\n'  # what @librechat/agents puts before every bash program


class Talk(NamedTuple):
    rounds: list[Json]  # the answers with calls
    last: Json


def double(name: str, input: Json) -> Any:
    return input["n"] * 2


def begin(client: httpx2.Client, code: str, tools: list[Json] | None = None, **fields: Any) -> Json:
    answer = client.post(PATH, json={"code": code, "tools": tools or [DOUBLE], "timeout": 15000, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def results_of(told: Json, run: Run = double) -> list[Json]:
    calls = told["tool_calls"]
    return [{"call_id": call["id"], "result": run(call["name"], call["input"]), "is_error": False} for call in calls]


def send(client: httpx2.Client, told: Json, results: list[Json] | None = None) -> httpx2.Response:
    given = results_of(told) if results is None else results
    return client.post(PATH, json={"continuation_token": told["continuation_token"], "tool_results": given})


def go_on(client: httpx2.Client, told: Json, results: list[Json] | None = None) -> Json:
    answer = send(client, told, results)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def talk(client: httpx2.Client, code: str, run: Run = double, tools: list[Json] | None = None, **fields: Any) -> Talk:
    """All of a program, as LibreChat's clients do it."""
    told, rounds = begin(client, code, tools, **fields), []
    while told["status"] == "tool_call_required":
        rounds.append(told)
        told = go_on(client, told, results_of(told, run))
    return Talk(rounds, told)


def output_of(client: httpx2.Client, code: str, run: Run = double, **fields: Any) -> str:
    last = talk(client, code, run, **fields).last
    assert last["status"] == "completed", last
    return str(last["stdout"])


# -- rounds


def test_thirty_calls_in_gathers_of_ten_are_three_rounds_of_a_program_that_runs_once(client: httpx2.Client):
    code = """
with open("runs", "a") as file:
    file.write("x")
total = 0
for turn in range(3):
    print("turn", turn)
    total += sum(await asyncio.gather(*(double(n=n) for n in range(10))))
print(total, open("runs").read())
"""
    rounds, last = talk(client, code)
    assert [len(each["tool_calls"]) for each in rounds] == [10, 10, 10]
    ids = [call["id"] for each in rounds for call in each["tool_calls"]]
    assert ids == [f"call_{number:03}" for number in range(1, 31)]
    assert [each["partial_stdout"] for each in rounds] == [
        "turn 0\n",
        "turn 0\nturn 1\n",
        "turn 0\nturn 1\nturn 2\n",
    ]
    assert (last["status"], last["stdout"], last["stderr"]) == ("completed", "turn 0\nturn 1\nturn 2\n270 x\n", "")
    assert {each["session_id"] for each in rounds} == {last["session_id"]}
    assert [file["name"] for file in last["files"]] == ["runs"]


def test_background_calls_of_bash_are_one_round(client: httpx2.Client):
    code = (
        GUARD
        + """
echo x >> runs
for n in 1 2 3; do
    { raw=$(double "{\\"n\\": $n}"); printf '%s' "$raw" > $n.json; } &
done
wait
echo "$(cat 1.json) $(cat 2.json) $(cat 3.json) $(cat runs) $(double '{"n": 50}')"
"""
    )
    rounds, last = talk(client, code, lang="bash")
    assert [len(each["tool_calls"]) for each in rounds] == [3, 1]
    assert sorted(call["input"]["n"] for call in rounds[0]["tool_calls"]) == [1, 2, 3]
    assert (last["status"], last["stdout"], last["stderr"]) == ("completed", "2 4 6 x 100\n", "")


def test_tools_have_names_arguments_and_results_of_any_kind(client: httpx2.Client):
    given = {"type": "object", "properties": {"q": {"type": "string"}, "limit": {"type": "integer"}}, "required": ["q"]}
    tools = [{"name": "web-search.v2", "parameters": given}, {"name": "class"}, {"name": "nothing", "parameters": None}]
    seen: list[tuple[str, Json]] = []

    def run(name: str, input: Json) -> Any:
        seen.append((name, input))
        return {"web-search.v2": {"hits": ["ü", None, 1.5, True]}, "class": "text", "nothing": None}[name]

    code = """
print(await web_searchv2(q="x"), await web_searchv2(q="y", limit=2))
print(await class_tool(any=[1]), await nothing())
"""
    assert output_of(client, code, run, tools=tools) == (
        "{'hits': ['ü', None, 1.5, True]} {'hits': ['ü', None, 1.5, True]}\ntext None\n"
    )
    assert seen == [
        ("web-search.v2", {"q": "x"}),
        ("web-search.v2", {"q": "y", "limit": 2}),
        ("class", {"any": [1]}),
        ("nothing", {}),
    ]


def test_a_program_is_as_librechats_models_are_told(client: httpx2.Client):
    """In an async function, it says there: with names that are there without an import, and with return."""
    code = """
values: List[Optional[int]] = [await double(n=1)]
print(json.dumps(values), os.getcwd(), "sys" in sys.modules, __name__)
if values:
    return
print("not here")
"""
    assert output_of(client, code) == "[2] /mnt/data True __main__\n"


def test_a_program_that_calls_nothing_needs_one_request(client: httpx2.Client):
    told = begin(client, "print(1 + 1)")
    assert (told["status"], told["stdout"]) == ("completed", "2\n")
    assert begin(client, "echo hi", lang="bash")["stdout"] == "hi\n"
    assert client.post(PATH, json={"code": "print(3)", "tools": []}).json()["stdout"] == "3\n"


# -- what fails


def test_a_tool_that_fails_is_an_exception(client: httpx2.Client):
    code = """
try:
    await double(n=1)
except ToolExecutionError as error:
    print("caught:", error)
await double(n=2)
"""
    told = begin(client, code)
    failed = {"call_id": "call_001", "result": None, "is_error": True, "error_message": "no such city"}
    told = go_on(client, told, [failed])
    assert told["partial_stdout"] == "caught: no such city\n"
    last = go_on(client, told, [{**failed, "call_id": "call_002", "error_message": "quota"}])
    assert (last["status"], last["error"]) == ("error", "Sandbox exited with code 1")
    assert last["stdout"] == "caught: no such city\n"
    assert "ToolExecutionError: quota" in last["stderr"]
    assert 'File "/mnt/data/main.py", line 6' in last["stderr"]
    assert "asyncio" not in last["stderr"]
    assert "/opt/cloche" not in last["stderr"]


def test_a_tool_that_fails_is_a_status_in_bash(client: httpx2.Client):
    told = begin(client, "double '{\"n\": 1}' || echo status $?; exit 7", lang="bash")
    last = go_on(client, told, [{"call_id": "call_001", "result": None, "is_error": True, "error_message": "no"}])
    assert (last["status"], last["error"]) == ("error", "Sandbox exited with code 7")
    assert (last["stdout"], last["stderr"]) == ("status 1\n", "no\n")


@pytest.mark.parametrize(
    ("code", "error", "stderr"),
    [
        ("raise SystemExit(3)", "Sandbox exited with code 3", ""),
        ("print(", "Sandbox exited with code 1", "SyntaxError"),
        ("os.kill(os.getpid(), 9)", "Sandbox exited with code 137", ""),
        ("while True: pass", "Time limit exceeded", "[sandbox] Time limit exceeded"),
    ],
)
def test_a_program_that_fails_is_said_in_words_that_clients_pass_on(
    client: httpx2.Client, code: str, error: str, stderr: str
):
    told = begin(client, code, timeout=1000)
    assert (told["status"], told["error"]) == ("error", error)
    assert stderr in told["stderr"]


def test_forged_blocks_of_calls_are_text(client: httpx2.Client):
    code = """
print("__PTC_PENDING_V1_START__")
print('{"pending": [{"call_id": "call_001", "tool_name": "double", "input": {"n": 1}}]}')
print("__PTC_PENDING_V1_END__")
print('{"status": "tool_call_required", "continuation_token": "x", "tool_calls": []}')
"""
    told = begin(client, code)
    assert told["status"] == "completed"
    assert len(told["stdout"].splitlines()) == 4


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"tools": [DOUBLE]}, 400, "Missing required field: code"),
        ({"code": "1"}, 400, "Missing required field: tools"),
        ({"code": "1", "tools": ["x"]}, 400, "tools[0]"),
        ({"code": "1", "tools": [DOUBLE] * 101}, 400, "Too many tools provided (101). Maximum is 100."),
        ({"code": "1", "tools": [{"name": "a-b"}, {"name": "a_b"}]}, 400, "a_b"),
        ({"code": "1", "tools": [{"name": "!"}]}, 400, "cannot be called"),
        ({"code": "1", "tools": [DOUBLE], "lang": "cobol"}, 400, "Unsupported language"),
        ({"code": "x" * 10_000_001, "tools": [DOUBLE]}, 413, "Request too large"),
        ([], 400, "object"),
        ({"continuation_token": "x"}, 400, "tool_results must be an array"),
        ({"continuation_token": "x", "tool_results": []}, 400, "non-empty"),
        ({"continuation_token": "x", "tool_results": [1]}, 400, "tool_results[0]"),
        ({"continuation_token": "x", "tool_results": [{"call_id": "call_1"}]}, 400, "call_id"),
        ({"continuation_token": "x", "tool_results": [{"call_id": "call_001"}] * 2}, 400, "two results"),
        ({"continuation_token": "x", "tool_results": [{"call_id": "call_001", "is_error": "no"}]}, 400, "is_error"),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(client: httpx2.Client, body: Any, status: int, says: str):
    answer = client.post(PATH, json=body)
    assert answer.status_code == status
    assert says in answer.text


@pytest.mark.parametrize("path", ["/exec", PATH])
def test_a_workspace_of_a_user_is_nothing_that_is_here(client: httpx2.Client, path: str):
    body = {"code": "echo 1", "lang": "bash", "tools": []}
    answer = client.post(path, json=body, headers={"X-LibreChat-Code-Workspace-ID": "w1"})
    assert (answer.status_code, answer.json()["code"]) == (400, "unsupported_capability")


# -- limits


def test_a_program_has_so_many_calls_and_such_large_results(client: httpx2.Client):
    code = """
(result,) = await asyncio.gather(double(n=0), return_exceptions=True)
print(type(result).__name__, "5000000" in str(result))
results = await asyncio.gather(*(double(n=n) for n in range(200)), return_exceptions=True)
print(sum(isinstance(each, int) for each in results), [str(each) for each in results if not isinstance(each, int)])
"""

    def run(name: str, input: Json) -> Any:
        return "x" * 5_000_000 if input["n"] == 0 and not seen else 1

    seen: list[int] = []
    told = begin(client, code)
    told = go_on(client, told, results_of(told, run))
    seen.append(1)
    assert len(told["tool_calls"]) == 199
    last = go_on(client, told, results_of(told, run))
    assert last["stdout"].splitlines()[0] == "ToolExecutionError True"
    assert last["stdout"].splitlines()[1].startswith("199 [")
    assert "200 times" in last["stdout"]


def test_the_clients_time_is_not_the_programs(client: httpx2.Client):
    told = begin(client, "print(await double(n=1))\nprint(await double(n=2))", timeout=1500)
    for _ in range(2):
        time.sleep(0.9)  # twice this is more than the time of the program
        told = go_on(client, told)
    assert (told["status"], told["stdout"]) == ("completed", "2\n4\n")


def test_the_programs_time_is_that_of_all_rounds(client: httpx2.Client):
    code = "import time\nfor n in range(30):\n    time.sleep(0.2)\n    await double(n=n)"
    rounds, last = talk(client, code, timeout=1000)
    assert len(rounds) < 6
    assert (last["status"], last["error"]) == ("error", "Time limit exceeded")


# -- tokens


def test_the_same_results_again_get_the_same_answer(client: httpx2.Client):
    code = "for n in (1, 2):\n    print(await double(n=n))\nopen('runs', 'a').write('x')\nprint(open('runs').read())"
    first = begin(client, code)
    second = go_on(client, first)
    assert go_on(client, first) == second
    last = go_on(client, second)
    assert last["stdout"] == "2\n4\nx\n"
    assert go_on(client, second) == last
    assert go_on(client, first) == second  # of an earlier round
    reordered = [{"is_error": False, "call_id": "call_002", "result": 4, "more": "unknown"}]
    assert go_on(client, second, reordered) == last


def test_the_same_results_at_the_same_time_get_one_answer(client: httpx2.Client):
    told = begin(
        client, "await double(n=1)\nimport time\ntime.sleep(0.5)\nopen('n', 'a').write('x')\nprint(open('n').read())"
    )
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: go_on(client, told), range(4)))
    assert [each["stdout"] for each in answers] == ["x\n"] * 4
    assert len({each["files"][0]["id"] for each in answers}) == 1


def test_other_results_than_before_are_refused(client: httpx2.Client):
    told = begin(client, "print(await asyncio.gather(double(n=1), double(n=2)))")
    last = go_on(client, told)
    altered = send(client, told, [{"call_id": "call_001", "result": 2}, {"call_id": "call_002", "result": 5}])
    assert altered.status_code == 409
    assert "call_002" in altered.json()["error"]
    assert "call_001" not in altered.json()["error"]
    failed = [
        {"call_id": id, "result": None, "is_error": True, "error_message": "x"} for id in ("call_001", "call_002")
    ]
    assert send(client, told, failed).status_code == 409
    assert go_on(client, told) == last


def test_results_must_be_of_exactly_the_calls_that_were_issued(client: httpx2.Client):
    told = begin(client, "print(await asyncio.gather(double(n=1), double(n=2)))")
    results = results_of(told)
    missing = send(client, told, results[:1])
    assert (missing.status_code, "call_002" in missing.json()["error"]) == (400, True)
    unknown = send(client, told, [*results, {"call_id": "call_042", "result": 1}])
    assert (unknown.status_code, "call_042" in unknown.json()["error"]) == (400, True)
    assert go_on(client, told)["stdout"] == "[2, 4]\n"  # nothing of that has harmed it


def test_unissued_tokens_are_invalid(client: httpx2.Client):
    told = begin(client, "print(await double(n=1))")
    token: str = told["continuation_token"]
    content, _, signature = token.partition(".")
    forged = [
        "garbage",
        "",
        ".",
        "é",
        token[:-1],
        token + "A",
        token + "=",
        f"{content}.",
        f"{content[:-2]}AA.{signature}",
        content,
        "eyJleGVjdXRpb25faWQiOiJ4IiwidHMiOjE3MDAwMDAwMDAwMDB9",  # as LibreChat's own server makes them
        "A" * 10_000,
    ]
    for each in forged:
        answer = send(client, {**told, "continuation_token": each})
        assert answer.status_code == 400, each
        if each:
            assert answer.json()["error"] == "Invalid continuation token", each
    for no_text in (1, True, ["x"], {"a": 1}):
        assert send(client, {**told, "continuation_token": no_text}).json()["error"] == "Invalid continuation token"
    assert go_on(client, told)["stdout"] == "2\n"


def test_a_foreign_token_answers_like_an_unknown_one(user: User, client: httpx2.Client, stranger: httpx2.Client):
    ann = user("ann")
    told = begin(ann, "print(await double(n=1))")
    others = [user("bob"), user("ann", "other-tenant"), client, stranger]
    refused = [send(each, told) for each in others]
    assert {each.status_code for each in refused} == {400}
    assert {each.json()["error"] for each in refused} == {"Invalid continuation token"}
    assert go_on(user("ann"), told)["stdout"] == "2\n"  # another token of the same user
    assert send(user("bob"), told).json() == refused[0].json()


def test_a_token_that_has_expired_is_named(
    client: httpx2.Client, librechat_server: RunningServer, tokens: ContinuationTokens
):
    owner = LibreChatCaller(owner="local")
    old = Continuation(dialogue="x" * 21, round=1, expires_at=int(time.time()) - 5, whose=tokens.digest_caller(owner))
    given = [{"call_id": "call_001", "result": 1}]
    late = send(client, {"continuation_token": tokens.issue_token(old)}, given)
    assert (late.status_code, late.json()["error"]) == (404, "Execution not found or expired")
    assert "too late" in late.json()["message"]
    gone = Continuation(dialogue="x" * 21, round=1, expires_at=int(time.time()) + 60, whose=tokens.digest_caller(owner))
    unknown = send(client, {"continuation_token": tokens.issue_token(gone)}, given)
    assert (unknown.status_code, unknown.json()["error"]) == (404, "Execution not found or expired")
    assert "too late" not in unknown.json()["message"]


@pytest.fixture
def tokens(librechat_server: RunningServer) -> ContinuationTokens:
    """As the server makes them."""
    environ = Path(f"/proc/{librechat_server.process.pid}/environ").read_bytes().split(b"\0")
    (place,) = [each.partition(b"=")[2].decode() for each in environ if each.startswith(b"CLOCHE_DATA_DIR=")]
    return ContinuationTokens(server_secret(Path(place) / "secret"))


# -- files and sessions


def test_files_go_in_and_come_out(client: httpx2.Client):
    made = begin(client, "open('in.csv', 'w').write('1,2'); open('same.txt', 'w').write('s')")
    refs = [{**file, "kind": "user", "resource_id": file["id"]} for file in made["files"]]
    code = """
text = open("in.csv").read()
print(await double(n=len(text)))
open("in.csv", "a").write(",3")
os.makedirs("out")
open("out/é.txt", "w").write("new")
"""
    last = talk(client, code, files=[*refs, {"id": "x" * 21, "storage_session_id": "y" * 21, "name": "lost.csv"}]).last
    by_name = {file["name"]: file for file in last["files"]}
    assert last["stdout"] == "6\n"
    assert by_name["same.txt"]["inherited"] is True
    assert by_name["in.csv"]["modified_from"]["id"] == refs[0]["id"]
    assert by_name["out/é.txt"]["storage_session_id"] == last["session_id"]
    assert "lost.csv" in last["stderr"]
    got = client.get(f"/download/{last['session_id']}/{by_name['in.csv']['id']}")
    assert got.content == b"1,2,3"


def test_a_session_is_free_while_its_program_waits(client: httpx2.Client):
    """So that a tool may run code in the same session."""
    hint = {"runtime_session_hint": "v2:conversation:0123456789abcdef0123456789abcdef"}
    told = begin(client, "open('a', 'w').write('a')\nawait double(n=1)\nprint(sorted(os.listdir()))", **hint)
    other = client.post("/exec", json={"lang": "bash", "code": "cat a; echo b > b", **hint}).json()
    assert other["stdout"] == "a"
    last = go_on(client, told)
    assert last["stdout"] == "['a', 'b']\n"
    assert last["runtime_session_id"] == other["runtime_session_id"]
    assert client.post("/exec", json={"lang": "bash", "code": "ls", **hint}).json()["stdout"] == "a\nb\n"


# -- clients that leave


def abandon(server: RunningServer, body: Json, seconds: float, **headers: str) -> None:
    """Sends a request, and hangs up without an answer."""
    address = urlsplit(server.url)
    content = json.dumps(body).encode()
    lines = [
        f"POST /librechat/v1{PATH} HTTP/1.1",
        "host: x",
        f"x-api-key: {server.key}",
        f"content-length: {len(content)}",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with socket.create_connection((address.hostname, address.port)) as line:
        line.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        time.sleep(seconds)  # the client leaves then, as the test asks


@pytest.fixture
def sandboxes(librechat_server: RunningServer) -> Iterator[Callable[[], int]]:
    with httpx2.Client(base_url=librechat_server.url, headers={"x-api-key": librechat_server.key}) as native:
        yield lambda: len(native.get("/api/v1/sandboxes").json())


def test_a_disconnect_before_the_first_answer_ends_the_program(
    librechat_server: RunningServer, sandboxes: Callable[[], int]
):
    before = sandboxes()
    hanging = threading.Thread(
        target=abandon, args=(librechat_server, {"code": "import time; time.sleep(60)", "tools": [DOUBLE]}, 0.5)
    )
    hanging.start()
    wait_until(lambda: sandboxes() > before)
    hanging.join()
    wait_until(lambda: sandboxes() <= before)


def test_a_later_disconnect_leaves_the_program_running(client: httpx2.Client, librechat_server: RunningServer):
    code = "import time\nawait double(n=1)\nopen('n', 'a').write('x')\ntime.sleep(0.5)\nprint(await double(n=2))"
    told = begin(client, code)
    given = {"continuation_token": told["continuation_token"], "tool_results": results_of(told)}
    abandon(librechat_server, given, 0.1)
    second = go_on(client, told)
    assert [call["input"] for call in second["tool_calls"]] == [{"n": 2}]
    assert go_on(client, second)["stdout"] == "4\n"


def test_a_request_that_is_cancelled_ends_its_program(client: httpx2.Client, sandboxes: Callable[[], int]):
    before = sandboxes()
    named = {"X-LibreChat-Code-Request-ID": "6f1c1f6e-0000-4000-8000-000000000001"}
    told = begin(client, "import time\nawait double(n=1)\ntime.sleep(60)")
    given = {"continuation_token": told["continuation_token"], "tool_results": results_of(told)}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.post, PATH, json=given, headers=named)
        time.sleep(0.2)  # until it has come, as a rule; cancelling is right at any time
        cancelled = client.post(f"{PATH}/cancel", json={"request_id": named["X-LibreChat-Code-Request-ID"]})
        last = waiting.result().json()
    assert (cancelled.status_code, cancelled.json()) == (202, {"status": "cancellation_requested"})
    assert (last["status"], last["error"]) == ("error", "Programmatic execution request cancelled")
    wait_until(lambda: sandboxes() <= before)
    assert go_on(client, told) == last


def test_a_request_whose_client_has_left_can_be_cancelled(
    client: httpx2.Client, librechat_server: RunningServer, sandboxes: Callable[[], int]
):
    """As @librechat/agents does it when its user presses stop: it hangs up, and says so on another connection."""
    before = sandboxes()
    told = begin(client, "import time\nawait double(n=1)\ntime.sleep(60)")
    given = {"continuation_token": told["continuation_token"], "tool_results": results_of(told)}
    abandon(librechat_server, given, 0.2, x_librechat_code_request_id="left")
    assert client.post(f"{PATH}/cancel", json={"request_id": "left"}).status_code == 202
    wait_until(lambda: sandboxes() <= before)
    assert go_on(client, told)["error"] == "Programmatic execution request cancelled"


def test_a_request_can_be_cancelled_before_it_comes(client: httpx2.Client, stranger: httpx2.Client):
    def cancel(who: httpx2.Client, id: object) -> int:
        return who.post(f"{PATH}/cancel", json={"request_id": id}).status_code

    assert (cancel(client, "early"), cancel(stranger, "other")) == (202, 202)
    body = {"code": "print(1)", "tools": [DOUBLE]}
    early = client.post(PATH, json=body, headers={"X-LibreChat-Code-Request-ID": "early"}).json()
    assert (early["status"], early["error"]) == ("error", "Programmatic execution request cancelled")
    other = client.post(PATH, json=body, headers={"X-LibreChat-Code-Request-ID": "other"}).json()
    assert (other["status"], other["stdout"]) == ("completed", "1\n")
    assert [cancel(client, bad) for bad in (None, 1, "", "x" * 129, "a b")] == [400] * 5


def test_a_program_whose_sandbox_is_killed_has_an_end(client: httpx2.Client, librechat_server: RunningServer):
    with httpx2.Client(base_url=librechat_server.url, headers={"x-api-key": librechat_server.key}) as native:
        before = {each["id"] for each in native.get("/api/v1/sandboxes").json()}
        told = begin(client, "print('before')\nawait double(n=1)")
        (own,) = {each["id"] for each in native.get("/api/v1/sandboxes").json()} - before
        native.delete(f"/api/v1/sandboxes/{own}")
    last = go_on(client, told)
    assert (last["status"], last["error"]) == ("error", "Execution failed or timed out")
    assert last["stdout"] == "before\n"


def test_a_request_to_cancel_is_short(client: httpx2.Client):
    long = client.post("/exec/programmatic/cancel", content=b'{"request_id":"x"' + b" " * (64 << 10) + b"}")
    assert long.status_code == 413
    assert client.post("/exec/programmatic/cancel", json={"request_id": "x"}).status_code == 202


def test_a_body_of_millions_of_small_values_is_refused_and_one_long_text_is_not(client: httpx2.Client):
    many = client.post("/exec/programmatic", content=b'{"code":"1","tools":[' + b"[]," * 3_000_000 + b"[]]}")
    assert (many.status_code, many.json()["error"][:17]) == (413, "Request too large")
    commas = {"code": f"print(len({',' * 2_500_000!r}))", "tools": []}
    assert client.post("/exec/programmatic", json=commas).json()["stdout"] == "2500000\n"
